"""Trainer trains on a choice of samples, as a plain loop with `thresher.attach` does."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding, TrainerCallback, default_data_collator

import thresher
from depth import depth, in_verify
from helpers import assert_same
from transformers_cases import (
    BATCH,
    EPOCHS,
    FULL,
    METHODS,
    WORDS,
    N,
    Sentences,
    model,
    outcome,
    trainer,
)

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.mark.parametrize(
    ("causal", "accumulate"),
    depth(
        [(False, 1), (True, 3)], [(causal, every) for causal in (False, True) for every in (1, 3)]
    ),
)
def test_full_data_changes_nothing(causal, accumulate, tmp_path):
    settings = {"gradient_accumulation_steps": accumulate, "eval_strategy": "epoch"}
    found = []
    for method in (None, thresher.FullData()):
        made = trainer(tmp_path, method, causal, **settings)
        made.train()
        found.append((outcome(made), made.rates, made.evaluated, made.seen))
    assert_same(found[1], found[0])
    assert made.lr_scheduler.get_last_lr() == [0, 0]
    assert not list(tmp_path.iterdir())


class LeavesEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.global_step == 2


def test_full_data_changes_nothing_in_an_epoch_that_ends_early(tmp_path):
    found = []
    for method in (None, thresher.FullData()):
        made = trainer(tmp_path, method)
        made.add_callback(LeavesEpoch())
        made.train()
        found.append((outcome(made), made.rates, made.seen))
    assert_same(found[1], found[0])
    assert made.state.global_step < EPOCHS * FULL


@pytest.mark.parametrize("method", [None, "full_data", "uniform_subset"])
def test_the_model_notices_only_the_passes_that_train(method, tmp_path):
    net = model(causal=True)

    class Counting(type(net)):
        calls = 0

        @functools.wraps(type(net).forward)  # Trainer gives it the inputs that its signature names
        def forward(self, *args, **kwargs):
            self.calls += 1
            return super().forward(*args, **kwargs)

    Counting.__name__ = type(net).__name__  # transformers chooses the loss by it
    net.__class__ = Counting
    method = {"full_data": thresher.FullData(), "uniform_subset": thresher.UniformSubset(0.5)}.get(
        method
    )
    made = trainer(tmp_path, method, True, net=net)
    made.train()
    assert net.calls == made.state.global_step > 0


def by_hand(folder, method, accumulate):
    """The same training of the classification as a plain loop; Trainer adds the means of its micro-batches up."""
    made = trainer(folder, gradient_accumulation_steps=accumulate)
    net, loader, steps = made.model, made.get_train_dataloader(), EPOCHS * -(-FULL // accumulate)
    optimizer = made.create_optimizer()
    run = thresher.attach(
        method,
        loader=loader,
        model=net,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        epochs=EPOCHS,
        forward=lambda net, batch: (
            net(batch["input_ids"], batch["attention_mask"]).logits,
            batch["labels"],
        ),
    )
    scheduler, updates = run.pace(made.create_scheduler(steps), steps), []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        last = len(run.loader)
        for number, batch in enumerate(run.loader, 1):
            net.train()
            outputs = run.model(batch["input_ids"], batch["attention_mask"]).logits
            losses = F.cross_entropy(outputs, batch["labels"], reduction="none")
            run.reduce(losses, outputs=outputs, targets=batch["labels"]).backward()
            if number % accumulate == 0 or number == last:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        made.evaluate()  # its loader draws a random number
        updates.append(-(-last // accumulate))
    return net, run, updates


def without_forward(entry):
    """An entry of the history without its forward passes, of which those that compare losses differ."""
    return {name: value for name, value in entry.items() if name not in ("forward", "comparing")}


@pytest.mark.parametrize(("method", "accumulate"), depth([("infobatch", 3), ("kakurenbo", 3)],
                                                         [(name, every) for name in METHODS for every in (1, 3)]))  # fmt: skip
def test_equals_a_plain_loop(method, accumulate, tmp_path):
    method = METHODS[method]
    net, run, updates = by_hand(tmp_path, method, accumulate)
    made = trainer(tmp_path, method, gradient_accumulation_steps=accumulate, eval_strategy="epoch")
    made.train()
    for name, value in net.state_dict().items():
        assert torch.allclose(made.model.state_dict()[name], value, atol=1e-6), name
    assert [without_forward(entry) for entry in made.run.history] == [
        without_forward(entry) for entry in run.history
    ]
    assert made.run.cost.of_loop == run.cost.of_loop
    assert made.state.global_step == sum(updates) == made.run.cost.steps
    assert [step for _, step in made.evaluated] == torch.tensor(updates).cumsum(0).tolist()
    assert [epoch for epoch, _ in made.evaluated] == [1, 2, 3]
    assert made.left == [False] * EPOCHS
    assert made.lr_scheduler.get_last_lr() == [0, 0]
    assert type(made.lr_scheduler) is torch.optim.lr_scheduler.LambdaLR


@pytest.mark.parametrize("method", depth(["selective_backprop"], list(METHODS)))
def test_a_causal_model(method, tmp_path):
    accumulate = (
        1 if method == "selective_backprop" else 3
    )  # in one pass, rows of different lengths share no divisor
    made = trainer(
        tmp_path,
        METHODS[method],
        causal=True,
        gradient_accumulation_steps=accumulate,
        eval_strategy="epoch",
    )
    made.train()
    assert made.lr_scheduler.get_last_lr() == [0, 0]
    assert len(made.evaluated) == EPOCHS
    losses = made.run.records["loss"]
    assert losses.isfinite().all() and losses.min() > 0
    kept = sum(entry["kept"] for entry in made.run.history)
    of_batches = (
        EPOCHS * FULL
    )  # SelectiveBackprop keeps one of four rows, and of the one row of the last batch
    assert made.run.cost.backward == (
        of_batches if method == "selective_backprop" else kept if method != "winnow" else 3 * 22
    )


class OneStep(Sentences):
    """Two batches with as many words in each row of a batch, but not in each batch: 3 words, then 6."""

    def __init__(self):
        super().__init__(causal=True, n=2 * BATCH)
        self.words = torch.randint(
            3, WORDS, self.words.shape, generator=torch.Generator().manual_seed(5)
        )
        self.mask = torch.ones_like(self.words)
        self.labels = self.words.clone()
        self.labels[:BATCH, 3:], self.labels[BATCH:, 6:] = -100, -100


def test_in_one_pass_a_step_is_the_mean_over_the_labels_that_were_kept(tmp_path):
    data, net = OneStep(), model(causal=True, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    before = copy.deepcopy(net)
    made = trainer(tmp_path, thresher.BigLoss(keep=0.5), net=net, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
                   num_train_epochs=1, lr_scheduler_type="constant", gradient_accumulation_steps=2, with_train_dataset=data,
                   train_sampling_strategy="sequential")  # fmt: skip
    made.train()
    losses = F.cross_entropy(
        before(data.words).logits[:, :-1].mT, data.labels[:, 1:], reduction="none"
    )
    valid = data.labels[:, 1:] != -100
    means = (losses.sum(1) / valid.sum(1)).view(2, BATCH)
    kept = (means.topk(2, dim=1).indices + torch.tensor([[0], [BATCH]])).flatten()
    (
        losses[kept].sum() / (data.labels[kept] != -100).sum()
    ).backward()  # Trainer counts the first words, too
    for old, new in zip(before.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(new, old - old.grad, rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_sample_is_the_mean_over_its_words(tmp_path):
    made = trainer(
        tmp_path,
        thresher.FullData(),
        causal=True,
        learning_rate=0.0,
        num_train_epochs=1,
        weight_decay=0.0,
    )
    made.model.eval()
    made.model.train = lambda mode=True: made.model  # no dropout
    made.train()
    data = Sentences(causal=True)
    with torch.no_grad():
        logits = made.model(data.words, attention_mask=data.mask).logits[:, :-1]
    losses = F.cross_entropy(logits.mT, data.labels[:, 1:], reduction="none")
    expected = losses.sum(1) / (data.labels[:, 1:] != -100).sum(1)
    assert torch.allclose(made.run.records["loss"], expected, atol=1e-5)


def tokens_by_hand(folder, method, tokens):
    """The same training of the causal model as a plain loop; Trainer counts the first words among the total, too."""
    made = trainer(folder, causal=True)
    net, loader, optimizer = made.model, made.get_train_dataloader(), made.create_optimizer()
    steps = EPOCHS * FULL
    run = thresher.attach(
        method, loader=loader, model=net, criterion=None, optimizer=optimizer, epochs=EPOCHS
    )
    scheduler = run.pace(made.create_scheduler(steps), steps)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for batch in run.loader:
            net.train()
            inputs, labels = (
                {name: batch[name] for name in ("input_ids", "attention_mask")},
                batch["labels"][:, 1:],
            )
            outputs, valid = run.model(**inputs).logits[:, :-1], labels != -100
            losses = F.cross_entropy(outputs.mT, labels, reduction="none")
            with torch.no_grad():
                known = F.cross_entropy(
                    tokens.reference(**inputs).logits[:, :-1].mT, labels, reduction="none"
                )
            keep, total = tokens.chosen(losses, valid, known), (batch["labels"] != -100).sum()
            run.reduce(losses, targets=labels, valid=valid, total=total, keep=keep).backward()
            run.cost.add_scores((len(labels), 0))
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return net, run


def test_token_selection(tmp_path):
    torch.manual_seed(3)
    tokens = thresher.TokenSelection(keep=0.4, reference=model(causal=True, n_embd=4))
    tokens.reference.eval()
    net, run = tokens_by_hand(tmp_path, METHODS["infobatch"], tokens)
    tokens.reference.train()
    made = trainer(tmp_path, [METHODS["infobatch"], tokens], causal=True)
    made.train()
    for name, value in net.state_dict().items():
        without_gradient = name.endswith(
            "c_attn.bias"
        )  # that of the keys, whose rounding errors Adam makes large
        assert without_gradient or torch.allclose(
            made.model.state_dict()[name], value, atol=1e-5
        ), name
    assert torch.allclose(made.run.records["loss"], run.records["loss"], atol=1e-4)
    counted = ("of_loop", "backward", "scoring", "steps")
    assert [getattr(made.run.cost, one) for one in counted] == [
        getattr(run.cost, one) for one in counted
    ]


@in_verify
@pytest.mark.parametrize("accumulate", [1, 3])
def test_tokens_that_are_all_kept(accumulate, tmp_path):
    plain = trainer(tmp_path, causal=True, gradient_accumulation_steps=accumulate)
    plain.train()
    tokens = thresher.TokenSelection(keep=1.0, reference=model(causal=True))
    made = trainer(tmp_path, tokens, causal=True, gradient_accumulation_steps=accumulate)
    made.train()
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(made.model.state_dict()[name], value, atol=1e-5), name
    cost = made.run.cost
    assert (
        cost.backward
        == cost.full_backward
        == cost.scoring
        == (cost.forward - cost.comparing) / 2
        == EPOCHS * N
    )


@pytest.mark.parametrize("strategy", depth(["steps"], ["steps", "no"]))
def test_the_end_of_a_shorter_training(strategy, tmp_path):
    """Trainer evaluates and saves at the last step; it would not know which it is."""
    settings = {
        "eval_strategy": strategy,
        "save_strategy": strategy,
        "eval_steps": 1000,
        "save_steps": 1000,
    }
    made = trainer(tmp_path, thresher.UniformSubset(keep=0.5), **settings)
    made.train()
    assert made.state.global_step == EPOCHS * 6 < made.state.max_steps
    assert made.state.epoch == EPOCHS
    assert made.evaluated == ([(EPOCHS, EPOCHS * 6)] if strategy == "steps" else [])
    assert [path.name for path in tmp_path.iterdir()] == (
        ["checkpoint-18"] if strategy == "steps" else []
    )


def test_forward_passes_before_the_loop(tmp_path):
    settings = {"forward_passes": "twice", "seed": 3}
    made = trainer(
        tmp_path, METHODS["selective_backprop"], causal=True, with_selection_settings=settings
    )
    made.train()
    assert made.run.cost.scoring == EPOCHS * N
    assert made.lr_scheduler.get_last_lr() == [0, 0]


@in_verify
def test_scheduler_by_a_metric_and_one_of_the_user(tmp_path):
    settings = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "epoch",
        "lr_scheduler_kwargs": {"patience": 0},
    }
    made = trainer(tmp_path, METHODS["infobatch"], **settings)
    made.train()
    assert type(made.lr_scheduler) is torch.optim.lr_scheduler.ReduceLROnPlateau
    assert made.lr_scheduler.last_epoch == EPOCHS
    net = model(causal=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * FULL)
    made = trainer(tmp_path, METHODS["infobatch"], net=net, with_optimizers=(optimizer, scheduler))
    made.train()
    assert made.lr_scheduler is scheduler
    assert scheduler.last_epoch == EPOCHS * FULL


@in_verify
def test_a_second_training_and_an_evaluation(tmp_path):
    made = trainer(tmp_path, METHODS["kakurenbo"])
    with pytest.raises(AttributeError, match="no training has begun"):
        _ = made.run
    assert not hasattr(made, "run")
    before = made.evaluate()["eval_loss"]
    runs = []
    for _ in range(2):
        made.train()
        runs.append(made.run)
        assert len(made.run.history) == EPOCHS
    assert runs[0] is not runs[1]
    assert made.evaluate()["eval_loss"] != before
    assert made.compute_loss_func is None


@in_verify
def test_other_collate_functions(tmp_path):
    made = trainer(
        tmp_path, METHODS["infobatch"], with_data_collator=lambda rows: BatchEncoding(default_data_collator(rows)),
        dataloader_drop_last=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    made.train()
    assert made.state.epoch == EPOCHS
    assert set(made.seen) == {4}


class Lengths(Sentences):
    """A regression of the number of words."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row | {"labels": row["attention_mask"].sum().float()}


