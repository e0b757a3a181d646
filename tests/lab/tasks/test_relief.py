from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import thresher
from thresher_lab.recipes.running import task_of
from thresher_lab.tasks.base import pixel_mean_iou
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec


@pytest.fixture(scope="module")
def some():
    """Few patches, and steps enough to learn something in an epoch."""
    task = replace(task_of("relief-made@64"), lr=0.01, batch_size=8)
    data = task.load(task.find(None))
    return task, replace(
        data, test_inputs=data.test_inputs[:16], test_targets=data.test_targets[:16]
    )


class Says(torch.nn.Module):
    """Marks the classes that its inputs name, of three."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return F.one_hot(x.long(), 3).movedim(-1, 1).float()


@pytest.mark.parametrize(
    ("said", "targets", "expected"),
    [
        ([[0, 1], [2, 2]], [[0, 1], [2, 2]], 1.0),
        ([[0, 0], [0, 0]], [[0, 0], [0, 1]], (3 / 4 + 0) / 2),
        ([[0, 1], [1, 2]], [[0, 0], [1, 1]], (1 / 2 + 1 / 3 + 0) / 3),
        ([[1, 1], [1, 1]], [[1, 1], [1, 1]], 1.0),
    ],
)
def test_mean_iou_by_hand(said, targets, expected):
    model = Says()
    batches = [
        (torch.tensor([row])[None], torch.tensor([row_of])[None])
        for row, row_of in zip(said, targets, strict=True)
    ]
    assert pixel_mean_iou(model, batches) == pytest.approx(expected) and model.training


@pytest.mark.parametrize("name", ["relief", "relief-made"])
def test_a_network_fits_its_patches_and_seeds_fix_it(name):
    task = task_of(name)
    state = torch.get_rng_state()
    model, same, other = (task.build(seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert task.build(0)(torch.zeros(2, 4, 32, 32)).shape == (2, 4, 32, 32)
    assert all(torch.equal(value, model[key]) for key, value in same.items())
    assert not torch.equal(model["head.weight"], other["head.weight"])
    assert not task.has_images


def test_a_backward_pass_over_some_rows_gives_their_gradients(some):
    task, data = some
    x, y = (tensor[:6] for tensor in data.train.tensors)
    plain, wrapped = task.build(0), task.build(0)
    subset = thresher.subset_backward(wrapped, strict=True)
    for model in (plain, subset):
        F.cross_entropy(model(x), y, reduction="none")[[1, 4]].mean().backward()
    for expected, got in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, atol=1e-6)
    assert thresher.mixes_samples(subset) == ()


@pytest.mark.parametrize(
    "ablation", [{}, {"move_back": False}, {"move_back": False, "reduce_fraction": False}]
)
def test_kakurenbo_hides_and_drops_the_top(some, ablation):
    settings = {"tau": 0.25, "drop_top": 0.1, **ablation}
    run = train(*some, MethodSpec("kakurenbo", settings), seed=0, epochs=2)
    first, second = run["history"]
    assert (first["kept"], run["metric"]["name"]) == (64, "mean_iou") and 0 <= run["metric"][
        "value"
    ] <= 1
    dropped, candidates = 6, 19 if "reduce_fraction" in ablation else 15
    assert 64 - second["kept"] == dropped + candidates - second["moved_back"] > dropped
    assert second["refresh"] == 64 - second["kept"]
    if "move_back" in ablation:
        assert second["moved_back"] == 0


def test_what_is_dropped_is_what_is_hardest(some, tmp_path):
    import pyarrow.parquet as pq

    path = tmp_path / "samples.parquet"
    train(
        *some,
        MethodSpec("kakurenbo", {"max_fraction": 0.0, "drop_top": 0.1}),
        seed=0,
        epochs=2,
        samples_to=path,
    )
    table = pq.read_table(path)
    losses, trained = (
        torch.tensor(table[name].to_pylist()) for name in ("loss_by_epoch", "trained_by_epoch")
    )
    assert "target" not in table.column_names
    assert set((trained[:, 1] == 0).nonzero().flatten().tolist()) == set(
        losses[:, 0].topk(6).indices.tolist()
    )
