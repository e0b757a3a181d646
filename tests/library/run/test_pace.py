import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher
from depth import crossed

# SequentialLR of torch 2.6 calls its schedulers in a way that they warn of.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
N, BATCH, EPOCHS, RATE = 22, 4, 5, 0.1
"""22 samples in batches of 4: six batches an epoch, the last one of two samples."""


def setting(n=N, *, drop_last=False):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(n, 3), torch.arange(n) % 2)
    model = nn.Linear(3, 2)
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=drop_last)
    return loader, model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def one_cycle(optimizer, total):
    return schedules.OneCycleLR(optimizer, max_lr=RATE, total_steps=total)


def cosine(optimizer, total):
    return schedules.CosineAnnealingLR(optimizer, T_max=total)


def lambda_lr(optimizer, total):
    return schedules.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total)))


def warm_up(optimizer, total):
    first = schedules.LinearLR(optimizer, 0.1, total_iters=4)
    return schedules.SequentialLR(optimizer, [first, cosine(optimizer, total - 4)], milestones=[4])


SCHEDULES = [one_cycle, cosine, lambda_lr, warm_up]


def total_of(loader, every):
    return EPOCHS * math.ceil(len(loader) / every)


def plain(make, every, **data):
    """The learning rate after each step of the unattached loop."""
    loader, model, optimizer = setting(**data)
    scheduler, rates = make(optimizer, total_of(loader, every)), []
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader, 1):
            nn.functional.cross_entropy(model(x), y).backward()
            if number % every == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
    return rates


class Loop:
    """A training with a paced schedule."""

    def __init__(self, make, method, every=1, **data):
        self.plain_loader, self.model, self.optimizer = setting(**data)
        self.run = thresher.attach(
            method,
            loader=self.plain_loader,
            criterion=nn.CrossEntropyLoss(),
            model=self.model,
            optimizer=self.optimizer,
            epochs=EPOCHS,
        )
        total = total_of(self.plain_loader, every)
        self.schedule, self.every, self.rates = (
            self.run.pace(make(self.optimizer, total), total),
            every,
            [],
        )

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.rates.append(self.optimizer.param_groups[0]["lr"])

    def epoch(self, stop_after=None):
        number, asked = 0, len(self.run.loader)
        for number, (x, y) in enumerate(self.run.loader, 1):
            self.run.criterion(self.run.model(x), y).backward()
            if number % self.every == 0 or number == asked:
                self.step()
            if number == stop_after:
                return

    def train(self):
        for _ in range(EPOCHS):
            self.epoch()
        return self.rates


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("make", SCHEDULES)
def test_all_data_has_every_rate_of_the_plain_loop(make, every):
    assert Loop(make, thresher.FullData(), every).train() == plain(make, every)


