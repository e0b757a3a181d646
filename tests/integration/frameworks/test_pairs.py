"""RewardTrainer and DPOTrainer of TRL with a selection: the loss and the margin of each pair."""

from functools import partial

import pytest
import torch

import thresher
from helpers import assert_same

pytest.importorskip("trl")
pytest.importorskip("peft")

import pair_cases as cases
from thresher.transformers import selection
from transformers_cases import METHODS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
BOTH = ["reward, float32", "dpo, float32"]
OBSERVED = {"with_selection_settings": {"observe": True}}


def state(made):
    return made.model.state_dict(), made.optimizer.state_dict()["state"], torch.get_rng_state()


@pytest.mark.parametrize("name", cases.SETTINGS)
def test_all_data_is_the_plain_training_bit_for_bit(name, tmp_path):
    plain = cases.trainer(tmp_path, None, name)
    plain.train()
    expected = state(plain)
    for settings in ({}, OBSERVED):
        made = cases.trainer(tmp_path, thresher.FullData(), name, **settings)
        made.train()
        assert_same(state(made), expected)
        assert made.run.cost.forward == made.run.cost.full_forward  # no extra pass


@pytest.mark.parametrize("name", cases.SETTINGS)
def test_records_are_the_losses_and_margins_of_the_pairs(name, tmp_path):
    made = cases.trainer(tmp_path, thresher.FullData(), name, learning_rate=0.0, **OBSERVED)
    losses, margins = cases.by_hand(made)
    assert (margins > 0).any() and (margins < 0).any()
    made.train()
    rounding = 2e-5 if cases.SETTINGS[name][0].get("bf16") is False else 3e-2
    found = made.run.data_map()
    assert (found["times_seen"] == 2).all()
    assert not {"tokens", "loss_mean", "perplexity"} & {*found}  # a pair has no tokens of its own
    same = {"rtol": 0, "atol": rounding}
    assert torch.allclose(made.run.records["loss"].float(), losses, **same)
    assert torch.allclose(torch.from_numpy(found["aum"]).float(), margins, **same)
    assert torch.allclose(
        torch.from_numpy(found["suspicion"]).float(), (-margins).sigmoid(), **same
    )


