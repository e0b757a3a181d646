"""What `thresher.transformers.Selection` refuses, by name."""

import importlib
import sys

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler
from transformers import default_data_collator

import thresher
from depth import depth, in_verify
from helpers import assert_same
from transformers_cases import WORDS, N, Selected, Sentences, model, trainer


def refused(match, folder, method=None, kind=ValueError, **settings):
    """The training is refused before anything is trained."""
    made = trainer(folder, method or thresher.InfoBatch(), **settings)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    with pytest.raises(kind, match=match):
        made.train()
    assert_same(made.model.state_dict(), before)
    assert made.compute_loss_func is None
    assert not made._trains


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"max_steps": 5},
            r"max_steps=5\) is not supported.*give num_train_epochs alone, or .*batches",
        ),
        ({"num_train_epochs": 1.5}, "num_train_epochs=1.5"),
        ({"with_compute_loss_func": lambda *_: 0}, "compute_loss_func.*give per_position="),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ],
)
def test_arguments_of_the_trainer(settings, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path, thresher.InfoBatch(), **settings)


@pytest.mark.parametrize("settings", [{}, {"forward_passes": "twice"}])
def test_a_number_of_steps_with_rows_that_may_be_gathered(settings, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"max_steps=5\) is not supported.*'forward_passes': 'once'}, for a method that",
    ):
        trainer(
            tmp_path,
            thresher.SelectiveBackprop(keep=0.5),
            max_steps=5,
            with_selection_settings=settings,
        )


@pytest.mark.parametrize(
    ("owner", "name", "value", "match"),
    [
        ("args", "enable_jit_checkpoint", True, "enable_jit_checkpoint=True.*save_steps="),
        ("args", "torch_compile", True, "torch_compile=True"),
        ("args", "_n_gpu", 2, "n_gpu=2.*torchrun"),
        ("", "is_fsdp_enabled", True, "in shards"),
    ],
)
def test_settings_when_it_trains(owner, name, value, match, tmp_path):
    made = trainer(tmp_path, thresher.InfoBatch())
    setattr(getattr(made, owner) if owner else made, name, value)
    with pytest.raises(ValueError, match=match):
        made.train()


def test_order_of_the_classes_and_settings(tmp_path):
    with pytest.raises(
        TypeError, match=r"Write class Wrong\(thresher.transformers.Selection, Trainer\)"
    ):
        type("Wrong", (transformers.Trainer, thresher.transformers.Selection), {})
    with pytest.raises(
        TypeError, match="epochs, lr: no such setting; the settings are collate_keeps_rows, .*spend"
    ):
        trainer(tmp_path, 0.5, with_selection_settings={"lr": 1, "epochs": 2})


def test_token_selections(tmp_path):
    own, net = thresher.TokenSelection(reference=model(causal=True)), model(causal=True)
    wrong = {
        "needs a reference model": thresher.TokenSelection(),
        "two TokenSelection; give only one": [own, own],
    }
    for match, selection in wrong.items():
        with pytest.raises(ValueError, match=match):
            trainer(tmp_path, selection, causal=True)
    refused(
        "shares parameters with the model",
        tmp_path,
        thresher.TokenSelection(reference=net),
        net=net,
        causal=True,
    )


class Weighted(transformers.BertForSequenceClassification):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.loss = None if outputs.loss is None else 1.5 * outputs.loss
        return outputs


def test_losses_of_the_model(tmp_path):
    weighted = Weighted(model(causal=False).config)
    match = "the loss of the trainer is .* would train another loss. Give per_position="
    refused(match, tmp_path, net=weighted, remove_unused_columns=False)
    refused("are not classes of the model's logits", tmp_path, net=model(causal=False, num_labels=1),
            with_train_dataset=Sentences(causal=True))  # fmt: skip
    refused("the batch has no `labels`, only input_ids", tmp_path, net=model(causal=False),
            with_data_collator=lambda rows: {"input_ids": default_data_collator(rows)["input_ids"]})  # fmt: skip


class OwnLoss(Selected):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch) * 1


