"""KAKURENBO against a transcription of the paper and of the original code that shares nothing with the library.

The transcription walks a sorted list sample by sample, as `HiddenSamplerUniform` of the original code does, and counts
with exact fractions of the decimals that a user writes.
"""

import copy
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from loss_cases import signals
from thresher import Kakurenbo
from thresher.losses import adapt
from thresher.methods.kakurenbo import hiding_candidates
from thresher.records import Records

CPU = torch.device("cpu")
PUBLISHED = (("0", "1"), ("0.3", "0.8"), ("0.6", "0.6"), ("0.8", "0.4"))


@dataclass
class Answer:
    kept: list[int]
    left_out: list[int]
    lr_scale: float
    moved_back: int
    scheduled: Fraction
    hidden: int


def scheduled_fraction(max_fraction: str, milestones: Any, epoch: int, epochs: int) -> Fraction:
    """F_e of the paper in exact arithmetic: the factor of the last milestone reached."""
    factor = Fraction(1)
    for boundary, value in milestones:
        start = Fraction(boundary)
        if 0 < start < 1:
            start *= epochs
        if epoch >= start:
            factor = Fraction(value)
    return Fraction(max_fraction) * factor


def transcribed(
    loss: list[float],
    correct: list[int],
    confidence: list[float],
    *,
    epoch: int,
    epochs: int,
    max_fraction: str,
    tau: str = "0.7",
    milestones: Any = PUBLISHED,
    move_back: bool = True,
    reduce_fraction: bool = True,
    adjust_lr: bool = True,
    warmup_epochs: int = 0,
    drop_top: str = "0",
    lr_fraction: str = "actual",
    candidates: str = "sort",
    first_epoch_hides: bool = False,
) -> Answer:
    n = len(loss)
    if epoch == 0 and not first_epoch_hides:
        return Answer(list(range(n)), [], 1.0, 0, Fraction(0), 0)
    fraction = scheduled_fraction(
        max_fraction, milestones if reduce_fraction else [("0", "1")], epoch, epochs
    )
    count = math.floor(fraction * n)
    ascending = sorted((value, i) for i, value in enumerate(loss) if math.isfinite(value))
    if candidates == "sort":
        easy = [i for _, i in ascending[:count]]
    else:
        # sorted_loss[n_e - 1] in Python: F = 0 reads the last, the largest loss.
        threshold = ascending[min(count, len(ascending)) - 1][0] if ascending else math.nan
        easy = [i for value, i in ascending if value <= threshold]
    hidden, moved_back = [], 0
    for i in easy:
        if move_back and (correct[i] == 0 or not confidence[i] >= np.float32(float(tau))):
            moved_back += 1
        else:
            hidden.append(i)
    left_out = set(hidden)
    for _ in range(math.floor(Fraction(drop_top) * n)):
        if ascending:
            left_out.add(ascending.pop()[1])
    kept = [i for i in range(n) if i not in left_out]
    lr_scale = 1.0  # the dropped do not count in it
    if adjust_lr and epoch >= warmup_epochs:
        if lr_fraction == "scheduled":
            lr_scale = float(1 / (1 - fraction))
        elif kept:
            lr_scale = n / (n - len(hidden))
    return Answer(kept, sorted(left_out), lr_scale, moved_back, fraction, len(hidden))


def filled(method: Kakurenbo, loss: Any, correct: Any = None, confidence: Any = None) -> Records:
    records = Records(method.columns(), len(loss), CPU)
    for name, values in (("loss", loss), ("correct", correct), ("confidence", confidence)):
        if name in records:
            records[name].copy_(torch.as_tensor(np.asarray(values)))
    return records


def planned(method: Kakurenbo, records: Records, epoch: int, epochs: int) -> thresher.EpochPlan:
    return method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=torch.Generator())


# 200 random instances

KINDS = (
    "plain",
    "ties",
    "one",
    "equal",
    "nonfinite",
    "zero",
    "integer",
    "tau",
    "drop_top",
    "everything",
)


