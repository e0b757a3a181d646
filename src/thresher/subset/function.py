"""The autograd function around a traced module: it finds the rows that carry gradient and runs the backward graph on them."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thresher.subset.graphs import Graphs, Layout, Taker
from thresher.torch_internals import backward_pass, retains_graph


class RowMeter(Protocol):
    """Counts the samples of a `subset_backward` model."""

    def subset_pass(self, rows: int) -> "PassMeter":
        """Counts a forward pass over `rows` rows, and returns the counter of its backward passes."""
        ...


class PassMeter(Protocol):
    """Counts the backward passes of one forward pass."""

    def count_backward(self, rows: int) -> None:
        """Counts a backward pass over `rows` rows."""
        ...


@dataclass
class Call:
    """One call of a traced module.

    Args:
        graphs: Graphs of the module.
        inputs: Arguments of the forward graph, which empties the list.
        buffers: Buffers that the forward updates.
        n: Number of samples in the batch.
        lengths: Sizes of this call, besides the batch size, that differ from call to call, such as the length of sequences.
            Default: none.
        meter: Counter of the rows that go backward; None counts nothing.
    """

    graphs: Graphs
    inputs: list[Any]
    buffers: list[Tensor]
    n: int
    lengths: tuple[int, ...] = ()
    meter: PassMeter | None = None


class SubsetFunction(torch.autograd.Function):
    """Autograd function whose forward is the traced forward and whose backward runs only on rows with a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *differentiated: Tensor) -> tuple[Tensor, ...]:
        """Runs the forward graph.

        Args:
            ctx: Context of the autograd node.
            call: Graphs with their arguments.
            *differentiated: Tensors that get gradients; autograd must see them as arguments.
        """
        graphs = call.graphs
        # The casts of autocast are already operations of the graph; autocast would cast their results again.
        with torch._C._DisableAutocast():
            returned = graphs.forward(call.inputs)
        count = len(graphs.mutated)
        saved = [returned[value.index] for value in graphs.saved]
        outputs = tuple(returned[count : graphs.num_forward])
        own_outputs = {id(output) for output in outputs}
        own_buffers = {id(buffer) for buffer in call.buffers}
        for position, value in enumerate(saved):
            if id(value) in own_outputs:
                # An output refers to this node. If the node saved the output itself, neither would ever be freed.
                saved[position] = value.detach()
            elif id(value) in own_buffers:
                # The buffer is updated below, but the gradient of this call needs the statistics as they were.
                saved[position] = value.clone()
        for buffer, new in zip(call.buffers, returned[:count], strict=True):
            buffer.copy_(new)
        ctx.graphs = graphs
        ctx.n = call.n
        ctx.lengths = call.lengths
        ctx.saved = saved
        ctx.meter = call.meter
        ctx.row_gradients = []
        # An output that shares memory with a saved value has its own version counter. It is checked, too: if the loop changed
        # such an output in place, the backward pass would use the changed numbers.
        memory = {
            value.untyped_storage().data_ptr() for value in saved if isinstance(value, Tensor)
        }
        shown = [
            output.detach() for output in outputs if output.untyped_storage().data_ptr() in memory
        ]
        ctx.versions = [
            (value, value._version) for value in (*saved, *shown) if isinstance(value, Tensor)
        ]
        ctx.differentiated = [
            (tensor.shape, tensor.dtype, tensor.device) for tensor in differentiated
        ]
        ctx.outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        # None must stay None: it tells which outputs no loss has reached, and so which parameters get no gradient at all.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(outputs[i] for i in range(len(outputs)) if i not in graphs.differentiable)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Runs the backward graph on the rows that carry gradient.

        Raises:
            RuntimeError: The call has `create_graph=True`, an earlier backward pass released the saved tensors, or a saved
                tensor was changed in place.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "subset_backward: double backward (create_graph=True) is not supported; call the model itself (.wrapped)"
            )
        graphs = ctx.graphs
        n = ctx.n
        saved = _saved(ctx)
        carrying = {i for i, gradient in enumerate(gradients) if gradient is not None} | {
            position for _, position, *_ in ctx.row_gradients
        }
        wanted = [
            not carrying.isdisjoint(outputs)
            for outputs, source in zip(graphs.grads_of, graphs.grads, strict=True)
            if source is not None
        ]
        rows, tangents = _rows_and_tangents(ctx, list(gradients))
        if ctx.meter is not None:
            ctx.meter.count_backward(n if rows is None else len(rows))
        # A process that keeps no row must give zeros and not None: the other processes of DDP wait for its gradients.
        if rows is not None and not len(rows):
            return None, *(
                torch.zeros(shape, dtype=dtype, device=device) if is_wanted else None
                for (shape, dtype, device), is_wanted in zip(
                    ctx.differentiated, wanted, strict=True
                )
            )
        with torch._C._DisableAutocast():
            computed = run_backward(graphs, saved, tangents, rows, n, ctx.lengths)
        results = []
        for gradient, layout, source in zip(
            computed, graphs.grad_layouts, graphs.grads, strict=True
        ):
            if source is not None:
                results.append(
                    gradient if rows is None or layout is None else layout.put(gradient, rows, n)
                )
        return None, *(
            result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True)
        )


