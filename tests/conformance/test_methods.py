"""What every epoch method promises, checked on one roster. A new method needs a line in CASES and nothing else."""

import copy
import dataclasses
import inspect
import io
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import EpochPlan, methods, rng
from thresher.records import Records

CPU = torch.device("cpu")
EPOCHS = 20

CASES: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "uniform": [{}, {"keep": 0.01}, {"keep": 1.0}],
    "kakurenbo": [
        {},
        {"max_fraction": 0.0},
        {"move_back": False},
        {"drop_top": 0.1, "first_epoch_hides": True},
        {"schedule": ((0, 1), (3, 0.5)), "warmup_epochs": 2, "adjust_lr": True, "reduce_fraction": True, "tau": 0.1},
        {
            "confidence": "batch",
            "lr_fraction": "scheduled",
            "refresh": "train",
            "merge": "sum",
            "candidates": "threshold",
            "tau": 0.9,
        },
    ],
    "infobatch": [{}, {"prune_fraction": 0.9, "threshold": 0.8, "delta": 1.0, "rescale": "ratio"}, {"prune_fraction": 0.0}],
}
BYTES = {"full": 4, "uniform": 4, "kakurenbo": 9, "infobatch": 4}
"""Bytes a sample that the default settings remember."""
IGNORES_LOSSES = {"full", "uniform"}

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "full": [],
    "uniform": [
        ({"keep": value}, rf"`keep` is the share kept, within \(0, 1\], got {value}") for value in (0, -0.1, 1.01, math.nan)
    ],
    "kakurenbo": [
        ({"max_fraction": 1.0}, r"`max_fraction` is a share removed, within \[0, 1\), got 1.0"),
        ({"max_fraction": -0.1}, r"`max_fraction` is a share removed, within \[0, 1\), got -0.1"),
        ({"max_fraction": math.nan}, r"`max_fraction` is a share removed, within \[0, 1\), got nan"),
        ({"drop_top": 1.0}, r"`drop_top` is a share removed, within \[0, 1\), got 1.0"),
        ({"drop_top": -0.5}, r"`drop_top` is a share removed, within \[0, 1\), got -0.5"),
        ({"max_fraction": 0.5, "drop_top": 0.5}, r"`max_fraction` \+ `drop_top` must stay below 1, got 0.5 \+ 0.5"),
        ({"tau": 1.1}, r"`tau` is a probability, within \[0, 1\], got 1.1"),
        ({"tau": math.nan}, r"`tau` is a probability, within \[0, 1\], got nan"),
        ({"warmup_epochs": -1}, r"`warmup_epochs` must be 0 or more, got -1"),
        ({"schedule": [(0.1, 1)]}, r"`schedule`: milestones must start at 0, got \[\(0.1, 1.0\)\]"),
        ({"schedule": [(0, 1), (30, 2)]}, r"`schedule`: values must be within \[0, 1\]"),
        ({"confidence": "rows"}, r"`confidence` must be one of \('class', 'batch'\), got 'rows'"),
        ({"lr_fraction": "none"}, r"`lr_fraction` must be one of \('actual', 'scheduled'\), got 'none'"),
        ({"refresh": True}, r"`refresh` must be one of \('eval', 'train'\), got True"),
        ({"merge": "mean"}, r"`merge` must be one of \('scatter', 'sum'\), got 'mean'"),
        ({"candidates": 0.3}, r"`candidates` must be one of \('sort', 'threshold'\), got 0.3"),
    ],
    "infobatch": [
        ({"prune_fraction": 1.0}, r"`prune_fraction` is a share removed, within \[0, 1\), got 1.0"),
        ({"prune_fraction": -0.1}, r"`prune_fraction` is a share removed, within \[0, 1\), got -0.1"),
        ({"prune_fraction": math.nan}, r"`prune_fraction` is a share removed, within \[0, 1\), got nan"),
        ({"delta": 1.1}, r"`delta` is a share of the epochs, within \[0, 1\], got 1.1"),
        ({"delta": -0.1}, r"`delta` is a share of the epochs, within \[0, 1\], got -0.1"),
        ({"threshold": "median"}, r"`threshold` must be 'mean' or a quantile within \(0, 1\), got 'median'"),
        ({"threshold": 1.0}, r"`threshold` must be 'mean' or a quantile within \(0, 1\), got 1.0"),
        ({"threshold": 0}, r"`threshold` must be 'mean' or a quantile within \(0, 1\), got 0"),
        ({"rescale": "sum"}, r"`rescale` must be 'mass' or 'ratio', got 'sum'"),
    ],
}