@dataclass
class Instance:
    loss: np.ndarray
    correct: np.ndarray
    confidence: np.ndarray
    settings: dict[str, Any]
    """As decimals, for exact arithmetic."""
    epoch: int
    epochs: int
    merge: str
    bits: str | None

    def method(self) -> Kakurenbo:
        settings = dict(self.settings)
        settings["schedule"] = [(float(b), float(v)) for b, v in settings.pop("milestones")]
        for name in ("max_fraction", "tau", "drop_top"):
            settings[name] = float(settings[name])
        if self.bits is None:
            return Kakurenbo(merge=self.merge, **settings)
        for name in ("move_back", "reduce_fraction", "adjust_lr"):
            del settings[name]
        return Kakurenbo.variant(self.bits, merge=self.merge, **settings)

    def answer(self) -> Answer:
        columns = (self.loss.tolist(), self.correct.tolist(), self.confidence.tolist())
        return transcribed(*columns, epoch=self.epoch, epochs=self.epochs, **self.settings)


def instance(number: int) -> Instance:
    r = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    n = 1 if kind == "one" else int(r.integers(2, 80))
    epochs = int(r.choice([1, 2, 3, 7, 10, 30, 90, 100, 110]))
    epoch = (
        int(r.integers(0, epochs))
        if r.random() < 0.2
        else int(r.integers(min(1, epochs - 1), epochs))
    )
    if r.random() < 0.3:
        epoch = (
            math.ceil(Fraction(str(r.choice(["0.1", "0.3", "0.6", "0.7", "0.8"]))) * epochs)
            % epochs
        )
    merge = "sum" if r.random() < 0.3 else "scatter"

    loss = r.gamma(1.0, 1.0, n).astype(np.float32)
    if kind in ("ties", "everything"):
        loss = r.choice(np.float32([0.1, 0.2, 0.3]), n)
    if kind == "equal":
        loss[:] = 0.1
    if kind in ("nonfinite", "everything"):
        bad = r.random(n) < r.choice([0.1, 0.5, 1.0])
        loss[bad] = r.choice(np.float32([np.nan, np.inf, -np.inf]), int(bad.sum()))
    tau = str(r.choice(["0.7", "0.5", "0.05", "0", "1"]))
    confidence = r.random(n).astype(np.float32)
    if kind in ("tau", "everything"):
        at = r.random(n) < 0.6
        confidence[at] = np.float32(float(tau)) + r.choice(
            np.float32([-1e-6, 0, 1e-6]), int(at.sum())
        )
    correct = (r.random(n) < 0.75).astype(np.uint8)
    if merge == "sum":
        twice = r.random(n) < 0.3
        correct[twice] *= 2
        confidence[twice] *= 2
    bits = f"v1{r.integers(0, 2)}{r.integers(0, 2)}{r.integers(0, 2)}"
    move_back, reduce_fraction, adjust_lr = (bit == "1" for bit in bits[2:])

    max_fraction = str(r.choice(["0.3", "0.2", "0.4", "0.29", "0.07", "0.55", "0.999"]))
    drop_top = "0"
    if kind == "zero":
        max_fraction = "0"
    if kind == "integer":
        n = 100
        loss, confidence = r.gamma(1.0, 1.0, n).astype(np.float32), r.random(n).astype(np.float32)
        correct = np.ones(n, np.uint8)
        max_fraction = str(r.choice(["0.29", "0.57", "0.58", "0.07", "0.14"]))
    if kind in ("drop_top", "everything"):
        drop_top = str(r.choice(["0.02", "0.1", "0.29"]))
        max_fraction = str(r.choice(["0.3", "0.5", "0.7"]))
    milestones = [
        PUBLISHED,
        [("0", "1"), ("30", "0.8"), ("60", "0.6"), ("80", "0.4")],
        [("0", "1"), ("1", "0.5"), ("2", "0.29")],
        [("0", "0.9"), ("0.1", "0.7"), ("0.7", "0")],
        [("0", "0.57")],
    ][r.integers(0, 5)]
    settings = {
        "max_fraction": max_fraction,
        "tau": tau,
        "milestones": milestones,
        "move_back": move_back,
        "reduce_fraction": reduce_fraction,
        "adjust_lr": adjust_lr,
        "warmup_epochs": int(r.choice([0, 0, 1, 5])),
        "drop_top": drop_top,
        "lr_fraction": str(r.choice(["actual", "scheduled"])),
        "candidates": str(r.choice(["sort", "sort", "threshold"])),
        "first_epoch_hides": bool(r.random() < 0.2),
    }
    return Instance(
        loss,
        correct,
        confidence,
        settings,
        epoch,
        epochs,
        merge,
        bits if r.random() < 0.5 else None,
    )


