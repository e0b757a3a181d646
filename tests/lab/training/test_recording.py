import io
import json
import tracemalloc
from itertools import islice

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import thresher
from thresher.records import Column, Records
from thresher_lab.recipes.running import task_of
from thresher_lab.training import samples as epoch_file
from thresher_lab.training.loop import train
from thresher_lab.training.samples import LOSS_BINS, Recording, class_labels, distribution
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.store import Checkpoint

EPOCHS = 4


@pytest.fixture(
    scope="module",
    params=["full", "kakurenbo:max_fraction=0.4:tau=0.0", "selective_backprop:keep=0.5"],
)
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
    assert {
        len(row)
        for name in ("loss_by_epoch", "trained_by_epoch")
        for row in table.column(name).to_pylist()
    } == {EPOCHS}
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
        assert entry["easy_share"] == pytest.approx(
            (finite < finite.max() / 20).sum() / len(finite)
        )
        assert entry["step_s"] > 0
    assert json.dumps(run, allow_nan=False)


def test_a_history_is_on_the_disk_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "run.parquet"
    recording = Recording(
        attached(), TensorDataset(torch.zeros(3, 1)), epochs_in=tmp_path / "epochs"
    )
    recording.epoch()
    recording.save(path)
    before = path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == ["run.parquet"]

    def full(_):
        raise OSError("no space left on device")

    recording.epoch()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        recording.save(path)
    assert path.read_bytes() == before and [file.name for file in path.parent.iterdir()] == [
        "run.parquet"
    ]


def attached():
    data = TensorDataset(torch.zeros(3, 1), torch.zeros(3))
    return thresher.attach(
        thresher.FullData(), loader=DataLoader(data), criterion=torch.nn.MSELoss(), epochs=1
    )


class Trained:
    """A run as a recording sees it, of n samples that are trained on up to 300 times per epoch."""

    def __init__(self, n):
        self.trained, self.records = (
            torch.zeros(n, dtype=torch.int32),
            Records({"loss": Column(torch.float32)}, n, torch.device("cpu")),
        )

    def epoch(self, number):
        draws = torch.Generator().manual_seed(number)
        times = torch.randint(300, self.trained.shape, generator=draws, dtype=torch.int32) * (
            number % 3
        )
        self.trained += times
        self.records["loss"].exponential_(generator=draws)
        return times.numpy(), self.records["loss"].numpy().copy()


def test_the_table_has_what_every_epoch_had(tmp_path, monkeypatch):
    """However many samples are read at once."""
    n, run, tables = 57, Trained(57), []
    recording = Recording(
        run, TensorDataset(torch.arange(n) % 3), epochs_in=tmp_path / "deep" / "epochs"
    )
    times, losses = (
        np.stack(of_epochs, axis=1)
        for of_epochs in zip(*(step(run, recording, i) for i in range(6)), strict=True)
    )
    for at_once in (1, 100, epoch_file.AT_ONCE):
        monkeypatch.setattr(epoch_file, "AT_ONCE", at_once)
        recording.save(tmp_path / "run.parquet")
        tables.append(pq.read_table(tmp_path / "run.parquet"))
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])
    table = tables[0]
    names = ["id", "target", "loss", "trained", "hidden", "loss_by_epoch", "trained_by_epoch"]
    kinds = ["int64", "int64", "float", "int32", "int16", "list<item: float>", "list<item: uint8>"]
    assert (
        table.schema.names == names
        and [str(kind).replace("element", "item") for kind in table.schema.types] == kinds
    )
    assert np.array_equal(np.array(table["loss_by_epoch"].to_pylist(), np.float32), losses)
    assert (
        np.array_equal(table["trained_by_epoch"].to_pylist(), np.minimum(times, 255))
        and times.max() > 255
    )
    assert (
        table["hidden"].to_pylist() == (times == 0).sum(1).tolist()
        and table["trained"].to_pylist() == times.sum(1).tolist()
    )
    assert table["id"].to_pylist() == list(range(n)) and table["target"].to_pylist() == [
        i % 3 for i in range(n)
    ]
    recording.discard()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == []


def step(run, recording, number):
    happened = run.epoch(number)
    recording.epoch()
    return happened


def test_memory_does_not_grow_with_the_epochs(tmp_path, monkeypatch):
    """Neither that of the recording, nor its state, nor what makes the table."""
    n, held, states = 100_000, [], []
    run, data = Trained(n), TensorDataset(torch.zeros(n))
    monkeypatch.setattr(epoch_file, "AT_ONCE", 2**14)
    tracemalloc.start()
    try:
        recording = Recording(run, data, epochs_in=tmp_path / "epochs")
        for number in range(10):
            run.epoch(number)
            recording.epoch()
            held.append(tracemalloc.get_traced_memory()[0])
            states.append(sum(tensor.nbytes for tensor in recording.state_dict()["before"]))
        tracemalloc.reset_peak()
        recording.save(tmp_path / "run.parquet")
        peak = tracemalloc.get_traced_memory()[1] - held[-1]
    finally:
        tracemalloc.stop()
    assert held[-1] - held[1] < 0.1 * n and held[-1] < 6 * n
    assert set(states) == {4 * n} and {*recording.state_dict()["epochs"]} == {"mark", "epochs"}
    assert peak < 40 * 2**14 < 10 * n  # the epochs have 50 n
    assert (tmp_path / "epochs").stat().st_size == epoch_file.MARK + 50 * n


