"""The loops of scripts with sequences: language models, taggers, translation, speech."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from scripts.kit import B, Dicts, Kit, N, normal, script, whole

T, WORDS = 6, 11
TOKENS, TAGS, KIND = whole(WORDS, N, T), whole(4, N, T, seed=1), whole(3, N, seed=2)
LENGTHS = whole(T - 2, N, seed=3) + 3


class Tagger(nn.Module):
    """An LSTM over (T, B) tokens, as in the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(WORDS, 8), nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0])


def _time_first(samples):
    tokens, tags = torch.utils.data.default_collate(samples)
    return tokens.T.contiguous(), tags.T.contiguous()


@script(
    "pytorch tutorials: a tagger with the time first",
    lambda model: F.cross_entropy(model(TOKENS.T).permute(1, 2, 0), TAGS, reduction="none").mean(1),
    note="the samples first in the loss, `logits.permute(1, 2, 0)` and `tags.T`, and `ids=run.ids`",
    rows=lambda tokens: tokens.shape[1],
)
def time_first(kit: Kit) -> None:
    model = Tagger()
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(TOKENS, TAGS), B, shuffle=True, collate_fn=_time_first)
    run = kit.attach(
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0]).permute(1, 2, 0), batch[1].T),
    )
    for _ in range(kit.epochs):
        for tokens, tags in run.loader:
            optimizer.zero_grad()
            logits = run.model(tokens)
            loss = run.criterion(logits.permute(1, 2, 0), tags.T, ids=run.ids)
            loss.backward()
            optimizer.step()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(WORDS, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(states[torch.arange(len(tokens)), lengths - 1])


def _by_length(samples):
    tokens, lengths, kind, index = torch.utils.data.default_collate(samples)
    order = lengths.argsort(descending=True, stable=True)
    return tokens[order], lengths[order], kind[order], index[order]


def _packed_losses(model):
    order = LENGTHS.argsort(descending=True)
    losses = F.cross_entropy(model(TOKENS[order], LENGTHS[order]), KIND[order], reduction="none")
    return losses[order.argsort()]


@script(
    "sequence classifiers with pack_padded_sequence: a collate function that sorts by length",
    _packed_losses,
    note="the dataset returns the index, and `ids=index`",
    refused={"kakurenbo": "sorts or mixes"},
)
def packed(kit: Kit) -> None:
    model = Classifier()
    optimizer = kit.sgd(model)
    data = TensorDataset(TOKENS, LENGTHS, KIND, torch.arange(N))
    loader = DataLoader(data, B, shuffle=True, collate_fn=_by_length)
    run = kit.attach(
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0], batch[1]), batch[2]),
    )
    for _ in range(kit.epochs):
        for tokens, lengths, kind, index in run.loader:
            optimizer.zero_grad()
            loss = run.criterion(run.model(tokens, lengths), kind, ids=index)
            loss.backward()
            optimizer.step()


class GPT(nn.Module):
    """As minGPT and nanoGPT: returns logits, and the loss where there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 16), nn.Parameter(torch.zeros(T, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.head(
            self.block(self.embed(idx) + self.place[: idx.shape[1]], src_mask=mask, is_causal=True)
        )
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def _gpt_losses(model):
    return F.cross_entropy(model(TOKENS[:, :-1])[0].mT, TOKENS[:, 1:], reduction="none").mean(1)


@script(
    "karpathy/minGPT: trainer.py without its endless sampler",
    _gpt_losses,
    note="logits without the model's loss, and `run.criterion(logits.flatten(0, 1), y.flatten())`",
)
def mingpt(kit: Kit) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), kit.rate, weight_decay=0)
    loader = DataLoader(TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:]), B, shuffle=True)
    run = kit.attach(
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0])[0].flatten(0, 1), batch[1].flatten()),
    )
    for _ in range(kit.epochs):
        for x, y in run.loader:
            logits, _ = run.model(x)
            loss = run.criterion(logits.flatten(0, 1), y.flatten())
            model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


@script(
    "karpathy/minGPT: trainer.py with its endless sampler",
    None,
    note="an epoch of 10^10 drawn samples: pass `shuffle=True` instead",
    refused={"kakurenbo": "", "half": "sets another order"},
)
def mingpt_endless(kit: Kit) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), kit.rate)
    data = TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:])
    loader = DataLoader(data, B, sampler=RandomSampler(data, replacement=True, num_samples=10**10))
    run = kit.attach(
        loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer
    )
    batches = iter(run.loader)
    for _ in range(18):
        x, y = next(batches)
        logits, _ = run.model(x)
        loss = run.criterion(logits.flatten(0, 1), y.flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


class Bert(nn.Module):
    """As a sequence classifier of Transformers: keyword arguments, and an output with `loss` and `logits`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, 3)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.out(
            self.block(self.embed(input_ids), src_key_padding_mask=attention_mask == 0).mean(1)
        )
        return {
            "loss": None if labels is None else F.cross_entropy(logits, labels),
            "logits": logits,
        }


