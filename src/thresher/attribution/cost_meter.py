"""Counts samples when passes really run: a forward pass when the model is called, a backward pass when autograd runs it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from thresher.cost import Cost
from thresher.loading.trees import leaves

KEY = -1
"""Key of our hook among those of a tensor; other hooks have keys of 0 or more."""
MOST_PASSES = 256
"""Largest number of remembered forward passes; a loss of an older pass counts as one of a new pass."""
MOST_NODES = 100_000
"""Largest number of autograd nodes searched for the parameters of the model."""
MOST_OPERATIONS = 4096
"""Largest number of operations searched for the forward pass of a tensor."""
UNCREDITED = (
    "run.model was called with gradients for inputs that are not a batch of run.loader, and no loss of its outputs was credited"
)
RECOMPUTED = (
    "run.model was called and differentiated inside of a backward pass, as by torch.utils.checkpoint with use_reentrant=True, "
    "so that its passes cannot be told apart; pass use_reentrant=False"
)
PARTS = (
    "the loop puts only a part of the rows of a batch through the model, and it is not known which of the samples that were "
    "not selected it would have left out; take such samples out of the dataset, as with torch.utils.data.Subset"
)
TRANSFORMED = "run.model was called inside of a torch.func transform, such as vmap or grad, whose passes cannot be counted"

SOME_DIMENSION = (
    "run.model was called with inputs that are not a batch of run.loader, and the samples of its losses can be along the first "
    "or the second dimension of these inputs"
)

next_node = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
"""Number of the autograd node that this thread makes next."""
_innermost: Any = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
_task: Any = torch._C._current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]


def in_transform() -> bool:
    """Returns whether a `torch.func` transform is running; its tensors have no storage."""
    return _innermost() is not None


class ForwardPass:
    """One forward pass of the training, and the hook that runs when a backward pass reaches its outputs.

    Args:
        meter: Meter that takes the numbers.
        first: Number of the first autograd node that can belong to this pass.
        n: Number of samples; None if only credited losses tell it.
        by_model: Whether `run.model` made the pass.
        rows: Number of rows of a call of `subset_backward`, which reports its own backward passes; 0 for other passes.

    Attributes:
        batch: Number of the batch of its inputs or, if the inputs do not show it, of its credited loss; None if unknown.
        inputs_of: Number of the batch of its inputs; None if the inputs do not show it.
    """

    __slots__ = (
        "backwards", "batch", "by_model", "first", "inputs_of", "last", "meter", "n", "named", "rows", "shapes", "task",
        "within",
    )  # fmt: skip
    __torch_unserializable__ = True

    def __init__(self, meter: "Meter", first: int, n: int | None, *, by_model: bool = True, rows: int = 0) -> None:
        self.meter, self.first, self.last, self.by_model = meter, first, next_node(), by_model
        self.n, self.named = n or 0, n is not None
        self.task, self.backwards, self.rows, self.within = -1, 0, rows, _task()
        self.batch: int | None = None
        self.inputs_of: int | None = None
        self.shapes: Sequence[Sequence[int]] = ()

    def __call__(self, _: Any) -> None:
        """Counts a backward pass once, even if it reaches several outputs."""
        # The hook runs for each output; the number of the autograd task is equal for all outputs of one backward pass.
        task = _task()
        if task != self.task:
            # A reentrant checkpoint makes the forward pass again, inside of the backward pass: it looks like another pass.
            if self.within != -1:
                self.meter.make_unknown(RECOMPUTED)
            self.task = task
            self.backwards += 1
            self.meter.backwards += 1
            self.meter.cost.backward += self.n
            self.meter.reached += self.n

    def count_backward(self, rows: int) -> None:
        """Counts a backward pass of `subset_backward` on some rows, in the unit of the forward pass: samples, if known.

        Args:
            rows: Number of rows.
        """
        meter = self.meter
        if self.within != -1:
            meter.make_unknown(RECOMPUTED)
        self.name_by_rows()
        self.backwards += 1
        meter.backwards += 1
        meter.subset_backwards += 1
        meter.whole_backwards += rows == self.rows
        meter.reached += self.n
        # The model may run several rows per sample, such as two crops: the two passes must be counted in one unit.
        if self.n == self.rows:
            meter.cost.backward += rows
        else:
            meter.count_shares(rows * self.n, self.rows)

    def name_by_rows(self) -> None:
        """Counts the forward pass of `subset_backward` once a loss or a backward pass shows that the loop trains on it."""
        if not self.named:
            self.named, self.n = True, self.rows
            self.meter.cost.forward += self.rows

    @property
    def uncredited(self) -> bool:
        """Whether `run.model` made the pass, and neither its inputs nor a loss tell the number of samples."""
        return not (self.named or self.n or self.rows)

    def add(self, n: int) -> None:
        """Adds samples of a credited loss to this pass."""
        self.n += n
        self.meter.cost.forward += n
        self.meter.cost.backward += n * self.backwards
        self.meter.reached += n * self.backwards
        self.meter.elsewhere += 0 if self.by_model else n

    def watch(self, outputs: Any) -> None:
        """Counts the backward passes that reach these outputs from now on."""
        for tensor in (outputs,) if isinstance(outputs, Tensor) else leaves(outputs):
            if not tensor.requires_grad:
                continue
            hooks = tensor._backward_hooks
            if hooks is None:
                # The same as `register_hook`, which takes four times as long: it would be a share of a small step.
                tensor._backward_hooks = OrderedDict(((KEY, self),))
                if tensor.grad_fn is not None:
                    tensor.grad_fn._register_hook_dict(tensor)
            else:
                hooks[KEY] = self


class Meter:
    """Counts the samples of the forward and backward passes of the training.

    A forward pass of `run.model` is counted when it runs. Other forward passes are counted by their losses. A loss belongs to a
    new forward pass if its outputs were computed after all earlier losses.

    Args:
        cost: Counters.
        parameters: Function that returns the parameters of `run.model`. Default: attach got no model.
    """

    def __init__(self, cost: Cost, parameters: Callable[[], Iterable[Tensor]] | None = None) -> None:
        self.cost, self.parameters = cost, parameters
        self.yielded = 0
        """Number of samples that the loader yielded in this pass over it."""
        self.reached = 0
        """Number of samples in forward passes that a backward pass reached, even if it ran on a part of their rows."""
        self.backwards = 0
        """Number of backward passes, counted once per forward pass that they reached."""
        self.subset_backwards = self.whole_backwards = 0
        """Numbers of backward passes of `subset_backward`, and of those among them that ran on all rows."""
        self.evaluated = 0
        """Number of calls of `run.model` without gradients."""
        self.elsewhere = 0
        """Number of samples whose forward pass was not made by `run.model`."""
        self.credited = 0
        """Number of batches with a credited loss."""
        self.subset: ForwardPass | None = None
        """The last forward pass of `subset_backward`, until `run.model` takes it."""
        self._known_parameters: dict[int, Tensor] = {}
        self._shares = 0.0
        self._passes: list[ForwardPass] = []
        self._fresh: list[tuple[ForwardPass, Tensor]] = []
        self.restart()

    def restart(self) -> None:
        """Continues from the present counters at another point of the training."""
        self._passes.clear()
        self._in_order = True  # each pass ended after those before it, which numbers of several threads do not show
        self._unknown = self.cost.unknown
        self._begin_window()

    def next_batch(self, n: int) -> None:
        """Notes that the loader yields a batch of n samples."""
        self._judge_rows()
        self.yielded += n
        self._size = n

    def _judge_rows(self) -> None:
        """Notes whether the loop put only a part of the latest batch through the model."""
        # Micro-batches add up to the whole batch, and a batch that was skipped adds nothing: only a rest is a part.
        passed, reached = self._at_batch
        self._at_batch = now = self.of_loop(), self.reached
        if (now[0] - passed) % self._size or (now[1] - reached) % self._size:
            self._in_parts = True

    def begin_pass(self) -> None:
        """Begins a pass over the loader, in which the plan may keep another share of the candidates."""
        self._judge_rows()
        self.settle()
        # `settle` judges the rows of this pass alone, and anew each time. Its last verdict must outlast the pass.
        if self.cost.unknown == PARTS:
            self.make_unknown(PARTS)
        self._begin_window()

    def _begin_window(self) -> None:
        cost = self.cost
        self.yielded = self.reached = self._more_forward = self._more_backward = 0
        self._start = self.of_loop(), cost.full_forward, cost.full_backward, cost.steps
        self._at_batch, self._size, self._in_parts, self._evaluated = (self._start[0], 0), 1, False, self.evaluated

    # What the model reports

    def passed(
        self, outputs: Any, n: int | None, first: int, batch: int | None = None, shapes: Sequence[Sequence[int]] = ()
    ) -> None:
        """Counts a forward pass of `run.model`.

        Args:
            outputs: Outputs of the model.
            n: Number of samples; None if the inputs do not show it.
            first: Value of `next_node` before the pass.
            batch: Number of the batch of the inputs; None if the inputs do not show it.
            shapes: First two dimensions of the inputs, if these do not show the number of samples.
        """
        one, self.subset = self.subset, None
        if one is None:
            one = ForwardPass(self, first, n)
            one.shapes = shapes
            self._remember(one)
            one.watch(outputs)
        else:
            one.first, one.last = first, next_node()
            self._in_order = self._in_order and self._passes[-1:] == [one]
            one.n, one.named = n or one.rows, True
        one.batch = one.inputs_of = batch
        self.cost.forward += one.n

    def subset_pass(self, rows: int) -> ForwardPass:
        """Returns the forward pass that `subset_backward` makes now, even if the loop calls the model without `run.model`.

        The pass is counted by `run.model`, by a credited loss of its outputs, or by a backward pass, whichever comes first.

        Args:
            rows: Number of rows of the pass.
        """
        # Not counted yet: a call by another name may be for a plot, and not for the training.
        self.subset = one = ForwardPass(self, number := next_node(), None, rows=rows)
        one.last = number + 1
        self._remember(one)
        return one

    def count_shares(self, part: int, rows: int) -> None:
        """Counts `part / rows` samples that went backward, and carries a fraction of a sample over to the next call."""
        whole = int(self._shares + part / rows + 1e-6)
        self._shares += part / rows - whole
        self.cost.backward += whole

    def has_passed(self, batch: int) -> bool:
        """Whether `run.model` made a forward pass for a batch, with outputs that can be trained on."""
        return any(one.by_model and one.batch == batch and one.last > one.first for one in self._passes)

    def last_pass(self, batch: int, before: int) -> ForwardPass | None:
        """Returns the last forward pass of `run.model` for a batch that began before the autograd node with a number."""
        return next((one for one in reversed(self._passes) if one.batch == batch and one.by_model and one.first < before), None)

    def pass_with(self, number: int) -> ForwardPass | None:
        """Returns the forward pass that made the autograd node with this number; None if it is not remembered."""
        for one in reversed(self._passes):
            if one.first <= number < one.last:
                return one
            if one.last <= number and self._in_order:
                return None
        return None

    # What losses tell

    def origin(self, outputs: Any) -> ForwardPass | None:
        """Returns the forward pass of outputs; None if it is not remembered."""
        return next(self._origins(outputs), None)

    def batches_of(self, outputs: Any) -> set[int]:
        """Returns the numbers of the batches whose forward passes made outputs; empty if one of the passes is unknown.

        Args:
            outputs: Outputs that a loss is made of, in any nesting.
        """
        found = {None if one is None else one.inputs_of for one in self._origins(outputs)}
        return {number for number in found if number is not None} if None not in found else set()

    def _origins(self, outputs: Any) -> Iterator[ForwardPass | None]:
        """Yields the forward passes of outputs, and None if the search is given up."""
        if not self._passes:
            return
        # Nodes older than the first remembered pass cannot lead to one: the walk ends there, not at the start of the graph.
        oldest, left = self._passes[0].first, MOST_OPERATIONS
        todo = [leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None]
        seen = set(todo)
        while todo and left:
            node, left = todo.pop(), left - 1
            number = node._sequence_nr()
            if (one := self.pass_with(number)) is not None:
                yield one
            elif number >= oldest:
                parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
                seen |= parents
                todo += parents
        if todo:
            yield None

    def count(self, outputs: Any, origin: ForwardPass | None, new: int | Tensor) -> None:
        """Counts the samples of a credited loss that the model has not counted.

        Args:
            outputs: Outputs that the loss is made of.
            origin: Result of `origin` for the outputs.
            new: Number of samples without an earlier loss of this forward pass; on a device, a tensor, shape ().
        """
        if origin is not None and origin.rows:
            origin.name_by_rows()
        if origin is not None and origin.named:
            return
        if origin is None:
            cached = self._is_cached(outputs)
            origin = ForwardPass(self, self._passes[-1].last if self._passes else 0, None, by_model=cached)
            if not cached:
                self._remember(origin)
        if not origin.by_model:
            origin.watch(outputs)
        # Rows beside the batch, such as unlabelled ones, run as well: the inputs tell their number, and the loss does not.
        rows = {shape[0] for shape in origin.shapes if shape}
        if len(rows) == 1 and (not isinstance(new, int) or max(rows) >= new):
            if new not in rows and any(new in shape[1:] for shape in origin.shapes):
                self.make_unknown(SOME_DIMENSION)
            origin.named = True
            origin.add(*rows)
        elif isinstance(new, int):
            origin.add(new)
        else:
            self._fresh.append((origin, new))

    def _is_cached(self, outputs: Any) -> bool:
        """Whether outputs were cached by a forward pass of `run.model` without gradients, as in GradCache."""
        # The backward pass of cached outputs ends at the cache; a later forward pass counts that of the model. Outputs that
        # lead to a parameter of the model are not cached: the call without gradients was for something else.
        if self.parameters is None or self.evaluated == self._evaluated:
            return False
        own = {id(parameter) for parameter in self.parameters()}
        todo, left = [leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None], MOST_OPERATIONS
        seen = set(todo)
        while todo and left:
            node, left = todo.pop(), left - 1
            if id(getattr(node, "variable", None)) in own:
                return False
            parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
            seen |= parents
            todo += parents
        return not todo

    def is_of_own_model(self, outputs: Any) -> bool:
        """Returns whether outputs were computed by the run's own model, with or without `run.model`.

        Args:
            outputs: Outputs that a loss is made of, in any nesting.
        """
        if self.parameters is None:
            return True
        todo = [leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None]
        seen, variables = set(todo), list[Tensor]()
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            one = self.pass_with(node._sequence_nr())
            if one is not None and one.by_model:
                return True
            variable: Tensor | None = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) in self._known_parameters:
                    return True
                variables.append(variable)
            parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
            seen |= parents
            todo += parents
        if not variables:
            return bool(todo)
        # Looked up anew if no variable is known, because the loop may have replaced parameters of its model. The values of the
        # table keep the parameters alive, so that a new tensor cannot get the id of an old one.
        self._known_parameters = {id(parameter): parameter for parameter in self.parameters()}
        return bool(todo) or any(id(variable) in self._known_parameters for variable in variables)

    def discard_foreign(self) -> None:
        """Removes the counts of passes that `run.model` did not make, because they were those of another model."""
        for one in self._passes:
            if not one.by_model:
                one.add(-one.n)
        self._fresh = [(one, new) for one, new in self._fresh if one.by_model]
        self._passes = [one for one in self._passes if one.by_model]

    # What is reported

    def settle(self) -> None:
        """Adds the numbers that the device counted, and the cost of the same loop with all candidates.

        A yielded sample stands for as many candidates as the plan says. A loop that leaves out batches, or trains on them
        twice, would do the same without selection.
        """
        for one, new in self._fresh:
            one.add(int(new))
        self._fresh.clear()
        cost = self.cost
        # Computed anew from the start of the pass: the user may read the cost at any time, and must not change it by reading.
        before, full_forward, full_backward, steps = self._start
        in_parts = False
        if self.yielded:
            forward = cost.full_forward - self._more_forward - full_forward
            backward = cost.full_backward - self._more_backward - full_backward
            passed = self.of_loop() - before
            unseen = not passed and (cost.steps > steps or self._unknown is not None)
            more_forward = 0 if unseen else _more(forward, passed, self.yielded)
            more_backward = 0 if unseen else _more(backward, self.reached, self.yielded)
            cost.full_forward += more_forward - self._more_forward
            cost.full_backward += more_backward - self._more_backward
            self._more_forward, self._more_backward = more_forward, more_backward
            uncertain = passed % self.yielded or self.reached % self.yielded
            in_parts = bool(uncertain and self._in_parts and (forward != self.yielded or backward != self.yielded))
        uncredited = any(one.uncredited for one in self._passes)
        cost.unknown = self._unknown or (UNCREDITED if uncredited else PARTS if in_parts else None)

    def make_unknown(self, reason: str) -> None:
        """Declares the cost unknown from now on; the reason is a sentence without its full stop."""
        self.cost.unknown = self._unknown = self._unknown or reason

    def of_loop(self) -> int:
        """Number of samples in forward passes of the loop."""
        return self.cost.forward - self.cost.refresh - self.cost.scoring

    def _remember(self, one: ForwardPass) -> None:
        self._in_order = self._in_order and (not self._passes or self._passes[-1].last <= one.last)
        self._passes.append(one)
        if len(self._passes) > MOST_PASSES:
            oldest = self._passes.pop(0)
            if oldest.uncredited:
                self.make_unknown(UNCREDITED)


def _more(candidates: int, passed: int, yielded: int) -> int:
    """Number of samples beyond one pass per candidate, if `passed` samples went through a pass for `yielded` yielded ones."""
    return round(candidates * (passed / yielded - 1))
