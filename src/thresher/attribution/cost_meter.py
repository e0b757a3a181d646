"""Counts samples where passes really run: a forward pass when the model is called, a backward pass when autograd runs it."""

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
"""Number of forward passes that are remembered; a loss of an older one counts as one of another forward pass."""
MOST_NODES = 100_000
"""Largest number of autograd nodes that are searched for the parameters of the model."""
MOST_OPERATIONS = 4096
"""Largest number of operations that are searched for the forward pass of a tensor."""
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
    """Returns whether a `torch.func` transform is running, whose tensors have no storage."""
    return _innermost() is not None


class ForwardPass:
    """One forward pass of the training; called as a hook of its outputs when a backward pass reaches them.

    Args:
        meter: Meter that takes the numbers.
        first: Number of the first autograd node that can be of this pass.
        n: Number of its samples; None where credited losses tell it.
        by_model: Whether `run.model` made it.
        rows: Number of rows of a call of `subset_backward`, which reports its backward passes itself; 0 for another pass.

    Attributes:
        batch: Number of the batch that its inputs are rows of or, where they do not show it, of its credited loss; or None.
        inputs_of: Number of the batch that its inputs are rows of; None where they do not show it.
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
        """Counts a backward pass, once however many outputs it reaches."""
        task = _task()
        if task != self.task:
            if self.within != -1:
                self.meter.make_unknown(RECOMPUTED)
            self.task = task
            self.backwards += 1
            self.meter.backwards += 1
            self.meter.cost.backward += self.n
            self.meter.reached += self.n

    def count_backward(self, rows: int) -> None:
        """Counts a backward pass of `subset_backward` on some rows, in the unit of the forward pass: samples, where known.

        Args:
            rows: Number of the rows.
        """
        meter = self.meter
        if self.within != -1:
            meter.make_unknown(RECOMPUTED)
        self.name_by_rows()
        meter.backwards += 1
        meter.reached += self.n
        if self.n == self.rows:
            meter.cost.backward += rows
        else:
            meter.count_shares(rows * self.n, self.rows)

    def name_by_rows(self) -> None:
        """Counts the rows of a call of `subset_backward` that a loss or a backward pass shows to be of the training."""
        if not self.named:
            self.named, self.n = True, self.rows
            self.meter.cost.forward += self.rows

    @property
    def uncredited(self) -> bool:
        """Whether `run.model` made the pass for inputs whose number of samples no loss has told."""
        return not (self.named or self.n or self.rows)

    def add(self, n: int) -> None:
        """Adds samples that a credited loss tells of."""
        self.n += n
        self.meter.cost.forward += n
        self.meter.cost.backward += n * self.backwards
        self.meter.reached += n * self.backwards
        self.meter.elsewhere += 0 if self.by_model else n

    def watch(self, outputs: Any) -> None:
        """Counts the backward passes that reach these outputs, from now on."""
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

    A forward pass of `run.model` is counted when it runs. Other forward passes are counted by their losses: a loss of outputs
    that were computed after every loss before it is of a new forward pass.

    Args:
        cost: Counters.
        parameters: Function that returns the parameters of `run.model`. Default: attach was given no model.
    """

    def __init__(self, cost: Cost, parameters: Callable[[], Iterable[Tensor]] | None = None) -> None:
        self.cost, self.parameters = cost, parameters
        self.yielded = 0
        """Number of samples that the loader yielded to the loop in this pass."""
        self.reached = 0
        """Number of samples in forward passes of this pass that a backward pass reached, however few of them it ran on."""
        self.backwards = 0
        """Number of backward passes, once for each forward pass that they reached."""
        self.evaluated = 0
        """Number of calls of `run.model` without gradients."""
        self.elsewhere = 0
        """Number of samples whose forward pass `run.model` did not make."""
        self.credited = 0
        """Number of batches with a credited loss."""
        self.subset: ForwardPass | None = None
        """The forward pass that `subset_backward` has just made."""
        self._known_parameters: dict[int, Tensor] = {}
        self._shares = 0.0
        self._passes: list[ForwardPass] = []
        self._fresh: list[tuple[ForwardPass, Tensor]] = []
        self.restart()

    def restart(self) -> None:
        """Goes on from the present counters, at another point of the training."""
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
        """Notes whether the loop put a part of the latest batch through the model, and not the whole batch."""
        passed, reached = self._at_batch
        self._at_batch = now = self.of_loop(), self.reached
        if (now[0] - passed) % self._size or (now[1] - reached) % self._size:
            self._in_parts = True

    def begin_pass(self) -> None:
        """Begins a pass over the loader, in which another share of the candidates may be yielded."""
        self._judge_rows()
        self.settle()
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
            n: Number of samples; None where the inputs do not show it.
            first: Value of `next_node` before the pass.
            batch: Number of the batch that the inputs are rows of; None where they do not show it.
            shapes: First two dimensions of the inputs, where they do not show the number of samples.
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
        """Returns a forward pass that `subset_backward` makes now, by whatever name the loop calls it.

        It is counted when `run.model` counts it, when a loss of its outputs is credited, or when a backward pass reaches it.

        Args:
            rows: Number of its rows.
        """
        self.subset = one = ForwardPass(self, number := next_node(), None, rows=rows)
        one.last = number + 1
        self._remember(one)
        return one

    def count_shares(self, part: int, rows: int) -> None:
        """Counts `part / rows` samples that went backward, and keeps what is less than a sample for the next time."""
        whole = int(self._shares + part / rows + 1e-6)
        self._shares += part / rows - whole
        self.cost.backward += whole

    def has_passed(self, batch: int) -> bool:
        """Whether a forward pass of `run.model` for a batch was seen, whose outputs can be trained on."""
        return any(one.by_model and one.batch == batch and one.last > one.first for one in self._passes)

    def last_pass(self, batch: int, before: int) -> ForwardPass | None:
        """Returns the last forward pass of `run.model` for a batch that began before an autograd node was made."""
        return next((one for one in reversed(self._passes) if one.batch == batch and one.by_model and one.first < before), None)

    def pass_with(self, number: int) -> ForwardPass | None:
        """Returns the forward pass that made the autograd node of this number; None where no known one did."""
        for one in reversed(self._passes):
            if one.first <= number < one.last:
                return one
            if one.last <= number and self._in_order:
                return None
        return None

    # What losses tell

    def origin(self, outputs: Any) -> ForwardPass | None:
        """Returns the forward pass that outputs come from; None where no known one made them."""
        return next(self._origins(outputs), None)

    def batches_of(self, outputs: Any) -> set[int]:
        """Returns the numbers of the batches whose forward passes outputs come from; empty where one is not known.

        Args:
            outputs: Outputs that a loss is made of, in any nesting.
        """
        found = {None if one is None else one.inputs_of for one in self._origins(outputs)}
        return {number for number in found if number is not None} if None not in found else set()

    def _origins(self, outputs: Any) -> Iterator[ForwardPass | None]:
        """Yields the forward passes that outputs come from, and None where the search is given up."""
        if not self._passes:
            return
        oldest, left = self._passes[0].first, MOST_OPERATIONS  # passes come in the order of their nodes
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
        """Counts the samples of a credited loss, where the model has not counted them.

        Args:
            outputs: Outputs that the loss is made of.
            origin: Result of `origin` for them.
            new: Number of samples of which no other loss of this forward pass was; a tensor, shape (), on a device.
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
        """Whether outputs are of a forward pass of `run.model` without gradients, as where a loop caches them.

        Their backward pass does not reach the model; that of a later forward pass does, and is counted there.
        """
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
        """Returns whether outputs were computed by the run's own model, called as `run.model` or by itself.

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
        # Looked up anew where a variable is not known, since the loop may have replaced parameters of its model.
        self._known_parameters = {id(parameter): parameter for parameter in self.parameters()}
        return bool(todo) or any(id(variable) in self._known_parameters for variable in variables)

    def discard_foreign(self) -> None:
        """Takes back what was counted for passes that `run.model` did not make, which turned out to be another model's."""
        for one in self._passes:
            if not one.by_model:
                one.add(-one.n)
        self._fresh = [(one, new) for one, new in self._fresh if one.by_model]
        self._passes = [one for one in self._passes if one.by_model]

    # What is reported

    def settle(self) -> None:
        """Adds the numbers that the device counted, and what the loop would have computed with all candidates.

        Each yielded sample stands for as many candidates as the plan of the pass makes it: a loop that leaves out batches,
        or trains on them twice, would do the same without selection.
        """
        for one, new in self._fresh:
            one.add(int(new))
        self._fresh.clear()
        cost = self.cost
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
        """Declares the cost unknown from now on, for a reason that is a sentence without its full stop."""
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
    """Number of samples beyond one pass per candidate, where so many of the yielded ones went through a pass."""
    return round(candidates * (passed / yielded - 1))