MASK = (torch.arange(T) < LENGTHS[:, None]).long()


@script(
    "transformers: run_glue_no_trainer.py",
    lambda model: F.cross_entropy(model(TOKENS, MASK)["logits"], KIND, reduction="none"),
    note="`run.criterion(outputs.logits, labels)` instead of `outputs.loss`; `forward=` for passes that Thresher adds",
)
def glue(kit: Kit) -> None:
    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), kit.rate, weight_decay=0)
    loader = DataLoader(Dicts(input_ids=TOKENS, attention_mask=MASK, labels=KIND), B, shuffle=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (6 * 3))
    run = kit.attach(
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (
            model(batch["input_ids"], batch["attention_mask"])["logits"],
            batch["labels"],
        ),
    )
    schedule = run.pace(schedule, total=18)
    for _ in range(kit.epochs):
        for batch in run.loader:
            labels = batch.pop("labels")
            outputs = run.model(**batch)
            loss = run.criterion(outputs["logits"], labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, x):
        return F.log_softmax(self.out(self.lstm(x)[0]), 2)


SOUND, TEXT = normal(N, 12, 5, seed=4), whole(WORDS - 1, N, 4, seed=5) + 1


def _ctc(log_probs, text):
    n = len(text)
    return F.ctc_loss(
        log_probs.transpose(0, 1), text, torch.full((n,), 12), torch.full((n,), 4), reduction="none"
    )


@script(
    "assemblyai: Deep Speech with CTCLoss",
    lambda model: _ctc(model(SOUND), TEXT),
    note="`reduction='none'` and `run.reduce(losses, ids=run.ids)`",
    refused={"kakurenbo": "criterion"},
)
def speech(kit: Kit) -> None:
    model = Speech()
    optimizer = torch.optim.AdamW(model.parameters(), kit.rate, weight_decay=0)
    loader = DataLoader(TensorDataset(SOUND, TEXT), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=None, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for sound, text in run.loader:
            optimizer.zero_grad()
            loss = run.reduce(_ctc(run.model(sound), text), ids=run.ids)
            loss.backward()
            optimizer.step()


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.out(self.net(self.embed(source), self.embed(target), tgt_mask=mask))


TARGET = torch.where(torch.arange(T) < LENGTHS[:, None], whole(WORDS - 1, N, T, seed=6) + 1, 0)


def _translation_losses(model):
    losses = F.cross_entropy(
        model(TOKENS, TARGET[:, :-1]).mT, TARGET[:, 1:], ignore_index=0, reduction="none"
    )
    return losses.sum(1) / (TARGET[:, 1:] != 0).sum(1)


@script(
    "pytorch tutorials: translation with nn.Transformer, padding ignored",
    _translation_losses,
    note="`forward=` for passes that Thresher adds",
)
def translation(kit: Kit) -> None:
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(TOKENS, TARGET), B, shuffle=True)
    run = kit.attach(
        loader=loader,
        criterion=nn.CrossEntropyLoss(ignore_index=0),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (
            model(batch[0], batch[1][:, :-1]).mT,
            batch[1][:, 1:],
        ),
    )
    for _ in range(kit.epochs):
        for source, target in run.loader:
            logits = run.model(source, target[:, :-1])
            optimizer.zero_grad()
            loss = run.criterion(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()


PAIRS = whole(WORDS, N, T, seed=7), whole(WORDS, N, T, seed=8)


def _log_ratios(model, chosen, rejected):
    """Log-probability of each chosen text minus that of the rejected one, from one forward pass of all of them."""
    texts = torch.cat([chosen, rejected])
    losses = F.cross_entropy(model(texts[:, :-1])[0].mT, texts[:, 1:], reduction="none").sum(1)
    return losses[len(chosen) :] - losses[: len(chosen)]


def _reference():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return GPT().eval()


def _dpo_losses(model):
    return -F.logsigmoid(0.1 * (_log_ratios(model, *PAIRS) - _log_ratios(_reference(), *PAIRS)))


@script(
    "eric-mitchell/direct-preference-optimization: trainers.py, the loss of DPO",
    _dpo_losses,
    note="`run.reduce(losses, ids=run.ids)` instead of `losses.mean()`",
    refused={"kakurenbo": "criterion"},
)
def dpo(kit: Kit) -> None:
    model, reference = GPT(), _reference()
    optimizer = torch.optim.RMSprop(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(*PAIRS), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=None, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for chosen, rejected in run.loader:
            with torch.no_grad():
                of_reference = _log_ratios(reference, chosen, rejected)
            ratios = _log_ratios(run.model, chosen, rejected) - of_reference
            loss = run.reduce(-F.logsigmoid(0.1 * ratios), ids=run.ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