NUMBERS = depth(range(60), range(200))


@over_instances(NUMBERS)
def test_agrees_with_the_transcription(number: int) -> None:
    given = instance(number)
    method, expected, n = given.method(), given.answer(), len(given.loss)
    records = filled(method, given.loss, given.correct, given.confidence)
    if not expected.kept:
        with pytest.raises(
            ValueError,
            match=rf"nothing is left to train on of {n} samples; lower `max_fraction` or",
        ):
            planned(method, records, given.epoch, given.epochs)
        return
    plan = planned(method, records, given.epoch, given.epochs)
    plan.check(n)
    assert plan.ids.tolist() == expected.kept
    assert ([] if plan.refresh is None else plan.refresh.tolist()) == expected.left_out
    assert plan.weights is None and not plan.drawn
    assert plan.lr_scale == pytest.approx(expected.lr_scale, rel=1e-12)
    assert plan.facts["moved_back"] == expected.moved_back
    assert plan.facts["scheduled_fraction"] == pytest.approx(float(expected.scheduled), rel=1e-12)
    assert plan.facts["actual_fraction"] == pytest.approx(expected.hidden / n, rel=1e-12)
    dropped = (len(expected.left_out) - expected.hidden) / n
    assert plan.facts.get("dropped_fraction", 0.0) == pytest.approx(dropped, rel=1e-12)


def test_the_instances_are_hard() -> None:
    """Every case that the transcription is there for really occurs, several times."""
    seen = dict.fromkeys(
        (
            "hides",
            "moves back",
            "tie at the cut",
            "at tau",
            "float product",
            "drops",
            "empty",
            "boundary",
        ),
        0,
    )
    for number in NUMBERS:
        given = instance(number)
        answer, s, n = given.answer(), given.settings, len(given.loss)
        count = math.floor(answer.scheduled * n)
        usable = np.sort(given.loss[np.isfinite(given.loss)])
        seen["hides"] += bool(answer.left_out) and s["drop_top"] == "0"
        seen["moves back"] += answer.moved_back > 0
        seen["tie at the cut"] += 0 < count < len(usable) and usable[count - 1] == usable[count]
        seen["at tau"] += answer.moved_back > 0 and bool(
            (given.confidence == np.float32(float(s["tau"]))).any()
        )
        seen["float product"] += given.epoch > 0 and int(float(answer.scheduled) * n) != count
        seen["drops"] += s["drop_top"] != "0" and bool(answer.left_out)
        seen["empty"] += not answer.kept
        seen["boundary"] += any(
            given.epoch == Fraction(b) * given.epochs
            for b, _ in s["milestones"]
            if 0 < Fraction(b) < 1
        )
    assert min(seen.values()) >= depth(1, 5), seen


# Worked vectors

LOSS = [0.05, 1.20, 0.30, 0.02, 2.50, 0.10, 0.70, 0.08, 3.10, 0.15]
CORRECT = [1, 0, 1, 1, 0, 1, 0, 0, 0, 1]
CONFIDENCE = [0.95, 0.40, 0.75, 0.99, 0.60, 0.65, 0.50, 0.80, 0.70, 0.70]


