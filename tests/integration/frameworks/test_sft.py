"""SFTTrainer of TRL with a selection: its fused head without logits, and rows that are joined or packed."""

import pytest
import torch

import thresher
from helpers import assert_same
from transformers_cases import METHODS

pytest.importorskip("trl")
pytest.importorskip("peft")

import sft_cases as cases

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:.*padding_free:UserWarning", "ignore:.*packing"
)

JOINED = [name for name in cases.SETTINGS if "packing" in name and "wrapped" not in name] + [
    "padding_free"
]


@pytest.mark.parametrize("name", cases.SETTINGS)
def test_all_data_is_the_plain_training_bit_for_bit(name, tmp_path):
    found = []
    for method in (None, thresher.FullData()):
        made = cases.trainer(tmp_path, method, name)
        made.train()
        found.append(
            (made.model.state_dict(), made.optimizer.state_dict()["state"], torch.get_rng_state())
        )
    assert_same(found[1], found[0])


@pytest.mark.parametrize("name", cases.SETTINGS)
def test_records_are_the_losses_of_the_examples(name, tmp_path):
    made = cases.trainer(
        tmp_path,
        thresher.FullData(),
        name,
        learning_rate=0.0,
        with_selection_settings={"observe": True},
    )
    expected = cases.losses_by_hand(made)
    made.train()
    exact = cases.SETTINGS[name][0].get("bf16") is False
    assert torch.allclose(
        made.run.records["loss"].float(), expected, rtol=0, atol=2e-6 if exact else 2e-3
    )
    found = made.run.data_map()
    mean = torch.from_numpy(found["dft_loss_mean" if name == "dft" else "loss_mean"]).float()
    assert torch.allclose(mean, expected, rtol=0, atol=2e-6 if exact else 2e-3)
    assert found["tokens"].tolist() == cases.tokens_by_hand(made)
    assert ("perplexity" in found) == (name != "dft")
    if name != "dft":
        assert found["perplexity"] == pytest.approx(mean.double().exp().numpy())


@pytest.mark.parametrize("name", JOINED)
def test_a_share_of_joined_examples(name, tmp_path):
    made = cases.trainer(tmp_path, thresher.UniformSubset(keep=0.5), name)
    made.train()
    rows = len(made.train_dataset)
    assert [(entry["complete"], entry["kept"]) for entry in made.run.history] == [
        (True, rows // 2)
    ] * 2
    assert made.lr_scheduler.get_last_lr() == [0, 0]


@pytest.mark.parametrize("name", ["float32", "padding_free", "packing"])
def test_goes_on_where_it_was_saved(name, tmp_path):
    made = cases.trainer(
        tmp_path,
        thresher.UniformSubset(keep=0.5),
        name,
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=1,
    )
    made.train()
    again = cases.trainer(tmp_path, thresher.UniformSubset(keep=0.5), name, num_train_epochs=3)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert_same(again.model.state_dict(), made.model.state_dict())
    assert [entry["kept"] for entry in again.run.history] == [
        entry["kept"] for entry in made.run.history
    ]


def test_winnow_draws_by_the_uncertainty_of_the_head(tmp_path):
    made = cases.trainer(
        tmp_path,
        thresher.Winnow(0.5, least_agreement=-1),
        "float32",
        num_train_epochs=4,
        learning_rate=0.0,
    )
    made.train()
    found = made.run.records["uncertainty"].float()
    with torch.no_grad():
        for number, row in enumerate(made.train_dataset):
            batch = made.data_collator([row])
            probabilities = made.model(batch["input_ids"]).logits[0, :-1].softmax(-1)
            assert found[number] == pytest.approx(
                (1 - probabilities.square().sum(-1)).mean().item(), abs=5e-3
            )
    assert made.run.cost.backward <= made.run.cost.full_backward / 2 + 4


def test_kakurenbo_hides_and_refreshes_without_logits(tmp_path):
    method = thresher.Kakurenbo(max_fraction=0.4, tau=0.0, move_back=False)
    made = cases.trainer(tmp_path, method, "float32", num_train_epochs=4)
    logits = []
    head = made.model.lm_head.register_forward_hook(lambda *_: logits.append(1))
    made.train()
    head.remove()
    assert made.run.history[-1]["refreshed"] > 0
    assert not logits


def test_each_layer_runs_once_a_batch(tmp_path):
    calls = []
    made = cases.trainer(tmp_path, thresher.FullData(), "float32", num_train_epochs=1)
    made.model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    made.train()
    assert len(calls) == 6


def test_a_batch_method_scores_first_and_says_why(tmp_path):
    made = cases.trainer(
        tmp_path, thresher.SelectiveBackprop(keep=0.5), "defaults", pad_to_multiple_of=16
    )
    with pytest.warns(
        UserWarning, match=r"SelectiveBackprop chooses by a scoring pass .*pad_to_multiple_of"
    ):
        made.train()
    assert made.run.cost.backward < made.run.cost.full_backward * 0.7
    made = cases.trainer(tmp_path, thresher.SelectiveBackprop(keep=0.5), "defaults")
    match = "cannot be joined.* Pad all batches to one shape, or use spend='batches' or, except in SFTTrainer, forward_passes"
    with (
        pytest.warns(UserWarning, match="pad_to_multiple_of"),
        pytest.raises(ValueError, match=match),
    ):
        made.train()
    settings = {"with_selection_settings": {"forward_passes": "once"}}
    made = cases.trainer(tmp_path, thresher.SelectiveBackprop(keep=0.5), "defaults", **settings)
    with pytest.raises(
        ValueError, match=r"forward_passes='once' with SFTTrainer is not supported.*'twice'"
    ):
        made.train()


@pytest.mark.parametrize(
    "method",
    [METHODS["kakurenbo"], METHODS["selective_backprop"]],
    ids=lambda method: type(method).__name__,
)
def test_methods_that_need_rows_are_refused_beside_joined_ones(method, tmp_path):
    made = cases.trainer(tmp_path, method, "padding_free")
    with pytest.raises(
        ValueError, match=rf"with {type(method).__name__} is not supported.*padding_free=False"
    ):
        made.train()


def test_rows_of_another_collate_function_are_refused(tmp_path):
    made = cases.trainer(tmp_path, thresher.FullData(), "padding_free")
    own = made.data_collator
    made.data_collator = lambda examples: own(examples[:-1])
    with pytest.raises(
        ValueError, match=r"examples of \d+ tokens were joined, but the model returned"
    ):
        made.train()


def test_another_loss_is_refused(tmp_path):
    made = cases.trainer(tmp_path, thresher.FullData(), "float32")
    plain = cases.SFT.__mro__[2].compute_loss

    def doubled(self, *args, **kwargs):
        return 2 * plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases.SFT.__mro__[2], "compute_loss", doubled)
        with pytest.raises(ValueError, match="would train another loss"):
            made.train()


