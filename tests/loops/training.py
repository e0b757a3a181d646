"""Runs a drawn loop with or without the library, and keeps a book of it."""

import copy
import itertools
import random

import torch
import torch.nn.functional as F
from tests.loops.book import Book
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import thresher

B, D, T, C, EPOCHS, MORE = 4, 8, 3, 3, 3, 2
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0])


class Samples(Dataset):
    def __init__(self, spec):
        generator = torch.Generator().manual_seed(0)
        n = spec["rows"]
        tokens = (T,) if spec["task"] == "tokens" else ()
        self.x = torch.randn(n, *tokens, D, generator=generator)
        self.y = {
            "classes": lambda: torch.randint(C, (n,), generator=generator),
            "tokens": lambda: torch.randint(C, (n, T), generator=generator),
            "regression": lambda: torch.randn(n, generator=generator),
            "labels": lambda: torch.randint(2, (n, C), generator=generator).float(),
        }[spec["task"]]()
        if spec["task"] == "tokens":
            self.y[torch.arange(n) % 3 == 1, 1] = -100
        self.form = spec["batch"]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x, y = self.x[i], self.y[i]
        return {"dict": {"x": x, "y": y, "i": i}, "pair and ids": ((x, y), i)}.get(
            self.form, (x, y, i)
        )

    def parts(self, batch):
        """Returns inputs, targets and ids of a batch."""
        if self.form == "dict":
            return batch["x"], batch["y"], batch["i"]
        return (*batch[0], batch[1]) if self.form == "pair and ids" else batch


def own_collate(samples):
    return default_collate(samples)


def loader_of(spec, data):
    n = len(data)
    generator = torch.Generator().manual_seed(5)
    settings = {
        "shuffle": lambda: {"shuffle": True},
        "in order": dict,
        "generator": lambda: {"shuffle": True, "generator": generator},
        "replacement": lambda: {"sampler": RandomSampler(data, replacement=True, num_samples=n)},
        "weighted": lambda: {"sampler": WeightedRandomSampler(torch.arange(1, n + 1), n)},
        "subset": lambda: {"sampler": SubsetRandomSampler(range(3, n))},
        "own": lambda: {"sampler": [*range(0, n, 2), *range(1, n, 2)]},
        "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(data), B, False)},
        "Shuffle": lambda: {"sampler": thresher.Shuffle(data, seed=3)},
    }[spec["sampler"]]()
    if "batch_sampler" not in settings:
        settings |= {"batch_size": B, "drop_last": spec["drop_last"]}
    collate = own_collate if spec["collate"] == "own" else None
    return DataLoader(data, num_workers=spec["workers"], collate_fn=collate, **settings)


class Net(nn.Module):
    """A small network. The gradient of `probe[i]` shows whether sample i had a part in a backward pass."""

    def __init__(self, spec):
        super().__init__()
        outputs = 1 if spec["task"] == "regression" else C
        self.probe = nn.Parameter(torch.zeros(spec["rows"] + MORE))
        self.body = nn.Linear(D, D)
        self.head, self.second = nn.Linear(D, outputs), nn.Linear(D, outputs)
        kinds = {"dropout": nn.Dropout(0.1), "batch norm": nn.BatchNorm1d(D), "tanh": nn.Tanh()}
        self.between = kinds.get(spec["model"], nn.Identity())
        self.heads = 2 if spec["model"] == "two heads" else 1

    def forward(self, x, i):
        h = self.body(x + self.probe[i].view(-1, *[1] * (x.dim() - 1)))
        if isinstance(self.between, nn.BatchNorm1d) and h.dim() == 3:
            h = self.between(h.mT).mT
        else:
            h = self.between(h)
        return (self.head(h), self.second(h)) if self.heads == 2 else self.head(h)


METHODS = {
    "FullData": thresher.FullData,
    "observe": thresher.FullData,
    "0.5": lambda: 0.5,
    "uniform": lambda: thresher.UniformSubset(0.5),
    "infobatch": thresher.InfoBatch,
    "kakurenbo": lambda: thresher.Kakurenbo(max_fraction=0.4, tau=0.0),
    "selective": lambda: thresher.SelectiveBackprop(keep=0.5),
    "selective twice": lambda: thresher.SelectiveBackprop(keep=0.5),
    "uniform rows": lambda: thresher.UniformRows(0.5),
}