def run_backward(
    graphs: Graphs,
    saved: list[Any],
    tangents: list[Tensor],
    rows: Tensor | None,
    n: int,
    lengths: tuple[int, ...] | None = None,
) -> Any:
    """Runs the backward graph on some rows, or on all rows if `rows` is None.

    Args:
        graphs: Graphs of a module.
        saved: Values that the forward graph saved, of all n samples; the list is emptied, so that each is freed after its use.
        tangents: Gradients of the outputs, for these rows only; the list is emptied.
        rows: Positions of the samples in the batch, shape (k,), int64; None for all samples.
        n: Number of samples in the batch.
        lengths: Sizes of this call, besides the batch size, that differ from call to call. Default: those of the traced call.
    """
    k = n if rows is None else len(rows)
    taker = None if rows is None else Taker(rows, n)
    arguments: list[Any] = []
    # Each value leaves the list before its rows are taken, so that the memory of the whole batch is freed value by value.
    saved.reverse()
    for description in graphs.saved:
        value = saved.pop()
        if description.follows:
            value = value // n * k
        elif description.counts:
            value = value[:k]
        elif description.layout is not None and taker is not None:
            value = taker(value, description.layout)
        arguments.append(value)
        del value
    # The taker holds every row that it has selected. Without it, the graph frees each value right after its last use.
    del taker
    arguments.extend(tangents)
    tangents.clear()
    compiled = graphs.compiled_backward
    if compiled is not None and compiled.holds_for(k, lengths):
        return compiled(arguments)
    return graphs.backward(arguments)