@pytest.mark.parametrize("name", ["float32", "padding_free"])
def test_tokens_are_chosen_beside_the_head(name, tmp_path):
    found = []
    for share in (1.0, 0.5):
        method = thresher.TokenSelection(share, reference=cases.model())
        made = cases.trainer(tmp_path, method, name)
        made.train()
        found.append(made.model.state_dict())
    plain = cases.trainer(tmp_path, None, name)
    plain.train()
    assert_same(found[0], plain.model.state_dict())
    assert not torch.equal(found[1]["lm_head.weight"], found[0]["lm_head.weight"])


@pytest.mark.parametrize("name", ["float32", "padding_free", "dft"])
def test_tokens_are_chosen_by_the_loss_that_is_trained(name, tmp_path):
    """The reference is the model before the training, so in the first step no token has a larger loss than under it."""
    found = []

    class Noting(thresher.TokenSelection):
        def chosen(self, losses, valid=None, reference=None):
            found.append((losses - reference)[valid].abs().max().item())
            return super().chosen(losses, valid, reference)

    made = cases.trainer(
        tmp_path, Noting(0.5, reference=cases.model()), name, learning_rate=0.0, num_train_epochs=1
    )
    made.train()
    assert max(found) < 2e-6


def test_losses_that_take_logits_are_those_of_before(tmp_path):
    """The user's signals read logits, so that the trainer makes them."""
    shapes = []

    def signals(outputs, targets):
        shapes.append(outputs.shape)
        return {"confidence": torch.ones(len(targets))}

    settings = {"with_selection_settings": {"signals": signals}}
    made = cases.trainer(tmp_path, METHODS["kakurenbo"], "float32", num_train_epochs=1, **settings)
    made.train()
    assert all(len(shape) == 3 for shape in shapes)
    assert shapes


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "method", [thresher.FullData(), 0.5, METHODS["infobatch"], METHODS["kakurenbo"]], ids=str
)
def test_a_hook_counts_what_the_cost_says(method, tmp_path):
    made = cases.trainer(tmp_path, method, "float32", num_train_epochs=3)
    rows = []
    made.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, outputs: rows.append(len(outputs))
    )
    made.train()
    assert made.run.cost.forward == sum(rows)