@pytest.mark.parametrize(
    ("bits", "fraction", "extra", "hidden"),
    [
        ("v1000", 0.4, {}, [0, 3, 5, 7]),
        ("v1100", 0.4, {}, [0, 3]),
        ("v1111", 0.4, {}, [0, 3]),
        ("v1100", 0.6, {}, [0, 2, 3, 9]),
        ("v1100", 0.6, {"drop_top": 0.1}, [0, 2, 3, 8, 9]),
    ],
)
def test_ten_samples(
    bits: str, fraction: float, extra: dict[str, float], hidden: list[int]
) -> None:
    method = Kakurenbo.variant(bits, max_fraction=fraction, **extra)
    plan = planned(method, filled(method, LOSS, CORRECT, CONFIDENCE), 1, 100)
    assert plan.refresh is not None
    assert plan.refresh.tolist() == hidden
    assert plan.ids.tolist() == [i for i in range(10) if i not in hidden]


def test_ten_samples_learning_rate() -> None:
    for lr_fraction, scale in (("scheduled", 1.6667), ("actual", 1.25)):
        method = Kakurenbo(0.4, lr_fraction=lr_fraction)
        plan = planned(method, filled(method, LOSS, CORRECT, CONFIDENCE), 1, 100)
        assert plan.lr_scale == pytest.approx(scale, abs=5e-5)
        assert plan.facts["actual_fraction"] == pytest.approx(0.2)
        assert plan.facts["moved_back"] == 2


@pytest.mark.parametrize(
    "schedule",
    [((0, 1), (0.3, 0.8), (0.6, 0.6), (0.8, 0.4)), ((0, 1), (30, 0.8), (60, 0.6), (80, 0.4))],
)
def test_imagenet_counts_and_learning_rates(schedule: Any) -> None:
    n = 1_281_167
    method = Kakurenbo(0.3, schedule=schedule, lr_fraction="scheduled", warmup_epochs=5)
    loss = torch.rand(n, generator=torch.Generator().manual_seed(1))
    records = filled(method, loss, torch.ones(n), torch.ones(n))
    expected = {
        1: 384350,
        4: 384350,
        5: 384350,
        29: 384350,
        30: 307480,
        59: 307480,
        60: 230610,
        79: 230610,
        80: 153740,
        99: 153740,
    }
    scales = {384350: 1.42857, 307480: 1.31579, 230610: 1.21951, 153740: 1.13636}
    for epoch, hidden in expected.items():
        plan = planned(method, records, epoch, 100)
        assert plan.refresh is not None
        assert (len(plan.refresh), len(plan.ids)) == (hidden, n - hidden)
        assert plan.lr_scale == pytest.approx(1 if epoch < 5 else scales[hidden], abs=5e-6)


def test_confidence_over_classes_and_over_the_batch() -> None:
    logits = torch.tensor([[4.0, 0, 0], [5, 1, 0], [0, 3, 0], [0, 0, 1]])
    targets = torch.tensor([0, 0, 1, 2])
    wanted = {"correct", "confidence", "batch_confidence"}
    proper = signals(adapt(nn.CrossEntropyLoss()), logits, targets, 4, wanted=wanted)
    official = proper["batch_confidence"]
    assert proper["correct"].all()
    np.testing.assert_allclose(
        proper["confidence"].numpy(), [0.964663, 0.975559, 0.909443, 0.576117], atol=5e-7
    )
    np.testing.assert_allclose(
        official.numpy(), [0.266318, 0.723927, 0.809776, 0.475367], atol=5e-7
    )
    for setting, confidence, hidden in (
        ("class", proper["confidence"], [0, 1, 2]),
        ("batch", official, [1, 2]),
    ):
        method = Kakurenbo(0.75, confidence=setting)
        assert method.columns()["confidence"].signal == (
            "batch_confidence" if setting == "batch" else "confidence"
        )
        plan = planned(
            method, filled(method, [0.1, 0.2, 0.3, 0.4], proper["correct"], confidence), 1, 100
        )
        assert plan.refresh is not None
        assert plan.refresh.tolist() == hidden


