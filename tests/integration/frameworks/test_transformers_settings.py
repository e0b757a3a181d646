"""Settings of Trainer that change its steps, its order or its loss, beside a selection."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

import thresher
from depth import depth
from helpers import assert_same
from transformers_cases import BATCH, EPOCHS, N, model, outcome, trainer

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


def weighted(outputs, labels):
    """Losses of tokens, and their weights: twice as much for odd labels."""
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    losses = F.cross_entropy(outputs["logits"].float().mT, labels, reduction="none")
    return losses, (labels != -100) * (1 + labels % 2).float()


def weighted_loss(outputs, labels, num_items_in_batch=None):
    losses, weights = weighted(outputs, labels)
    return (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("chooses_tokens", [False, True])
def test_a_data_map_of_a_language_model(smoothing, chooses_tokens, tmp_path):
    """Its losses and tokens are all that count, even if the method trains on a part of them."""
    settings: dict[str, Any] = {"with_selection_settings": {"observe": True}}
    chosen = thresher.TokenSelection(keep=0.4, reference=model(True, n_embd=4))
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    made = trainer(
        tmp_path,
        chosen if chooses_tokens else thresher.FullData(),
        True,
        net=model(True, **without_dropout),
        label_smoothing_factor=smoothing,
        learning_rate=0.0,
        **settings,
    )
    made.train()
    found = made.run.data_map()
    rows = made.train_dataset
    labels = rows.labels[:, 1:]
    made.model.eval()
    with torch.no_grad():
        logits = made.model(input_ids=rows.words, attention_mask=rows.mask).logits[:, :-1]
    losses = F.cross_entropy(logits.mT, labels, reduction="none", label_smoothing=smoothing)
    counts = (labels != -100).sum(1)
    expected = (losses.sum(1) / counts).numpy()
    assert found["tokens"].tolist() == counts.tolist()
    if smoothing:
        assert found["smoothed_loss_mean"] == pytest.approx(expected, rel=1e-5)
        assert not {"loss_mean", "perplexity"} & {*found}
    else:
        assert found["loss_mean"] == pytest.approx(expected, rel=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)


def test_a_data_map_of_a_weighted_loss_has_no_perplexity(tmp_path):
    made = trainer(
        tmp_path,
        thresher.FullData(),
        True,
        net=model(True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        learning_rate=0.0,
        with_compute_loss_func=weighted_loss,
        with_per_position=weighted,
        with_selection_settings={"observe": True},
    )
    made.train()
    found = made.run.data_map()
    rows = made.train_dataset
    with torch.no_grad():
        outputs = made.model.eval()(input_ids=rows.words, attention_mask=rows.mask)
    losses, weights = weighted(outputs, rows.labels)
    expected = ((losses * weights).sum(1) / weights.sum(1)).numpy()
    assert found["loss_mean"] == pytest.approx(expected, rel=1e-5)
    assert not {"perplexity", "tokens"} & {*found}


def test_the_mean_loss_is_of_all_visits(tmp_path):
    """Its training changes the losses, which are noted here after each epoch. Signals of the user's stay."""
    noted = []

    class Noting(TrainerCallback):
        def on_epoch_end(self, *args, **kwargs):
            noted.append(made.run.records["last_loss"].double().clone())

    settings = {"observe": True, "signals": lambda outputs, targets: {"el2n": outputs[:, 0, 0]}}
    made = trainer(tmp_path, thresher.FullData(), True, with_selection_settings=settings)
    made.add_callback(Noting())
    made.train()
    mean = torch.stack(noted).mean(0).numpy()
    assert made.run.data_map()["loss_mean"] == pytest.approx(mean, rel=1e-2)  # noted in bfloat16
    assert noted[0].numpy() != pytest.approx(mean, rel=2e-2)


def test_a_classifier_has_no_tokens(tmp_path):
    made = trainer(tmp_path, thresher.FullData(), with_selection_settings={"observe": True})
    made.train()
    assert not {"tokens", "loss_mean", "perplexity"} & {*made.run.data_map()}
    assert not {"tokens", "loss_sum"} & {*made.run.records}
