"""Remembers the forward passes of the training by their autograd nodes, and counts their backward passes with a hook."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from thresher.attribution.rows import AttributionError, Rows
from thresher.torch_internals import backward_pass, next_node
from thresher.trees import leaves

KEY = -1
"""Key of our hook among those of a tensor; other hooks have keys of 0 or more."""
MOST_PASSES = 256
"""Largest number of remembered forward passes; a loss of an older pass counts as one of a new pass."""
MOST_NODES = 100_000
"""Largest number of autograd nodes searched for the parameters of the model."""
MOST_OPERATIONS = 4096
"""Largest number of operations searched for the forward pass of a tensor."""
RECOMPUTED = (
    "run.model was called and differentiated inside of a backward pass, as by torch.utils.checkpoint with use_reentrant=True, "
    "so its passes cannot be distinguished; pass use_reentrant=False"
)

AFTER_STEP = (
    "The loss comes from a forward pass whose step is over: another loss of the same samples and pass was recorded before the "
    "optimizer stepped, or before later batches came. The loss after it was taken for a log, and was not recorded. Compute all "
    "losses of a forward pass that you train on before the optimizer steps."
)


class ForwardPass:
    """One forward pass of the training loop, and the hook that runs when a backward pass reaches its outputs.

    Args:
        meter: `cost_meter.Meter` whose counters the passes add to.
        first: Number of the first autograd node that can belong to this pass.
        n: Number of samples; None if only the losses of its outputs will show it.
        by_model: Whether `run.model` made the pass.
        rows: Number of rows of a call of `subset_backward`, which reports its own backward passes; 0 for other passes.

    Attributes:
        batch: Number of the batch of its inputs or, if the inputs do not show it, of its loss; None if unknown.
        inputs_of: Number of the batch of its inputs; None if the inputs do not show it.
        named: Whether no loss needs to show the number of samples: it is known, or the pass may be one of an evaluation.
        beside: Number of its rows that are not of the batch.
        samples: Samples of its inputs; None if one of these does not show them.
        is_over: Whether its outputs had a loss after the step that used its gradients, as for a log.
    """

    __slots__ = (
        "backwards", "batch", "beside", "by_model", "first", "inputs_of", "is_over", "last", "meter", "n", "named", "rows",
        "samples", "shapes", "task", "within",
    )  # fmt: skip
    # torch warns when a tensor with a hook is pickled, unless the hook has this attribute.
    __torch_unserializable__ = True

    def __init__(
        self, meter: Any, first: int, n: int | None, *, by_model: bool = True, rows: int = 0
    ) -> None:
        self.meter = meter
        self.first = first
        self.last = next_node()
        self.by_model = by_model
        self.n = n or 0
        self.named = n is not None
        self.task = -1
        self.backwards = 0
        self.rows = rows
        self.within = backward_pass()
        self.batch: int | None = None
        self.inputs_of: int | None = None
        self.shapes: Sequence[Sequence[int]] = ()
        self.samples: Rows | None = None
        self.beside = 0
        self.is_over = False

    def __call__(self, _: Any) -> None:
        """Counts a backward pass once, even if it reaches several outputs."""
        # The hook runs for each output; the number of the autograd task is equal for all outputs of one backward pass.
        task = backward_pass()
        if task != self.task:
            meter = self.meter
            if self.is_over:
                raise AttributionError(AFTER_STEP)
            # A reentrant checkpoint makes the forward pass again, inside of the backward pass: it looks like another pass.
            if self.within != -1:
                meter.make_unknown(RECOMPUTED)
            meter.backward_begins()
            self.task = task
            self.backwards += 1
            if meter.pending is not None and len(meter.reached_passes) < MOST_PASSES:
                meter.reached_passes.append(self)
            meter.backwards += 1
            meter.cost.backward += self.n
            meter.reached += self.n
            if self.beside:
                meter.reached_beside(self.beside)

    def count_backward(self, rows: int) -> None:
        """Counts a backward pass of `subset_backward` on some rows, in the unit of the forward pass: samples, if known.

        Args:
            rows: Number of rows.
        """
        meter = self.meter
        if self.is_over:
            raise AttributionError(AFTER_STEP)
        if self.within != -1:
            meter.make_unknown(RECOMPUTED)
        meter.backward_begins()
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
            self.named = True
            self.n = self.rows
            self.meter.cost.forward += self.rows

    @property
    def unnamed(self) -> bool:
        """Whether the number of samples is unknown, because neither the inputs nor a loss show it."""
        return not (self.n or self.rows)

    @property
    def uncredited(self) -> bool:
        """Whether the number of samples is unknown, and the pass is not one of an evaluation."""
        return self.unnamed and not self.named

    def add(self, n: int) -> None:
        """Adds n samples to this pass, which a loss of its outputs has shown."""
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
                # One key for all passes: an output that is watched again, as one that a model returns twice, still counts once.
                hooks[KEY] = self


class ForwardPasses:
    """Remembers the latest forward passes of the training, and finds the pass that computed some outputs.

    Args:
        parameters: Function that returns the parameters of `run.model`; None if attach got no model.
        forgets: Function that is called with a pass that is not remembered any more.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[Tensor]] | None,
        forgets: Callable[[ForwardPass], None],
    ) -> None:
        self.parameters = parameters
        self._forgets = forgets
        self.latest: list[ForwardPass] = []
        """The passes, the last one at the end."""
        self.subset: ForwardPass | None = None
        """The last forward pass of `subset_backward`, until `run.model` takes it."""
        self.in_order = True
        """Whether node numbers increase from pass to pass, which can be false if passes run in several threads."""
        self._known_parameters: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Forgets all passes."""
        self.latest.clear()
        self.in_order = True

    def add(self, forward_pass: ForwardPass) -> None:
        """Remembers a forward pass.

        Args:
            forward_pass: The pass, which has ended.
        """
        # Autograd numbers nodes per thread, so the passes of a second thread can have lower numbers than those before them.
        self.in_order = self.in_order and (
            not self.latest or self.latest[-1].last <= forward_pass.last
        )
        self.latest.append(forward_pass)
        if len(self.latest) > MOST_PASSES:
            self._forgets(self.latest.pop(0))

    def has_passed(self, batch: int) -> bool:
        """Whether `run.model` made a forward pass for a batch, with outputs that can be trained on."""
        return any(
            forward_pass.by_model
            and forward_pass.batch == batch
            and forward_pass.last > forward_pass.first
            for forward_pass in self.latest
        )

    def last_pass(self, batch: int, before: int) -> ForwardPass | None:
        """Returns the last pass of `run.model` for batch number `batch` that began before autograd node number `before`."""
        return next(
            (
                forward_pass
                for forward_pass in reversed(self.latest)
                if forward_pass.batch == batch
                and forward_pass.by_model
                and forward_pass.first < before
            ),
            None,
        )

    def pass_with(self, number: int) -> ForwardPass | None:
        """Returns the forward pass that made the autograd node with this number; None if it is not remembered."""
        for forward_pass in reversed(self.latest):
            if forward_pass.first <= number < forward_pass.last:
                return forward_pass
            # All earlier passes ended before this one did, so none of them has the node either.
            if forward_pass.last <= number and self.in_order:
                return None
        return None

    def origin(self, outputs: Any) -> ForwardPass | None:
        """Returns the forward pass of outputs; None if it is not remembered."""
        return next(self.origins(outputs), None)

    def batches_of(self, outputs: Any) -> set[int]:
        """Returns the numbers of the batches that outputs were computed for; empty if one of the passes is unknown.

        Args:
            outputs: Outputs that a loss was computed from, in any nesting.
        """
        batches = {
            None if forward_pass is None else forward_pass.inputs_of
            for forward_pass in self.origins(outputs)
        }
        if None not in batches:
            return {number for number in batches if number is not None}
        return set()

    def origins(self, outputs: Any) -> Iterator[ForwardPass | None]:
        """Yields the forward passes that computed outputs, and None at the end if the graph is too large to search."""
        if not self.latest:
            return
        # Nodes older than the first remembered pass cannot lead to one: the walk ends there, not at the start of the graph.
        oldest = self.latest[0].first
        walk = GraphWalk(outputs, MOST_OPERATIONS)
        for node in walk:
            number = node._sequence_nr()
            forward_pass = self.pass_with(number)
            if forward_pass is not None:
                yield forward_pass
            elif number >= oldest:
                walk.enter(node)
        if walk.todo:
            yield None

    def lead_to_parameters(self, outputs: Any) -> bool:
        """Returns whether the graph of some outputs reaches a parameter of the model.

        The result is True, too, if the graph is too large to search or attach got no model.

        Args:
            outputs: Outputs that a loss was computed from, in any nesting.
        """
        if self.parameters is None:
            return True
        trained = {id(parameter) for parameter in self.parameters()}
        walk = GraphWalk(outputs, MOST_OPERATIONS)
        for node in walk:
            # AccumulateGrad, the node at each leaf of the graph, has a `variable`: the parameter itself.
            if id(getattr(node, "variable", None)) in trained:
                return True
            walk.enter(node)
        return bool(walk.todo)

    def is_of_own_model(self, outputs: Any) -> bool:
        """Returns whether outputs were computed by the run's own model, called as `run.model` or directly.

        The result is True, too, if the graph is too large to search or attach got no model.

        Args:
            outputs: Outputs that a loss was computed from, in any nesting.
        """
        if self.parameters is None:
            return True
        variables = list[Tensor]()
        walk = GraphWalk(outputs, MOST_NODES)
        for node in walk:
            forward_pass = self.pass_with(node._sequence_nr())
            if forward_pass is not None and forward_pass.by_model:
                return True
            variable: Tensor | None = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) in self._known_parameters:
                    return True
                variables.append(variable)
            walk.enter(node)
        if not variables:
            return bool(walk.todo)
        # Looked up anew if no variable is known, because the loop may have replaced parameters of its model. The values of the
        # table keep the parameters alive, so that a new tensor cannot get the id of an old one.
        self._known_parameters = {id(parameter): parameter for parameter in self.parameters()}
        # A graph that is too large to search counts as that of the run's model: its losses would otherwise be left out
        # silently.
        return bool(walk.todo) or any(
            id(variable) in self._known_parameters for variable in variables
        )


class GraphWalk:
    """Visits the autograd nodes of outputs, each once, and those nodes before them that the caller enters.

    Args:
        outputs: Tensors, in any nesting.
        most: Largest number of nodes to visit.

    Attributes:
        todo: Nodes that were not visited yet; not empty at the end if the graph is too large to search.
    """

    def __init__(self, outputs: Any, most: int) -> None:
        self.todo = [leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None]
        self._left = most
        self._seen = set(self.todo)

    def __iter__(self) -> Iterator[Any]:
        while self.todo and self._left:
            self._left -= 1
            yield self.todo.pop()

    def enter(self, node: Any) -> None:
        """Visits the nodes whose results this node used, too."""
        parents = {parent for parent, _ in node.next_functions if parent is not None} - self._seen
        self._seen |= parents
        self.todo += parents