@pytest.mark.parametrize("name", ["reward, accumulation", "dpo, accumulation", "dpo, precomputed"])
@pytest.mark.parametrize(
    "method", [0.5, thresher.InfoBatch(), thresher.UniformSubset(keep=0.5)], ids=str
)
def test_methods_choose_pairs_before_an_epoch(method, name, tmp_path):
    made = cases.trainer(tmp_path, method, name, num_train_epochs=4, **OBSERVED)
    trained = []
    step = made.training_step

    def noting(model, inputs, *args):
        trained.append(len(inputs["input_ids"]) // 2)
        return step(model, inputs, *args)

    made.training_step = noting
    made.train()
    assert sum(trained) == sum(entry["kept"] for entry in made.run.history) < 4 * 24
    assert made.run.data_map()["times_seen"].sum() == sum(trained)
    assert made.run.cost.forward == 2 * sum(trained)


@pytest.mark.parametrize("name", [*BOTH, "reward, centered"])
def test_a_weighted_pair_has_its_weight_in_the_loss(name, tmp_path, monkeypatch):
    made = cases.trainer(tmp_path, thresher.InfoBatch(), name, num_train_epochs=4)
    losses, weighted = [], []
    read = selection.losses_of_pairs

    def noting(*args):
        losses.append(read(*args)[0].detach())
        return read(*args)

    monkeypatch.setattr(selection, "losses_of_pairs", noting)
    own = made.compute_loss

    def compared(*args, **kwargs):
        value = own(*args, **kwargs)
        plan, ids = made.run.plan, made._rows[0]
        weights = (
            torch.ones(24)
            if plan.weights is None
            else torch.zeros(24).scatter(0, plan.ids, plan.weights)
        )
        assert torch.allclose(value, (weights[ids] * losses[-1]).mean(), rtol=1e-5)
        weighted.append(bool((weights[ids] > 1).any()))
        return value

    made.compute_loss = compared
    made.train()
    assert any(weighted)


@pytest.mark.parametrize("name", BOTH)
def test_goes_on_where_it_was_saved(name, tmp_path):
    settings = {"num_train_epochs": 3} | OBSERVED
    made = cases.trainer(tmp_path, 0.5, name, save_strategy="steps", save_steps=1, **settings)
    made.train()
    again = cases.trainer(tmp_path, 0.5, name, **settings)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-4")
    assert_same(again.model.state_dict(), made.model.state_dict())
    assert_same(dict(again.run.data_map()), dict(made.run.data_map()))


@pytest.mark.parametrize("name", BOTH)
def test_a_trainer_gets_a_selection_later(name, tmp_path):
    made = cases.Selection.add_to(
        cases.trainer(tmp_path, None, name),
        thresher.FullData(),
        selection_settings={"observe": True},
    )
    made.train()
    assert made.run.data_map()["times_seen"].tolist() == [2] * 24


@pytest.mark.parametrize("name", BOTH)
def test_sources_are_compared(name, tmp_path):
    """Pairs with their answers exchanged have the sign of their margin exchanged as well."""
    made = cases.trainer(tmp_path, thresher.FullData(), name, learning_rate=0.0, **OBSERVED)
    margins = cases.by_hand(made)[1]
    made.train()
    found = made.run.data_map().by((margins > 0).numpy().astype(str), at_least=0)
    assert found["group"].tolist() == ["False", "True"]
    assert found["suspicion"][0] > 0.5 > found["suspicion"][1]


@pytest.mark.parametrize("kind", [cases.trl.RewardTrainer, cases.trl.DPOTrainer])
@pytest.mark.parametrize("later", [False, True])
def test_another_loss_is_refused_in_any_step(kind, later, tmp_path):
    """Here the loss is another from the start, or in the fifth step alone, whose loss Trainer's own check would not see."""

    class Changed(kind):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss if later and self.state.global_step != 4 else 1.01 * loss

    name = BOTH[kind is cases.trl.DPOTrainer]
    made = cases.trainer(
        tmp_path,
        thresher.FullData(),
        name,
        type("Selecting", (cases.Selection, Changed), {}),
        logging_steps=1,
    )
    with pytest.raises(ValueError, match="computed from its pairs is .* would train another loss"):
        made.train()
    assert made.state.global_step == 4 * later


def test_a_loss_without_margins_is_refused(tmp_path):
    class Squared(cases.trl.RewardTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return model(**inputs).logits.square().mean()

    kind = type("Selecting", (cases.Selection, Squared), {})
    made = cases.trainer(tmp_path, thresher.FullData(), "reward, float32", kind)
    with pytest.raises(
        ValueError, match="the trainer's loss has no margins. .*train without Selection"
    ):
        made.train()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"loss_type": ["hinge"]},
            r"loss_type=\['hinge'\], use_weighting=False\) is not supported. Use loss_type='sigmoid'",
        ),
        (
            {"loss_type": ["sigmoid", "sft"]},
            r"loss_type=\['sigmoid', 'sft'\], use_weighting=False\) is not supported",
        ),
        (
            {"loss_type": ["sigmoid", "sigmoid_norm"]},
            r"loss_type=\['sigmoid', 'sigmoid_norm'\], use_weighting=False\) is not supported",
        ),
        (
            {"loss_type": ["robust"], "label_smoothing": 0.1},
            "is not supported. Use loss_type='sigmoid'",
        ),
        ({"use_weighting": True}, r"use_weighting=True\) is not supported"),
        ({"with_per_position": print}, "per_position= or TokenSelection with Preferring"),
        (
            {"with_data_collator": print},
            r"A data_collator of your own .*'collate_keeps_rows': True",
        ),
    ],
    ids=str,
)
def test_what_changes_the_loss_of_a_pair_is_refused(settings, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        cases.trainer(tmp_path, thresher.FullData(), "dpo, float32", **settings)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("method", [METHODS["selective_backprop"], METHODS["kakurenbo"]], ids=str)
def test_methods_that_need_a_row_per_sample_are_refused(method, name, tmp_path):
    match = "A batch has two rows for a pair. This method needs one row per sample. Use a method that chooses before"
    with pytest.raises(ValueError, match=match):
        cases.trainer(tmp_path, method, name)


def test_an_auxiliary_loss_is_refused_before_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(cases.sft_cases, "model", partial(cases.sft_cases.model, experts=True))
    made = cases.trainer(tmp_path, thresher.FullData(), "dpo, float32")
    with pytest.raises(ValueError, match=r"another loss. .*router_aux_loss_coef=0\.0"):
        made.train()
    without = cases.trainer(
        tmp_path, thresher.FullData(), "dpo, float32", router_aux_loss_coef=0.0, **OBSERVED
    )
    without.train()
    assert (made.state.global_step, without.state.global_step) == (0, 12)


def test_weights_of_losses_are_refused_before_a_step(tmp_path):
    made = cases.trainer(
        tmp_path, thresher.FullData(), "dpo, float32", loss_type=["sigmoid"], loss_weights=[2.0]
    )
    with pytest.raises(ValueError, match="another loss. .*loss_weights=None"):
        made.train()
    assert made.state.global_step == 0


def test_a_collator_that_keeps_the_order_of_pairs(tmp_path):
    own = cases.trainer(tmp_path, None, "dpo, float32").data_collator
    settings = {"observe": True, "collate_keeps_rows": True}
    made = cases.trainer(
        tmp_path,
        thresher.FullData(),
        "dpo, float32",
        learning_rate=0.0,
        with_data_collator=lambda examples: own(examples),
        with_selection_settings=settings,
    )
    losses, _ = cases.by_hand(made)
    made.train()
    assert torch.allclose(made.run.records["loss"].float(), losses, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:.*non-finite")
def test_a_loss_that_is_not_finite_goes_on(tmp_path):
    made = cases.trainer(tmp_path, thresher.FullData(), "reward, float32")
    with torch.no_grad():
        made.model.score.weight[0, 0] = torch.nan
    made.train()
    assert made.state.global_step == 12


@pytest.mark.parametrize("name", BOTH)
def test_a_sheet_shows_the_answers_of_the_suspects(name, tmp_path):
    made = cases.trainer(tmp_path, thresher.FullData(), name, num_train_epochs=1, **OBSERVED)
    made.train()
    found = made.run.data_map()
    found.sheet(
        tmp_path / "pairs.html",
        2,
        classes=["rejected", "chosen"],
        show=lambda number: made.train_dataset[number],
    )
    page = (tmp_path / "pairs.html").read_text()
    for number in found.suspects(2).tolist():
        row = cases.data()[number]
        texts = [f"prompt: {row['prompt']} "]
        texts += [f"{side}: {row[side].strip()}&lt;eos&gt;" for side in ("chosen", "rejected")]
        preferred = ("rejected", "chosen")[found["predicted"][number]]
        assert f"<p>{'</p><p>'.join(texts)}</p><div>{number}<br> → {preferred}<br>" in page
