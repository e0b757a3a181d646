"""Parts of AdaSelection by hand; the whole of it is in tests/reference."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher import (
    AdaBoost,
    AdaSelection,
    BatchPlan,
    BigLoss,
    CoresetCenter,
    CoresetExtremes,
    DivBS,
    GradientNorm,
    Kakurenbo,
    RhoLoss,
    SmallLoss,
)
from thresher.methods.ada_selection import (
    HUGE,
    SELECTORS,
    as_votes,
    drawn,
    in_equal_spread,
    in_ranks,
    log_importance,
    log_scores,
    mean_of_kept,
    normal_quantiles,
    over_mean,
    reweighted,
    usable_signals,
)
from thresher.rng import seeded
from thresher.scores import Scores

NAN, INF = math.nan, math.inf
EVERYTHING = tuple(SELECTORS)
LOSS = [0.3, 2.0, 0.1, 0.9, 1.4, 0.2]


def literal(keep: float = 0.5, **settings: Any) -> AdaSelection:
    return AdaSelection.variant("literal", keep=keep, **settings)


def planned(
    method: AdaSelection, loss: Any, state: Any = None, step: int = 0, **more: Any
) -> tuple[BatchPlan, Any]:
    loss = torch.as_tensor(loss)
    signals = {"id": torch.arange(len(loss)), "loss": loss, "grad_norm": loss, **more}
    state = method.init_state() if state is None else state
    return method.plan_batch(signals, state, step=step, generator=seeded(step))


def rows(
    method: AdaSelection, loss: Any, state: Any = None, step: int = 0, **more: Any
) -> list[int]:
    return planned(method, loss, state, step, **more)[0].rows.tolist()


def trained(method: AdaSelection, *losses: Any) -> Any:
    """The state after a step with each of these losses."""
    state = method.init_state()
    for step, loss in enumerate(losses):
        _, state = planned(method, loss, state, step)
    return state


def weights(method: AdaSelection, state: Any) -> list[float]:
    return [value for name, value in method.report(state).items() if name.startswith("weight_")]


def test_defaults() -> None:
    method = AdaSelection()
    assert method.pool == ("big_loss", "small_loss", "uniform")
    assert (method.keep, method.beta, method.gamma, method.average, method.curriculum) == (
        0.5,
        0.5,
        1.0,
        "weighted",
        True,
    )
    assert (method.adaboost, method.uniform, method.stop_after, method.normalise) == (
        "paper_abs",
        "drawn",
        None,
        True,
    )
    assert method.importance == "ranks"
    assert AdaSelection(pool=["uniform"]) == AdaSelection(pool=("uniform",))


def test_the_literal_reading() -> None:
    method = AdaSelection.variant("literal", keep=0.3)
    assert (method.keep, method.average, method.uniform, method.normalise) == (
        0.3,
        "picked",
        "flat",
        False,
    )
    assert AdaSelection.variant("literal", average="weighted").average == "weighted"
    with pytest.raises(
        ValueError, match=r"^AdaSelection\.variant: `name` must be 'literal', got 'letters'$"
    ):
        AdaSelection.variant("letters")  # type: ignore[arg-type]


def test_a_pool_that_cannot_leave_large_losses_is_warned_of() -> None:
    for pool in (
        ("big_loss", "small_loss"),
        ("gradient_norm",),
        ("small_loss", "ada_boost"),
        ("coreset_extremes",),
    ):
        with pytest.warns(
            UserWarning,
            match=rf"`pool` is .* which has '{set(pool).difference({'small_loss'}).pop()}' and not",
        ):
            AdaSelection(pool=pool)
    AdaSelection(pool=("small_loss", "coreset_center"))
    literal(pool=("big_loss", "small_loss"))


def test_signals_depend_on_the_pool() -> None:
    assert AdaSelection().requires.signals == ("loss",)
    assert AdaSelection(pool=("uniform", "gradient_norm")).requires.signals == ("loss", "grad_norm")
    planned(AdaSelection(), LOSS, grad_norm="never looked at")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"`keep` is the share kept, within \(0, 1\], got 0"),
        (
            {"pool": ()},
            r"`pool` must be some of big_loss, small_loss, uniform, .*, coreset_center, or batch methods, got \(\)",
        ),
        (
            {"pool": ("big_loss", "rho_loss")},
            r"`pool` must be some of .*, got \('big_loss', 'rho_loss'\)",
        ),
        ({"pool": "big_loss"}, r"`pool` must be some of .*, got 'big_loss'"),
        (
            {"pool": ("uniform", "uniform")},
            r"`pool` must have each selector once, got \('uniform', 'uniform'\)",
        ),
        *(
            ({"beta": value}, rf"`beta` must be a number within \[0, 1\], got {value}")
            for value in (1.1, -0.5, NAN)
        ),
        (
            {"beta": -2, "normalise": False},
            r"`beta` must be a number within \[-1, 1\], got -2",
        ),
        *(
            ({"gamma": value}, rf"`gamma` must be a number within \(0, inf\), got {value}")
            for value in (0, -1, INF, NAN)
        ),
        ({"stop_below": 0}, r"`stop_below` must be a number within \(0, inf\), got 0"),
        ({"average": "mean"}, r"`average` must be one of \('weighted', 'picked'\), got 'mean'"),
        (
            {"uniform": "even", "importance": "softmax"},
            r"`uniform` must be one of \('drawn', 'flat'\), got 'even'",
        ),
        ({"uniform": "flat"}, r"`uniform` must be one of \('drawn',\), got 'flat'"),
        (
            {"importance": "loud"},
            r"`importance` must be one of \('ranks', 'votes', 'spread', 'softmax'\), got 'loud'",
        ),
        ({"normalise": "mean"}, r"`normalise` must be one of \(True, False\), got 'mean'"),
        ({"adaboost": "abs"}, r"`adaboost` must be one of \('scaled', 'paper_abs'\), got 'abs'"),
        *(
            (
                {"stop_after": value},
                f"`stop_after` must be a whole number of 1 or more, got {value}",
            )
            for value in (0, 2.0)
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^AdaSelection: {message}$"):
        AdaSelection(**settings)


def test_known_signals() -> None:
    loss, norm = torch.tensor([1, NAN, 3e38, -3e38, 2, INF]), torch.tensor([5, 1, 1, 1, -INF, 0])
    usable, values = usable_signals({"loss": loss, "grad_norm": norm})
    assert usable.tolist() == [True, False, True, True, False, False]
    assert values["loss"][usable].tolist() == pytest.approx([1, HUGE, -HUGE])
    assert not bool(values["loss"][~usable].isfinite().any()) and not bool(
        values["grad_norm"][~usable].isfinite().any()
    )
    for dtype, far in ((torch.float64, 1e300), (torch.float16, 6e4)):
        usable, values = usable_signals({"loss": torch.tensor([1.5, INF, far], dtype=dtype)})
        assert usable.tolist() == [True, False, True] and values["loss"].dtype == torch.float32
        assert values["loss"][[0, 2]].tolist() == pytest.approx([1.5, min(far, HUGE)], rel=1e-3)


def test_importance_is_of_the_usable_samples_alone() -> None:
    scores = torch.tensor([[0.0, 5], [1, NAN], [math.log(3), 5], [9, 9]])
    found = log_importance(scores, torch.tensor([True, False, True, False])).exp()
    assert found[[0, 2]].tolist() == [pytest.approx([0.25, 0.5]), pytest.approx([0.75, 0.5])]
    assert found[[1, 3]].nan_to_num(0).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("usable", "k", "expected"),
    [
        ([True] * 4, 2, [6, 1.5]),
        ([True] * 4, 4, [3.75, 3.75]),
        (
            [True, True, True, False],
            2,
            [4, 1],
        ),  # one of the two is the sample that cannot be scored
        ([True, False, False, False], 2, [None, None]),
        ([True, False, False, False], 3, [None, None]),
        ([True, False, False, False], 4, [1, 1]),
        ([False] * 4, 4, [None, None]),
    ],
)
def test_mean_of_kept(usable: list[bool], k: int, expected: list[Any]) -> None:
    mask, loss = torch.tensor(usable), torch.tensor([1.0, 2, 4, 8])
    loss = torch.where(mask, loss, 0)
    found = mean_of_kept(torch.stack((loss, -loss), 1), loss, mask, k)
    assert [None if math.isnan(value) else value for value in found.tolist()] == expected


def test_weights_follow_the_relative_change() -> None:
    start, before = torch.log(torch.tensor([0.5, 0.25, 0.25])), torch.tensor([1.0, 2.0, 4.0])
    found = reweighted(start, before, torch.tensor([2.0, 2.0, 2.0]), 0.5).exp()
    parts = [0.5 * math.exp(0.5), 0.25, 0.25 * math.exp(-0.25)]
    assert found.tolist() == pytest.approx([part / sum(parts) for part in parts])


@pytest.mark.parametrize(
    ("before", "now"),
    [(NAN, 1), (1, NAN), (0, 1), (0, 0), (-0.0, 2), (INF, 1), (1, INF), (1e-38, 1e38), (NAN, NAN)],
)
def test_weights_stay_where_the_change_is_not_known(before: float, now: float) -> None:
    start = torch.log(torch.tensor([0.75, 0.25]))
    found = reweighted(start, torch.tensor([before, 2.0]), torch.tensor([now, 2.0]), 1.0)
    assert found.exp().tolist() == pytest.approx([0.75, 0.25])


def test_a_weight_that_vanishes_comes_back() -> None:
    down = reweighted(
        torch.log(torch.tensor([0.5, 0.5])), torch.tensor([1.0, 1]), torch.tensor([1.0, 501]), 1.0
    )
    assert down.exp().tolist() == [0, 1]
    back = reweighted(down, torch.tensor([1.0, 501]), torch.tensor([501.0, 501]), 1.0)
    assert back.exp().tolist() == pytest.approx([0.5, 0.5])


def test_scores_do_not_underflow() -> None:
    """As products all but the largest would be 0."""
    loss = torch.tensor([100.0, 300, 200, 1000])
    importance = log_importance(loss[:, None], torch.ones(4, dtype=torch.bool))
    found = log_scores(importance, torch.zeros(1), loss, 0.5)
    assert found.tolist() == pytest.approx([-950, -850, -900, -500])
    assert rows(literal(0.75, pool=("big_loss",), curriculum=False), loss) == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("big_loss", BigLoss),
        ("small_loss", SmallLoss),
        ("gradient_norm", GradientNorm),
        ("ada_boost", AdaBoost),
        ("coreset_extremes", CoresetExtremes),
        ("coreset_center", CoresetCenter),
    ],
)
def test_a_pool_of_one_chooses_as_the_selector(name: str, kind: Any) -> None:
    for seed in range(20):
        loss = torch.rand(17, generator=seeded(seed))
        loss[:2] = torch.tensor([NAN, INF])
        signals = {"id": torch.arange(17), "loss": loss, "grad_norm": loss.flip(0)}
        method = literal(0.6, pool=(name,), curriculum=False)
        plan, _ = method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))
        alone = {"id": signals["id"], **{one: signals[one] for one in kind.requires.signals}}
        if name == "gradient_norm":  # in a pool the loss must be finite as well
            alone["grad_norm"] = torch.where(loss.isfinite(), loss.flip(0), NAN)
        assert torch.equal(
            plan.rows, kind(0.6).plan_batch(alone, {}, step=0, generator=seeded(0))[0].rows
        )


def test_the_curriculum_favors_small_losses_and_ends() -> None:
    method = literal(2 / 6, pool=("big_loss", "uniform"), gamma=0.5)
    assert rows(method, LOSS, step=0) == [2, 5]
    assert rows(method, LOSS, step=10_000) == [1, 4]
    assert rows(literal(2 / 6, pool=("big_loss", "uniform"), curriculum=False), LOSS) == [1, 4]
    assert rows(literal(2 / 6, pool=("big_loss", "uniform"), gamma=1000.0), LOSS, step=10_000) == [
        1,
        4,
    ]


def test_the_first_step_leaves_the_weights_alone() -> None:
    for average in ("picked", "weighted"):
        method = AdaSelection(pool=EVERYTHING, average=average)
        assert weights(method, method.init_state()) == pytest.approx([1 / 7] * 7)
        assert weights(method, trained(method, LOSS)) == pytest.approx([1 / 7] * 7)


@pytest.mark.parametrize(("beta", "grows"), [(0.5, True), (-0.5, False), (0.0, None)])
def test_beta_says_who_gains(beta: float, grows: bool | None) -> None:
    """The largest losses double, the smallest stay."""
    method = literal(pool=("big_loss", "small_loss"), beta=beta)
    big, small = weights(method, trained(method, [1.0, 1, 4, 4], [1.0, 1, 8, 8]))
    expected = math.exp(beta) / (1 + math.exp(beta))
    assert (big, small) == pytest.approx((expected, 1 - expected))
    assert grows is None or (big > small) == grows


def test_the_averages() -> None:
    pool = ("big_loss", "small_loss", "uniform")
    picked = trained(literal(pool=pool), [1.0, 2, 3, 6])["average"]
    assert picked.tolist() == pytest.approx([4.5, 1.5, 3])
    spoilt = trained(literal(4 / 6, pool=pool), [1.0, 2, 3, 6, NAN, INF])["average"]
    assert spoilt.tolist() == pytest.approx([4.5, 1.5, 3])
    e = [math.exp(x) for x in (1, 2, 3, 6)]
    weighted = trained(literal(pool=pool, average="weighted"), [1.0, 2, 3, 6, NAN])["average"]
    assert weighted[[0, 2]].tolist() == pytest.approx(
        [(e[0] + 2 * e[1] + 3 * e[2] + 6 * e[3]) / sum(e), 3]
    )


@pytest.mark.parametrize("average", ["picked", "weighted"])
def test_a_batch_without_a_finite_loss_keeps_the_weights(average: Any) -> None:
    method = AdaSelection(average=average)
    state = trained(method, [1.0, 1, 4, 4], [1.0, 1, 8, 8])
    plan, after = planned(method, [NAN, INF, -INF, NAN], state, 2)
    assert plan.rows.tolist() == [2, 3]
    assert weights(method, after) == pytest.approx(weights(method, state))
    _, later = planned(method, [1.0, 1, 1, 1], after, 3)
    assert weights(method, later) == pytest.approx(weights(method, state)), (
        "there is no average to compare with"
    )
    assert bool(later["average"].isfinite().all())


def test_losses_of_zero_keep_the_weights() -> None:
    method = AdaSelection(pool=EVERYTHING)
    state = trained(method, [0.0] * 4, LOSS)
    assert weights(method, state) == pytest.approx([1 / 7] * 7)


def test_a_gradient_that_is_not_finite_comes_first() -> None:
    norm = torch.tensor([1, 2, NAN, 4.0])
    assert rows(literal(0.25, pool=("gradient_norm",)), [1.0, 2, 3, 4], grad_norm=norm) == [2]


def test_the_higher_id_wins_a_tie() -> None:
    signals = {"id": torch.tensor([7, 9, 2**40, 8]), "loss": torch.full((4,), 2.0)}
    method = literal()
    assert method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))[
        0
    ].rows.tolist() == [1, 2]


def test_equal_losses_have_equal_scores_wherever_they_are() -> None:
    """So that the id alone decides: 37 samples fill no vector register evenly."""
    for seed in range(50):
        levels = torch.rand(3, generator=seeded(seed)) * 5
        loss = levels[torch.randint(3, (37,), generator=seeded(seed, 1))]
        names = tuple(name for name in EVERYTHING if name != "coreset_extremes")
        picked = rows(literal(0.5, pool=names), loss, step=seed)
        for level in levels:
            same = [row for row in range(37) if loss[row] == level]
            kept = [row for row in same if row in picked]
            assert kept == same[len(same) - len(kept) :]


def test_uniform_votes_for_rows_at_random() -> None:
    method = AdaSelection(pool=("uniform",), curriculum=False, importance="softmax")
    draws = torch.rand(20, generator=seeded(3))
    picked = rows(method, torch.ones(20), step=3)
    assert picked == sorted(draws.argsort()[10:].tolist()) != rows(method, torch.ones(20), step=4)
    mean = trained(method, torch.arange(20.0))["average"].item()
    order = torch.rand(20, generator=seeded(0)).argsort()
    assert mean == pytest.approx(order[10:].float().mean().item()) != pytest.approx(9.5)


def test_uniform_votes_for_rows_with_a_loss() -> None:
    draws, usable = torch.tensor([0.9, 0.1, 0.5, 0.3]), torch.tensor([False, True, True, True])
    assert drawn(draws, usable, 2).tolist() == [False, False, True, True]
    assert drawn(draws, ~usable, 2).tolist()[0]
    assert drawn(torch.zeros(3), torch.ones(3, dtype=torch.bool), 1).tolist() == [
        True,
        False,
        False,
    ]
    method = AdaSelection(0.5, pool=("uniform",), curriculum=False, importance="softmax")
    _, state = planned(method, [NAN, 2.0, 2.0, 2.0])
    assert state["average"].item() == 2


def test_uniform_draws_only_where_it_votes() -> None:
    for method, draws in (
        (AdaSelection(), True),
        (literal(), False),
        (AdaSelection(pool=("small_loss",)), False),
    ):
        g = seeded(0)
        before = g.get_state()
        method.plan_batch(
            {"id": torch.arange(4), "loss": torch.rand(4)}, method.init_state(), step=0, generator=g
        )
        assert torch.equal(g.get_state(), before) != draws


def test_losses_in_units_of_their_mean() -> None:
    usable = torch.tensor([True, True, False, True])
    assert over_mean(torch.tensor([1.0, 2, NAN, 3]), usable)[usable].tolist() == [0.5, 1, 1.5]
    assert over_mean(torch.tensor([-1.0, -2, NAN, 3]), usable)[usable].tolist() == [-0.5, -1, 1.5]
    assert over_mean(torch.tensor([0.0, 0, NAN, 0]), usable)[usable].tolist() == [0, 0, 0]
    assert bool(over_mean(torch.full((4,), HUGE), usable)[usable].eq(1).all())
    assert bool(over_mean(torch.full((4,), NAN), torch.zeros(4, dtype=torch.bool)).isnan().all())


@pytest.mark.parametrize("factor", [100.0, 0.01, 1024.0, 1e-6])
def test_the_unit_of_the_loss_does_not_matter(factor: float) -> None:
    pool = tuple(name for name in EVERYTHING if name != "gradient_norm")
    for method in (
        AdaSelection(0.3),
        AdaSelection(0.3, pool=pool),
        AdaSelection(0.5, pool=EVERYTHING, beta=1.0),
    ):
        one, other, r = method.init_state(), method.init_state(), seeded(7)
        for step in range(20):
            loss = torch.rand(32, generator=r).square() * 3
            plan, one = planned(method, loss, one, step)
            again, other = planned(method, factor * loss, other, step)
            assert torch.equal(plan.rows, again.rows)
            assert other["log_weights"].tolist() == pytest.approx(
                one["log_weights"].tolist(), rel=1e-3, abs=1e-3
            )


def test_the_uniform_selector_decides_where_it_has_the_weight() -> None:
    for weight, name in ((0.999999, "uniform"), (1e-6, "big_loss")):
        method = AdaSelection(0.5, pool=("big_loss", "uniform"), curriculum=False)
        state = {
            "log_weights": torch.tensor([1 - weight, weight]).log(),
            "average": torch.full((2,), NAN),
        }
        alone = (
            AdaSelection(0.5, pool=("uniform",), curriculum=False)
            if name == "uniform"
            else BigLoss(0.5)
        )
        plan, _ = alone.plan_batch(
            {"id": torch.arange(6), "loss": torch.tensor(LOSS)},
            alone.init_state(),
            step=3,
            generator=seeded(3),
        )
        assert rows(method, LOSS, state, 3) == plan.rows.tolist()


def test_adaboost_as_published() -> None:
    """Above 1 its weight falls: 1.1 is chosen and 50 is not."""
    loss = [0.2, 50.0, 1.1, 0.1]
    for adaboost, kept in (("scaled", [1]), ("paper_abs", [2])):
        assert (
            rows(literal(0.25, pool=("ada_boost",), adaboost=adaboost, curriculum=False), loss)
            == kept
        )


def test_an_empty_batch() -> None:
    for average in ("picked", "weighted"):
        method = AdaSelection(pool=EVERYTHING, average=average)
        plan, state = planned(method, torch.empty(0), trained(method, LOSS))
        assert len(plan.rows) == 0 and not bool(state["log_weights"].isnan().any())


def test_report() -> None:
    method = literal()
    state = trained(method, [1.0, 1, 4, 4], [1.0, 1, 8, 8])
    said = method.report(state)
    assert list(said) == ["weight_big_loss", "weight_small_loss", "weight_uniform"]
    assert sum(said.values()) == pytest.approx(1) and all(
        type(value) is float for value in said.values()
    )
    change = [math.exp(0.5), 1, math.exp(0.4)]
    assert list(said.values()) == pytest.approx([each / sum(change) for each in change])


def test_weights_that_keep_still_are_fixed() -> None:
    method = literal(pool=("big_loss", "small_loss"), stop_after=3, stop_below=0.01)
    state, still, fixed = method.init_state(), [], []
    calm, wild = [1.0, 1, 4, 4], [1.0, 1, 8, 8]
    for step, loss in enumerate(
        [calm, calm, wild, wild, wild, [NAN] * 4, wild, wild, wild, wild, calm, wild]
    ):
        _, state = planned(method, loss, state, step)
        still.append(int(state["still"]))
        fixed.append(method.report(state)["weights_fixed"])
        if step == 9:
            last = weights(method, state)
    assert still == [0, 1, 0, 1, 2, 0, 0, 1, 2, 3, 3, 3]
    assert fixed == [0.0] * 9 + [1.0] * 3
    assert weights(method, state) == last, "they moved after they were fixed"
    free = literal(pool=("big_loss", "small_loss"))
    assert "still" not in free.init_state() and "weights_fixed" not in free.report(
        free.init_state()
    )


class Reads(TorchDispatchMode):
    """Counts operations; those that read values on the host, or have shapes that depend on values, wait for the device."""

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
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_it_takes_few_operations() -> None:
    """It is asked in every step: 73 operations, 80 with torch 2.6; 10 for Big Loss."""
    signals = {"id": torch.arange(8), "loss": torch.rand(8)}
    with Reads() as reads:
        AdaSelection().plan_batch(signals, AdaSelection().init_state(), step=1, generator=seeded(0))
    assert len(reads.found) <= 80


@pytest.mark.parametrize(
    ("beta", "least", "most"), [(0.5, 0.99, 1.0), (0.0, 1 / 3, 1 / 3), (-0.5, 0.0, 0.01)]
)
def test_weights_drift_to_the_noisiest_average(beta: float, least: float, most: float) -> None:
    """Averages that go nowhere, one of which is noisy for its size: what the module says of equation (3)."""
    noise = torch.rand(500, 3, generator=seeded(0)) * torch.tensor([0.01, 0.9, 0.01])
    log_weights = torch.full((3,), -math.log(3))
    for before, after in zip(1 + noise, 1 + noise[1:], strict=False):
        log_weights = reweighted(log_weights, before, after, beta)
    assert least - 1e-6 <= log_weights[1].exp() <= most + 1e-6


def test_every_selector_has_the_same_voice() -> None:
    scores = torch.tensor([[3.0, 0.1], [1e6, 0.2], [-5.0, 0.3], [NAN, 9.0]])
    usable = torch.tensor([True, True, True, False])
    ranks = in_ranks(scores, usable)
    assert (
        sorted(ranks[:, 0].tolist())
        == sorted(ranks[:, 1].tolist())
        == normal_quantiles(4, ranks.device).tolist()
    )
    assert ranks[:, 0].argsort().tolist() == [3, 2, 0, 1] and ranks[:, 1].argsort().tolist() == [
        3,
        0,
        1,
        2,
    ]
    assert as_votes(scores, usable, 2).eq(0).tolist() == [
        [True, False],
        [True, True],
        [False, True],
        [False, False],
    ]
    spread = in_equal_spread(scores, usable)[usable]
    assert spread.mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert spread.std(0, correction=0).tolist() == pytest.approx([1, 1])
    assert in_equal_spread(torch.full((3, 1), 2.0), usable[:3]).tolist() == [[0], [0], [0]]


def test_at_equal_weights_random_draws_do_not_decide() -> None:
    """Of losses that are alike, softmaxes are nearly flat, and nearly all rows kept are the random ones."""
    shares = {}
    for importance in ("ranks", "softmax"):
        method = AdaSelection(0.1, beta=0.0, importance=importance)
        state = method.init_state()
        for step in range(200, 300):
            loss = 5.5 + 0.5 * torch.randn(128, generator=seeded(step))
            state = method.plan_batch(
                {"id": torch.arange(128), "loss": loss}, state, step=step, generator=seeded(step)
            )[1]
        shares[importance] = method.report(state)["random_share"]
    assert shares["ranks"] < 0.6 and shares["softmax"] > 0.9


def test_a_batch_method_in_the_pool_votes_for_its_rows() -> None:
    loss = torch.arange(20.0)
    for member in (SmallLoss(0.25), CoresetCenter(0.25)):
        method = AdaSelection(0.25, pool=(member,), curriculum=False)
        signals = {"id": torch.arange(20) * 7, "loss": loss}
        alone = member.plan_batch(signals, {}, step=0, generator=seeded(0))[0].rows
        assert (
            method.plan_batch(signals, method.init_state(), step=0, generator=seeded(0))[
                0
            ].rows.tolist()
            == alone.tolist()
        )
    assert list(method.report(method.init_state())) == ["weight_coreset_center"]


def test_a_batch_method_in_the_pool_keeps_its_state_and_its_needs() -> None:
    known = Scores(
        torch.arange(4),
        torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64),
        forward=8,
        backward=4,
    )
    method = AdaSelection(0.5, pool=(RhoLoss(known, keep=0.5), "uniform"), beta=0.0)
    assert method.cost == (8, 4)
    with pytest.raises(ValueError, match="no finite loss for 1 of 5 samples"):
        method.check(torch.arange(5))
    state = method.init_state()
    assert torch.equal(state["rho_loss.irreducible"], known.dense(4))
    signals = {"id": torch.arange(4), "loss": torch.tensor([1.0, 3.1, 2.0, 0.5])}
    plan, state = method.plan_batch(signals, state, step=10_000, generator=seeded(0))
    assert (
        list(method.report(state)) == ["weight_rho_loss", "weight_uniform", "random_share"]
        and len(plan.rows) == 2
    )
    with pytest.raises(ValueError, match="`pool` must have each selector once"):
        AdaSelection(pool=(BigLoss(0.1), "big_loss"))
    with pytest.raises(ValueError, match="or batch methods, got"):
        AdaSelection(pool=(Kakurenbo(),))  # pyright: ignore[reportArgumentType]


def test_a_pool_with_a_batch_method_trains() -> None:
    data = TensorDataset(torch.randn(32, 3, generator=seeded(0)), torch.arange(32) % 2)
    net = torch.nn.Linear(3, 2)
    run = thresher.attach(
        AdaSelection(0.5, pool=("big_loss", "uniform", DivBS(keep=0.5))),
        loader=DataLoader(data, 8),
        criterion=torch.nn.CrossEntropyLoss(),
        model=net,
        optimizer=(optimizer := torch.optim.SGD(net.parameters(), 0.1)),
        epochs=2,
        forward_passes="twice",
    )
    for _ in range(2):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {"weight_div_bs", "weight_uniform", "random_share"} <= {
        name.removeprefix("batch_") for name in run.history[-1]
    }
