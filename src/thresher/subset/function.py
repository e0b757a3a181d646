"""The autograd function around a traced module: finds the rows that carry gradient and runs the backward graph on them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thresher.subset.graphs import Graphs
from thresher.subset.rows import Layout, Taker

_task: Any = torch._C._current_graph_task_id  # pyright: ignore[reportAttributeAccessIssue]
_keep_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class Call:
    """One call of a traced module.

    Args:
        graphs: The module's graphs.
        inputs: Arguments of the forward graph; emptied by the call.
        buffers: Buffers that the forward updates.
        n: Samples in the batch.
    """

    graphs: Graphs
    inputs: list[Any]
    buffers: list[Tensor]
    n: int


class SubsetFunction(torch.autograd.Function):
    """Forward: the traced forward. Backward: the traced backward, on the rows whose gradient is not zero."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: Tensor) -> tuple[Tensor, ...]:
        """Run the forward graph; `trained` is only there so that autograd knows what gets gradients."""
        graphs = call.graphs
        with torch._C._DisableAutocast():
            returned = graphs.forward(call.inputs)
        count = len(graphs.mutated)
        saved = [returned[slot.index] for slot in graphs.saved]
        outputs = tuple(returned[count : graphs.num_forward])
        mine = {id(output) for output in outputs}
        held = {id(buffer) for buffer in call.buffers}
        for position, value in enumerate(saved):
            if id(value) in mine:
                saved[position] = value.detach()  # the output itself would hold this node, which holds the output
            elif id(value) in held:
                saved[position] = value.clone()
        for buffer, new in zip(call.buffers, returned[:count], strict=True):
            buffer.copy_(new)
        ctx.graphs, ctx.n, ctx.saved, ctx.given = graphs, call.n, saved, []
        memory = {value.untyped_storage().data_ptr() for value in saved if isinstance(value, Tensor)}
        shown = [output.detach() for output in outputs if output.untyped_storage().data_ptr() in memory]
        ctx.versions = [(value, value._version) for value in (*saved, *shown) if isinstance(value, Tensor)]
        ctx.trained = [(tensor.shape, tensor.dtype, tensor.device) for tensor in trained]
        ctx.outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[i] for i in range(len(outputs)) if i not in graphs.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Run the backward graph on the rows that carry gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "subset_backward: double backward (create_graph=True) is not supported; call the model itself (.wrapped)"
            )
        graphs, n, saved = ctx.graphs, ctx.n, _saved(ctx)
        carrying = {i for i, gradient in enumerate(gradients) if gradient is not None} | {
            position for _, position, *_ in ctx.given
        }
        wanted = [not carrying.isdisjoint(of) for of, of_what in zip(graphs.grads_of, graphs.grads, strict=True) if of_what]
        rows, tangents = _rows_and_tangents(ctx, list(gradients))
        if rows is not None and not len(rows):
            return None, *(
                torch.zeros(shape, dtype=dtype, device=device) if is_wanted else None
                for (shape, dtype, device), is_wanted in zip(ctx.trained, wanted, strict=True)
            )
        with torch._C._DisableAutocast():
            found = run_backward(graphs, saved, tangents, rows, n)
        results = []
        for gradient, layout, source in zip(found, graphs.grad_layouts, graphs.grads, strict=True):
            if source is not None:
                results.append(gradient if rows is None or layout is None else layout.put(gradient, rows, n))
        return None, *(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))


def run_backward(graphs: Graphs, saved: list[Any], tangents: list[Tensor], rows: Tensor | None, n: int) -> Any:
    """Run the backward graph on some rows, or on all where `rows` is None.

    Args:
        graphs: A traced module.
        saved: What the forward graph saved, for all n samples; emptied, so that each value is freed when it was used.
        tangents: Gradients of the outputs, of the rows alone; emptied.
        rows: Which samples, shape (k,), int64.
        n: Samples in the batch.
    """
    k = n if rows is None else len(rows)
    taker = None if rows is None else Taker(rows, n)
    arguments: list[Any] = []
    saved.reverse()
    for slot in graphs.saved:
        value = saved.pop()
        if slot.per:
            value = slot.per * k
        elif slot.layout is not None and taker is not None:
            value = taker(value, slot.layout)
        arguments.append(value)
        del value
    del taker
    arguments.extend(tangents)
    tangents.clear()
    return graphs.backward(arguments)


