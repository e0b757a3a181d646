"""Every epoch method with `target=` or `keep=` leaves out the share that was asked for, within one point."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from depth import depth
from helpers import noted
from thresher import methods, rng
from thresher.methods.contract import defines, requirements_of
from thresher.testing.check import Case, Exam

N, EPOCHS, POINT = 1000, 24, 0.01
WITH_A_SHARE = {
    (name, setting)
    for name, info in methods.infos().items()
    if info.stage == "epoch"
    for setting in {field.name for field in fields(methods.load(name))} & {"target", "keep"}  # type: ignore[arg-type]
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "order_dp": {"pool": 1.0},
    "grad_match": {"every": 4, "batch_size": 4, "gradient": "bias"},
}
LOSSES = ("smooth", "tied", "equal", "zero", "huge", "skewed", "falling", "few lost")


def signals_after(exam: Exam, kind: str, epoch: int, n: int) -> dict[str, torch.Tensor]:
    """Signals of all samples after an epoch, of a kind that is hard for thresholds."""
    r = np.random.default_rng([epoch, *kind.encode()])
    found = {}
    for name, generator in exam.generators.items():
        values = np.asarray(generator(r, n))
        if values.dtype.kind == "f":
            values = values.astype(np.float32)
            if kind == "tied":
                values = np.round(2 * values) / 2
            if kind in ("equal", "zero"):
                values[:] = kind == "equal"
            if kind == "huge":
                values *= np.float32(1e36)
            if kind == "skewed":
                values **= np.float32(6)
            if kind == "falling":
                values *= np.float32(0.5**epoch)
            if kind == "few lost":
                values[r.random(n) < 0.01] = np.nan
        found[name] = torch.from_numpy(values)
    return found


def realized(method: Any, kind: str, n: int = N, epochs: int = EPOCHS) -> list[float]:
    """The share that each epoch of a training leaves out, in which only samples that are kept or refreshed are seen."""
    exam = Exam(method, epochs, n)
    table, left_out = exam.records(n), []
    for epoch in range(epochs):
        columns = {**table, **exam.full_pass(epoch, n, "smooth")}
        plan, _ = exam.ask(Case(n, columns, epoch))
        left_out.append(1 - len(plan.ids) / n)
        table.remember(plan.remember)
        table.epoch = epoch
        table.start_epoch()
        seen = plan.ids if plan.refresh is None else torch.cat([plan.ids, plan.refresh])
        seen = seen.unique()
        table.write(
            seen,
            {name: values[seen] for name, values in signals_after(exam, kind, epoch, n).items()},
        )
    return left_out


def cases() -> list[tuple[str, str, float]]:
    shares = {"target": (0.12, 0.3, 0.5, 0.62), "keep": (0.1, 0.5, 0.88)}
    return [
        (name, setting, share)
        for name, setting in sorted(WITH_A_SHARE)
        for share in shares[setting]
    ]


@pytest.mark.parametrize(("name", "setting", "share"), cases())
def test_the_share_is_the_one_that_was_asked_for(name: str, setting: str, share: float) -> None:
    method = methods.create(name, **{**OTHER_SETTINGS.get(name, {}), setting: share})
    kinds = (
        LOSSES[:1]
        if defines(method, "full_pass") or not requirements_of(method).records
        else LOSSES
    )
    for kind in depth(kinds[:: 1 if share == 0.5 else 4], kinds):
        with noted(f"losses: {kind}"):
            found = realized(method, kind)
            if setting == "target":
                assert abs(float(np.mean(found)) - share) < POINT
                continue
            choosing = [part for epoch, part in enumerate(found) if part or epoch > 1]
            assert np.abs(np.array(choosing) - (1 - share)).max() < POINT


def test_every_method_with_a_threshold_has_a_target() -> None:
    assert {name for name, setting in WITH_A_SHARE if setting == "target"} == {
        "infobatch",
        "seta",
        "repb",
        "ies",
    }


def test_without_a_target_the_share_is_far_from_the_setting() -> None:
    """The reason for it: of exponential losses a bit more than 1 - 1 / e are below the mean, and some epochs prune nothing."""
    found = float(np.mean(realized(methods.create("infobatch", prune_fraction=0.5), "smooth")))
    assert 0.5 * (1 - math.exp(-1)) * 20 / 24 < found < 0.3


@pytest.mark.parametrize(
    "name", sorted(name for name, setting in WITH_A_SHARE if setting == "target")
)
@pytest.mark.parametrize(("n", "epochs"), [(1, 20), (2, 30), (3, 24), (57, 40)])
def test_small_datasets_never_lose_all_their_samples(name: str, n: int, epochs: int) -> None:
    found = realized(methods.create(name, target=0.5), "tied", n, epochs)
    assert max(found) <= 1 - 1 / n
    assert n < 57 or abs(float(np.mean(found)) - 0.5) < POINT


def test_what_an_epoch_could_not_leave_out_is_left_out_later() -> None:
    """For half of the training no loss is finite."""
    method = methods.create("infobatch", target=0.3)
    table, left_out = Exam(method, EPOCHS, N).records(N), []
    for epoch in range(EPOCHS):
        plan = method.plan_epoch(table, epoch=epoch, epochs=EPOCHS, generator=rng.seeded(epoch))
        left_out.append(1 - len(plan.ids) / N)
        table.remember(plan.remember)
        loss = torch.rand(len(plan.ids), generator=rng.seeded(epoch))
        table.write(plan.ids, {"loss": loss * (math.nan if epoch < EPOCHS // 2 else 1)})
    assert not any(left_out[: EPOCHS // 2])
    assert abs(float(np.mean(left_out)) - 0.3) < POINT
