"""Parts of Selective-Backprop by hand; the whole of it is in tests/reference."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thresher import BatchPlan, SelectiveBackprop
from thresher.methods._base import extended_history, top_positions
from thresher.methods.selective_backprop import percentile, precedence
from thresher.rng import seeded

NAN, INF = math.nan, math.inf


def planned(
    method: SelectiveBackprop, loss: Any, ids: Any = None, seed: int = 0, step: int = 0
) -> BatchPlan:
    loss = torch.as_tensor(loss)
    ids = torch.arange(len(loss)) if ids is None else torch.as_tensor(ids)
    plan, _ = method.plan_batch(
        {"id": ids, "loss": loss}, method.init_state(), step=step, generator=seeded(seed)
    )
    return plan


def values(tensor: torch.Tensor) -> list[Any]:
    return [None if math.isnan(value) else value for value in tensor.tolist()]


def test_published_defaults() -> None:
    method = SelectiveBackprop()
    assert method == SelectiveBackprop(beta=1.0, history=1024, min_probability=0.0, warmup_steps=0)
    assert (method.keep, method.beta) == (None, 1.0)
    assert (SelectiveBackprop(keep=0.5).keep, SelectiveBackprop(0.5).beta) == (0.5, None)
    assert SelectiveBackprop.requires.signals == ("loss",)


def test_both_ways_at_once() -> None:
    with pytest.raises(
        ValueError,
        match=r"`keep` .* and `beta` .* exclude each other, got keep=0.5 and beta=1.0; give one",
    ):
        SelectiveBackprop(keep=0.5, beta=1.0)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"keep": 0.29}, 0.29),
        ({"beta": 0}, 1),
        ({"beta": 0.0, "min_probability": 0.5}, 1),
        ({"beta": 0.25}, 0.8),
        ({"beta": 1}, 0.5),
        ({"beta": 3}, 0.25),
        (
            {"beta": 1, "min_probability": 0.5},
            0.625,
        ),  # .5 below the median, .75 on average above it
        ({"beta": 2, "min_probability": 1.0}, 1),
        ({"beta": 1e-320, "min_probability": 0.5}, 1),
    ],
)
def test_expected_keep(settings: dict[str, float], share: float) -> None:
    assert SelectiveBackprop(**settings).expected_keep == pytest.approx(share)
    plan = planned(SelectiveBackprop(**settings), [1.0, 2.0, 3.0])
    assert plan.facts["scheduled_fraction"] == pytest.approx(1 - share)


@pytest.mark.parametrize(
    ("loss", "k", "positions"),
    [
        ([3, 1, 2], 1, [0]),
        ([3, 1, 2], 2, [2, 0]),
        ([1, 1, 1], 2, [1, 2]),
        ([0.0, -0.0, 0.0, -0.0], 1, [3]),
        ([5, NAN, 7, -INF, INF], 3, [1, 3, 4]),
        ([5, NAN, 7, -INF, INF], 2, [3, 4]),
        ([5, NAN, 7, -INF, INF], 4, [2, 1, 3, 4]),
        ([4, 2, 3], 4, [1, 2, 0]),
        ([4, 2], 5, [1, 0]),
        ([], 1, []),
    ],
)
def test_largest_losses(loss: list[float], k: int, positions: list[int]) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert top_positions(torch.tensor(loss, dtype=dtype), k).tolist() == positions


@pytest.mark.parametrize(
    ("history", "loss", "size", "after"),
    [
        ([], [1, 2], 4, [1, 2]),
        ([1, 2], [3, 4], 4, [1, 2, 3, 4]),
        ([1, 2, 3], [4, 5], 4, [2, 3, 4, 5]),
        ([1, 2, 3], [4, 5, 6, 7, 8], 4, [5, 6, 7, 8]),
        ([1, 2, 3, 4], [5, 6, 7, 8], 4, [5, 6, 7, 8]),
        ([1, 2, 3, 4], [], 2, [3, 4]),
        ([1, NAN], [INF, 2, -INF, NAN], 5, [None, None, 2, None, None]),
    ],
)
def test_remembered(history: list[float], loss: list[float], size: int, after: list[Any]) -> None:
    before = torch.tensor(history)
    found = extended_history(before, torch.tensor(loss), size)
    assert values(found) == after and found.dtype == torch.float32
    assert values(before) == [None if math.isnan(value) else value for value in history]
    assert found.untyped_storage().nbytes() == 4 * len(after), (
        "saving it would save what was forgotten as well"
    )


@pytest.mark.parametrize(
    ("history", "loss", "q"),
    [
        ([1, 2, 3, 4], [0, 1, 2.5, 4, 5], [0, 0, 0.5, 0.75, 1]),
        ([2, 2, 2, 3], [2, 3], [0, 0.75]),
        ([NAN, 1, NAN, 3], [2, 4, 1], [0.5, 1, 0]),
        ([1, 2], [NAN, INF, -INF, 1.5], [1, 1, 1, 0.5]),
        ([NAN, NAN], [1, NAN], [1, 1]),
        ([], [1], [1]),
        ([0.0, -0.0], [-0.0, 0.0], [0, 0]),
    ],
)
def test_percentile(history: list[float], loss: list[float], q: list[float]) -> None:
    assert percentile(torch.tensor(loss), torch.tensor(history)).tolist() == q


@pytest.mark.parametrize(
    ("n", "keep", "count"),
    [
        (100, 0.29, 29),
        (100, 0.57, 57),
        (3, 0.5, 1),
        (3, 0.1, 1),
        (1, 0.01, 1),
        (9, 1.0, 9),
        (9, 1, 9),
    ],
)
def test_a_fixed_share(n: int, keep: float, count: int) -> None:
    loss = torch.randperm(n, generator=seeded(n)).float()
    plan = planned(SelectiveBackprop(keep), loss)
    assert plan.rows.tolist() == sorted(loss.argsort().tolist()[n - count :])
    assert plan.facts == pytest.approx(
        {"scheduled_fraction": 1 - keep, "actual_fraction": 1 - count / n}
    )
    assert plan.weights is None


def test_the_higher_id_wins_a_tie() -> None:
    assert planned(
        SelectiveBackprop(0.5), [1.0, 1.0, 1.0, 1.0], ids=[7, 9, 2**40, 8]
    ).rows.tolist() == [1, 2]
    assert planned(
        SelectiveBackprop(0.5), [1.0, NAN, -INF, INF], ids=[7, 9, 3, 8]
    ).rows.tolist() == [1, 3]


def test_a_fixed_share_draws_and_remembers_nothing() -> None:
    method, g = SelectiveBackprop(0.5), seeded(0)
    before = g.get_state()
    _, state = method.plan_batch(
        {"id": torch.arange(4), "loss": torch.rand(4)}, method.init_state(), step=3, generator=g
    )
    assert state == method.init_state() == {}
    assert torch.equal(g.get_state(), before)


def test_a_loss_that_is_not_finite_is_always_chosen_and_never_counted() -> None:
    method = SelectiveBackprop(beta=500.0)
    loss = torch.arange(40.0)
    loss[[3, 17, 25]] = torch.tensor([NAN, INF, -INF])
    for seed in range(20):
        assert (
            {3, 17, 25}
            <= set(planned(method, loss, seed=seed).rows.tolist())
            <= {3, 17, 25, 38, 39}
        )


def test_a_double_beyond_single_precision_counts_as_infinite() -> None:
    loss = torch.tensor([1.0, 1e300], dtype=torch.float64)
    signals = {"id": torch.arange(2), "loss": loss}
    plan, state = SelectiveBackprop().plan_batch(
        signals, {"history": torch.empty(0)}, step=0, generator=seeded(0)
    )
    assert values(state["history"]) == [1, None]
    assert plan.rows.tolist() == [1]


def test_a_draw_must_be_below_the_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chances are 0, 1/4, 1/2 and 3/4; a chance of 0 is none."""
    for draws, rows in (
        ([0.0] * 4, [1, 2, 3]),
        ([0.0, 0.25, 0.5, 0.75], []),
        ([0.0, 0.2, 0.5, 0.7], [1, 3]),
    ):
        monkeypatch.setattr(
            torch,
            "rand",
            lambda n, *, generator, dtype, draws=draws: torch.tensor(draws, dtype=dtype),
        )
        assert planned(SelectiveBackprop(), [1.0, 2.0, 3.0, 4.0]).rows.tolist() == rows