class Bypassing(Selected.__mro__[2]):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@in_verify
def test_a_trainer_with_a_loss_of_its_own(tmp_path):
    kind = type("Bypassed", (thresher.transformers.Selection, Bypassing), {})
    refused("does not call compute_loss_func", tmp_path, of=kind)
    made = trainer(tmp_path, thresher.InfoBatch(), of=OwnLoss, num_train_epochs=1)
    made.train()
    assert made.run.cost.backward == N


class Answers(Sentences):
    """Words that follow other words."""

    def __init__(self, causal):
        super().__init__(causal)
        self.labels = self.labels.where(self.mask == 0, WORDS - self.words)


def test_rows_of_other_lengths_with_one_divisor_in_one_pass(tmp_path):
    match = "SelectiveBackprop in one pass, .* rows of different numbers of labels, .*'forward_passes': 'twice'"
    half = thresher.SelectiveBackprop(keep=0.5)
    refused(match, tmp_path, half, causal=True, gradient_accumulation_steps=2)
    settings = {"with_selection_settings": {"forward_passes": "twice"}, "num_train_epochs": 1}
    made = trainer(tmp_path, half, causal=True, gradient_accumulation_steps=2, **settings)
    made.train()
    assert made.run.cost.scoring == N


def test_a_decoder_without_inputs(tmp_path):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    net = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes)
    )
    match = r"DataCollatorForSeq2Seq\(tokenizer, model=model\)"
    for method in (thresher.InfoBatch(), thresher.SelectiveBackprop(keep=0.5)):
        refused(match, tmp_path, method, causal=True, net=net)
    made = trainer(tmp_path, thresher.FullData(), causal=True, net=net, num_train_epochs=1)
    made.train()  # on the trainer's own loss, for which the model makes the inputs of its decoder
    assert made.run.cost.ratio() == 1


@in_verify
def test_an_encoder_with_a_decoder_needs_the_inputs_of_the_decoder(tmp_path):
    sizes = {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
    }
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    ends = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }
    net = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=WORDS, **sizes | heads | ends)
    )
    data = {"with_train_dataset": Answers(causal=True)}
    refused("must have decoder_input_ids", tmp_path, causal=True, net=net, **data)

    def with_inputs(rows):
        batch = default_data_collator(rows)
        return batch | {
            "decoder_input_ids": net.prepare_decoder_input_ids_from_labels(batch["labels"])
        }

    made = trainer(tmp_path, thresher.InfoBatch(), causal=True, net=net, num_train_epochs=1, with_data_collator=with_inputs,
                   **data)  # fmt: skip
    made.train()
    assert made.run.records["loss"].min() > 0


class Stream(IterableDataset):
    def __len__(self):
        return N

    def __iter__(self):
        yield from Sentences(causal=False)


class Repeats(Selected):
    def _get_train_sampler(self, train_dataset=None):
        return WeightedRandomSampler(torch.ones(N), N)


class Wrong(Sampler):
    def __init__(self, said, yielded):
        self.said, self.yielded = said, yielded

    def __len__(self):
        return self.said

    def __iter__(self):
        yield from range(self.yielded)


def test_loaders(tmp_path):
    refused(
        "over Stream is not supported.*thresher.attach also takes an IterableDataset",
        tmp_path,
        0.5,
        with_train_dataset=Stream(),
    )
    refused("InfoBatch with a WeightedRandomSampler, which may repeat", tmp_path, of=Repeats)
    chance = thresher.SelectiveBackprop(beta=1.0)
    refused(
        "not known.*forward_passes='once'",
        tmp_path,
        chance,
        with_selection_settings={"forward_passes": "twice"},
    )


@pytest.mark.parametrize(("yielded", "what"), depth([(30, "more")], [(30, "more"), (10, "fewer")]))
def test_samplers_that_yield_other_numbers_than_they_say(yielded, what, tmp_path):
    class Other(Selected):
        def _get_train_sampler(self, train_dataset=None):
            return Wrong(20, yielded)

    made = trainer(tmp_path, thresher.FullData(), of=Other)
    with pytest.raises(RuntimeError, match=f"{what} batches than the 5"):
        made.train()


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_without_the_packages(missing, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("thresher.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'thresher\[transformers\]'"):
        importlib.import_module("thresher.transformers")