def test_every_registered_method_has_a_case() -> None:
    registered = {name for name, info in methods.infos().items() if info.stage == "epoch"}
    for roster in (CASES, BYTES, REFUSED):
        assert set(roster) == registered, "a registered method has no line in the roster, or the other way round"


ROSTER = [
    pytest.param(name, settings, id="-".join([name, *(f"{key}={value}" for key, value in settings.items())]))
    for name, cases in CASES.items()
    for settings in cases
]
each = pytest.mark.parametrize(("name", "settings"), ROSTER)


def some_records(method: Any, n: int = 50, seed: int = 0) -> Records:
    """Losses, confidences and hits as training leaves them, with ties and a few losses that are not finite."""
    r = np.random.default_rng(seed)
    records = Records(method.columns(), n, CPU)
    found = {
        "loss": r.gamma(1.0, 1.0, n).round(1),
        "correct": r.random(n) < 0.8,
        "confidence": r.random(n),
        "batch_confidence": r.random(n),
    }
    found["loss"][r.random(n) < 0.1] = r.choice([math.nan, math.inf])
    signals = {name: torch.from_numpy(values) for name, values in found.items()}
    records.write(torch.arange(n), signals)
    assert records.signals <= set(signals)
    return records


def planned(method: Any, records: Records, epoch: int = 5, seed: int = 0) -> EpochPlan:
    plan = method.plan_epoch(records, epoch=epoch, epochs=EPOCHS, generator=rng.seeded(seed, epoch))
    assert isinstance(plan, EpochPlan)
    plan.check(len(records["loss"]))
    return plan


def content(plan: EpochPlan) -> tuple[Any, ...]:
    """What a plan says, copied, as values that compare."""
    tensors = (None if t is None else t.tolist() for t in (plan.ids, plan.weights, plan.refresh))
    return (*tensors, plan.lr_scale, plan.drawn, dict(plan.facts))


def left_out(plan: EpochPlan, n: int) -> set[int]:
    return set(range(n)) - set(plan.ids.tolist())


