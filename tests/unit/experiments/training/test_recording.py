import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import thresher
from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.training.loop import train
from thresher.experiments.training.recording import LOSS_BINS, Recording, class_labels, distribution
from thresher.experiments.training.specs import parse_methods

EPOCHS = 4


@pytest.fixture(scope="module", params=["full", "kakurenbo:max_fraction=0.4:tau=0.0", "selective_backprop:keep=0.5"])
def recorded(request, tmp_path_factory):
    task = task_of("digits@300")
    data = task.load(task.find(None))
    [spec] = parse_methods(request.param)
    path = tmp_path_factory.mktemp("runs") / "run.parquet"
    run = train(task, data, spec, seed=0, epochs=EPOCHS, samples_to=path)
    return run, pq.read_table(path), data.train.tensors[1].numpy()


def test_one_row_a_sample_and_one_value_an_epoch(recorded):
    run, table, labels = recorded
    assert table.column("id").to_pylist() == list(range(len(labels)))
    assert table.column("target").to_pylist() == labels.tolist()
    assert {len(row) for name in ("loss_by_epoch", "trained_by_epoch") for row in table.column(name).to_pylist()} == {EPOCHS}
    last = [row[-1] for row in table.column("loss_by_epoch").to_pylist()]
    assert np.array_equal(np.float32(last), table.column("loss").to_numpy())


def test_samples_add_up_to_what_the_run_counted(recorded):
    run, table, labels = recorded
    by_epoch = np.array(table.column("trained_by_epoch").to_pylist())
    assert np.array_equal(by_epoch.sum(1), table.column("trained").to_numpy())
    assert np.array_equal((by_epoch == 0).sum(1), table.column("hidden").to_numpy())
    assert by_epoch.sum(0).tolist() == [entry["backward"] for entry in run["history"]]
    for epoch, entry in enumerate(run["history"]):
        hidden = labels[by_epoch[:, epoch] == 0]
        assert entry["hidden_by_class"] == [int((hidden == label).sum()) for label in range(10)]
        assert sum(entry["hidden_by_class"]) == len(labels) - entry["backward"]
    hides = run["method"] != "full"
    assert any(sum(entry["hidden_by_class"]) for entry in run["history"]) == hides


def test_distributions_are_those_of_the_losses(recorded):
    run, table, _ = recorded
    losses = np.array(table.column("loss_by_epoch").to_pylist())
    for epoch, entry in enumerate(run["history"]):
        finite = losses[:, epoch][np.isfinite(losses[:, epoch])]
        assert sum(entry["loss_histogram"]) == len(finite)
        assert entry["easy_share"] == pytest.approx((finite < finite.max() / 20).sum() / len(finite))
        assert entry["step_s"] > 0
    assert json.dumps(run, allow_nan=False)


def test_a_history_is_on_the_disk_whole_or_not_at_all(tmp_path, monkeypatch):
    recording, path = Recording(attached(), TensorDataset(torch.zeros(3, 1))), tmp_path / "runs" / "run.parquet"
    recording.epoch()
    recording.save(path)
    before = path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == ["run.parquet"]

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    recording.epoch()
    with pytest.raises(OSError, match="no space"):
        recording.save(path)
    assert path.read_bytes() == before and [file.name for file in path.parent.iterdir()] == ["run.parquet"]


def attached():
    data = TensorDataset(torch.zeros(3, 1), torch.zeros(3))
    return thresher.attach(thresher.FullData(), loader=DataLoader(data), criterion=torch.nn.MSELoss(), epochs=1)


def test_histograms_hold_everything_that_is_finite():
    losses = np.array([0.0, 1e-9, 0.5, 1e9, np.nan, np.inf, -np.inf], dtype=np.float32)
    found = distribution(losses)
    counts = found["loss_histogram"]
    assert len(counts) == len(LOSS_BINS) - 1 and sum(counts) == 4 and (counts[0], counts[-1]) == (2, 1)
    assert counts[np.searchsorted(LOSS_BINS, 0.5) - 1] == 1 and found["easy_share"] == 0.75
    assert distribution(np.full(3, -np.inf, dtype=np.float32)) == {}


class Held(Dataset):
    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        (TensorDataset(torch.zeros(3, 2), torch.tensor([2, 0, 1])), [2, 0, 1]),
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3)), None),
        (TensorDataset(torch.zeros(3, 2), torch.tensor([2, -100, 1])), None),
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)), None),
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3, dtype=torch.bfloat16)), None),
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3, requires_grad=True)), None),
        (TensorDataset(torch.zeros(3, 2), torch.tensor([2, 10**9, 1])), None),
        (TensorDataset(torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool)), None),
        (Held([[1], [1, 2], [0]]), None),
        (Held(np.array([1, 0, 1])), [1, 0, 1]),
        (Held([1, 0, 1]), [1, 0, 1]),
        (Held([1, 0]), None),
        (Held(["a", "b", "c"]), None),
        ([1, 2, 3], None),
    ],
)
def test_class_labels(dataset, labels):
    found = class_labels(dataset)
    assert (None if found is None else found.tolist()) == labels
