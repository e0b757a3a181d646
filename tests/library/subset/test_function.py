import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from subset_cases import Calls, distance, numbers, wrap
from thresher.subset import kept_rows

pytestmark = pytest.mark.usefixtures("shared_traces")
X = numbers(7, 6)
ROWS = torch.tensor([1, 4, 5])


@pytest.fixture
def sub():
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def gradients(model):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def expected(sub, loss):
    plain = copy.deepcopy(sub.wrapped)
    plain.zero_grad()
    loss(plain(X)).backward()
    return gradients(plain)


# What the backward costs


class Rows(TorchDispatchMode):
    """Notes the first dimensions of what matrix products see, and operations by name."""

    def __init__(self):
        super().__init__()
        self.rows, self.names = set(), []

    @property
    def waits(self):
        """Whether the kept rows were looked for, for which a device would be waited for."""
        return any(
            "nonzero" in name or "item" in name or "local_scalar" in name for name in self.names
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if func is torch.ops.aten.mm.default:
            self.rows |= {size for arg in args for size in arg.shape}
        return func(*args, **(kwargs or {}))


def test_the_backward_sees_the_kept_rows_only(sub) -> None:
    out = sub(X)[ROWS].sum()
    with Rows() as seen:
        out.backward()
    assert 3 in seen.rows and 7 not in seen.rows
    assert "aten.nonzero.default" in seen.names


def test_kept_rows_need_not_be_looked_for(sub) -> None:
    out = kept_rows(sub(X), ROWS)
    with Rows() as seen:
        out.sum().backward()
    assert not seen.waits and 7 not in seen.rows


def test_nothing_kept_costs_nothing(sub) -> None:
    out = kept_rows(sub(X), ROWS[:0])
    with Rows() as seen:
        out.sum().backward()
    assert not seen.rows and not sub.wrapped[0].weight.grad.any()


# kept_rows


@pytest.mark.parametrize("rows", [[], [2], [1, 4, 5], list(range(7))])
def test_kept_rows_are_those_of_indexing(sub, rows) -> None:
    rows = torch.tensor(rows, dtype=torch.int64)
    out = sub(X)
    assert torch.equal(kept_rows(out, rows), out[rows])
    kept_rows(out, rows).square().sum().backward()
    found = gradients(sub)
    sub.zero_grad()
    sub(X)[rows].square().sum().backward()
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(sub).items())
    assert distance(expected(sub, lambda out: out[rows].square().sum()), found) < 1e-13


def test_kept_rows_of_several_entries_a_sample() -> None:
    sub = wrap(Calls(lambda m, x: m.linear(x).tanh().reshape(-1, 6)))
    x = numbers(7, 5, 6)
    for n in (7, None):
        rows = ROWS if n else torch.arange(3, 20)
        out = sub(x)
        some = kept_rows(out, rows, n)
        parts = out.detach().view(7, 5, 6)[rows].flatten(0, 1) if n else out.detach()[rows]
        assert torch.equal(some, parts)
        sub.zero_grad()
        with Rows() as seen:
            some.square().sum().backward()
        assert seen.waits == (n is None)
        found = gradients(sub)
        plain = copy.deepcopy(sub.wrapped)
        plain.zero_grad()
        picked = plain(x).view(7, 5, 6)[rows] if n else plain(x)[rows]
        picked.square().sum().backward()
        assert distance(gradients(plain), found) < 1e-12


def test_kept_rows_beside_other_uses_of_the_outputs(sub) -> None:
    def loss(take):
        def of(out):
            return (
                take(out, ROWS).square().sum()
                + out[0].sum()
                + take(out, ROWS[:1]).sum()
                + take(out, ROWS).sin().sum()
            )

        return of

    loss(kept_rows)(sub(X)).backward()
    assert distance(expected(sub, loss(lambda out, rows: out[rows])), gradients(sub)) < 1e-13


def test_kept_rows_of_several_outputs() -> None:
    sub = wrap(Calls(lambda m, x: (m.linear(x).tanh(), m.linear(x).sin(), m.linear(x).mean())))

    def loss(out, take, *, third=0.0, other=ROWS):
        return take(out[0], ROWS).square().sum() + take(out[1], other).sum() + third * out[2]

    for kwargs in ({}, {"third": 1.0}, {"other": torch.tensor([0, 1])}):
        sub.zero_grad()
        loss(sub(X), kept_rows, **kwargs).backward()
        assert (
            distance(
                expected(
                    sub, lambda out, kwargs=kwargs: loss(out, lambda o, rows: o[rows], **kwargs)
                ),
                gradients(sub),
            )
            < 1e-13
        )


def test_kept_rows_with_a_hook_retained_outputs_and_other_tensors(sub) -> None:
    for prepare in (lambda out: out.register_hook(lambda g: 2 * g), lambda out: out.retain_grad()):
        out = sub(X)
        prepare(out)
        some = kept_rows(out, ROWS)
        sub.zero_grad()
        with Rows() as seen:
            some.sum().backward()
        assert seen.waits
        assert not out.retains_grad or torch.equal(out.grad.any(1).nonzero().squeeze(1), ROWS)
        assert sub.wrapped[0].weight.grad.any()
    for out in (X, sub.wrapped(X), sub(X) * 2, sub(X).detach()):
        assert torch.equal(kept_rows(out, ROWS), out[ROWS])


def test_what_an_unfinished_backward_left_is_not_counted(sub) -> None:
    out = sub(X)
    loss = kept_rows(out, ROWS).square().sum()
    assert torch.autograd.grad(loss, out, retain_graph=True, allow_unused=True) == (None,)
    loss.backward()
    assert distance(expected(sub, lambda out: out[ROWS].square().sum()), gradients(sub)) < 1e-13


