"""Frameworks step a scheduler themselves: its rates are those of plain training at the same share of the training."""

import pytest

import lightning_cases
import thresher
import transformers_cases
from depth import depth

METHODS = depth(
    [
        (0.5, {}),
        (0.5, {"spend": "steps"}),
        (thresher.UniformSubset(keep=0.5), {"spend": "batches"}),
    ],
    [
        (0.5, {}),
        (0.5, {"spend": "steps"}),
        (0.5, {"stratify": None}),
        (thresher.UniformSubset(keep=0.5), {"spend": "batches"}),
        (thresher.UniformSubset(keep=0.6), {}),
        (thresher.UniformSubset(keep=0.4), {"stratify": "class"}),
        (thresher.SelectiveBackprop(keep=0.5), {}),
    ],
)


def assert_same_shape(rates, plain):
    """Asserts that rates follow those of plain training, at the same share of the training, within a step of each."""
    steps, full = len(rates), len(plain)
    for number, rate in enumerate(rates):
        # The step before and after on either side: both trainings move by whole steps.
        low, high = (number / steps - 1 / steps, number / steps + 1 / steps)
        near = plain[max(0, int(low * full) - 1) : int(high * full) + 2]
        assert min(near) - 1e-12 <= rate <= max(near) + 1e-12, (number, steps, rate, near)


class Rates(transformers_cases.transformers.TrainerCallback):
    """Notes the rate of each step."""

    def __init__(self):
        self.rates = []

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        self.rates.append(optimizer.param_groups[0]["lr"])


def of_trainer(folder, method=None, **settings):
    seen = Rates()
    made = transformers_cases.trainer(folder, method, **settings)
    made.add_callback(seen)
    made.train()
    return [*seen.rates, made.lr_scheduler.get_last_lr()[0]]


@pytest.mark.parametrize("settings", depth(
    [{"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 3}, {"num_train_epochs": 1, "warmup_steps": 3}],
    [{"lr_scheduler_type": kind, "gradient_accumulation_steps": every, "num_train_epochs": epochs, "warmup_steps": warm}
     for kind in ("linear", "cosine") for every in (1, 3) for epochs in (1, 3) for warm in (0, 3)],
), ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainer(settings, tmp_path):
    plain = of_trainer(tmp_path, **settings)
    for method, how in METHODS:
        rates = of_trainer(tmp_path, method, with_selection_settings=how, **settings)
        assert_same_shape(rates, plain)
        assert rates[-1] == plain[-1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainer_with_max_steps(tmp_path):
    plain = of_trainer(tmp_path, max_steps=17, warmup_steps=3)
    assert of_trainer(tmp_path, 0.5, max_steps=17, warmup_steps=3) == plain


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning(accumulate):
    def rates_of(*callbacks):
        module = lightning_cases.Classifier()
        lightning_cases.fit(module, *callbacks, accumulate_grad_batches=accumulate)
        return module.rates

    plain = rates_of()
    for method, how in METHODS:
        rates = rates_of(thresher.lightning.Selection(method, **how))
        assert_same_shape(rates, plain)