def squares(outputs, labels):
    losses = F.mse_loss(outputs.logits.squeeze(-1), labels, reduction="none")
    return losses, torch.ones_like(losses, dtype=torch.bool)


@pytest.mark.parametrize("accumulate", depth([1], [1, 3]))
def test_losses_of_the_user(accumulate, tmp_path):
    found = []
    data = {"with_train_dataset": Lengths(causal=False), "gradient_accumulation_steps": accumulate}
    for method, own in ((None, {}), (thresher.FullData(), {"with_per_position": squares})):
        made = trainer(tmp_path, method, net=model(causal=False, num_labels=1), **data, **own)
        made.train()
        found.append(made.model.state_dict())
    if accumulate == 1:
        for name, value in found[0].items():
            assert torch.allclose(found[1][name], value, atol=1e-5), name
    net = model(causal=False, num_labels=1)
    settings = {
        "with_per_position": squares,
        "with_selection_settings": {"forward_passes": "twice"},
    }
    made = trainer(tmp_path, METHODS["selective_backprop"], net=net, **settings, **data)
    made.train()
    assert made.run.cost.scoring == EPOCHS * N


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_has_one_forward_pass_and_no_fall_back(causal, tmp_path):
    trained = trainer(tmp_path, thresher.SelectiveBackprop(keep=0.5), causal, bf16=True)
    trained.train()
    run = trained.run
    assert run.model.module.fallback is None
    assert run.cost.forward - run.cost.comparing == run.cost.full_forward == EPOCHS * N
    assert run.cost.backward == EPOCHS * ((N // BATCH) * (BATCH // 2) + N % BATCH)


COUNTED = {
    "full": thresher.FullData(),
    "half": 0.5,
    "infobatch": METHODS["infobatch"],
    "kakurenbo": METHODS["kakurenbo"],
    "selective_backprop": thresher.SelectiveBackprop(keep=0.5),
    "uniform rows": thresher.UniformRows(keep=0.5),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "passes"), [*((name, "auto") for name in COUNTED), ("selective_backprop", "twice")]
)
def test_a_hook_counts_what_the_cost_says(name, passes, tmp_path):
    """Each forward pass of the model counts, also those that compare losses; FullData makes none of these."""
    settings = {} if passes == "auto" else {"with_selection_settings": {"forward_passes": passes}}
    made = trainer(tmp_path, COUNTED[name], causal=True, **settings)
    rows = []
    made.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, outputs: rows.append(len(outputs))
    )
    made.train()
    assert made.run.cost.forward == sum(rows)
    assert made.run.cost.comparing <= 4 * BATCH
    assert name != "full" or made.run.cost.comparing == 0


def test_full_data_is_the_plain_trainer_bit_for_bit_with_label_smoothing(tmp_path):
    """The loss is the trainer's own, not one that is equal up to rounding."""
    plain = trainer(tmp_path, causal=True, label_smoothing_factor=0.1)
    plain.train()
    made = trainer(tmp_path, thresher.FullData(), causal=True, label_smoothing_factor=0.1)
    made.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(made.model.state_dict()[name], value), name