def test_beta_0_keeps_everything() -> None:
    assert planned(SelectiveBackprop(beta=0), [1.0, 1.0, 0.0]).rows.tolist() == [0, 1, 2]


def test_a_batch_may_be_left_out_whole() -> None:
    """All equal: nothing is below, and nobody is chosen."""
    plan = planned(SelectiveBackprop(), [2.0] * 8)
    assert len(plan.rows) == 0 and plan.facts["actual_fraction"] == 1
    assert planned(SelectiveBackprop(min_probability=1.0), [2.0] * 8).rows.tolist() == list(
        range(8)
    )


@pytest.mark.parametrize("settings", [{"keep": 0.25}, {"beta": 2.0}])
def test_warm_up_keeps_everything_and_remembers_nothing(settings: dict[str, Any]) -> None:
    method = SelectiveBackprop(**settings, warmup_steps=2)
    state, kept = method.init_state(), []
    for step in range(4):
        signals = {"id": torch.arange(8), "loss": torch.arange(8.0) + step}
        plan, after = method.plan_batch(signals, state, step=step, generator=seeded(step))
        assert after is not state
        kept.append(plan.rows.tolist())
        filled = 8 * max(0, step - 1) if "beta" in settings else None
        assert (len(after["history"]) if "history" in after else None) == filled
        assert (plan.facts["scheduled_fraction"] == 0) == (step < 2)
        state = after
    assert kept[:2] == [list(range(8))] * 2
    assert len(kept[2]) < 8


