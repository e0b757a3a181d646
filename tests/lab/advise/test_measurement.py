"""What is measured of a training whose parts take planted times."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from thresher.samplers import Mixture, WeightedSampler
from thresher_lab.advise import measurement
from thresher_lab.advise.advise import answer
from thresher_lab.advise.measurement import SLOW_STEP, TimedTraining, accepted_settings, size_of
from thresher_lab.advise.pace import Spent
from thresher_lab.recipes.running import task_of
from thresher_lab.training.trainable import Training


class Planted:
    """A clock that goes on by planted seconds as parts of a training are called."""

    def __init__(self, load=0.0, forward=0.0, backward=0.0, optimizer=0.0, fixed=0.0):
        self.seconds = 0.0
        self.load, self.forward, self.backward, self.optimizer, self.fixed = (
            load,
            forward,
            backward,
            optimizer,
            fixed,
        )

    def now(self):
        return Spent(self.seconds, self.seconds)

    def training(self, samples=64, batch_size=8, size=lambda i: 4):
        clock = self

        class Samples(Dataset):
            def __len__(self):
                return samples

            def __getitem__(self, i):
                clock.seconds += clock.load
                return torch.ones(size(i)), i % 2

        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                clock.seconds += clock.fixed + clock.backward * len(gradient)
                return gradient

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(1, 2)

            def forward(self, x):
                clock.seconds += clock.fixed + clock.forward * len(x)
                return Backward.apply(self.linear(x.mean(1, keepdim=True)))

        class Step(torch.optim.SGD):
            def step(self, *args, **options):
                clock.seconds += clock.optimizer
                return super().step(*args, **options)

        def pad(rows):
            inputs = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
            return inputs, torch.tensor([y for _, y in rows])

        model = Model()
        loader = DataLoader(Samples(), batch_size=batch_size, shuffle=True, collate_fn=pad)
        optimizer = Step(model.parameters(), lr=0.1)
        return Training(model, loader, nn.CrossEntropyLoss(), optimizer, lambda model: 0.5)

    def measure(self, seconds=30.0, **data):
        training = self.training(**data)
        before = [weight.detach().clone() for weight in training.model.parameters()]
        found = TimedTraining(training, seconds=seconds, clock=self.now).measure()
        assert all(
            torch.equal(old, new)
            for old, new in zip(before, training.model.parameters(), strict=True)
        )
        return found


def test_the_parts_of_a_step_are_those_that_were_planted():
    pace = Planted(load=0.01, forward=0.02, backward=0.03, optimizer=0.16).measure().pace
    assert (pace.loader, pace.forward, pace.backward) == pytest.approx((0.08, 0.16, 0.24))
    assert (pace.optimizer, pace.scoring, pace.half) == pytest.approx((0.16, 0.16, 0.36))
    assert pace.full == pytest.approx(0.64) and pace.overlap == 0


def test_steps_of_fixed_time_and_a_slow_loader_are_found_and_printed():
    given = {"task": "planted", "epochs": 2, "budget": [0.5], "threads": 1}
    text = "\n".join(answer(Planted(fixed=0.1).measure(), given)["lines"])
    assert "A step takes 200 ms: loading 0 %, forward 50 %, backward 50 %, optimizer 0 %." in text
    assert (
        "Half a batch takes 100 % of the computing time of a whole one: smaller batches save little."
        in text
    )
    text = "\n".join(
        answer(Planted(load=0.1, forward=0.01, backward=0.015).measure(), given)["lines"]
    )
    assert "A step takes 1000 ms: loading 80 %, forward 8 %, backward 12 %, optimizer 0 %." in text
    assert "The loader is the bottleneck: a step waits for it 80 % of the time." in text


def test_a_slow_step_is_tried_twice_and_then_given_up():
    clock = Planted(forward=2.0)
    found = clock.measure()
    assert found.pace is None and found.step_s >= SLOW_STEP and clock.seconds == 2 * 16.0
    clock = Planted(forward=1.0, backward=1.5)
    assert clock.measure().pace is None and clock.seconds == 2 * 20.0
    clock = Planted(forward=100.0)
    assert (
        clock.measure().pace is None and clock.seconds == 800
    )  # after the forward pass of the first step


def test_steps_just_fast_enough_end_within_a_minute():
    clock = Planted(load=0.1, forward=0.3, backward=0.8, optimizer=0.1)
    found = clock.measure()
    assert found.pace.full == pytest.approx(9.7) and clock.seconds < 60


def test_rounds_end_with_the_time():
    clock = Planted(forward=0.1, backward=0.1)
    assert clock.measure(seconds=20.0).pace is not None and clock.seconds < 30


def test_padding_is_that_of_the_collate_function():
    sizes = Planted(forward=0.001).measure(size=lambda i: 1 + i % 8, samples=48, batch_size=8).sizes
    assert (sizes.smallest, sizes.largest) == (1, 8)
    assert sizes.sorted_padding == pytest.approx(0.1) and 0.3 < sizes.padding < 0.45
    sizes = Planted(forward=0.001).measure().sizes
    assert (sizes.smallest, sizes.largest, sizes.padding) == (4, 4, 0.0)


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        ((torch.zeros(2, 3), 1), 6),
        ({"input_ids": [1, 2, 3], "label": 0}, 3),
        ([1.0, 2.0], 2),
        ((torch.zeros(3).numpy(), 0), 3),
        ((5, 1), 1),
        ("text", None),
        ((), None),
    ],
)
def test_the_size_of_a_sample(sample, size):
    assert size_of(sample) == size


def of_digits(**changed):
    task = task_of("digits@200")
    return replace(task.training(task.load(None), 0), **changed)


def test_a_task_is_measured_in_a_second_without_warnings(monkeypatch):
    monkeypatch.setattr(measurement, "ROUNDS", 0)
    announced = []
    with warnings.catch_warnings(action="error"):
        found = TimedTraining(of_digits(), announce=announced.append).measure()
    assert (
        announced[:2] == ["timing one step", "calling `evaluate` once"]
        and announced[2] == "tracing the model"
    )
    assert (
        found.pace.forward > 0
        and found.pace.half > 0
        and found.fallback is None
        and found.steps == 4
    )


def test_workers_load_while_the_model_computes(monkeypatch):
    monkeypatch.setattr(measurement, "ROUNDS", 0)
    loader = DataLoader(
        of_digits().loader.dataset, batch_size=20, num_workers=1, multiprocessing_context="fork"
    )
    assert 0 <= TimedTraining(of_digits(loader=loader)).measure().pace.overlap <= 1


def test_parts_in_evaluation_mode_stay_there(monkeypatch):
    monkeypatch.setattr(measurement, "ROUNDS", 0)
    training = of_digits(evaluate=lambda model: float(model.train().training))
    training.model.train()[0].eval()
    modes = [part.training for part in training.model.modules()]
    TimedTraining(training).measure()
    assert [part.training for part in training.model.modules()] == modes and False in modes


def test_mistakes_are_named_before_anything_takes_long():
    with pytest.raises(ValueError, match="evaluate returned None; it must return a number"):
        TimedTraining(of_digits(evaluate=lambda _: None)).measure()
    loader = DataLoader(of_digits().loader.dataset, batch_size=256, drop_last=True)
    with pytest.raises(
        ValueError,
        match="the loader of 200 samples has no batch; give it more of them, or drop_last=False",
    ):
        TimedTraining(of_digits(loader=loader))


@pytest.mark.parametrize(
    ("order", "settings"),
    [
        (lambda n: {"batch_size": 8, "shuffle": True}, measurement.SETTINGS),
        (
            lambda n: {"batch_sampler": Mixture([i % 2 for i in range(n)], 8)},
            measurement.SETTINGS[2:],
        ),
        (
            lambda n: {"batch_size": 8, "sampler": WeightedSampler(torch.arange(1.0, n + 1))},
            (measurement.SETTINGS[0], *measurement.SETTINGS[2:]),
        ),
    ],
)
def test_settings_that_a_loader_accepts(order, settings):
    training = Planted().training()
    dataset = training.loader.dataset
    loader = DataLoader(dataset, **order(len(dataset)))
    assert accepted_settings(replace(training, loader=loader), 0.5) == [*settings]
