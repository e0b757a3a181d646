"""Finds the samples that a loss belongs to, or raises an error if they are not certain.

Every operation between the model and the criterion must be known to keep rows in their order. An operation may have moved rows
if it is not in the lists of this module, or if it acts along the rows.

There are two sources of evidence. Targets: a tensor that shares storage with a yielded batch shows rows of that batch, by its
element range. Outputs: the tensors that `run.model` returns show the same rows as the inputs of that call. If both sources are
known, they must agree. A tensor that was changed in place does not count. Equal values alone are never evidence.

One case cannot be noticed: inputs that are permuted or mixed into new storage before `run.model`, together with the
original targets. This case looks the same as a normalization of the inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thresher.attribution.given_ids import Suspicion, is_in_order, moved_among_samples, within
from thresher.attribution.rows import (
    Attribution,
    AttributionError,
    RowLayout,
    Rows,
    TrackedTensor,
    YieldedBatch,
    memory_layout,
)
from thresher.attribution.tracker import CHANGED_INPUTS, Lookup, RowTracker
from thresher.loading.collate_check import MOVED
from thresher.trees import leaves


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The lists have the names of autograd nodes up to "Backward": that of AddBackward0 is "Add". They err on the side of an error:
# an operation that is missing here is refused, and the message names it.
ELEMENTWISE = _names(
    """
Abs Acos Acosh Add Addcdiv Addcmul Alias Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy BinaryCrossEntropyWithLogits
Ceil Celu Clamp ClampMax ClampMin Clone Copy Copysign Cos Cosh Cummax Cummin Cumprod Cumsum Digamma Div Elu Erf Erfc
Erfinv Exp Exp2 Expand Expm1 Floor Fmax Fmin Fmod Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh
HuberLoss Hypot LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid LogSoftmax Logaddexp Logaddexp2 Logit MaskedFill
Maximum Minimum Mish MseLoss Mul NanToNum NativeDropout Neg Pow Reciprocal Relu Relu6 Remainder Round Rrelu
RreluWithNoise Rsqrt Rsub SafeSoftmax Selu Sgn Sigmoid Sign Silu Sin Sinc Sinh SmoothL1Loss SoftMarginLoss Softmax
Softplus Softshrink Sqrt Sub Tan Tanh Threshold To ToCopy Trunc Where Xlog1Py Xlogy torch::autograd::Copy
"""
)
"""Operations that compute element i from element i of operands that are not broadcast along the rows."""

ROW_MAJOR = _names("Reshape ReshapeAlias Squeeze UnsafeView Unsqueeze View")
"""Operations that keep the order of the elements, and change the shape."""

ALONG = _names(
    """
Amax Amin Cat Flip Gather IndexSelect Kthvalue LinalgVectorNorm Logcumsumexp Logsumexp Max Mean Median Min Mode
Nanmedian Nansum Norm Prod Roll Select Slice Sort Split SplitWithSizes Stack Std StdMean Sum Topk Transpose Unbind
Unfold Var VarMean
"""
)
"""Operations that act along named dimensions, and keep the order of the others."""

# Further operands are weights and the like, whose first dimension is not that of the samples.
_FIRST = _names(
    """
AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D AvgPool3D BatchNorm Cdist Convolution
ConvolutionOverrideable CudnnBatchNorm CudnnConvolution FusedRmsNorm Glu Linear MaxPool2DWithIndices
MaxPool3DWithIndices MkldnnConvolution Mm MultiMarginLoss MultilabelMarginLoss Mv NativeBatchNorm NativeGroupNorm
NativeLayerNorm NllLoss NllLoss2D PixelShuffle PixelUnshuffle Prelu PreluKernel UpsampleBicubic2D UpsampleBilinear2D
UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleTrilinear3D
"""
)
_ATTENTION = _names(
    """
ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
ScaledDotProductFlashAttentionForCpu
"""
)

OPERANDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_FIRST, (0,)),
    **dict.fromkeys(_ATTENTION, (0, 1, 2)),
    # Operand 0 is the bias that is added.
    "Addmm": (1,),
    "Addmv": (1,),
    "Bmm": (0, 1),
    "Baddbmm": (0, 1, 2),
}
"""Operations that compute row i from row i of these operands."""


MOST_OPERATIONS = 100_000
"""Largest number of operations to follow."""


class Moved(NamedTuple):
    """Rows that may not be in the order of the batch any more.

    Attributes:
        by: Name of the operation.
        changed: Description of the inputs if these were changed before the model got them; None otherwise.
    """

    by: str
    changed: str | None = None


Followed = Rows | Moved | None
"""What is known of the rows of a tensor; None if it was not computed from a tensor that the model returned."""

GraphPlace = tuple[int, int]
"""Sequence number of an autograd node, and the number of one of its results."""


def follow_rows(outputs: Tensor, returned: Mapping[GraphPlace, TrackedTensor]) -> Followed:
    """Finds the rows that a tensor shows, from the operations since the model returned.

    Args:
        outputs: A tensor that the criterion is called with.
        returned: Tensors that the model returned, by their place in the autograd graph.

    Returns:
        The rows, or the operation that may have moved the rows. None if `outputs` was not computed from a returned tensor.
    """
    if outputs.grad_fn is None or not returned:
        return None
    start = outputs.grad_fn._sequence_nr(), outputs.output_nr
    # Nodes older than every returned tensor are inside of the model or before it: what happened there does not count.
    oldest = min(returned)[0]
    states = dict[GraphPlace, Followed]()
    # A stack in place of recursion, which a long chain of operations would drive into Python's limit.
    todo: list[tuple[Any, GraphPlace]] = [(outputs.grad_fn, start)]
    while todo:
        node, place = todo[-1]
        if place in states:
            todo.pop()
            continue
        if place in returned:
            tracked = returned[place]
            states[place] = tracked.rows if tracked.changed is None else Moved("", tracked.changed)
            continue
        edges = [
            None if parent is None else (parent, (parent._sequence_nr(), nr))
            for parent, nr in node.next_functions
        ]
        # A node without operands is a leaf of the graph, such as a parameter: it has no rows.
        known = [
            edge
            for edge in edges
            if edge is not None and oldest <= edge[1][0] and edge[0].next_functions
        ]
        missing = [edge for edge in known if edge[1] not in states]
        if missing and len(states) + len(todo) < MOST_OPERATIONS:
            todo += missing
            continue
        if missing:
            return Moved("too many operations")
        operands = [
            None
            if edge is None or (state := states.get(edge[1])) is None
            else _Operand(i, _shape(edge[0], edge[1][1]), state)
            for i, edge in enumerate(edges)
        ]
        states[place] = _after(node, place[1], operands)
    return states[start]


class _Operand(NamedTuple):
    number: int
    shape: tuple[int, ...]
    state: Rows | Moved


def _shape(node: Any, number: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)


def _after(node: Any, number: int, all_operands: Sequence[_Operand | None]) -> Followed:
    """Returns the rows of the result of an operation, from the rows of its operands."""
    operands = [operand for operand in all_operands if operand is not None]
    if not operands:
        return None
    name = node.name()
    shape = _shape(node, number)
    kind = name.split("Backward")[0]
    if kind in ROW_MAJOR:
        return _reshape(operands[0].state, shape, name)
    if kind == "Cat" and 0 in _dims(node, len(shape)):
        return _concatenate(all_operands, name)
    if kind in {"Slice", "Split", "SplitWithSizes"} and 0 in _dims(node, len(shape)):
        return _part(operands[0], *_range(node, kind, number, operands[0].shape[0]), shape[0], name)
    # An operand with fewer rows is broadcast, such as a mean over the batch that is subtracted: row i has no sample i there.
    in_order = [
        operand.state
        for operand in operands
        if operand.shape[:1] == shape[:1] != () and _keeps(node, kind, operand, shape)
    ]
    states = set(in_order)
    if len(states) == 1 and isinstance(rows := in_order[0], Rows):
        return rows
    return next((state for state in in_order if isinstance(state, Moved)), Moved(name))


def _keeps(node: Any, kind: str, operand: _Operand, shape: tuple[int, ...]) -> bool:
    """Whether row i of the result is computed from row i of an operand with as many rows."""
    if kind in ELEMENTWISE:
        return len(operand.shape) == len(shape)
    if kind in OPERANDS:
        return operand.number in OPERANDS[kind]
    if kind == "Permute":
        return _positive(node._saved_dims[:1], len(shape)) == {0}
    # A repeat with more numbers than dimensions adds dimensions in front.
    if kind == "Repeat":
        return len(operand.shape) == len(shape) and node._saved_repeats[0] == 1
    # Padding is given from the last dimension backward, two numbers per dimension: a full list pads the rows as well.
    if kind == "ConstantPadNd":
        return len(node._saved_pad) < 2 * len(shape)
    if kind == "Index":
        return _indexes_in_order(node._saved_indices, shape[0])
    if kind not in ALONG:
        return False
    # The dimension of a stack is one of its result. Without named dimensions, an operation reduces all of them.
    dims = _dims(node, len(shape) if kind == "Stack" else len(operand.shape))
    return bool(dims) and 0 not in dims


def _dims(node: Any, dimensions: int) -> set[int]:
    """Dimensions that an operation acts along; empty if unknown, or if it acts along all."""
    names = ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1", "_saved_dimension")
    saved = [getattr(node, name) for name in names if hasattr(node, name)]
    dims = [
        dim
        for saved_dims in saved
        if saved_dims is not None
        for dim in (saved_dims if isinstance(saved_dims, tuple | list) else (saved_dims,))
    ]
    return _positive(dims, dimensions)


def _positive(dims: Sequence[int], dimensions: int) -> set[int]:
    """Dimensions counted from 0; autograd saves negative ones as unsigned numbers."""
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]
    return {dim + dimensions if dim < 0 else dim for dim in signed}


def _indexes_in_order(indices: Sequence[Tensor | None], rows: int) -> bool:
    """Whether advanced indexing keeps the order of the rows."""
    # An index on a device is not read, since that would wait for it: it counts as one that may move rows.
    first = indices[0]
    indexed = [i for i, index in enumerate(indices) if index is not None]
    if first is None:
        return indexed == list(
            range(indexed[0], indexed[-1] + 1)
        )  # else the indexed dimensions come first
    if (
        first.device.type != "cpu"
        or first.dtype == torch.bool
        or first.shape[:1] != (rows,)
        or first.numel() != rows
    ):
        return False
    others = all(index is None or index.dim() <= first.dim() for index in indices)
    return others and torch.equal(first.flatten(), torch.arange(rows))


def _reshape(state: Rows | Moved, shape: tuple[int, ...], name: str) -> Followed:
    if isinstance(state, Moved):
        return state
    whole = shape and shape[0] and shape[0] % state.n == 0
    return state._replace(repeat=shape[0] // state.n) if whole else Moved(name)


def _range(node: Any, kind: str, number: int, size: int) -> tuple[int, int]:
    """First row and step of a slice, or of one part of a split, along the rows."""
    if kind == "Split":
        return number * int(node._saved_split_size), 1
    if kind == "SplitWithSizes":
        return sum(int(part) for part in node._saved_split_sizes[:number]), 1
    (start,) = _positive([int(node._saved_start or 0)], size)
    return min(max(start, 0), size), int(node._saved_step)


def _part(whole: _Operand, start: int, step: int, count: int, name: str) -> Followed:
    rows = whole.state
    if isinstance(rows, Moved):
        return rows
    repeat = rows.repeat
    # Flattened tokens: a part that begins or ends within a sample, or takes every other token, is no whole number of samples.
    if not count or (repeat > 1 and (step > 1 or start % repeat or count % repeat)):
        return Moved(name)
    return rows._replace(
        start=rows.start + rows.step * (start // repeat), step=rows.step * step, n=count // repeat
    )


def _concatenate(operands: Sequence[_Operand | None], name: str) -> Followed:
    """Rows of parts that are joined along the rows; `Moved` if a part does not follow the one before it."""
    states = [None if operand is None else operand.state for operand in operands]
    whole: Rows | None = None
    for rows in states:
        if not isinstance(rows, Rows):
            return rows or Moved(name)
        if whole is None:
            whole = rows
            continue
        follows = (
            rows._replace(start=whole.start, n=whole.n) == whole
            and rows.start == whole.start + whole.step * whole.n
        )
        if not follows:
            return Moved(name)
        whole = whole._replace(n=whole.n + rows.n)
    return whole


WAY_OUT = (
    "`forward` must return outputs and targets whose row i is sample i of the batch. Put the samples in dimension 0, as in "
    "outputs.unflatten(0, (len(x), -1)) for flattened tokens; or return the targets of the batch unchanged, or views of them."
)


def layout_of(batch: Any, n: int, targets: Any) -> RowLayout:
    """Finds the layout of the tensors that `forward` returned for a batch.

    Args:
        batch: The batch that `forward` was called with.
        n: Number of samples in the batch.
        targets: Targets that `forward` returned, in any nesting.

    Raises:
        AttributionError: The targets are in another order than the samples, or their rows are unknown.
    """
    # A tracker of its own: `forward` runs in extra passes, whose batches must not count as yielded.
    tracker = RowTracker()
    known = [leaf for leaf in leaves(batch) if leaf.dim() and len(leaf) == n]
    ids = torch.arange(n, device=known[0].device if known else None)
    record = YieldedBatch(ids, 0)
    tracker.remember_batch(record, known)
    repeats = [
        _repeat_of(leaf, n, tracker, record)
        for leaf in leaves(targets)
        if leaf.dim() and len(leaf) % n == 0
    ]
    return RowLayout(n, max(repeats, default=1))


def _repeat_of(targets: Tensor, n: int, tracker: RowTracker, record: YieldedBatch) -> int:
    lookup = tracker.look(targets)
    if lookup.rows is not None:
        if (lookup.rows.start, lookup.rows.step, lookup.rows.n) != (0, 1, n):
            raise AttributionError(
                f"forward= returned targets of only some rows of a batch of {n} samples. {WAY_OUT}"
            )
        return lookup.rows.repeat
    repeat = len(targets) // n
    # With a new `Suspicion`, because evidence about `forward` says nothing about the ids that the loop passes. Reading the
    # flags waits for the device, as an extra pass may.
    if any(
        bool(flag)
        for flag in moved_among_samples(targets, [record], record.ids, repeat, Suspicion())
    ):
        raise AttributionError(
            f"forward= returned the targets of the batch in another order of samples. {WAY_OUT}"
        )
    if repeat > 1 and not is_in_order(targets, record, repeat):
        raise AttributionError(
            f"forward= returned targets of shape {tuple(targets.shape)} for {n} samples: cannot tell which rows belong to "
            f"which sample. {WAY_OUT}"
        )
    return max(repeat, 1)


MORE = "More: docs/attribution.md"
GIVE_IDS = (
    "Pass ids=run.ids, indexed as you indexed the batch. For flattened rows, pass run.ids without an index, and repeat= with "
    "the number of rows per sample."
)
ITERATE = (
    "No batch of run.loader was yielded yet: iterate over run.loader instead of your own DataLoader. To continue within an "
    "epoch, use run.load_state_dict, not accelerate.skip_first_batches(run.loader). For other data, such as validation data, "
    "call it under torch.no_grad()."
)
NO_GRAD = "For other data, such as validation data, call it under torch.no_grad()."
RETURN_INDEX = (
    "Let the dataset return the index of each sample, and pass the indices of the rows as ids=."
)
OTHER_DEVICE = 'Batches are on {0}, and the loss is on {1}: pass model= or device="{1}" to attach, and drop `.to(device)`.'
SAME_ROWS = "Pass outputs and targets of the same rows."
ONE_BATCH = "Call it once for each batch; a step may have several calls."
REPEAT_OF_TENSORS = "Leave out `repeat`, or pass the number of rows per sample in the tensors."

NEW_VALUES = "Targets are new tensors, and their values differ from the targets of the samples that the outputs belong to"
LET_GO = (
    "Targets are new tensors, and the values of batch {} are no longer held for a comparison: its loss was already computed, "
    "or the loader is too many batches ahead. Cast the targets just before the loss, or pass ids=run.ids_of(tensor) with an "
    "input or a target as the loader yielded it"
)
ANOTHER_BATCH = (
    "run.ids belongs to the last batch that the loader yielded. If the loop got several batches before it computed losses, "
    "pass ids=run.ids_of(tensor) with an input or a target as the loader yielded it"
)
CONTRADICTION = f"`ids` contradicts the samples that outputs or targets belong to. {ANOTHER_BATCH}"
OTHER_BATCH = f"`ids` are not of {{}}, from which outputs or targets come. {ANOTHER_BATCH}"
OTHER_ORDER = (
    "`ids` contradicts the targets: the targets of these samples are at the rows of other samples. Index `ids` as you indexed "
    "the targets, and keep the rows of a sample next to each other. If the targets should belong to other samples, as in the "
    "second term of mixup, compute the losses yourself and use run.reduce(losses, ids=...)"
)
REPEATED = (
    "`ids` names a sample more than once. If a sample has several consecutive rows, give its id once and pass `repeat=`; if "
    "its rows are apart, as with two views or masked tokens, add up the losses of each sample yourself, and call "
    "run.reduce(losses, ids=...)"
)
WHICH_BATCH = (
    "`ids` belong to batch {}, the last that the loader yielded, but batch {} has no loss yet (it was skipped, or the loader "
    "runs ahead of the loop). Pass ids=run.ids_of(tensor) with an input or a target as the loader yielded it"
)
STRANGE = (
    "`ids` names samples that are not in any batch without a loss. An id is the position of a sample in the loader's dataset "
    "(for a Subset, the position in the subset, not in the dataset below it), in a batch that the loader yielded"
)
UNCLEAR = (
    ". The batch has a tensor of shape {}: its {} samples may be along the first or the second dimension, and no batch of "
    "another shape has shown which. Make the collate_fn put the samples first, and use another batch size; or, if they are "
    "first already, pass ids=run.ids"
)


@dataclass(frozen=True)
class StatedIds:
    """Ids that the caller gives, and the batches that they can belong to.

    Args:
        ids: Sample ids of the rows, shape (rows,), int64.
        repeat: Number of consecutive rows per id; None for one row, unless the tensors name more.
        recent: Batches last yielded, the latest at the end; `ids` may be a view of the ids of one of them.
        waiting: Batches that `ids` can belong to if no tensor names rows.
        passed_over: Earlier batch that has no loss yet, so `run.ids` may be meant for it; None if there is none.
        made_for: Batches that the model computed the outputs for, without released batches; None if unknown.
        counted: Most likely batch of `ids`, used if `ids` is not a view of known ids and no tensor shows the batch.
        ids_repeat: Whether the loader can yield a sample twice, so that `ids` may name it twice.
    """

    ids: Tensor
    repeat: int | None
    recent: Sequence[YieldedBatch]
    waiting: Sequence[YieldedBatch]
    passed_over: YieldedBatch | None
    made_for: Sequence[YieldedBatch] | None
    counted: YieldedBatch | None
    ids_repeat: bool


def attribute(
    tracker: RowTracker, outputs: Any, targets: Any, stated: StatedIds | None = None
) -> Attribution:
    """Finds the samples that outputs and targets belong to.

    Args:
        tracker: Tensors of the run whose rows are known.
        outputs: First argument of the criterion, with any nesting.
        targets: Second argument of the criterion, with any nesting; or None.
        stated: Sample ids that the caller gives; None to find the samples from the tensors.

    Returns:
        The samples, and the results of comparisons that were not read from the device yet.

    Raises:
        AttributionError: No tensor has known rows, two tensors belong to different samples, a tensor contradicts `stated`, or
            targets do not have the values that the loader yielded.
    """
    at_once = tracker.untouched(outputs, targets) if stated is None else None
    if at_once is not None:
        return at_once
    case = _Case(tracker, outputs, targets)
    if stated is not None:
        dimension = tracker.sample_dimension
        if (stated.repeat or 1) > 1 and dimension is not None and dimension.may_be_second:
            # A flattened (T, B) tensor has all samples of the first time step, then all of the next: the rows of one sample are
            # apart.
            raise case.refusal(
                "`repeat` needs the rows of a sample next to each other, but these batches have the samples along the second "
                "dimension",
                "Put the samples first and leave out `repeat`, as in "
                "run.criterion(outputs.permute(1, 2, 0), targets.T, ids=run.ids)",
            )
        return _attribute_to(stated, case)
    rows, flags = case.agreed_rows()
    if rows is None:
        raise case.refusal("Cannot tell which samples this loss belongs to", case.way_out())
    return Attribution(
        rows.ids, rows.key, rows.batch, RowLayout(rows.n, rows.repeat), rows.positions(), flags
    )


def certain_now(flag: Tensor) -> bool:
    """Returns whether the result of a comparison can be read without waiting for a device."""
    return flag.device.type == "cpu"


class _Case:
    """Finds the samples of one call of the criterion."""

    def __init__(self, tracker: RowTracker, outputs: Any, targets: Any) -> None:
        self.tracker = tracker
        # Tensors without dimensions, such as a temperature, have no rows.
        self.outputs = [leaf for leaf in leaves(outputs) if leaf.dim()]
        self.targets = [leaf for leaf in leaves(targets) if leaf.dim()]
        self.output_lookups = [tracker.look(leaf) for leaf in self.outputs]
        self.target_lookups = [tracker.look(leaf) for leaf in self.targets]

    def way_out(self) -> str:
        """Returns the advice for a loss without known rows."""
        # If the last batch has its loss already, this one is most likely of other data, such as validation.
        batch = self.tracker.latest
        if batch is None:
            return ITERATE
        if batch.credited:
            return NO_GRAD
        if not batch.tensors:  # a collate_fn that leaves samples out, or joins them
            return RETURN_INDEX
        here = batch.tensors[0].device
        elsewhere = [leaf.device for leaf in (*self.outputs, *self.targets) if leaf.device != here]
        if elsewhere:
            return OTHER_DEVICE.format(here, elsewhere[0])
        rows_of_batch = any(
            len(leaf) % len(batch.ids) == 0 for leaf in (*self.outputs, *self.targets)
        )
        return GIVE_IDS if rows_of_batch else NO_GRAD

    def refusal(self, why: str, way_out: str = "") -> AttributionError:
        """Returns the error to raise: the reason, what is known of all tensors, and what to do unless the reason says it."""
        dimension = self.tracker.sample_dimension
        if dimension is not None and dimension.unclear is not None:
            why += UNCLEAR.format(dimension.unclear, dimension.unclear[0])
        return AttributionError(
            f"{why}. Saw outputs: {_describe(self.output_lookups)}. Saw targets: {_describe(self.target_lookups)}. "
            f"Nothing was recorded. {way_out + ' ' if way_out else ''}{MORE}"
        )

    def agreed_rows(self) -> tuple[Rows | None, tuple[Tensor, ...]]:
        """Returns the rows that outputs and targets agree on (None if neither shows any), and flags still on a device."""
        for lookup in (*self.output_lookups, *self.target_lookups):
            if lookup.refuse:
                # That description says what to do.
                way_out = "" if lookup.description == CHANGED_INPUTS else GIVE_IDS
                raise self.refusal(
                    f"Cannot tell which samples this loss belongs to: {lookup.description}", way_out
                )
        followed = self._follow_outputs()
        derived = [Lookup(rows, "") for _, rows in followed if isinstance(rows, Rows)]
        by_output = self._one_of([*self.output_lookups, *derived], "outputs")
        by_target = self._one_of(self.target_lookups, "targets")
        if by_output is not None and by_target is not None and by_output.key != by_target.key:
            raise self.refusal("Outputs and targets belong to different rows", SAME_ROWS)
        # This matters even if the targets name the rows: with moved outputs, each sample would get the loss of another one.
        rows = by_target or by_output
        self._check_order(followed, 1 if rows is None else rows.n)
        if rows is None:
            return None, ()
        if rows.batch.unknown is not None:
            raise self.refusal(
                f"The rows of a batch are not its samples in order: {rows.batch.unknown}",
                RETURN_INDEX,
            )
        targets = zip(self.targets, self.target_lookups, strict=True)
        unknown = [leaf for leaf, lookup in targets if lookup.rows is None and len(leaf) >= rows.n]
        # Targets that were cast or moved are new tensors. Equal values are enough only together with outputs that name the
        # rows: alone, equal labels could be those of other samples.
        if by_output is not None:
            return rows, self._check_values(unknown, by_output)
        if unknown:
            raise self.refusal("Some targets come from a known batch, others do not", GIVE_IDS)
        return rows, ()

    def _one_of(self, lookups: list[Lookup], name: str) -> Rows | None:
        named = [lookup.rows for lookup in lookups if lookup.rows is not None]
        if len({rows.key for rows in named}) > 1:
            raise self.refusal(f"The {name} belong to different rows", ONE_BATCH)
        return named[0] if named else None

    def _follow_outputs(self) -> list[tuple[Tensor, Rows | Moved | None]]:
        """Returns outputs with unknown memory, and the rows that the operations since the model give them."""
        unnamed = [
            leaf
            for leaf, lookup in zip(self.outputs, self.output_lookups, strict=True)
            if lookup.rows is None
        ]
        returned = self.tracker.places() if unnamed else {}
        return [(leaf, follow_rows(leaf, returned)) for leaf in unnamed]

    def _check_order(self, followed: list[tuple[Tensor, Rows | Moved | None]], n: int) -> None:
        """Raises an error if outputs can be rows of samples, and an operation may have moved these rows."""
        moved = next(
            (state for leaf, state in followed if isinstance(state, Moved) and len(leaf) % n == 0),
            None,
        )
        if moved is None:
            return
        if moved.changed is not None:
            raise self.refusal(f"Cannot tell which samples this loss belongs to: {moved.changed}")
        raise self.refusal(
            f"Outputs went through {moved.by} after the model returned them, which may change the order of rows",
            GIVE_IDS,
        )

    def _check_values(self, targets: list[Tensor], rows: Rows) -> tuple[Tensor, ...]:
        """Compares new targets with the yielded ones; returns the flags that are still on a device."""
        why = NEW_VALUES if rows.batch.tensors else LET_GO.format(rows.batch.number)
        way_out = GIVE_IDS if rows.batch.tensors else ""
        return _all_hold([self._same_values(leaf, rows) for leaf in targets], self, why, way_out)

    def _same_values(self, target: Tensor, rows: Rows) -> Tensor:
        """Returns whether `target` is an unchanged tensor of the batch after a cast, a move, a reshape or a shift of tokens."""
        if target.shape[0] % rows.n == 0:
            flat = target.detach().reshape(rows.n, -1)
        else:
            flat = None
        same = torch.zeros((), dtype=torch.bool, device=target.device)
        if flat is None:
            return same
        for tensor in rows.batch.tensors:
            lookup = self.tracker.look(tensor)
            per_row = tensor.numel() // len(tensor)
            k = flat.shape[1]
            # A tensor that was changed in place since it was yielded has no rows, and is no evidence.
            if lookup.rows is None or not (k == per_row or (tensor.dim() == 2 and 1 < k < per_row)):
                continue
            # Language models train on labels[:, 1:] or on [:, :-1]: the last or the first positions of each row are enough.
            stop = rows.start + rows.step * rows.n
            yielded = tensor.detach()[rows.start : stop : rows.step].reshape(rows.n, -1)
            yielded = yielded.to(target.device)
            same = same | (yielded[:, -k:] == flat).all() | (yielded[:, :k] == flat).all()
        return same


def _describe(lookups: list[Lookup]) -> str:
    return "; ".join(map(_description, lookups)) or "no tensor"


def _description(lookup: Lookup) -> str:
    rows = lookup.rows
    note = lookup.description
    if rows is None:
        return note
    place = f"rows {rows.start}:{rows.start + rows.step * rows.n}:{rows.step} of batch {rows.batch.number}"
    return f"{place} ({note})" if note else place


def _attribute_to(stated: StatedIds, case: _Case) -> Attribution:
    """Attributes a loss to the ids that the caller gives, unless a tensor contradicts them."""
    ids = stated.ids
    view, from_ids_of = _view_of(ids, stated.recent)
    if view is not None and view.batch.unknown is not None and MOVED in view.batch.unknown:
        # `run.ids` has the samples as they were drawn. Here their rows are known to be in another order: each loss would
        # silently be recorded for another sample.
        raise case.refusal(
            f"`ids` are in the order of the sampler, but the rows of the batch are not: {view.batch.unknown}",
            RETURN_INDEX,
        )
    flags: tuple[Tensor, ...] = ()
    # A view of the ids of a batch cannot name a row twice, so only ids of other memory are sorted and compared.
    if view is None and not stated.ids_repeat:
        ordered = ids.sort().values
        flags += _all_hold([(ordered[1:] != ordered[:-1]).all()], case, REPEATED)
    shown = [
        rows
        for lookup in (*case.output_lookups, *case.target_lookups)
        if (rows := lookup.rows) is not None and not lookup.refuse
    ]
    named = [rows for rows in shown if rows.batch.unknown is None]
    for rows in named:
        flags += _check_rows(stated, view, rows, case)
    if not named:
        flags += _check_batch(
            stated, view, {rows.batch: None for rows in shown}, case, from_ids_of=from_ids_of
        )
    repeat = stated.repeat or max((rows.repeat for rows in named), default=1)
    batches = [*stated.recent] if view is None else [view.batch]
    if not any(
        rows is lookup.rows for rows in named for lookup in case.output_lookups
    ):  # else the outputs confirm the ids
        unnamed = [
            leaf
            for leaf, lookup in zip(case.targets, case.target_lookups, strict=True)
            if lookup.rows is None
        ]
        suspicion = case.tracker.suspicion
        moved = [
            flag
            for leaf in unnamed
            for flag in moved_among_samples(leaf, batches, ids, repeat, suspicion)
        ]
        flags += _all_hold([~flag for flag in moved], case, OTHER_ORDER)
    layout = RowLayout(len(ids), repeat)
    if view is not None:
        return Attribution(view.ids, view.key, view.batch, layout, view.positions(), flags)
    device = stated.recent[-1].ids.device if stated.recent else ids.device
    # Without a key: ids of the caller's own tensor can be compared by value only, which waits for the device.
    return Attribution(
        ids.to(device), None, _batch_of(stated, [rows.batch for rows in shown]), layout, None, flags
    )


def _batch_of(stated: StatedIds, shown: Sequence[YieldedBatch]) -> YieldedBatch | None:
    """Returns the batch that ids are taken to belong to: that of the tensors, else the first batch that contains the ids."""
    # With a wrong batch here, that batch would count as trained, and release its tensors before its own loss comes.
    tensors = {*shown, *(stated.made_for or ())}
    if len(tensors) == 1:
        return tensors.pop()
    likely = [] if stated.counted is None else [stated.counted]
    for batch in (*likely, *stated.waiting):
        if certain_now(has := within(stated.ids, batch)) and has:
            return batch
    return stated.counted


def _check_rows(
    stated: StatedIds, view: Rows | None, rows: Rows, case: _Case
) -> tuple[Tensor, ...]:
    """Compares ids with the rows that a tensor names; returns the flags that are still on a device."""
    ids = stated.ids
    repeat = stated.repeat
    if repeat is not None and rows.repeat not in (1, repeat):
        raise case.refusal(
            f"`repeat` is {repeat}, but tensors have {rows.repeat} rows per sample",
            REPEAT_OF_TENSORS,
        )
    if view is not None and view.key == rows.key:
        return ()
    if rows.n != len(ids):
        raise case.refusal(
            f"`ids` has {len(ids)} rows, but outputs or targets have {rows.n}. {ANOTHER_BATCH}"
        )
    return _all_hold([(rows.ids == ids.to(rows.ids.device)).all()], case, CONTRADICTION)


def _check_batch(
    stated: StatedIds,
    view: Rows | None,
    shown: Mapping[YieldedBatch, None],
    case: _Case,
    *,
    from_ids_of: bool,
) -> tuple[Tensor, ...]:
    """Compares the batch of the ids with the batches of the tensors, if no tensor names rows.

    Args:
        stated: Ids of the caller.
        view: Rows that the ids are a view of; None for a new tensor.
        shown: Batches of the tensors of the call.
        case: The call.
        from_ids_of: Whether the ids are a view of those that `run.ids_of` returned.

    Returns:
        The flags that are still on a device.
    """
    flags: tuple[Tensor, ...] = ()
    origins = [
        batches
        for batches in (*((batch,) for batch in shown), stated.made_for)
        if batches is not None
    ]
    for batches in origins:
        known = view is not None or not batches
        # For a view, the batch is compared, and no values are read. Without batches to compare with, no ids are right.
        if known:
            among = torch.tensor(view is not None and view.batch in batches)
        else:
            among = within(stated.ids, *batches)
        names = (
            " or ".join(f"batch {batch.number}" for batch in batches)
            or "the batch of an earlier step"
        )
        flags += _all_hold([among], case, OTHER_BATCH.format(names))
    # A tensor has shown the batch, so a skipped batch leaves no doubt.
    if origins:
        return flags
    if stated.passed_over is not None and not from_ids_of:
        latest = stated.recent[-1]
        if view is not None:
            doubt = torch.tensor(view.batch is latest)
        else:
            doubt = within(stated.ids, latest) & (not latest.chosen_by_caller)
        flags += _all_hold(
            [~doubt], case, WHICH_BATCH.format(latest.number, stated.passed_over.number)
        )
    if view is None and stated.waiting:
        flags += _all_hold([within(stated.ids, *stated.waiting)], case, STRANGE)
    return flags


def _all_hold(flags: list[Tensor], case: _Case, why: str, way_out: str = "") -> tuple[Tensor, ...]:
    """Raises an error if a flag on the CPU is false; returns the flags that are still on a device."""
    if not all(bool(flag) for flag in flags if certain_now(flag)):
        raise case.refusal(why, way_out)
    return tuple(flag for flag in flags if not certain_now(flag))


def check_stated(ids: Any, repeat: Any, n: int) -> None:
    """Checks the ids and `repeat` of the caller.

    Args:
        ids: Sample ids of the rows, shape (rows,), int64; or None.
        repeat: Number of consecutive rows per id; None for the default.
        n: Number of samples of the dataset.

    Raises:
        TypeError: `ids` is not an int64 tensor.
        ValueError: `ids` is empty, out of range or not one-dimensional; or `repeat` is not a positive integer, or comes without
            `ids`.
    """
    # True is an integer in Python.
    if repeat is not None and (
        isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1
    ):
        raise ValueError(
            f"`repeat` must be the number of consecutive rows per id, an integer of at least 1, got {repeat!r}"
        )
    if ids is None:
        if repeat is not None:
            raise ValueError(
                "`repeat` is the number of consecutive rows per id: pass `ids` with it, for example ids=run.ids"
            )
        return
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"`ids` must be an int64 tensor of sample positions, got {got}")
    if ids.dim() != 1 or not ids.numel():
        raise ValueError(
            f"`ids` must have shape (rows,) with at least one row, got {tuple(ids.shape)}"
        )
    # Ids on a device are not read here, which would wait for it in every step.
    if ids.device.type == "cpu" and (int(ids.min()) < 0 or int(ids.max()) >= n):
        raise ValueError(
            f"`ids` must be positions in the loader's dataset, within [0, {n}), got {int(ids.min())} to {int(ids.max())}"
        )


def _view_of(ids: Tensor, recent: Sequence[YieldedBatch]) -> tuple[Rows | None, bool]:
    """Returns the rows that `ids` is a view of, or None for a new tensor, and whether `run.ids_of` returned these ids."""
    # By memory and not by value, which would wait for the device. And values do not show which batch the loop means: a sample
    # can be in several batches, and `run.ids` can be of another batch than the loss.
    layout = memory_layout(ids)
    if layout is None:
        return None, False
    storage = ids.untyped_storage()._cdata
    for batch in reversed(recent):
        for known, from_ids_of in ((batch.ids, False), (batch.returned_ids, True)):
            if known is not None and storage == known.untyped_storage()._cdata:
                tracked = TrackedTensor.of(known, Rows(batch, 0, 1, len(known), 1))
                return None if tracked is None else tracked.locate(*layout), from_ids_of
    return None, False