@pytest.mark.parametrize("settings", [{"keep": 0.5}, {}, {"warmup_steps": 1}])
def test_an_empty_batch(settings: dict[str, Any]) -> None:
    assert len(planned(SelectiveBackprop(**settings), torch.empty(0)).rows) == 0


class Reads(TorchDispatchMode):
    """Counts what must wait for the device: values read on the host, and shapes that depend on values."""

    WAITING = {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "unique_dim",
        "_unique2",
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITING:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({"keep": 0.5}, {}),
        ({"keep": 0.5, "draw": True}, {}),
        ({"beta": 1.5}, {"nonzero": 1}),
        ({"beta": 1.5, "warmup_steps": 9}, {}),
    ],
)
def test_only_a_random_number_of_rows_waits_for_the_device(
    settings: dict[str, Any], waits: dict[str, int]
) -> None:
    method = SelectiveBackprop(**settings)
    signals, state = {"id": torch.arange(8), "loss": torch.rand(8)}, method.init_state()
    with Reads() as reads:
        method.plan_batch(signals, state, step=0, generator=seeded(0))
    assert reads.found == waits


@pytest.mark.parametrize("draw", [False, True])
def test_a_fixed_share_reads_no_value(draw: bool) -> None:
    """On the meta device there is nothing to read."""
    signals = {
        "id": torch.empty(8, dtype=torch.int64, device="meta"),
        "loss": torch.empty(8, device="meta"),
    }
    plan, _ = SelectiveBackprop(0.5, draw=draw).plan_batch(signals, {}, step=0, generator=seeded(0))
    assert plan.rows.is_meta and plan.rows.shape == (4,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": -0.1}, r"`start` must be a number within \[0, 1\), got -0.1"),
        ({"start": 1.0}, "`start` .* got 1.0"),
        ({"start": NAN}, "`start` .* got nan"),
        (
            {"end": 1.1},
            "`end` is a share of training, above `start` and up to 1, got start=0.0 and end=1.1",
        ),
        ({"start": 0.5, "end": 0.5}, "`end` .* got start=0.5 and end=0.5"),
        ({"end": NAN}, "`end` .* got start=0.0 and end=nan"),
        ({"interrupt": -1}, "`interrupt` must be a whole number of 0 or more, got -1"),
        ({"interrupt": 2.0}, "`interrupt` .* got 2.0"),
        ({"draw": True}, "`draw` needs `keep`, the share to draw, got keep=None"),
        ({"draw": True, "beta": 1.0}, "`draw` needs `keep`, the share to draw, got keep=None"),
    ],
)
def test_settings_of_composers_rule_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^SelectiveBackprop: {message}"):
        SelectiveBackprop(**settings)