# Autograd's rules


@pytest.mark.parametrize("take", [kept_rows, lambda out, rows: out[rows]])
def test_backward_twice(sub, take) -> None:
    loss = take(sub(X), ROWS).square().sum()
    loss.backward(retain_graph=True)
    once = gradients(sub)
    loss.backward(retain_graph=True)
    loss.backward()
    assert distance({name: 3 * gradient for name, gradient in once.items()}, gradients(sub)) < 1e-13
    with pytest.raises(RuntimeError, match="second|freed"):
        loss.backward()


def test_what_was_saved_is_needed_only_once(sub) -> None:
    out = sub(X)
    out[ROWS].sum().backward()
    with pytest.raises(
        RuntimeError, match="subset_backward: second backward through the same forward pass"
    ):
        out.sum().backward()


def test_parameters_changed_between_forward_and_backward(sub) -> None:
    out = sub(X)[ROWS].sum()
    with torch.no_grad():
        sub.wrapped[2].weight.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"shape \(.*\) that the backward pass needs was changed in place"
    ):
        out.backward()


@pytest.mark.parametrize("which", ["input", "output", "inner", "returned input"])
def test_tensors_changed_between_forward_and_backward(which) -> None:
    def run(model, x):
        h = model.linear(x).tanh()
        return model.linear(h).tanh(), h, x

    for strict in (None, True):
        model = Calls(run).double() if strict is None else wrap(Calls(run))
        x = X.clone()
        last, inner, returned = model(x)
        loss = last[ROWS].square().sum()
        with torch.no_grad():
            {"input": x, "output": last, "inner": inner, "returned input": returned}[which].mul_(0)
        with pytest.raises(RuntimeError, match="in place|inplace"):
            loss.backward()


def test_an_output_changed_in_place_as_autograd_allows() -> None:
    sub = wrap(Calls(lambda m, x: m.linear(x)))

    def loss(out):
        out.mul_(2)
        out[0] = 0
        return kept_rows(out, torch.tensor([0, 4])).square().sum()

    loss(sub(X)).backward()
    assert distance(expected(sub, loss), gradients(sub)) < 1e-13


def test_double_backward_and_forward_mode_are_refused(sub) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"double backward \(create_graph=True\) is not supported"
    ):
        torch.autograd.grad(sub(x).sum(), x, create_graph=True)
    with warnings.catch_warnings(), torch.autograd.forward_ad.dual_level():
        warnings.simplefilter("ignore")  # what PyTorch loads for this
        dual = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(RuntimeError, match="transforms are not supported"):
            sub(dual)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_function_transforms_are_refused(sub, transform) -> None:
    sub(X)
    refused = pytest.raises(
        RuntimeError,
        match=r"torch\.func transforms are not supported; call the model itself \(\.wrapped\)",
    )
    with warnings.catch_warnings(), refused:
        warnings.simplefilter("ignore")  # what PyTorch loads for this
        if transform == "grad":
            torch.func.grad(lambda x: sub(x).sum())(X)
        elif transform == "vmap":
            torch.func.vmap(sub)(X[:, None])
        else:
            torch.func.jvp(sub, (X,), (X,))


def test_functional_call(sub) -> None:
    doubled = {name: (2 * p).detach().requires_grad_() for name, p in sub.named_parameters()}
    torch.func.functional_call(sub, doubled, X)[ROWS].sum().backward()
    found = {name: p.grad for name, p in doubled.items()}
    plain = {name: p.detach().clone().requires_grad_() for name, p in doubled.items()}
    torch.func.functional_call(sub.wrapped, plain, X)[ROWS].sum().backward()
    assert distance({name: p.grad for name, p in plain.items()}, found) < 1e-13
    assert sub.wrapped[0].weight.grad is None


def test_gradients_of_some_parameters(sub) -> None:
    (found,) = torch.autograd.grad(sub(X)[ROWS].square().sum(), [sub.wrapped[2].weight])
    (plain,) = torch.autograd.grad(sub.wrapped(X)[ROWS].square().sum(), [sub.wrapped[2].weight])
    assert torch.allclose(found, plain, rtol=1e-12)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=True):
        sub(X)[ROWS].sum().backward()


# Memory


@pytest.mark.parametrize("last", [nn.Identity, nn.Tanh])
def test_nothing_is_left_without_the_garbage_collector(sub, last) -> None:
    sub = wrap(nn.Sequential(sub.wrapped, last()))
    sub(X)
    gc.collect()
    gc.disable()
    try:
        for take in (kept_rows, lambda out, rows: out[rows]):
            out = sub(X)
            some = take(out, ROWS)
            references = [weakref.ref(out), weakref.ref(some)]
            some.sum().backward()
            del out, some
            assert [reference() for reference in references] == [None, None]
        out = sub(X)
        reference = weakref.ref(out)
        del out
        assert reference() is None
    finally:
        gc.enable()


def test_saved_tensors_are_freed_by_the_backward() -> None:
    sub = wrap(Calls(lambda m, x: m.linear(m.linear(x).tanh()).tanh()))
    out = sub(X)
    node = out.grad_fn
    references = [
        weakref.ref(value)
        for value in node.saved
        if isinstance(value, torch.Tensor) and value.shape[0] == 7
    ]
    assert references
    out[ROWS].sum().backward(retain_graph=True)
    assert all(reference() is not None for reference in references[1:])
    out[ROWS].sum().backward()
    assert node.saved is None and all(r() is None or r() is X for r in references)