def kept_rows(outputs: Tensor, rows: Tensor, n: int | None = None, *, drawn: bool = False) -> Tensor:
    """Rows of what a `subset_backward` model returned; its backward then knows them without looking, or waiting, for them.

    Args:
        outputs: A tensor with the batch first, shape (n * per, ...); any other tensor is indexed and no more.
        rows: Which samples, ascending, shape (k,), int64.
        n: Samples in the batch, where each has several consecutive entries. Default: one entry each.
        drawn: Whether a row may be there several times.

    Returns:
        Shape (k * per, ...).
    """
    n = len(outputs) if n is None else n
    if len(rows) == n and not drawn:
        return outputs
    layout = Layout(0, len(outputs) // n)
    node: Any = outputs.grad_fn
    if not isinstance(node, SubsetFunction._backward_cls) or outputs._backward_hooks or outputs.retains_grad:
        return _indexed(outputs, rows, n)
    if node.graphs.outputs[outputs.output_nr] != layout or node.n != n:
        return _indexed(outputs, rows, n)
    return KeptRows.apply(outputs, rows, node, layout)


def _indexed(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """The same of any tensor, by operations that autograd knows."""
    if len(values) == n:
        return values.index_select(0, rows)
    return values.unflatten(0, (n, len(values) // n)).index_select(0, rows).flatten(0, 1)


class KeptRows(torch.autograd.Function):
    """Hands the gradient of some rows straight to the node that made them, instead of one of the batch full of zeros."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: Tensor, node: Any, layout: Layout) -> Tensor:
        """Select the rows."""
        ctx.node, ctx.rows, ctx.position = node, rows, outputs.output_nr
        return layout.take(outputs, rows, node.n)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Leave the gradient with the node; it runs after this and adds what else it is given."""
        ctx.node.given.append((_task(), ctx.position, ctx.rows, gradient))
        return None, None, None, None


def _saved(ctx: Any) -> list[Any]:
    """What the forward saved, for one backward; it stays only where the graph is retained.

    Raises:
        RuntimeError: It is gone, or was changed in place.
    """
    saved = ctx.saved
    if saved is None:
        raise RuntimeError(
            "subset_backward: backward through the same forward a second time; what was saved is freed by the first unless "
            "retain_graph=True is given"
        )
    for value, version in ctx.versions:
        if value._version != version:
            raise RuntimeError(
                f"subset_backward: a tensor of shape {tuple(value.shape)} that the backward pass needs was changed in place "
                "after the forward pass (an optimizer step between the two?)"
            )
    if _keep_graph():
        return list(saved)
    ctx.saved = None
    ctx.versions = []
    return saved


def _rows_and_tangents(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, list[Tensor]]:
    """Which rows carry gradient, None for all, and the gradients of those rows of every output that can have one."""
    graphs, n = ctx.graphs, ctx.n
    given = [(position, rows, gradient) for task, position, rows, gradient in ctx.given if task == _task()]
    ctx.given = []
    if given and all(g is None for g in gradients) and len({id(rows) for _, rows, _ in given}) == 1:
        rows = given[0][1]
        for position, _, gradient in given:
            before = gradients[position]
            gradients[position] = gradient if before is None else before + gradient
        return rows, _complete(ctx, gradients, len(rows))
    for position, rows, gradient in given:
        layout = graphs.outputs[position]
        spread = layout.put(gradient, rows, n)
        before = gradients[position]
        gradients[position] = spread if before is None else before + spread
    layouts = graphs.outputs
    carrying = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if any(layouts[i] is None for i in carrying):
        return None, _complete(ctx, gradients, n)
    masks = [layouts[i].carries(gradients[i], n) for i in carrying]
    rows = torch.stack(masks).any(0).nonzero().squeeze(1) if masks else torch.empty(0, dtype=torch.int64)
    if len(rows) == n:
        return None, _complete(ctx, gradients, n)
    for i in carrying:
        gradients[i] = layouts[i].take(gradients[i], rows, n)
    return rows, _complete(ctx, gradients, len(rows))


def _complete(ctx: Any, gradients: list[Tensor | None], k: int) -> list[Tensor]:
    """The gradients that the backward graph asks for, of k samples; zeros where autograd has none."""
    complete = []
    for position in ctx.graphs.differentiable:
        gradient = gradients[position]
        if gradient is None:
            shape, dtype, device = ctx.outputs[position]
            layout = ctx.graphs.outputs[position]
            if layout is not None:
                shape = (*shape[: layout.axis], k * layout.per, *shape[layout.axis + 1 :])
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        complete.append(gradient)
    return complete
