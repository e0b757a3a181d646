"""What every batch method promises, checked on one roster. A new method needs a line in CASES and nothing else."""

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

import thresher
from thresher import BatchPlan, methods, rng

CASES: dict[str, list[dict[str, Any]]] = {
    "selective_backprop": [
        {},
        {"keep": 0.3},
        {"keep": 1.0},
        {"beta": 0.0},
        {"beta": 3.0, "history": 7, "min_probability": 0.1, "warmup_steps": 2},
    ],
    "random_backprop": [{}, {"keep": 0.01}, {"keep": 1.0}],
}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "selective_backprop": [
        *(
            ({"keep": value}, rf"`keep` is the share kept, within \(0, 1\], got {value!r}")
            for value in (0, -0.1, 1.01, math.nan, "half")
        ),
        *(
            ({"beta": value}, rf"`beta` must be a finite number of 0 or more, got {value!r}")
            for value in (-0.1, math.nan, math.inf, "one")
        ),
        ({"keep": 0.5, "beta": 0.0}, "`keep` .* exclude each other, got keep=0.5 and beta=0.0; give one of them"),
        ({"history": 0}, "`history` must be a whole number of 1 or more, got 0"),
        ({"history": 10.0}, "`history` must be a whole number of 1 or more, got 10.0"),
        *(
            ({"min_probability": value}, rf"`min_probability` is a probability, within \[0, 1\], got {value}")
            for value in (-0.1, 1.1, math.nan)
        ),
        ({"warmup_steps": -1}, "`warmup_steps` must be 0 or more, got -1"),
    ],
    "random_backprop": [
        ({"keep": value}, rf"`keep` is the share kept, within \(0, 1\], got {value}") for value in (0, -0.1, 1.01, math.nan)
    ],
}


def test_every_registered_method_has_a_case() -> None:
    registered = {name for name, info in methods.infos().items() if info.stage == "batch"}
    for roster in (CASES, REFUSED):
        assert set(roster) == registered, "a registered method has no line in the roster, or the other way round"


ROSTER = [
    pytest.param(name, settings, id="-".join([name, *(f"{key}={value}" for key, value in settings.items())]))
    for name, cases in CASES.items()
    for settings in cases
]
each = pytest.mark.parametrize(("name", "settings"), ROSTER)

SIZES = (16, 16, 1, 16, 16, 5)


def some_signals(n: int, seed: int) -> dict[str, torch.Tensor]:
    """What a forward pass tells, with ties and a few losses that are not finite."""
    r = np.random.default_rng([n, seed])
    loss = r.gamma(1.0, 1.0, n).round(1)
    loss[r.random(n) < 0.1] = r.choice([math.nan, math.inf])
    found = {"id": r.permutation(1000)[:n], "loss": loss.astype(np.float32), "confidence": r.random(n, dtype=np.float32)}
    return {name: torch.from_numpy(values) for name, values in found.items()}


def planned(method: Any, signals: Any, state: Any, step: int = 5, seed: int = 0) -> tuple[BatchPlan, Any]:
    plan, after = method.plan_batch(signals, state, step=step, generator=rng.seeded(seed, step))
    assert isinstance(plan, BatchPlan)
    rows = plan.rows
    assert bool((rows[1:] > rows[:-1]).all()), "rows are not ascending"
    assert set(rows.tolist()) <= set(range(len(signals["id"])))
    assert rows.device == signals["id"].device
    assert after is not state
    return plan, after


def steps(method: Any, state: Any = None, start: int = 0) -> tuple[list[Any], Any]:
    """What the method answers to the same few batches, and what it remembers then."""
    state, said = method.init_state() if state is None else state, []
    for step in range(start, len(SIZES)):
        plan, state = planned(method, some_signals(SIZES[step], step), state, step)
        said.append(content(plan))
    return said, state


def content(plan: BatchPlan) -> tuple[Any, ...]:
    return plan.rows.tolist(), None if plan.weights is None else plan.weights.tolist(), dict(plan.facts)


def plain(state: Any) -> dict[str, Any]:
    """A state as values that compare; NaN as None."""
    found = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    return {name: [None if x != x else x for x in v] if isinstance(v, list) else v for name, v in found.items()}