@pytest.mark.parametrize("n", [21, 24, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_other_sizes_have_every_rate_of_the_plain_loop(n, drop_last):
    rates = plain(cosine, 1, n=n, drop_last=drop_last)
    assert Loop(cosine, thresher.FullData(), n=n, drop_last=drop_last).train() == rates


METHODS = [
    thresher.UniformSubset(keep=0.4),
    thresher.InfoBatch(),
    thresher.Kakurenbo(max_fraction=0.4),
    thresher.SelectiveBackprop(keep=0.5),
]


@pytest.mark.parametrize(("make", "every", "method"), crossed(SCHEDULES, [1, 3], METHODS))
def test_shorter_epochs_end_at_the_last_rate_of_the_plain_loop(make, every, method):
    rates = plain(make, every)
    loop = Loop(make, method, every)
    loop.train()
    assert loop.rates[-1] == rates[-1]
    assert set(loop.rates) <= {*rates, RATE}


def test_smaller_batches_have_every_rate_of_the_plain_loop():
    for share in (0.3, 0.5, 0.9):
        loop = Loop(cosine, thresher.Winnow(share=share))
        assert loop.train() == plain(cosine, 1)


def test_a_prefetcher_has_every_rate_of_the_plain_loop():
    loop = Loop(cosine, thresher.FullData())
    for _ in range(EPOCHS):
        batches = iter(loop.run.loader)
        ahead = [next(batches), next(batches)]
        while ahead:
            x, y = ahead.pop(0)
            loop.run.criterion(loop.run.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            ahead += [batch for batch in [next(batches, None)] if batch is not None]
            loop.schedule.step()
            loop.rates.append(loop.optimizer.param_groups[0]["lr"])
    assert loop.rates == plain(cosine, 1)


def test_one_step_an_epoch_is_right_too():
    loop = Loop(
        lambda optimizer, _: schedules.MultiStepLR(optimizer, [2, 4], 0.5),
        thresher.UniformSubset(keep=0.5),
    )
    schedule = loop.run.pace(schedules.MultiStepLR(loop.optimizer, [2, 4], 0.5), EPOCHS)
    seen = []
    for _ in range(EPOCHS):
        for x, y in loop.run.loader:
            loop.run.criterion(loop.run.model(x), y).backward()
            loop.optimizer.step()
        schedule.step()
        seen.append(schedule.get_last_lr()[0])
    assert seen == [0.1, 0.05, 0.05, 0.025, 0.025]


@pytest.mark.parametrize(
    ("method", "steps"),
    [(thresher.Winnow(share=0.5), (0, 3, 4, 5)), (thresher.FullData(), range(4))],
)
def test_a_batch_that_is_skipped_counts_as_consumed_except_in_full_training(method, steps):
    loop = Loop(cosine, method)
    for number, (x, y) in enumerate(loop.run.loader):
        if number in (1, 2):
            continue
        loop.run.criterion(loop.run.model(x), y).backward()
        loop.step()
    assert loop.rates == [plain(cosine, 1)[step] for step in steps]


def test_an_epoch_that_is_left_early_has_the_rates_of_the_plain_loop():
    rates = plain(cosine, 1)
    loop = Loop(cosine, thresher.FullData())
    for _ in range(2):
        loop.epoch(stop_after=4)
    assert loop.rates == rates[:8]


@pytest.mark.parametrize("stop_after", [1, 3, None])
def test_resumes_with_the_same_rates(stop_after):
    whole = Loop(one_cycle, thresher.UniformSubset(keep=0.6))
    whole.train()
    first = Loop(one_cycle, thresher.UniformSubset(keep=0.6))
    first.epoch()
    first.epoch(stop_after)
    states = [one.state_dict() for one in (first.run, first.schedule, first.optimizer, first.model)]
    second = Loop(one_cycle, thresher.UniformSubset(keep=0.6))
    for one, state in zip(
        (second.run, second.schedule, second.optimizer, second.model), states, strict=True
    ):
        one.load_state_dict(state)
    for _ in range(EPOCHS - 1 if stop_after else EPOCHS - 2):
        second.epoch()
    assert first.rates + second.rates == whole.rates


def test_looks_like_the_scheduler_that_it_paces():
    loop = Loop(cosine, thresher.FullData())
    assert isinstance(loop.schedule, schedules.LRScheduler)
    assert loop.schedule.optimizer is loop.optimizer
    assert loop.schedule.T_max == total_of(loop.plain_loader, 1)
    assert loop.schedule.get_last_lr() == [RATE]
    assert loop.schedule.base_lrs == [RATE]


def test_the_total_of_one_cycle_is_its_own():
    loop = Loop(one_cycle, thresher.FullData())
    total = total_of(loop.plain_loader, 1)
    assert loop.run.pace(one_cycle(loop.optimizer, total)).total == total
    assert loop.run.pace(cosine(loop.optimizer, 9)).total == total
    with pytest.raises(ValueError, match=r"OneCycleLR was created for 30 steps, but total=7"):
        loop.run.pace(one_cycle(loop.optimizer, total), 7)


def test_a_scheduler_of_accelerate_is_paced_as_the_one_that_it_holds():
    accelerate = pytest.importorskip("accelerate")
    rates = []
    for prepared in (False, True):
        accelerator = accelerate.Accelerator(cpu=True) if prepared else None
        loop = Loop(cosine, thresher.UniformSubset(keep=0.5))
        schedule = cosine(loop.optimizer, 30)
        if accelerator is not None:
            optimizer, wrapped = accelerator.prepare(loop.optimizer, schedule)
            assert (
                type(wrapped).__name__ == "AcceleratedScheduler" and optimizer is not loop.optimizer
            )
            schedule = wrapped
        loop.schedule = loop.run.pace(schedule)
        loop.train()
        rates.append(loop.rates)
    assert rates[0] == rates[1]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop = Loop(cosine, thresher.FullData())
    _, wrapped = accelerator.prepare(loop.optimizer, cosine(loop.optimizer, 9))
    with pytest.raises(
        ValueError, match="accelerate does not step a scheduler once per batch.*Pass total="
    ):
        loop.run.pace(wrapped)
    assert loop.run.pace(wrapped, 9).total == 9


def test_refuses_what_it_cannot_pace():
    loop = Loop(cosine, thresher.FullData())
    with pytest.raises(TypeError, match="`scheduler` must be .* got ReduceLROnPlateau"):
        loop.run.pace(schedules.ReduceLROnPlateau(loop.optimizer))
    with pytest.raises(TypeError, match="`scheduler` must be .* got function"):
        loop.run.pace(cosine)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`scheduler` must be .* got PacedLR"):
        loop.run.pace(loop.schedule)
    wrong: list[Any] = [0, 1.5, True]
    for total in wrong:
        with pytest.raises(
            ValueError,
            match=f"`total` must be the number of steps of full training, 1 or more, got {total}",
        ):
            loop.run.pace(cosine(loop.optimizer, 9), total)
    stepped = cosine(loop.optimizer, 9)
    loop.optimizer.step()
    stepped.step()
    with pytest.raises(ValueError, match="CosineAnnealingLR has made 1 steps already"):
        loop.run.pace(stepped)
    with pytest.raises(TypeError, match=r"step\(epoch\) is not supported"):
        loop.schedule.step(3)


def test_refuses_a_state_that_is_not_its_own():
    loop = Loop(cosine, thresher.FullData())
    with pytest.raises(ValueError, match="the state lacks scheduler, stepped, total"):
        loop.schedule.load_state_dict(loop.schedule.scheduler.state_dict())
    other = loop.run.pace(cosine(loop.optimizer, 9), 9)
    with pytest.raises(
        ValueError, match="the state was saved with total=9, but this scheduler has total=30"
    ):
        loop.schedule.load_state_dict(other.state_dict())


def test_refuses_a_stream_without_a_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(3), 1)] * 8)

    _, model, optimizer = setting()
    run = thresher.attach(
        thresher.SelectiveBackprop(keep=0.5),
        loader=DataLoader(Stream(), 2),
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
    )
    with pytest.raises(ValueError, match="IterableDataset without a length"):
        run.pace(cosine(optimizer, 8), 8)


