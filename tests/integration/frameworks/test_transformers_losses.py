"""The loss that is trained with `per_position=` is that of the trainer, or it is refused."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import DataCollatorWithFlattening

import thresher
from depth import depth
from helpers import assert_same
from thresher import AttributionError
from transformers_cases import EPOCHS, LENGTH, WORDS, N, Noted, Selected, Sentences, model, trainer

CLASSES = torch.tensor([1.0, 5.0])


class Rows(Sentences):
    """Sentences with labels of a kind."""

    def __init__(self, kind):
        super().__init__(causal=False)
        generator = torch.Generator().manual_seed(4)
        places = torch.randint(0, 3, (2, N), generator=generator)
        tags = (self.words > 12).long()
        self.kinds = {
            "regression": {"labels": self.mask.sum(1) / LENGTH},
            "labels": {
                "labels": torch.stack(
                    [self.labels, self.labels == 0, self.words[:, 0] > 9], 1
                ).float()
            },
            "spans": {"start_positions": places[0], "end_positions": places[1]},
            "segments": {"labels": tags.where(self.mask == 1, 255)},
            "tokens": {"labels": tags.where(self.mask == 1, -100)},
            "classes": {"labels": self.labels},
        }
        self.parts = self.kinds[kind]

    def __getitem__(self, index):
        words = {"input_ids": self.words[index], "attention_mask": self.mask[index]}
        return words | {name: value[index] for name, value in self.parts.items()}


class Segments(transformers.BertForTokenClassification):
    """Ignores 255; `divides` says whether it divides by num_items_in_batch, which counts these positions, too."""

    divides = True

    def forward(
        self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs
    ):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if labels is not None:
            total = num_items_in_batch if self.divides else None
            loss = F.cross_entropy(
                outputs.logits.mT,
                labels,
                ignore_index=255,
                reduction="mean" if total is None else "sum",
            )
            outputs.loss = loss if total is None else loss / total
        return outputs


class SegmentMeans(Segments):
    divides = False


def network(kind, cls):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {
            "vocab_size": WORDS,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
        labels = {"regression": 1, "labels": 3}.get(kind, 2)
        return cls(
            transformers.BertConfig(**sizes, max_position_embeddings=LENGTH, num_labels=labels)
        )


def ones(losses):
    return losses, torch.ones_like(losses, dtype=torch.bool)


def squares(outputs, labels):
    return ones((outputs.logits.squeeze(-1) - labels) ** 2)


def every_label(outputs, labels):
    return ones(F.binary_cross_entropy_with_logits(outputs.logits, labels, reduction="none"))


def mean_label(outputs, labels):
    losses, _ = every_label(outputs, labels)
    return ones(losses.mean(1))


def spans(outputs, labels):
    start = F.cross_entropy(outputs.start_logits, labels["start_positions"], reduction="none")
    return ones(
        (start + F.cross_entropy(outputs.end_logits, labels["end_positions"], reduction="none")) / 2
    )


def segments(outputs, labels):
    return F.cross_entropy(
        outputs.logits.mT, labels, ignore_index=255, reduction="none"
    ), labels != 255


def tokens(outputs, labels):
    return F.cross_entropy(outputs.logits.mT, labels, reduction="none"), labels != -100


def weighted(outputs, labels):
    return F.cross_entropy(outputs.logits, labels, reduction="none"), CLASSES[labels]


def half_weighted(outputs, labels):
    losses, weights = weighted(outputs, labels)
    return ones(losses * weights)


class Weighted(Noted):
    """The way of the documentation of transformers to weigh classes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=CLASSES)(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class SelectedWeighted(thresher.transformers.Selection, Weighted):
    pass


class WeightedOfStep(Weighted):
    """Divides by the number of rows of the step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        _, outputs = super().compute_loss(model, inputs, True)
        loss = F.cross_entropy(outputs.logits, inputs["labels"], CLASSES, reduction="sum")
        loss = loss / (len(inputs["labels"]) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class SelectedOfStep(thresher.transformers.Selection, WeightedOfStep):
    pass


def weighted_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits, labels, CLASSES)


BERT, QA = transformers.BertForSequenceClassification, transformers.BertForQuestionAnswering
TAGS = transformers.BertForTokenClassification
KINDS = {
    "regression": ("regression", BERT, squares, (Noted, Selected)),
    "every label": ("labels", BERT, every_label, (Noted, Selected)),
    "labels of a row": ("labels", BERT, mean_label, (Noted, Selected)),
    "spans": ("spans", QA, spans, (Noted, Selected)),
    "segments": ("segments", Segments, segments, (Noted, Selected)),
    "means of segments": ("segments", SegmentMeans, segments, (Noted, Selected)),
    "tokens": ("tokens", TAGS, tokens, (Noted, Selected)),
    "class weights": ("classes", BERT, weighted, (Weighted, SelectedWeighted)),
    "class weights by step": ("classes", BERT, weighted, (WeightedOfStep, SelectedOfStep)),
}


def trained(folder, name, accumulate, method=None, **settings):
    kind, net, losses, of = KINDS[name]
    own = {} if method is None else {"with_per_position": losses}
    made = trainer(folder, method, net=network(kind, net), of=of[method is not None], gradient_accumulation_steps=accumulate,
                   with_eval_dataset=None, **{"with_train_dataset": Rows(kind)} | own | settings)  # fmt: skip
    made.train()
    return made


@pytest.mark.parametrize("accumulate", depth([4], [1, 2, 4]))
@pytest.mark.parametrize("name", list(KINDS))
def test_full_data_is_the_training_of_the_trainer(name, accumulate, tmp_path):
    """Up to the rounding of another order of sums."""
    settings = {"optim": "sgd", "learning_rate": 0.3}
    plain = trained(tmp_path, name, accumulate, **settings).model.state_dict()
    made = trained(tmp_path, name, accumulate, thresher.FullData(), **settings)
    for parameter, value in made.model.state_dict().items():
        torch.testing.assert_close(value, plain[parameter], rtol=1e-4, atol=1e-5)
    start = network(*KINDS[name][:2]).state_dict()
    assert max((plain[parameter] - start[parameter]).abs().max() for parameter in plain) > 0.01
    assert made.run.records["loss"].min() > 0


def test_batches_with_as_many_positions_as_samples(tmp_path):
    """Nothing but the trainer shows that the rows of such losses are the samples."""
    losses = []
    for method in (None, thresher.FullData()):
        made = trainer(
            tmp_path, method, True, per_device_train_batch_size=LENGTH, num_train_epochs=1
        )
        losses.append(made.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and made.run.trained.sum() == N


@pytest.mark.parametrize("name", depth(["class weights"], ["spans", "class weights"]))
def test_methods_choose_by_these_losses(name, tmp_path):
    for method, backward in (
        (thresher.SelectiveBackprop(keep=0.5), 69),
        (thresher.UniformSubset(keep=0.4), 54),
    ):
        made = trained(tmp_path, name, 1, method)
        assert made.run.cost.backward == backward
    made = trained(tmp_path, name, 1, thresher.SelectiveBackprop(keep=0.5),
                   with_selection_settings={"forward_passes": "twice"})  # fmt: skip
    assert made.run.cost.scoring == EPOCHS * N


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loss_function_of_the_trainer(accumulate, tmp_path):
    found = []
    for method, own in ((None, {}), (thresher.FullData(), {"with_per_position": weighted})):
        made = trainer(tmp_path, method, gradient_accumulation_steps=accumulate, optim="sgd", learning_rate=0.3,
                       with_compute_loss_func=weighted_loss, **own)  # fmt: skip
        made.train()
        assert made.compute_loss_func is weighted_loss
        found.append(made.model.state_dict())
    for parameter, value in found[1].items():
        torch.testing.assert_close(value, found[0][parameter], rtol=1e-4, atol=1e-5)


class WithoutLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(WORDS, 2)

    def forward(self, input_ids, attention_mask):
        return {"logits": self.net(input_ids).mean(1)}


@pytest.mark.parametrize("name", ["tokens", "segments"])
def test_batches_without_a_position_that_counts(name, tmp_path):
    found = []
    for method in (None, thresher.FullData()):
        data = Rows(KINDS[name][0])
        data.parts["labels"][:41] = 255 if name == "segments" else -100
        found.append(
            trained(
                tmp_path, name, 4, method, with_train_dataset=data, optim="sgd"
            ).model.state_dict()
        )
    for parameter, value in found[1].items():
        torch.testing.assert_close(value, found[0][parameter], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_full_training_with_another_loss_says_what_it_records(accumulate, tmp_path):
    """The first batch, which has one class, does not show the class weights."""
    settings = {"gradient_accumulation_steps": accumulate}
    made = trainer(tmp_path, thresher.FullData(), of=SelectedWeighted, **settings)
    with pytest.warns(UserWarning, match="run.records and mean_loss are of the cross-entropy"):
        made.train()
    plain = trainer(tmp_path, of=Weighted, **settings)
    plain.train()
    assert_same(made.model.state_dict(), plain.model.state_dict())


def of_dictionary(outputs, labels):
    return ones(F.cross_entropy(outputs["logits"], labels, reduction="none"))


@pytest.mark.parametrize("losses", [half_weighted, weighted])
def test_full_training_compares_the_losses_too(losses, tmp_path):
    """Without the weights in its `compute_loss`, Trainer would train without them."""
    made = trainer(tmp_path, thresher.FullData(), with_per_position=losses)
    with pytest.raises(ValueError, match="would train another loss. .*class_weights"):
        made.train()


@pytest.mark.parametrize(
    ("losses", "settings", "match"),
    [
        (
            half_weighted,
            {},
            "the mean loss of per_position= is .* would train another loss. .*class_weights",
        ),
        (
            half_weighted,
            {"of": SelectedWeighted},
            "the mean loss of per_position= is .* would train another loss",
        ),
        (weighted, {}, "would train another loss. .*by compute_loss_func= or its compute_loss"),
        (
            of_dictionary,
            {"net": WithoutLoss(), "remove_unused_columns": False},
            "has no loss of its own .*'labels'.*compute_loss_func=",
        ),
        (
            None,
            {"of": SelectedWeighted},
            "compute_loss of SelectedWeighted does not call .* class_weights",
        ),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_another_loss_is_refused(losses, settings, match, accumulate, tmp_path):
    """Also where the first batch, which has one class, does not show it."""
    made = trainer(
        tmp_path,
        thresher.InfoBatch(),
        with_per_position=losses,
        gradient_accumulation_steps=accumulate,
        **settings,
    )
    with pytest.raises(ValueError, match=match):
        made.train()
    assert made.state.global_step < 4


class Twice(DataCollatorWithFlattening):
    """Two rows of each sample."""

    def __call__(self, rows, *args, **kwargs):
        batch = transformers.default_data_collator(rows)
        return {name: torch.cat([value, value]) for name, value in batch.items()}


@pytest.mark.parametrize("collator", [DataCollatorWithFlattening(), Twice()])
@pytest.mark.filterwarnings("ignore:collate_fn")
def test_rows_that_are_no_samples(collator, tmp_path):
    made = trainer(
        tmp_path,
        0.5,
        causal=True,
        net=model(causal=True, n_positions=40),
        with_data_collator=collator,
    )
    with pytest.raises(
        AttributionError,
        match="rows of the batch are not samples.*Use a data_collator that pads: DataCollatorWithFlattening",
    ):
        made.train()


class Plain(thresher.transformers.Selection, transformers.Trainer):
    pass


class Untraceable(nn.Module):
    """A model that reads a value, so it can't be traced: SelectiveBackprop scores in passes of its own from epoch 2 on."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x, labels=None):
        logits = self.head(x)
        logits = logits * 1.0 if logits.sum().item() < torch.inf else logits
        return (
            {"logits": logits}
            if labels is None
            else {"loss": F.cross_entropy(logits, labels), "logits": logits}
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_cannot_be_traced_trains_with_fewer_batches_from_the_second_epoch_on(tmp_path):
    torch.manual_seed(0)
    data = [{"x": x, "labels": int(x[0] > 0)} for x in torch.randn(96, 8)]
    settings = {"per_device_train_batch_size": 16, "num_train_epochs": 3}
    method = thresher.SelectiveBackprop(keep=0.5)
    made = trainer(
        tmp_path, method, of=Plain, net=Untraceable(), with_train_dataset=data, **settings
    )
    made.train()
    assert [entry["steps"] for entry in made.run.history] == [6, 3, 3]
    assert made.state.global_step == 12 and set(made.lr_scheduler.get_last_lr()) == {0}