@each
def test_it_is_a_method(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    info = methods.infos()[name]
    assert isinstance(method, methods.EpochMethod)
    assert method.stage == info.stage == "epoch"
    assert methods.name_of(method) == name
    assert info.summary and info.target == f"{type(method).__module__}:{type(method).__qualname__}"
    assert getattr(thresher, type(method).__name__) is type(method)
    parameters = inspect.signature(method.plan_epoch).parameters
    assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == ["epoch", "epochs", "generator"]


@each
def test_it_is_a_frozen_value_that_owns_no_tensors(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    assert dataclasses.is_dataclass(method)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.stage = "batch"
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, getattr(method, field.name))
        assert isinstance(getattr(method, field.name), bool | int | float | str | tuple)
    assert hash(method) == hash(methods.create(name, **settings))


@each
def test_repr_pickle_and_copy_give_it_back(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    assert eval(repr(method), vars(thresher) | {type(method).__name__: type(method)}) == method
    assert pickle.loads(pickle.dumps(method)) == method
    assert copy.deepcopy(method) == method
    defaults = methods.create(name)
    assert (method == defaults) == all(getattr(defaults, key) == getattr(method, key) for key in settings)


@each
def test_it_answers_the_same_to_the_same_question(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    for epoch in (0, 1, 5, EPOCHS - 1):
        answers = [content(planned(copy.deepcopy(method), some_records(method), epoch)) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]


@each
def test_it_leaves_global_random_states_alone_and_does_not_depend_on_them(name: str, settings: dict[str, Any]) -> None:
    method, answers = methods.create(name, **settings), []
    records = some_records(method)
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        answers.append([content(planned(method, records, epoch)) for epoch in range(EPOCHS)])
        after = torch.get_rng_state(), np.random.get_state(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1][0] == after[1][0] and (before[1][1] == after[1][1]).all() and before[1][2:] == after[1][2:]
        assert before[2] == after[2]
    assert answers[0] == answers[1]


@each
def test_it_neither_changes_the_records_nor_keeps_hold_of_them(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    records = some_records(method)
    before = records.state_dict()
    plan = planned(method, records)
    for column, saved in before.items():
        assert torch.equal(records[column].nan_to_num(-1), saved.nan_to_num(-1))
    said = content(plan)
    for column in records:
        records[column].zero_()
    assert content(plan) == said


@each
def test_its_memory_is_as_declared(name: str, settings: dict[str, Any]) -> None:
    used = Records(methods.create(name, **settings).columns(), 3, CPU).bytes_per_sample
    assert used <= BYTES[name]
    assert Records(methods.create(name).columns(), 3, CPU).bytes_per_sample == BYTES[name]


@each
def test_before_any_loss_everything_is_kept(name: str, settings: dict[str, Any]) -> None:
    if name == "uniform" or settings.get("first_epoch_hides"):
        return  # needs no losses; hides by initial losses, as its switch says
    method = methods.create(name, **settings)
    for epoch in range(3):
        plan = planned(method, Records(method.columns(), 50, CPU), epoch)
        assert plan.ids.tolist() == list(range(50))
        assert plan.weights is None
        if epoch == 0:
            assert plan.lr_scale == 1


@each
@pytest.mark.parametrize("value", [0.0, 0.1, 3.0, math.nan, math.inf])
def test_one_sample(name: str, settings: dict[str, Any], value: float) -> None:
    method = methods.create(name, **settings)
    records = some_records(method, 1)
    records["loss"].fill_(value)
    for column in ("correct", "confidence"):
        if column in records:
            records[column].fill_(False)
    for epoch in range(EPOCHS):
        assert planned(method, records, epoch).ids.tolist() == [0]


@each
@pytest.mark.parametrize("value", [0.0, 0.1, 3.0])
def test_all_equal(name: str, settings: dict[str, Any], value: float) -> None:
    method, n = methods.create(name, **settings), 50
    records = some_records(method)
    records["loss"].fill_(value)
    plans = [planned(method, records, epoch) for epoch in range(EPOCHS)]
    assert all(0 < len(plan.ids) <= n for plan in plans)
    assert all(np.isfinite(list(plan.facts.values())).all() for plan in plans)


@each
def test_losses_that_are_not_finite(name: str, settings: dict[str, Any]) -> None:
    method, n = methods.create(name, **settings), 50
    for value in (math.nan, math.inf, -math.inf):
        records = some_records(method)
        records["loss"][10:] = value
        for epoch in range(EPOCHS):
            plan = planned(method, records, epoch)
            if name not in IGNORES_LOSSES:
                assert left_out(plan, n) <= set(range(10))
                assert plan.weights is None or bool((plan.weights[plan.ids >= 10] == 1).all())
        records["loss"].fill_(value)
        if name not in IGNORES_LOSSES:
            assert planned(method, records).ids.tolist() == list(range(n))


@each
def test_a_plan_survives_saving_the_records(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    records = some_records(method)
    buffer = io.BytesIO()
    torch.save(records.state_dict(), buffer)
    buffer.seek(0)
    loaded = Records(method.columns(), 50, CPU)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for epoch in range(EPOCHS):
        assert content(planned(method, loaded, epoch)) == content(planned(method, records, epoch))


@each
def test_facts_are_for_the_history(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    for epoch in range(EPOCHS):
        plan = planned(method, some_records(method), epoch)
        assert {"scheduled_fraction", "actual_fraction"} <= set(plan.facts)
        assert plan.facts["actual_fraction"] == pytest.approx(1 - len(plan.ids) / 50)
        assert all(type(value) in (int, float) for value in plan.facts.values())


@each
def test_it_trains(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=g)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    run = thresher.attach(
        method, loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer, epochs=EPOCHS
    )
    before = nn.functional.cross_entropy(model(x), y).item()
    for epoch in range(EPOCHS):
        kept, lr_scale, seen = set(run.plan.ids.tolist()), run.plan.lr_scale, set()
        for inputs, targets in run.loader:
            seen |= set(run.ids.tolist())
            optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
        assert seen == kept
        assert (run.history[-1]["epoch"], run.history[-1]["kept"]) == (epoch, len(kept))
        assert run.history[-1]["lr_scale"] == lr_scale
    assert nn.functional.cross_entropy(model(x), y).item() < 0.9 * before


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        pytest.param(name, settings, message, id=f"{name}-{settings}")
        for name, cases in REFUSED.items()
        for settings, message in cases
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, settings: dict[str, Any], message: str) -> None:
    class_name = methods.load(name).__name__
    with pytest.raises(ValueError, match=f"^{class_name}: {message}"):
        methods.create(name, **settings)


@pytest.mark.parametrize("name", CASES)
def test_unknown_settings_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fraction_of_nothing'"):
        methods.create(name, fraction_of_nothing=1)