class Training:
    """A loop of some features.

    Args:
        spec: The features.
        library: Whether the loop is attached to a run.
    """

    def __init__(self, spec, *, library):
        self.spec = spec
        self.data = Samples(spec)
        torch.manual_seed(1)
        self.model = Net(spec).train(spec["model"] != "evaluation")
        others = [p for name, p in self.model.named_parameters() if name != "probe"]
        # With a rate of 0, the probe stays 0, and is cleared with the other gradients.
        self.optimizer = torch.optim.SGD(
            [{"params": others}, {"params": [self.model.probe], "lr": 0.0}], 0.01, momentum=0.5
        )
        self.loss_module = self._criterion()
        self.book = Book(len(self.data))
        self.probed = torch.zeros(len(self.data), dtype=torch.int64)
        self.order: list[list[list[int]]] = []
        self.epoch = self.batches = 0
        self.far = 0.0
        loader = loader_of(spec, self.data)
        self.run = self._attach(loader) if library else None
        self.loader = self.run.loader if self.run else loader
        self.call = self.run.model if self.run else self.model
        self.criterion = self.run.criterion if self.run else self.loss_module

    def _criterion(self):
        if self.spec["task"] == "regression":
            return nn.MSELoss()
        if self.spec["task"] == "labels":
            return nn.BCEWithLogitsLoss()
        settings = {
            "smoothed": {"label_smoothing": 0.1},
            "class weights": {"weight": CLASS_WEIGHTS},
            "unreduced": {"reduction": "none"},
        }
        return nn.CrossEntropyLoss(**settings.get(self.spec["criterion"], {}))

    def _attach(self, loader):
        name = self.spec["method"]
        settings = {"forward_passes": "once" if name == "selective" else "twice"}
        settings = settings if name in ("selective", "selective twice") else {}

        def forward(model, batch):
            x, y, i = self.data.parts(batch)
            outputs = model(x, i)
            return self._form(outputs[0] if isinstance(outputs, tuple) else outputs, y)

        return thresher.attach(
            METHODS[name](),
            loader=loader,
            criterion=self.loss_module,
            model=self.model,
            optimizer=self.optimizer if self.spec["optimizer"] else None,
            epochs=EPOCHS,
            forward=forward,
            observe=name == "observe",
            **settings,
        )

    # One loss

    def _form(self, outputs, targets):
        """Returns outputs and targets in the form that the criterion gets."""
        if self.spec["task"] == "regression":
            outputs = outputs.squeeze(-1)
        if self.spec["form"] == "processed" and self.spec["task"] in ("classes", "tokens"):
            outputs = F.log_softmax(outputs, -1)  # changes no loss
        elif self.spec["form"] == "processed":
            outputs = outputs * 1.0
        if self.spec["task"] != "tokens":
            return outputs, targets
        if self.spec["form"] == "flattened":
            return outputs.flatten(0, 1), targets.flatten()
        return outputs.mT, targets

    def _values(self, outputs, targets):
        """Returns the loss of each row, shape (n,), NaN for rows without a label, by position, and which of these count."""
        task = self.spec["task"]
        if task == "regression":
            losses = (outputs.squeeze(-1) - targets) ** 2
        elif task == "labels":
            losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        else:
            smoothing = 0.1 if self.spec["criterion"] == "smoothed" else 0.0
            classes = outputs.movedim(-1, 1)
            losses = F.cross_entropy(classes, targets, reduction="none", label_smoothing=smoothing)
        valid = (
            torch.ones_like(losses) if task in ("regression", "labels") else (targets >= 0).float()
        )
        rows = losses.reshape(len(losses), -1)
        counts = valid.reshape(len(losses), -1)
        return (rows * counts).sum(1) / counts.sum(1), losses, valid

    def _loss(self, outputs, targets, ids):
        """Computes one loss in the way of the spec."""
        kind = self.spec["loss"]
        if "reduce" not in kind:
            options = {"ids": ids} if self.run and kind == "criterion ids=" else {}
            formed = self._form(outputs, targets)
            value = self.criterion(*formed, **options)
            return value.mean() if self.spec["criterion"] == "unreduced" else value
        _, losses, valid = self._values(outputs, targets)
        if not self.run:
            return (losses * valid).sum() / valid.sum()
        options = (
            {} if self.spec["task"] in ("classes", "regression", "labels") else {"valid": valid}
        )
        if kind == "reduce outputs=":
            formed, options["targets"] = self._form(outputs, targets)
            options["outputs"] = formed
        if kind == "reduce ids=":
            options["ids"] = ids
        return self.run.reduce(losses, **options)

    def _forward(self, x, y, ids, rows):
        """Makes one forward pass, and returns the sum of the losses of its heads with their entries in the book."""
        inputs, index = x, ids
        if self.spec["inputs"] == "made in the loop":
            inputs, index = x * 2 - 1, ids.clone()
        if self.spec["inputs"] == "more rows":
            more = torch.full((MORE, *x.shape[1:]), 0.5)
            inputs = torch.cat([x, more])
            index = torch.cat([ids, len(self.data) + torch.arange(MORE)])
        outputs = self.call(inputs, index)
        of_pass = self.book.passed(len(inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = (
            [one[: len(x)] for one in outputs] if self.spec["inputs"] == "more rows" else outputs
        )
        known = self.run.ids[rows] if self.run else ids
        total, entries = 0.0, []
        for one in outputs:
            total = total + self._loss(one, y, known)
            values = self._values(one, y)[0]
            entries.append(self.book.loss(self.batches, ids, rows.start or 0, values, of_pass))
        return total, entries, lambda: self._loss(outputs[0], y, known)

    def _losses(self, x, y, ids, rows=slice(None)):
        """Computes the loss of some rows, with the logs of the spec before it."""
        total, entries, log = self._forward(x, y, ids, rows)
        if self.spec["passes"] == "two":
            again, more, _ = self._forward(x, y, ids, rows)
            total, entries = total + again, entries + more
        if self.spec["log"] == "before backward":
            log()
        self._read("before backward")
        return total, entries, log

    def _backward(self, loss, entries, log, factor=1.0):
        (loss * factor).backward()
        self.book.backward(entries)
        if self.spec["log"] == "after backward":
            log()
        self._read("after backward")

    def _zero(self):
        self.optimizer.zero_grad()
        self.book.cleared()

    def _step(self):
        gradient = self.model.probe.grad
        if gradient is not None:
            self.probed += (gradient[: len(self.data)] != 0).long()
        self.optimizer.step()
        self.book.stepped()

    # One batch

    def _batch(self, number, x, y, ids):
        kind, zero = self.spec["step"], self.spec["zero"]
        hard = number % 3 == 1
        if kind == "closure":
            return self._closure(x, y, ids)
        if zero == "at the start" and kind != "accumulated":
            self._zero()
        reference = self._reference()
        if kind.startswith("made again") and hard:
            self._losses(x, y, ids)
        if kind == "in parts" or (kind == "made again in parts" and hard):
            log = self._in_parts(x, y, ids)
        else:
            loss, entries, log = self._losses(x, y, ids)
            if (kind == "skipped" and hard) or (kind == "skipped at the end" and self.epoch > 1):
                return None
            if zero == "before backward":
                self._zero()
            self._backward(loss, entries, log, 0.5 if kind == "accumulated" else 1.0)
            self._compare(reference, x, y, ids)
        if kind == "given up" and hard:
            return self._zero()
        if kind == "SAM":
            log = self._sam(x, y, ids)
        if kind == "accumulated" and number % 2 == 0:
            return None
        self._step()
        if zero == "after step" or kind == "accumulated":
            self._zero()
        if self.spec["log"] == "after step":
            log()
        return None

    def _in_parts(self, x, y, ids):
        log = None
        for half in torch.arange(len(x)).chunk(2):
            rows = slice(int(half[0]), int(half[-1]) + 1)
            loss, entries, log = self._losses(x[rows], y[rows], ids[rows], rows)
            self._backward(loss, entries, log, len(half) / len(x))
        return log

    def _sam(self, x, y, ids):
        moved = [(p, 0.05 * p.grad) for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, change in moved:
                parameter += change
        self._zero()
        loss, entries, log = self._losses(x, y, ids)
        self._backward(loss, entries, log)
        with torch.no_grad():
            for parameter, change in moved:
                parameter -= change
        return log

    def _closure(self, x, y, ids):
        def closure():
            self._zero()
            loss, entries, log = self._losses(x, y, ids)
            self._backward(loss, entries, log)
            self.probed += (self.model.probe.grad[: len(self.data)] != 0).long()
            return loss

        self.optimizer.step(closure)
        self.book.stepped()

    # The gradient of a method that leaves out or weights rows

    def _reference(self):
        spec = self.spec
        fits = (
            self.run
            and spec["step"] == "plain"
            and (spec["passes"], spec["log"], spec["inputs"]) == ("one", "none", "as they are")
            and spec["model"] != "two heads"
            and spec["criterion"] != "unreduced"
        )
        return (copy.deepcopy(self.model), torch.get_rng_state()) if fits else None

    def _compare(self, reference, x, y, ids):
        """Notes how far the gradients are from those of the rows with a part in the backward pass, with their weights."""
        if reference is None:
            return
        model, state = reference
        model.zero_grad()
        kept = self.model.probe.grad[ids] != 0
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            outputs = model(x, ids)
        means, _, valid = self._values(outputs, y)
        shares = valid.reshape(len(x), -1)
        if self.spec["criterion"] == "class weights":
            shares = shares * CLASS_WEIGHTS[y.clamp(min=0)].reshape(len(x), -1)
            weighted = F.cross_entropy(
                outputs.movedim(-1, 1), y, weight=CLASS_WEIGHTS, reduction="none"
            )
            means = weighted.reshape(len(x), -1).sum(1) / shares.sum(1)
        shares = shares.sum(1)
        weights = torch.ones(len(x))
        plan = self.run.plan
        if plan.weights is not None:
            table = torch.ones(len(self.data))
            table[plan.ids] = plan.weights
            weights = table[ids]
        # A weighted mean of classes stays one: its weights are divided by their sum.
        by_class = self.spec["criterion"] == "class weights"
        divisor = (weights * shares if by_class else shares)[kept].sum()
        (weights * shares * means)[kept].sum().div(divisor).backward()
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            if theirs.grad is None:
                continue
            scale = theirs.grad.abs().max().clamp(min=1e-3)
            self.far = max(self.far, float((ours.grad - theirs.grad).abs().max() / scale))

    # The whole

    def _read(self, when):
        if not self.run or self.spec["when"] != when or random.Random(self.epoch).random() < 0.3:
            return
        {
            "nothing": lambda: None,
            "records": lambda: self.run.records.get("loss"),
            "trained": lambda: self.run.trained,
            "cost": lambda: str(self.run.cost),
            "length": lambda: len(self.run.loader),
            "state": lambda: self.run.state_dict(),
            "summary": lambda: self.run.summary(),
        }[self.spec["read"]]()

    def _batches(self):
        loader, form = self.loader, self.spec["loop"]
        if form == "islice":
            yield from itertools.islice(loader, len(loader))
        elif form == "next":
            batches = len(loader)
            iterator = iter(loader)
            for _ in range(batches):
                yield next(iterator)
        elif form == "zip":
            for _, batch in zip(range(len(loader)), loader):  # noqa: B905
                yield batch
        else:
            for number, batch in enumerate(loader):
                yield batch
                if form == "break" and number == 3:
                    break

    def train(self, stop=None):
        """Trains to the end, or up to `stop`: the number of an epoch, and of a batch in it or None for its end."""
        first = self.epoch
        for epoch in range(first, EPOCHS):
            self.epoch = epoch
            resumes = epoch == first and len(self.order) > epoch
            if not resumes:
                self.order.append([])
                self.book.begin_epoch()
            number = len(self.order[epoch])
            for batch in self._batches():
                x, y, ids = self.data.parts(batch)
                self.order[epoch].append(ids.tolist())
                self.batches += 1
                if self.spec["labels"] != "all" and epoch:
                    y = y.clone()
                    y[1:][ids[1:] % 2 == 0] = -100
                self._batch(number, x, y, ids)
                self._read("after step")
                number += 1
                if stop == (epoch, number):
                    return
            if stop == (epoch, None):
                self.epoch = epoch + 1
                return
        if self.run:
            self.run.detach()
        self.book.close()

    def state(self):
        """Returns what a script saves."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "run": self.run.state_dict(),
                "own": (self.book, self.probed, self.order, self.epoch, self.batches),
            }
        )

    def load(self, state):
        """Goes on from a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.run.load_state_dict(state["run"])
        self.book, self.probed, self.order, self.epoch, self.batches = state["own"]
        assert self.run.epoch == self.epoch