@pytest.mark.parametrize(
    ("merge", "loss", "confidence", "correct", "hidden"),
    [("sum", 1.0, 0.9, 2, [2]), ("scatter", 0.5, 0.45, 1, [])],
)
def test_a_padded_duplicate(
    merge: Any, loss: float, confidence: float, correct: int, hidden: list[int]
) -> None:
    """Two processes pad five samples to six; the sample that both meet is added up by the original code."""
    method = Kakurenbo(0.2, merge=merge, tau=0.7)
    records = Records(method.columns(), 5, CPU)
    records.start_epoch()

    def write(ids: list[int], losses: list[float]) -> None:
        n = len(ids)
        signals = {
            "loss": torch.tensor(losses),
            "correct": torch.ones(n, dtype=torch.bool),
            "confidence": torch.full((n,), 0.45),
        }
        records.write(torch.tensor(ids), signals)

    write([0, 1, 2], [3.0, 2.0, 0.5])
    write([3, 4, 2], [2.5, 1.5, 0.5])
    assert records["loss"].tolist() == [3.0, 2.0, loss, 2.5, 1.5]
    assert records["confidence"][2].item() == pytest.approx(confidence)
    assert int(records["correct"][2]) == correct
    plan = planned(method, records, 1, 100)
    assert plan.refresh is not None
    assert plan.refresh.tolist() == hidden


def test_sums_start_again_every_epoch() -> None:
    method = Kakurenbo(merge="sum")
    records = Records(method.columns(), 2, CPU)
    one = {
        "loss": torch.ones(2),
        "correct": torch.ones(2, dtype=torch.bool),
        "confidence": torch.ones(2),
    }
    for _ in range(3):
        records.start_epoch()
        records.write(torch.tensor([0, 1]), one)
    assert records["loss"].tolist() == records["confidence"].tolist() == [1.0, 1.0]


def test_ties_at_the_threshold() -> None:
    loss = np.array([0.1, 0.2, 0.2, 0.2, 0.5])
    for fraction, by_threshold, marked in (
        (0.4, False, [0, 1]),
        (0.4, True, [0, 1, 2, 3]),
        (0.0, False, []),
        (0.0, True, [0, 1, 2, 3, 4]),
    ):
        assert (
            np.flatnonzero(hiding_candidates(loss, fraction, by_threshold=by_threshold)).tolist()
            == marked
        )
    sort, threshold = Kakurenbo(0.4), Kakurenbo(0.4, candidates="threshold")
    for method, hidden in ((sort, [0, 1]), (threshold, [0, 1, 2, 3])):
        plan = planned(method, filled(method, loss, np.ones(5), np.ones(5)), 1, 100)
        assert plan.refresh is not None
        assert plan.refresh.tolist() == hidden


# A whole training run against a loop written by hand


def blobs(n: int = 96) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 4, generator=g) + 2.5 * F.one_hot(y, 4).float()
    return TensorDataset(x, y)


