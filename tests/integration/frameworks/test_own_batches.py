"""`thresher.transformers.Selection` with trainers that make their own batches, such as that of sentence-transformers."""

import importlib

import pytest
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import thresher
import thresher.transformers
from helpers import assert_same
from thresher.samplers import Grouped
from transformers_cases import N, outcome, trainer

METHODS = {
    "Winnow": 0.5,
    "InfoBatch": thresher.InfoBatch(),
    "SelectiveBackprop": thresher.SelectiveBackprop(keep=0.5),
}


class ByLength(transformers.Trainer):
    """Groups samples by their lengths, in batches of different sizes."""

    def get_train_dataloader(self):
        lengths = self.train_dataset.mask.sum(1)
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_sampler=Grouped(lengths, max_tokens=30))
        )


class SelectedByLength(thresher.transformers.Selection, ByLength):
    pass


class OwnBatches(BatchSampler):
    """Batches that a run cannot compose again."""


class InBatches(transformers.Trainer):
    """Has a loss of the whole batch: each row has the others as its negatives."""

    def get_train_dataloader(self):
        batches = OwnBatches(SequentialSampler(self.train_dataset), 6, False)
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=batches))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return torch.nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class SelectedInBatches(thresher.transformers.Selection, InBatches):
    pass


def test_batches_by_length_are_composed_again(tmp_path):
    expected = trainer(tmp_path, of=ByLength, gradient_accumulation_steps=2)
    expected.train()
    made = trainer(
        tmp_path, thresher.FullData(), of=SelectedByLength, gradient_accumulation_steps=2
    )
    made.train()
    assert_same(outcome(made), outcome(expected))
    assert made.run.cost.backward == made.run.cost.full_backward


@pytest.mark.parametrize("name", METHODS)
def test_methods_choose_within_batches_by_length(name, tmp_path):
    made = trainer(tmp_path, METHODS[name], of=SelectedByLength)
    made.train()
    assert made.run.cost.backward < made.run.cost.full_backward


def test_full_data_keeps_the_batches(tmp_path):
    expected = trainer(tmp_path, of=InBatches, gradient_accumulation_steps=2)
    expected.train()
    made = trainer(
        tmp_path, thresher.FullData(), of=SelectedInBatches, gradient_accumulation_steps=2
    )
    with pytest.warns(
        UserWarning, match="FullData keeps the batches of OwnBatches, and records nothing"
    ):
        made.train()
    assert_same(outcome(made), outcome(expected))
    with pytest.raises(AttributeError, match="A trainer that makes its own batches has no run"):
        _ = made.run


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_leaves_out_samples_is_refused(name, tmp_path):
    made = trainer(tmp_path, METHODS[name], of=SelectedInBatches)
    with pytest.raises(
        ValueError,
        match=rf"({name}|attach\(0.5\)) with the batches of OwnBatches .*in-batch negatives.* Use selection=thresher.Full",
    ):
        made.train()


def test_observing_is_refused(tmp_path):
    made = trainer(
        tmp_path,
        thresher.FullData(),
        of=SelectedInBatches,
        with_selection_settings={"observe": True},
    )
    with pytest.raises(
        ValueError,
        match="FullData with observe with the batches of OwnBatches .*no sample has a loss of its own",
    ):
        made.train()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batches", ["batch_sampler", "no_duplicates", "group_by_label"])
def test_sentence_transformers(batches, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    words = pytest.importorskip("tokenizers")
    names = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(N))]
    tokens = words.Tokenizer(
        words.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokens.pre_tokenizer = words.pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]"
    )
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = transformers.BertModel(transformers.BertConfig(vocab_size=len(names), **sizes))
    net.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    columns = {
        "anchor": [f"w{i} w{i * 7 % N}" for i in range(N)],
        "positive": [f"w{i} w{i * 4 % N}" for i in range(N)],
    }
    if batches == "group_by_label":
        columns = {"sentence": columns["anchor"], "label": [i % 3 for i in range(N)]}

    class SelectedSentences(thresher.transformers.Selection, library.SentenceTransformerTrainer):
        pass

    def trained(method):
        torch.manual_seed(0)
        model = library.SentenceTransformer(str(tmp_path), device="cpu")
        kind = library.SentenceTransformerTrainer if method is None else SelectedSentences
        arguments = library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=8,
            batch_sampler=batches,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        by_label = batches == "group_by_label"
        losses = importlib.import_module("sentence_transformers.losses")
        loss = (
            losses.BatchAllTripletLoss(model)
            if by_label
            else losses.MultipleNegativesRankingLoss(model)
        )
        data = datasets.Dataset.from_dict(columns)
        more = {} if method is None else {"selection": method}
        kind(model, arguments, train_dataset=data, loss=loss, **more).train()
        return model.state_dict()

    assert_same(trained(thresher.FullData()), trained(None))
    with pytest.raises(ValueError, match="in-batch negatives"):
        trained(0.5)
