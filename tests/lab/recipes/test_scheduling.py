import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from thresher_lab.recipes.schema import ScheduleSection
from thresher_lab.recipes.task import LearningRateFactor

STEPS = 10
"""Of an epoch."""


def at_epochs(schedule, epochs):
    factor = LearningRateFactor(schedule, epochs)
    return [factor(epoch * STEPS / (epochs * STEPS)) for epoch in range(epochs)]


def of_torch(make, epochs):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    scheduler, found = make(optimizer), []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_steps_are_those_of_torch():
    found = at_epochs(ScheduleSection(decay="step", rate=0.1, epochs=(30, 60, 80)), 100)
    assert found == pytest.approx(of_torch(lambda o: MultiStepLR(o, [30, 60, 80], 0.1), 100))


def test_a_cosine_by_epochs_is_that_of_torch():
    found = at_epochs(ScheduleSection(decay="cosine", floor=0.1), 35)
    assert found == pytest.approx(of_torch(lambda o: CosineAnnealingLR(o, 35, eta_min=0.1), 35))


def test_a_cosine_stays_through_an_epoch_and_one_by_steps_does_not():
    whole, steps = (
        LearningRateFactor(ScheduleSection(decay=decay), 4) for decay in ("cosine", "cosine_iter")
    )
    assert whole(0.25) == whole(0.49) > whole(0.5)
    assert steps(0.25) == whole(0.25) and steps(0.25) > steps(0.3) and steps(1) == pytest.approx(0)


def test_every_so_many_epochs():
    factor = LearningRateFactor(ScheduleSection(decay="step", rate=0.9, every=2), 100)
    assert [factor(epoch / 100) for epoch in (0, 1, 2, 3, 4, 99)] == pytest.approx(
        [1, 1, 0.9, 0.9, 0.81, 0.9**49]
    )
    assert LearningRateFactor(ScheduleSection(decay="step", rate=0.97, every=2.4), 10)(
        0.25
    ) == pytest.approx(0.97)


def test_warm_up_is_linear_in_steps_and_ends_where_the_decay_is():
    factor = LearningRateFactor(
        ScheduleSection(warmup_epochs=5, warmup_from=0.2, decay="cosine_after_warmup"), 105
    )
    assert [factor(epoch / 105) for epoch in (0, 2.5, 5)] == pytest.approx([0.2, 0.6, 1.0])
    assert factor(55 / 105) == pytest.approx(0.5) and factor(1) == pytest.approx(0)
    counted_from_the_first = LearningRateFactor(
        ScheduleSection(warmup_epochs=5, decay="cosine"), 10
    )
    assert counted_from_the_first(0.5) == pytest.approx(0.5)


def test_no_decay():
    assert LearningRateFactor(ScheduleSection(), 3)(0.7) == 1