def test_always_active_by_default() -> None:
    for method in (SelectiveBackprop(), SelectiveBackprop(0.5)):
        assert all(
            method.active(progress, step) for progress in (0.0, 0.5, 1.0) for step in range(4)
        )


@pytest.mark.parametrize(
    ("progress", "active"),
    [
        (0.0, False),
        (0.25, True),
        (0.25 - 1e-12, True),
        (0.5, True),
        (0.75 - 1e-12, False),
        (0.75, False),
    ],
)
def test_active_from_start_to_before_end(progress: float, active: bool) -> None:
    assert SelectiveBackprop(start=0.25, end=0.75).active(progress, 0) == active


def test_how_many_is_unknown_where_some_batches_stay_whole() -> None:
    assert SelectiveBackprop(0.5, draw=True).count(9) == 4
    for settings in ({"start": 0.1}, {"end": 0.9}, {"interrupt": 3}, {"warmup_steps": 1}):
        assert SelectiveBackprop(0.5, **settings).count(9) is None


def test_a_draw_by_rank() -> None:
    """A fixed number, another draw each time, by loss and not by row."""
    loss = torch.rand(40, generator=seeded(1))
    order = torch.randperm(40, generator=seeded(2))
    method, found = SelectiveBackprop(0.25, draw=True), set()
    for seed in range(10):
        rows = planned(method, loss, seed=seed).rows
        permuted = planned(method, loss[order], ids=order, seed=seed).rows
        assert sorted(order[permuted].tolist()) == rows.tolist() and len(rows) == 10
        found.add(tuple(rows.tolist()))
    assert len(found) == 10
    assert planned(SelectiveBackprop(1.0, draw=True), loss).rows.tolist() == list(range(40))
    assert len(planned(SelectiveBackprop(0.5, draw=True), [1.0]).rows) == 1


def test_a_very_small_share_draws_the_largest() -> None:
    """Weights far below the smallest number: only their logarithms can be compared."""
    assert [
        planned(SelectiveBackprop(1e-5, draw=True), torch.arange(64.0), seed=seed).rows.tolist()
        for seed in range(5)
    ] == [[63]] * 5


def test_a_draw_takes_losses_that_are_not_finite_before_all_others() -> None:
    for seed in range(20):
        rows = planned(
            SelectiveBackprop(0.5, draw=True), [9.0, NAN, 1.0, INF, 8.0, 2.0, -INF, 7.0], seed=seed
        ).rows.tolist()
        assert {1, 3, 6} < set(rows) and len(rows) == 4
    assert planned(
        SelectiveBackprop(0.25, draw=True), [9.0, NAN, 1.0, INF, 8.0, 2.0, -INF, 7.0]
    ).rows.tolist() == [3, 6]


def test_precedence_is_a_permutation_from_the_generator_alone() -> None:
    first, again, other = (precedence(9, 0.5, seeded(seed)).tolist() for seed in (1, 1, 2))
    assert first == again != other and sorted(first) == list(range(9))
