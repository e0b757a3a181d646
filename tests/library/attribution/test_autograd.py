"""The walk over the autograd graph: which rows outputs are, after the operations since the model returned."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.attribution import resolve as autograd
from thresher.attribution.resolve import Moved, follow_rows
from thresher.attribution.rows import Rows, TrackedTensor, YieldedBatch

N = 6
ORDER = torch.tensor([2, 0, 1, 5, 3, 4])
WHOLE = slice(0, N, 1)


@pytest.fixture
def returned():
    return torch.rand(N, N, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0


def walk(outputs, *returned, changed=None):
    batch = YieldedBatch(torch.arange(N), 0)
    tracked = [TrackedTensor.of(tensor, Rows(batch, 0, 1, N, 1), changed) for tensor in returned]
    found = follow_rows(outputs, {one.place: one for one in tracked})
    return (
        slice(found.start, found.start + found.step * found.n, found.step)
        if isinstance(found, Rows)
        else found
    )


def head(*shape):
    return torch.rand(*shape, requires_grad=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.flip(0)

    @staticmethod
    def backward(ctx, *grad):
        return grad[0].flip(0)


def scattered(t, where, values):
    t = t.clone()
    t[where] = values
    return t


MOVES = {
    "Index": lambda t: t[ORDER],
    "Index with a mask": lambda t: t[torch.tensor([True] * N)],
    "Index of separate dimensions": lambda t: t.view(N, 2, 1, 3)[:, ORDER % 2, :, ORDER % 3],
    "IndexSelect": lambda t: t.index_select(0, ORDER),
    "IndexSelect with a negative dimension": lambda t: t.index_select(-2, ORDER),
    "Gather": lambda t: t.gather(0, ORDER.unsqueeze(1).expand(-1, N)),
    "Sort": lambda t: t.sort(0).values,
    "Flip": lambda t: t.flip(-2),
    "Flip of both": lambda t: t.flip((1, 0)),
    "Roll": lambda t: t.roll(1, 0),
    "Roll of all": lambda t: t.roll(1),
    "Take": lambda t: t.take(torch.arange(N)),
    "MaskedSelect": lambda t: t.masked_select(torch.eye(N, dtype=torch.bool)),
    "Cat": lambda t: torch.cat([t[3:], t[:3]]),
    "Cat of something else": lambda t: torch.cat([t[:3], torch.zeros(3, N)]),
    "Stack": lambda t: torch.stack([t[i] for i in (1, 0, 2, 3, 4, 5)]),
    "T": lambda t: t.t() * 1.0,
    "Transpose": lambda t: t.transpose(0, -1) * 1.0,
    "Permute": lambda t: t.permute(1, 0) * 1.0,
    "Mm": lambda t: torch.eye(N)[ORDER] @ t,
    "Bmm": lambda t: torch.bmm(torch.eye(N)[ORDER].unsqueeze(0), t.unsqueeze(0)).squeeze(0),
    "Topk": lambda t: t.topk(N, 0).values,
    "IndexPut": lambda t: scattered(t, ORDER, t),
    "CopySlices": lambda t: scattered(t, slice(0, 3), t[3:]),
    "Embedding": lambda t: F.embedding(ORDER, t),
    "AsStrided": lambda t: t.as_strided((N, N), (1, N)) * 1.0,
    "Diagonal": lambda t: t.diagonal() * 1.0,
    "Sum": lambda t: t.sum(0),
    "Sum of all": lambda t: t.sum().expand(N) * 1.0,
    "Broadcast": lambda t: torch.zeros(N, N) + t[:, 0],
    "Cdist": lambda t: torch.cdist(torch.rand(N, N), t),
    "Pad": lambda t: F.pad(t, (0, 0, 1, -1)),
    "Where": lambda t: torch.where(t > 0.5, t, t.flip(0)),
    "Split": lambda t: torch.cat(t.split(3)[::-1]),
    "Slices of two steps": lambda t: torch.cat([t[::2], t[1::2]]),
    "its own function": lambda t: Doubled.apply(t),
    "Repeat": lambda t: t.repeat(2, 1),
}


@pytest.mark.parametrize("name", MOVES)
def test_operations_that_can_move_rows(returned, name):
    """Also where others stand before and after them, however many."""
    moved = walk(MOVES[name](returned.sigmoid() + 1) * 2, returned)
    assert isinstance(moved, Moved) and moved.by
    far = MOVES[name](returned)
    for _ in range(300):
        far = far + 1
    assert isinstance(walk(far, returned), Moved)


KEEPS = {
    "arange": lambda t: t[torch.arange(N)],
    "arange and columns": lambda t: t[torch.arange(N), torch.zeros(N, dtype=torch.int64)],
    "arange and several columns": lambda t: t[
        torch.arange(N)[:, None], torch.zeros(N, 2, dtype=torch.int64)
    ],
    "columns": lambda t: t[:, [1, 0]],
    "index_select": lambda t: t.index_select(1, torch.tensor([1, 0])),
    "gather": lambda t: t.gather(1, torch.zeros(N, 1, dtype=torch.int64)),
    "sort": lambda t: t.sort(1).values,
    "topk": lambda t: t.topk(2, -1).values,
    "max": lambda t: t.max(1).values,
    "flip": lambda t: t.flip(1),
    "roll": lambda t: t.roll(1, -1),
    "reshape": lambda t: t.reshape(-1).sigmoid(),
    "tokens": lambda t: t.view(N, 2, 3).transpose(1, 2).reshape(-1, 2).log_softmax(1),
    "normalise": lambda t: F.normalize(t),
    "standardize": lambda t: (t - t.mean(0)) / t.std(0),
    "linear": lambda t: F.linear(t, head(3, N), head(3)).relu(),
    "linear of tokens": lambda t: F.linear(t.view(N, 2, 3), head(4, 3), head(4)).mean(1),
    "convolution": lambda t: F.max_pool1d(F.conv1d(t.view(N, 2, 3), head(4, 2, 1)), 2).flatten(1),
    "norms": lambda t: F.layer_norm(F.batch_norm(t, None, None, training=True), (N,)),
    "dropout": lambda t: F.dropout(t),
    "cast": lambda t: t.double().to(torch.bfloat16),
    "cat": lambda t: torch.cat([t, t], -1),
    "stack": lambda t: torch.stack([t, t], 1),
    "stack at the end": lambda t: torch.stack([t, t], -1),
    "parts in order": lambda t: torch.cat([part.sigmoid() for part in t.chunk(3)]),
    "sizes in order": lambda t: torch.cat([part.sigmoid() for part in t.split([2, 4])]),
    "slices in order": lambda t: torch.cat([t[:2] * 2, t[2:-1], t[-1:]]),
    "columns apart": lambda t: t.unbind(1)[1] + t.split(3, 1)[1].sum(1),
    "similarity": lambda t: F.cosine_similarity(t, torch.rand(N, N)),
    "similarities": lambda t: F.normalize(t) @ F.normalize(t).t(),
    "einsum": lambda t: torch.einsum("bd,bd->b", t, t),
    "attention": lambda t: F.scaled_dot_product_attention(*[t.view(N, 1, 2, 3)] * 3),
    "cross-entropy": lambda t: F.cross_entropy(t, ORDER, reduction="none", label_smoothing=0.1),
    "dense cross-entropy": lambda t: F.cross_entropy(
        t.view(N, 3, 2), ORDER[:2].expand(N, 2) % 3, reduction="none"
    ),
    "soft cross-entropy": lambda t: F.cross_entropy(t, torch.eye(N), reduction="none"),
    "binary": lambda t: F.binary_cross_entropy_with_logits(t, torch.eye(N), reduction="none").mean(
        1
    ),
    "squares": lambda t: F.mse_loss(t, torch.eye(N), reduction="none"),
    "huber": lambda t: F.smooth_l1_loss(t, torch.eye(N), reduction="none"),
    "gaussian": lambda t: F.gaussian_nll_loss(t, torch.eye(N), t.exp(), reduction="none"),
    "margin": lambda t: F.multi_margin_loss(t, ORDER, reduction="none"),
    "kl": lambda t: F.kl_div(t.log(), torch.rand(N, N), reduction="none").sum(-1),
    "distance": lambda t: F.pairwise_distance(t, torch.rand(N, N)),
    "in place": lambda t: t.clone().mul_(2).copy_(t * 2),
    "pad": lambda t: F.pad(t, (1, 2)),
    "repeat": lambda t: t.repeat(1, 2),
    "interleave": lambda t: t.repeat_interleave(2, 0),
}


@pytest.mark.parametrize("name", KEEPS)
def test_operations_that_keep_rows_in_their_order(returned, name):
    assert walk(KEEPS[name](returned.sigmoid()) * 2, returned) == WHOLE


def test_parts_of_the_rows(returned):
    assert walk(returned[2:5] * 2, returned) == slice(2, 5, 1)
    assert walk(returned[-2:] * 2, returned) == slice(4, 6, 1)
    assert walk((returned[1:] * 2)[::2] * 2, returned) == slice(1, 7, 2)
    assert walk(returned.chunk(3)[1] * 2, returned) == slice(2, 4, 1)
    assert walk(returned.view(2 * N, 3)[4:8] * 2, returned) == slice(2, 4, 1)
    assert isinstance(walk(returned.view(2 * N, 3)[3:7] * 2, returned), Moved)
    assert isinstance(walk(returned.view(4, 9) * 2, returned), Moved)


def test_several_returned_tensors():
    both = torch.rand(N, 4, requires_grad=True).sigmoid().unbind(1)  # results of one operation
    assert walk(both[0] + both[2], both[0], both[2]) == WHOLE
    other = torch.rand(N, 2, requires_grad=True) * 1.0
    assert walk(other * both[0].unsqueeze(1), both[0], other) == WHOLE


def test_what_happened_before_the_model_returned_does_not_count(returned):
    moved = returned[ORDER] * 1.0
    assert walk(moved * 2, moved) == WHOLE


def test_a_tensor_that_is_not_connected():
    other = torch.ones(N, 2, requires_grad=True)[ORDER]
    later = torch.ones(N, 2, requires_grad=True) * 1.0
    assert walk(other, later) is None
    assert follow_rows(other, {}) is None
    assert walk(torch.ones(3), later) is None


def test_changed_inputs(returned):
    assert walk(returned * 2, returned, changed="changed").changed == "changed"


def test_the_walk_ends(returned, monkeypatch):
    monkeypatch.setattr(autograd, "MOST_OPERATIONS", 8)
    outputs = returned
    for _ in range(20):
        outputs = outputs + 1
    assert isinstance(walk(outputs, returned), Moved)


@pytest.mark.parametrize("name", MOVES)
def test_moved_outputs_are_refused(name):
    model = nn.Linear(2, N)
    loader = DataLoader(TensorDataset(torch.rand(N, 2), torch.arange(N)), N)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=lambda o, y: o.flatten(1)[:, 0] * y,
        model=model,
        epochs=1,
    )
    x, y = next(iter(run.loader))
    with pytest.raises(thresher.AttributionError, match="may change the order of rows"):
        run.criterion(MOVES[name](run.model(x)).reshape(N, -1), y)
    assert not run.trained.any()
