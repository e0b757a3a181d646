"""A method with `keep=` trains on that share: within one point, over the batches of an epoch, the last of which is smaller."""

import inspect
from typing import Any

import pytest
import torch

from depth import depth
from thresher import methods, rng
from thresher.scores import Scores
from thresher.testing.check import Exam

SCORES = Scores(torch.arange(50), torch.linspace(0, 1, 50))
REQUIRED: dict[str, dict[str, Any]] = {
    "rho_loss": {"irreducible": Scores(torch.arange(4096), torch.linspace(0, 1, 4096))},
    "prune": {"scores": SCORES},
    "ccs": {"scores": SCORES},
}
WITH_KEEP = [
    name for name in methods.BUILT_IN if "keep" in inspect.signature(methods.load(name)).parameters
]
IN_BATCHES = [name for name in WITH_KEEP if methods.infos()[name].stage == "batch"]
BEFORE = [name for name in WITH_KEEP if methods.infos()[name].stage == "before"]


@pytest.mark.parametrize("keep", depth([0.3], [0.1, 0.3, 0.5, 0.77]))
@pytest.mark.parametrize("name", IN_BATCHES)
def test_in_the_batch(name: str, keep: float) -> None:
    method = methods.create(name, keep=keep, **REQUIRED.get(name, {}))
    exam = Exam(method, samples=4000)
    state, rows, of = method.init_state(), 0, 0
    for step, n in enumerate([*[128] * 31, 32]):
        plan, state = method.plan_batch(
            exam.batch(n, step, "smooth"), state, step=step, generator=rng.seeded(0, step)
        )
        rows, of = rows + len(plan.rows), of + n
    assert rows / of == pytest.approx(keep, abs=0.01)


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("name", BEFORE)
def test_before_training(name: str, keep: float) -> None:
    assert len(methods.create(name, keep=keep, **REQUIRED[name]).kept(50)) / 50 == pytest.approx(
        keep, abs=0.01
    )


def test_there_are_such_methods() -> None:
    assert {"threshold_keep", "div_bs", "rho_loss", "big_loss"} <= set(IN_BATCHES)
    assert set(BEFORE) == {"prune", "ccs"}
