"""Settings of Trainer that change its steps, its order or its loss, beside a selection."""

import math

import pytest

import thresher
from depth import depth
from helpers import assert_same
from transformers_cases import BATCH, EPOCHS, N, outcome, trainer

STEPS = math.ceil(N / BATCH)
SETTINGS = {
    "label smoothing": {"label_smoothing_factor": 0.1, "optim": "sgd"},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "a number of steps": {"max_steps": STEPS + 2},
    "a number of steps, accumulated": {"max_steps": 3, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("causal", depth([False], [False, True]))
def test_full_data_is_trainer(settings, causal, tmp_path):
    found = []
    for method in (None, thresher.FullData()):
        made = trainer(tmp_path, method, causal, **settings)
        made.train()
        found.append(outcome(made))
    if "label_smoothing_factor" not in settings:
        assert_same(*found)
    for plain, own in zip(
        found[0]["parameters"].values(), found[1]["parameters"].values(), strict=True
    ):
        assert plain.allclose(own, atol=1e-5)  # Trainer adds the smoothed losses in another order


@pytest.mark.filterwarnings("ignore:.*this run has only one:UserWarning")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_share_trains_in_as_many_steps(settings, tmp_path):
    full = trainer(tmp_path, **settings)
    half = trainer(tmp_path, 0.5, **settings)
    full.train()
    half.train()
    assert half.state.global_step == full.state.global_step
    assert half.lr_scheduler.get_last_lr() == full.lr_scheduler.get_last_lr()
    assert abs(half.run.cost.backward / half.run.cost.full_backward - 0.5) < 0.06


def test_a_plan_of_smaller_batches_has_a_number_of_steps(tmp_path):
    made = trainer(
        tmp_path,
        thresher.InfoBatch(),
        max_steps=STEPS + 2,
        with_selection_settings={"spend": "batches"},
    )
    made.train()
    assert made.state.global_step == STEPS + 2 and made.run.epochs == 2


@pytest.mark.parametrize(
    "settings", [{"forward_passes": "once"}, {"forward_passes": "twice", "spend": "batches"}]
)
def test_selection_within_a_batch_has_a_number_of_steps(settings, tmp_path):
    method = thresher.SelectiveBackprop(keep=0.5)
    full = trainer(tmp_path, max_steps=STEPS + 2)
    made = trainer(tmp_path, method, max_steps=STEPS + 2, with_selection_settings=settings)
    full.train()
    made.train()
    assert made.state.global_step == made.run.cost.steps == STEPS + 2 and made.run.epochs == 2
    assert made.lr_scheduler.get_last_lr() == full.lr_scheduler.get_last_lr()
    assert (
        made.run.cost.backward == 11 * 2 + 1 + 2 * 2
    )  # two of four rows, and the one row of the last batch


def test_smoothed_losses_are_recorded(tmp_path):
    found = []
    for smoothing in (0.0, 0.5):
        made = trainer(
            tmp_path,
            thresher.InfoBatch(),
            label_smoothing_factor=smoothing,
            learning_rate=0.0,
            num_train_epochs=1,
        )
        made.train()
        found.append(made.run.records["loss"])
    assert not found[0].allclose(found[1]) and found[1].isfinite().all()


@pytest.mark.parametrize("causal", depth([True], [False, True]))
def test_a_data_map_of_the_training(causal, tmp_path):
    made = trainer(tmp_path, thresher.FullData(), causal, with_selection_settings={"observe": True})
    made.train()
    found = made.run.data_map()
    assert {"confidence", "variability", "aum", "suspicion"} <= set(found) and (
        found["times_seen"] == EPOCHS
    ).all()
    assert ((found["confidence"] > 0) & (found["confidence"] < 1)).all()