@each
def test_it_is_a_method(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    info = methods.infos()[name]
    assert isinstance(method, methods.BatchMethod)
    assert method.stage == info.stage == "batch"
    assert isinstance(method.signals, tuple) and set(method.signals) <= {"loss", "correct", "confidence"}
    assert methods.name_of(method) == name
    assert info.summary and info.target == f"{type(method).__module__}:{type(method).__qualname__}"
    assert getattr(thresher, type(method).__name__) is type(method)
    parameters = inspect.signature(method.plan_batch).parameters
    assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == ["step", "generator"]


@each
def test_it_is_a_frozen_value_that_owns_no_tensors(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    assert dataclasses.is_dataclass(method)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, getattr(method, field.name))
        assert isinstance(getattr(method, field.name), bool | int | float | str | tuple | None)
    assert hash(method) == hash(methods.create(name, **settings))


@each
def test_repr_pickle_and_copy_give_it_back(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    assert eval(repr(method), {type(method).__name__: type(method)}) == method
    assert pickle.loads(pickle.dumps(method)) == method
    assert copy.deepcopy(method) == method


@each
def test_it_answers_the_same_to_the_same_question(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    answers = [steps(copy.deepcopy(method)) for _ in range(3)]
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert plain(answers[0][1]) == plain(answers[2][1])


@each
def test_it_leaves_global_random_states_alone_and_does_not_depend_on_them(name: str, settings: dict[str, Any]) -> None:
    method, answers = methods.create(name, **settings), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        answers.append(steps(method)[0])
        after = torch.get_rng_state(), np.random.get_state(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1][0] == after[1][0] and (before[1][1] == after[1][1]).all() and before[1][2:] == after[1][2:]
        assert before[2] == after[2]
    assert answers[0] == answers[1]


@each
def test_it_neither_changes_what_it_is_given_nor_keeps_hold_of_it(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    _, state = steps(method)
    signals, remembered = some_signals(16, 9), plain(state)
    given = {key: value.clone() for key, value in signals.items()}
    plan, after = planned(method, signals, state)
    assert plain(state) == remembered
    assert all(torch.equal(signals[key].nan_to_num(-1), value.nan_to_num(-1)) for key, value in given.items())
    said, known = content(plan), plain(after)
    for tensor in (*signals.values(), *(value for value in state.values() if isinstance(value, torch.Tensor))):
        tensor.zero_()
    assert (content(plan), plain(after)) == (said, known)


@each
def test_the_order_of_the_rows_does_not_matter(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    _, state = steps(method)
    signals = some_signals(16, 3)
    plan, after = planned(method, signals, state)
    for seed in range(10):
        order = torch.randperm(16, generator=rng.seeded(seed))
        permuted, remembered = planned(method, {key: value[order] for key, value in signals.items()}, state)
        assert sorted(order[permuted.rows].tolist()) == plan.rows.tolist()
        assert plain(remembered) == plain(after)


@each
@pytest.mark.parametrize("value", [0.0, 3.0, math.nan, math.inf, -math.inf])
def test_one_sample_and_all_equal(name: str, settings: dict[str, Any], value: float) -> None:
    method = methods.create(name, **settings)
    for n in (1, 8):
        plan, _ = planned(method, {"id": torch.arange(n), "loss": torch.full((n,), value)}, method.init_state())
        assert len(plan.rows) >= 1 or (name == "selective_backprop" and math.isfinite(value) and "keep" not in settings)


@each
def test_losses_that_are_not_finite_come_first(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    if "loss" not in method.signals:
        return
    signals = {"id": torch.arange(20), "loss": torch.arange(20.0)}
    signals["loss"][[2, 5, 9]] = torch.tensor([math.nan, math.inf, -math.inf])
    plan, _ = planned(method, signals, method.init_state())
    assert {2, 5, 9} <= set(plan.rows.tolist())


@each
def test_its_state_survives_saving(name: str, settings: dict[str, Any]) -> None:
    method = methods.create(name, **settings)
    said, last = steps(method)
    state = method.init_state()
    for step in range(3):
        _, state = planned(method, some_signals(SIZES[step], step), state, step)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again, end = steps(method, torch.load(buffer, weights_only=True), start=3)
    assert again == said[3:]
    assert plain(end) == plain(last)


@each
def test_facts_are_for_the_history(name: str, settings: dict[str, Any]) -> None:
    for (rows, _, facts), n in zip(steps(methods.create(name, **settings))[0], SIZES, strict=True):
        assert {"scheduled_fraction", "actual_fraction"} <= set(facts)
        assert facts["actual_fraction"] == pytest.approx(1 - len(rows) / n)
        assert all(type(value) in (int, float) for value in facts.values())


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