class RunningMean(nn.Module):
    """Subtracts a mean that only training mode moves, so that the mode of the refresh pass shows; batches of one are fine."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), RunningMean(8), nn.ReLU(), nn.Linear(8, 3))


EPOCHS, BATCH, LR = 10, 16, 0.05
SWITCHES = {
    "published": {},
    "official": {
        "confidence": "batch",
        "lr_fraction": "scheduled",
        "refresh": "train",
        "merge": "sum",
        "warmup_epochs": 1,
    },
    "dropping": {"drop_top": 0.05, "move_back": False},
}


def by_hand(model: nn.Module, settings: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """KAKURENBO in a plain loop: the answer of each epoch, and the learning rate of each step."""
    data = blobs()
    x, y = data.tensors
    n = len(data)
    generator = torch.Generator().manual_seed(11)
    order_of_the_loader = DataLoader(range(n), batch_size=BATCH, shuffle=True, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    rates = []
    loss, correct, confidence = [math.inf] * n, [0] * n, [0.0] * n
    official = settings.get("confidence") == "batch"
    names = {"drop_top", "move_back", "lr_fraction", "warmup_epochs"} & settings.keys()
    left_out = []

    def note(ids: list[int], outputs: torch.Tensor) -> None:
        rows = outputs.detach()
        shares = rows.softmax(0 if official else 1)
        for row, i in enumerate(ids):
            loss[i] = F.cross_entropy(rows[row], y[i]).item()
            correct[i] = int(rows[row].argmax() == y[i])
            confidence[i] = shares[row].max().item()

    for epoch in range(EPOCHS):
        chosen = {
            name: str(settings[name]) if name == "drop_top" else settings[name] for name in names
        }
        answer = transcribed(
            np.float32(loss).tolist(),
            correct,
            np.float32(confidence).tolist(),
            epoch=epoch,
            epochs=EPOCHS,
            max_fraction="0.4",
            tau="0.6",
            **chosen,
        )
        left_out.append(answer.left_out)
        kept = set(answer.kept)
        order = [int(i) for batch in order_of_the_loader for i in batch if int(i) in kept]
        for at in range(0, len(order), BATCH):
            ids = order[at : at + BATCH]
            outputs = model(x[ids])
            note(ids, outputs)
            optimizer.zero_grad()
            F.cross_entropy(outputs, y[ids]).backward()
            for group in optimizer.param_groups:
                group["lr"] *= answer.lr_scale
                rates.append(group["lr"])
            optimizer.step()
            for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr
        scheduler.step()
        model.train(settings.get("refresh") == "train")
        with torch.no_grad():
            for at in range(0, len(answer.left_out), BATCH):
                ids = answer.left_out[at : at + BATCH]
                note(ids, model(x[ids]))
        model.train()
    return left_out, rates


@pytest.mark.parametrize("switches", SWITCHES)
def test_a_training_run_equals_one_written_by_hand(switches: str) -> None:
    settings = SWITCHES[switches]
    torch.manual_seed(2)
    model = Net()
    reference = copy.deepcopy(model)
    expected, rates = by_hand(reference, settings)

    generator = torch.Generator().manual_seed(11)
    loader = DataLoader(blobs(), batch_size=BATCH, shuffle=True, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    method = Kakurenbo(0.4, tau=0.6, **settings)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=EPOCHS,
    )
    left_out, used = [], []
    optimizer.register_step_pre_hook(
        lambda *_: used.append(optimizer.param_groups[0]["lr"])
    )  # after the run's own hook
    for _ in range(EPOCHS):
        refresh = run.plan.refresh
        left_out.append([] if refresh is None else refresh.tolist())
        for x, y in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        scheduler.step()
    assert left_out == expected
    assert sum(map(len, expected)) > 30
    assert used == pytest.approx(rates, rel=1e-12)
    assert max(rates[:20]) > LR
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_the_learning_rate_is_restored_when_a_step_raises() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    method = Kakurenbo(0.4, lr_fraction="scheduled")
    loader = DataLoader(blobs(), batch_size=BATCH)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=10,
    )
    fails = False

    def fail(*_: Any) -> None:
        if fails:
            raise RuntimeError(f"stepped with {optimizer.param_groups[0]['lr']:.6f}")

    optimizer.register_step_pre_hook(fail)
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            if run.epoch == 1:
                fails = True
                with pytest.raises(RuntimeError, match=f"stepped with {LR / 0.6:.6f}"):
                    optimizer.step()
                fails = False
                assert optimizer.param_groups[0]["lr"] == LR
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == LR


def test_an_optimizer_whose_step_calls_the_one_of_its_base_class() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            used.append(self.param_groups[0]["lr"])
            return super().step(closure)

    model, used = Net(), []
    torch.optim.SGD(
        model.parameters(), lr=LR
    )  # the first of its class: from then on torch runs hooks in SGD.step as well
    optimizer = Own(model.parameters(), lr=LR)
    method = Kakurenbo(0.4, lr_fraction="scheduled")
    loader = DataLoader(blobs(), batch_size=BATCH)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=10,
    )
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == LR
    assert used == pytest.approx([LR] * 6 + [LR / 0.6] * (len(used) - 6))
    assert run.cost.steps == len(used)