def kept_rows(
    outputs: Tensor, rows: Tensor, n: int | None = None, *, drawn: bool = False
) -> Tensor:
    """Selects rows of an output of a `subset_backward` model, and passes their numbers to its backward pass.

    Without this function, the backward pass searches for the rows that carry gradient, which makes the CPU wait for a GPU. On
    any other tensor, this function is plain indexing.

    Args:
        outputs: Tensor with `per` consecutive entries for each sample, such as one per token, shape (n * per, ...).
        rows: Positions of the samples in the batch, shape (k,), int64, ascending.
        n: Number of samples in the batch. Default: the first dimension of `outputs`, one entry per sample.
        drawn: Whether `rows` may name a sample more than once, as sampling with replacement does. Default: False.

    Returns:
        Entries of the selected samples, shape (k * per, ...).

    Example:
        >>> from thresher.subset import subset_backward
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> model = subset_backward(layer)
        >>> kept_rows(model(torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 5.0]])), torch.tensor([0, 2])).sum().backward()
        >>> layer.weight.grad
        tensor([[4., 5.]])
    """
    n = len(outputs) if n is None else n
    if len(rows) == n and not drawn:
        return outputs
    layout = Layout(0, len(outputs) // n)
    node: Any = outputs.grad_fn
    # A hook and `retain_grad` need the gradient of the whole outputs, which is never computed if the rows are passed directly.
    if (
        not isinstance(node, SubsetFunction._backward_cls)
        or outputs._backward_hooks
        or outputs.retains_grad
    ):
        return _index(outputs, rows, n)
    known = node.graphs.outputs[outputs.output_nr]
    if node.n != n or known not in (layout, Layout(0, 0)):
        return _index(outputs, rows, n)
    return KeptRows.apply(outputs, rows, node, layout)


def _index(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Selects the rows of any tensor, with plain PyTorch operations."""
    if len(values) == n:
        return values.index_select(0, rows)
    return values.unflatten(0, (n, len(values) // n)).index_select(0, rows).flatten(0, 1)


class KeptRows(torch.autograd.Function):
    """Selects rows, and passes their gradient directly to the autograd node of the model, without zeros for other rows."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: Tensor, node: Any, layout: Layout) -> Tensor:
        """Selects the rows."""
        ctx.node = node
        ctx.rows = rows
        ctx.position = outputs.output_nr
        return layout.take(outputs, rows, node.n)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Stores the gradient in the node, which runs afterwards and adds up all gradients that it gets."""
        ctx.node.row_gradients.append((backward_pass(), ctx.position, ctx.rows, gradient))
        return None, None, None, None


def _saved(ctx: Any) -> list[Any]:
    """Returns the values that the forward saved, and releases them unless the graph is retained.

    Raises:
        RuntimeError: An earlier backward pass released the values, or one was changed in place.
    """
    saved = ctx.saved
    if saved is None:
        raise RuntimeError(
            "subset_backward: second backward through the same forward pass; pass retain_graph=True to the first backward to "
            "keep the saved tensors"
        )
    for value, version in ctx.versions:
        if value._version != version:
            raise RuntimeError(
                f"subset_backward: a tensor of shape {tuple(value.shape)} that the backward pass needs was changed in place "
                "after the forward pass (by an optimizer step between the two?)"
            )
    if retains_graph():
        return list(saved)
    ctx.saved = None
    ctx.versions = []
    return saved


def _rows_and_tangents(
    ctx: Any, gradients: list[Tensor | None]
) -> tuple[Tensor | None, list[Tensor]]:
    """Returns the rows that carry gradient (None for all rows), and the gradients of all outputs for these rows."""
    graphs = ctx.graphs
    n = ctx.n
    # An earlier backward pass that stopped before this node, such as `torch.autograd.grad` with respect to the outputs, may
    # have left gradients here. They are not part of this pass.
    received = [
        (position, rows, gradient)
        for task, position, rows, gradient in ctx.row_gradients
        if task == backward_pass()
    ]
    ctx.row_gradients = []
    # The row tensors are compared by identity, because comparing their numbers would wait for the device.
    if (
        received
        and all(g is None for g in gradients)
        and len({id(rows) for _, rows, _ in received}) == 1
    ):
        rows = received[0][1]
        for position, _, gradient in received:
            before = gradients[position]
            gradients[position] = gradient if before is None else before + gradient
        return rows, _complete(ctx, gradients, len(rows))
    for position, rows, gradient in received:
        layout = graphs.outputs[position]
        spread = layout.put(gradient, rows, n)
        before = gradients[position]
        gradients[position] = spread if before is None else before + spread
    layouts = graphs.outputs
    carrying = [i for i, gradient in enumerate(gradients) if gradient is not None]
    # An output without samples, such as a loss of the whole batch, has a gradient that every row needs.
    if any(layouts[i] is None for i in carrying):
        return None, _complete(ctx, gradients, n)
    masks = [layouts[i].carries(gradients[i], n) for i in carrying]
    # `nonzero` waits for a GPU. This is the price of plain indexing, which `kept_rows` does not pay.
    if masks:
        rows = torch.stack(masks).any(0).nonzero().squeeze(1)
    else:
        rows = torch.empty(0, dtype=torch.int64)
    if len(rows) == n:
        return None, _complete(ctx, gradients, n)
    for i in carrying:
        gradients[i] = layouts[i].take(gradients[i], rows, n)
    return rows, _complete(ctx, gradients, len(rows))


def _complete(ctx: Any, gradients: list[Tensor | None], k: int) -> list[Tensor]:
    """Returns the tangents of the backward graph for k samples, with zeros if autograd has no gradient."""
    complete = []
    for position in ctx.graphs.differentiable:
        gradient = gradients[position]
        if gradient is None:
            shape, dtype, device = ctx.outputs[position]
            layout = ctx.graphs.outputs[position]
            if layout is not None:
                shape = (
                    *shape[: layout.axis],
                    k * layout.entries(shape[layout.axis], ctx.n),
                    *shape[layout.axis + 1 :],
                )
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        complete.append(gradient)
    return complete