def test_refuses_a_loader_without_batches():
    loader, model, optimizer = setting(n=BATCH - 1, drop_last=True)
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=2,
    )
    with pytest.raises(ValueError, match="the loader has no batches"):
        run.pace(cosine(optimizer, 8))


def test_a_paced_schedule_needs_no_warning_of_steps():
    loop = Loop(lambda_lr, thresher.UniformSubset(keep=0.5))
    loop.train()  # warnings are errors


def test_a_pass_without_training_does_not_move_the_schedule():
    loop = Loop(cosine, thresher.FullData(), n=100)  # 25 batches, more than a prefetcher holds
    schedule = loop.run.pace(schedules.MultiStepLR(loop.optimizer, [2, 4], 0.5), EPOCHS)
    seen = []
    for _ in range(EPOCHS):
        for x, y in loop.run.loader:
            loop.run.criterion(loop.run.model(x), y).backward()
            loop.optimizer.step()
        with torch.no_grad():
            for x, _ in loop.run.loader:
                loop.run.model(x)
        schedule.step()
        seen.append(schedule.get_last_lr()[0])
    assert seen == [0.1, 0.05, 0.05, 0.025, 0.025]


def test_a_schedule_whose_run_was_not_resumed_is_refused():
    first, second = (Loop(cosine, thresher.Winnow(share=0.5)) for _ in range(2))
    first.epoch()
    second.schedule.load_state_dict(first.schedule.state_dict())
    with pytest.raises(RuntimeError, match="made 6 steps, but the run is only at step 1 of 30"):
        second.epoch()


@pytest.mark.parametrize(
    ("every", "total", "warns"), [(1, None, False), (3, None, True), (3, 10, False)]
)
def test_a_schedule_that_steps_once_for_several_batches_needs_total(every, total, warns):
    loader, model, optimizer = setting()
    run = thresher.attach(
        thresher.Winnow(share=0.5),
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        epochs=EPOCHS,
    )
    scheduler = run.pace(lambda_lr(optimizer, total or total_of(loader, every)), total)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(run.loader, 1):
                if number == 2:
                    continue  # a loop that skips a batch
                run.criterion(run.model(x), y).backward()
                if number % every == 0 or number == len(run.loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
    assert sum("Pass total=, the number of steps" in str(one.message) for one in said) == warns