class Loop:
    """A training whose recording can be saved and restored at any step."""

    def __init__(self, file):
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(60, 3, generator=draws)
        data = TensorDataset(x, (x[:, 0] + torch.randn(60, generator=draws) > 0).long())
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.run = thresher.attach(
            thresher.Kakurenbo(0.4, tau=0.0),
            loader=DataLoader(data, 8, shuffle=True, generator=draws),
            criterion=torch.nn.CrossEntropyLoss(),
            model=self.model,
            optimizer=self.optimizer,
            epochs=5,
        )
        self.recording = Recording(self.run, data, epochs_in=file)

    def train(self, epochs, steps=None):
        """Trains epochs, the last of which is not recorded where it ends after some steps."""
        for number in range(epochs):
            last = steps is not None and number == epochs - 1
            for inputs, targets in islice(self.run.loader, steps if last else None):
                self.optimizer.zero_grad()
                self.run.criterion(self.run.model(inputs), targets).backward()
                self.optimizer.step()
            if not last:
                self.recording.epoch()

    def parts(self):
        return {name: getattr(self, name) for name in ("recording", "model", "optimizer", "run")}


@pytest.mark.parametrize("again", [False, True])
def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path, again):
    """Also where the interrupted run had written more epochs than its state has."""
    whole, interrupted, resumed = (Loop(tmp_path / name) for name in ("whole", "epochs", "epochs"))
    whole.train(5)
    whole.recording.save(tmp_path / "whole.parquet")
    interrupted.train(3, steps=2)
    state = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in interrupted.parts().items()}, state)
    if again:
        with pytest.warns(UserWarning, match="continues within epoch"):
            interrupted.train(1)
        interrupted.recording.epoch()
    state.seek(0)
    found = torch.load(state, weights_only=True)
    for name, part in resumed.parts().items():
        part.load_state_dict(found[name])
    resumed.train(3)
    resumed.recording.save(tmp_path / "resumed.parquet")
    tables = [pq.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "resumed")]
    assert tables[0].equals(tables[1]) and len(tables[0]["loss_by_epoch"][0]) == 5


def test_a_state_without_its_epochs_is_refused(tmp_path):
    run, data = Trained(3), TensorDataset(torch.zeros(3))
    without, with_them = Recording(run, data), Recording(run, data, epochs_in=tmp_path / "epochs")
    without.epoch()
    with pytest.raises(
        ValueError,
        match="written without the history of every sample, .* go on without `samples_to`",
    ):
        with_them.load_state_dict(without.state_dict())
    for recording in (without, with_them):
        with pytest.raises(
            ValueError, match=r"Recording.save: there is no history; give `epochs_in`"
        ):
            recording.save(tmp_path / "run.parquet")
    with_them.epoch()
    without.load_state_dict(with_them.state_dict())
    without.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["epochs"]


class StopError(Exception):
    pass


@pytest.fixture(scope="module")
def digits():
    task = task_of("digits@300")
    return task, task.load(task.find(None)), parse_methods("kakurenbo:max_fraction=0.4:tau=0.0")[0]


def test_a_checkpoint_has_the_epochs_beside_it(tmp_path, digits):
    def stop(done, metric):
        if done == 2:
            raise StopError

    settings = {"seed": 0, "epochs": 3}
    train(*digits, **settings, samples_to=tmp_path / "whole.parquet")
    checkpoint = Checkpoint(tmp_path / "checkpoint.pt", {})
    with pytest.raises(StopError):
        train(
            *digits,
            **settings,
            samples_to=tmp_path / "run.parquet",
            checkpoint=checkpoint,
            progress=stop,
        )
    assert checkpoint.epochs_in.exists()
    train(*digits, **settings, samples_to=tmp_path / "run.parquet", checkpoint=checkpoint)
    assert pq.read_table(tmp_path / "run.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
    train(*digits, **settings, samples_to=tmp_path / "again.parquet", checkpoint=checkpoint)
    assert pq.read_table(tmp_path / "again.parquet").equals(
        pq.read_table(tmp_path / "whole.parquet")
    )
    checkpoint.delete()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.parquet",
        "run.parquet",
        "whole.parquet",
    ]


def test_a_run_that_fails_without_a_checkpoint_leaves_nothing(tmp_path, digits):
    def stop(done, metric):
        assert [path.name for path in tmp_path.iterdir()] == [".run.parquet.epochs"]
        raise StopError

    with pytest.raises(StopError):
        train(*digits, seed=0, epochs=3, samples_to=tmp_path / "run.parquet", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_histograms_hold_everything_that_is_finite():
    losses = np.array([0.0, 1e-9, 0.5, 1e9, np.nan, np.inf, -np.inf], dtype=np.float32)
    found = distribution(losses)
    counts = found["loss_histogram"]
    assert (
        len(counts) == len(LOSS_BINS) - 1 and sum(counts) == 4 and (counts[0], counts[-1]) == (2, 1)
    )
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
