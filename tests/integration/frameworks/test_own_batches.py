"""`thresher.transformers.Selection` with trainers that make their own batches."""

import pytest
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import thresher
import thresher.transformers
from helpers import assert_same
from thresher.samplers import Grouped
from transformers_cases import outcome, trainer

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
