"""Which calls of the criterion count: not the same loss a second time, and not the loss of another model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thresher.attribution.meter import ForwardPass, Meter
from thresher.attribution.operations import ROW_MAJOR
from thresher.attribution.rows import Attribution, YieldedBatch
from thresher.loading.trees import leaves

MOST_NODES = 100_000
"""Largest number of autograd nodes that are searched for the parameters of the model."""

CallIdentity = int | tuple[Any, ...]
"""Identity of the outputs and targets of one call; equal for two calls with the very same ones."""


def identity_of(outputs: Any, targets: Any) -> CallIdentity | None:
    """Returns the identity of one call of the criterion; None where an output has no autograd node.

    Outputs that were only reshaped since are the same ones.

    Args:
        outputs: First argument of the criterion, in any nesting.
        targets: Second argument of the criterion, in any nesting.
    """
    made = tuple(_origin(leaf) for leaf in leaves(outputs))
    if not made or None in made:
        return None
    return made, tuple(_place(leaf) for leaf in leaves(targets) if leaf.layout is torch.strided)


def _origin(tensor: Tensor) -> tuple[Any, ...] | None:
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name().split("Backward")[0] in ROW_MAJOR:
        node, number = node.next_functions[0]
    return None if node is None else (node._sequence_nr(), number, tuple(tensor.shape))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # A weak reference keeps the address of a storage from being used again.
    storage = StorageWeakRef(tensor.untyped_storage())
    version = -1 if tensor.is_inference() else tensor._version
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), version


def same_samples(one: Attribution, other: Attribution) -> bool:
    """Returns whether two losses are known to belong to the same samples, without waiting for a device."""
    if one.key is not None and one.key == other.key:
        return True
    return one.ids is other.ids or (one.ids.is_cpu and other.ids.is_cpu and torch.equal(one.ids, other.ids))


class CreditedCall(NamedTuple):
    """A call of the criterion that was credited.

    Attributes:
        identity: Identity of outputs and targets; None where it is not known.
        made: Number of the autograd node that was next after the loss.
        origin: Forward pass that the outputs came from; None where it was not searched.
    """

    identity: CallIdentity | None
    made: int
    origin: ForwardPass | None


def credited_before(
    calls: Sequence[CreditedCall], outputs: Any, call: CallIdentity | None, batch: YieldedBatch | None, meter: Meter
) -> bool | None:
    """Looks for the outputs of a loss among those of earlier calls for the same samples.

    Args:
        calls: The earlier calls; where the identity is a number, the outputs were what `run.model` returned last.
        outputs: Outputs that the loss is made of, in any nesting.
        call: Identity of outputs and targets.
        batch: Batch of the samples.
        meter: Meter that knows the forward passes of the run's model.

    Returns:
        True where one was of these outputs; False where one was only of the same forward pass; None where none was.
    """
    if not isinstance(call, tuple) or batch is None:
        return None
    made, origin = call[0], meter.origin(outputs)
    returned = meter.pass_with(made[0][0]) is origin
    found = None
    for one in calls:
        as_returned = one.origin is None and isinstance(one.identity, int)
        of = meter.last_pass(batch.number, one.made) if as_returned else one.origin
        if isinstance(one.identity, tuple) and one.identity[0] == made:
            return True
        if of is not None and of is origin:
            found = found or (as_returned and returned)
    return found


class OwnModel:
    """Finds out whether outputs were computed by the run's own model, called as `run.model` or by itself.

    Args:
        meter: Meter that knows the forward passes of `run.model`.
        parameters: Function that returns the parameters of the model.
    """

    def __init__(self, meter: Meter, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._meter, self._parameters = meter, parameters
        self._known: dict[int, Tensor] = {}

    def made(self, outputs: Any) -> bool:
        """Returns whether outputs depend on a forward pass of `run.model`, or on a parameter of the model.

        Args:
            outputs: Outputs that a loss is made of, in any nesting.
        """
        todo = [leaf.grad_fn for leaf in leaves(outputs) if leaf.grad_fn is not None]
        seen, variables = set(todo), list[Tensor]()
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            one = self._meter.pass_with(node._sequence_nr())
            if one is not None and one.by_model:
                return True
            variable: Tensor | None = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) in self._known:
                    return True
                variables.append(variable)
            parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
            seen |= parents
            todo += parents
        if not variables:
            return bool(todo)
        self._known = {id(parameter): parameter for parameter in self._parameters()}  # which the loop may have replaced
        return bool(todo) or any(id(variable) in self._known for variable in variables)
