"""How well a data map finds wrong labels that people gave, and what training without the suspects changes.

`python -m benchmarks.people --cifar DIR --ratings FILE` trains with `thresher.observe` on labels by people, whose errors are
known from other people:

- CIFAR-10N (Wei et al., arXiv:2110.12088): 10,000 of the training images of CIFAR-10, drawn by the seed, with the labels by
  one person (random1), of the majority of three (aggregate), and with a wrong one of the three where there is one (worst). DIR
  has `cifar-10-batches-py` and a table `labels.csv` of the training images in their order, with the columns `clean`,
  `aggregate`, `random1` and `worst`, written from the published `CIFAR-10_human.pt`.
- The ratings of 23,703 tweets, snippets of reviews and sentences of news by 15 to 99 people each (Hutto and Gilbert, ICWSM
  2014): the label is the sign of the rating by one person, drawn by the seed; the right one is the most frequent sign. FILE is
  vaderSentiment-3.3.2.tar.gz (`pip download vaderSentiment==3.3.2 --no-binary :all: --no-deps`).

Decided before the first counted training: networks, epochs and rates, from one training each with another seed; seeds 0 to 4,
cross-validation and training again as in `Source`; and the only change that `suspicion` could get: `aum` takes its place if it
has the larger mean AUROC on three of four (the mean of the tasks of benchmarks.observe at 10 %, the texts, random1, worst) and
is behind by more than 0.01 on none.
"""

import argparse
import ast
import csv
import io
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from benchmarks import observe
from benchmarks.kept import add_line, pack, read_lines
from benchmarks.marks import between_marks
from thresher_lab.comparison.statistics import Paired
from thresher_lab.tasks import images
from thresher_lab.tasks.base import accuracy
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "people-runs.jsonl.gz"
PAGE = ROOT / "docs" / "evidence" / "wrong-labels.md"
MARKS = "<!-- tables of benchmarks.people -->", "<!-- end of the tables of people -->"
SEEDS = 5
FOLDS = 3
EARLY = 3
"""Epochs after which the data map is read for the first time."""
FIRST = 100
"""Number of suspects whose precision is measured, beside as many as labels are wrong."""
CIFAR_SAMPLES = 10_000
TEXT_DOMAINS = (
    "tweets",
    "movieReviewSnippets",
    "amazonReviewSnippets",
    "nytEditorialSnippets",
)
VOCABULARY, WORDS = 16_384, 64
"""Number of hashed words and pairs of words, and the largest number of them in a text."""


class Labeled(NamedTuple):
    """Samples with the labels that people gave, and test samples with right labels."""

    inputs: Tensor
    labels: Tensor
    right: Tensor
    test_inputs: Tensor
    test_labels: Tensor


class Text(nn.Module):
    """A linear classifier of the mean of embeddings; 0 in the input stands for no word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32, padding_idx=0)
        self.classes = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 3))

    def forward(self, words: Tensor) -> Tensor:
        """Returns the scores of the classes, shape (N, 3), of numbers of words, shape (N, WORDS)."""
        count = (words > 0).sum(1, keepdim=True).clamp(min=1)
        return self.classes(self.words(words).sum(1) / count.sqrt())


def image_network() -> nn.Module:
    """Returns a network of three convolutions for images of 3 x 32 x 32."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    widths = (3, 32, 64, 128)
    layers = [layer for pair in pairwise(widths) for layer in block(*pair)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


@dataclass(frozen=True)
class Source:
    """A set of labels by people, and how it is trained on.

    Args:
        load: Function of the folder or file and the seed, which returns the samples.
        network: Function that returns a new network.
        optimizer: Function of the parameters.
        lr: Largest learning rate of a one-cycle schedule.
        epochs: Number of epochs.
        augment: Function of a batch of inputs.
        validated: Number of seeds with a cross-validation.
        retrained: Number of seeds that train again.
    """

    load: Callable[[Path, int], Labeled]
    network: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    epochs: int
    augment: Callable[[Tensor], Tensor]
    validated: int
    retrained: int


@cache
def _cifar(folder: Path) -> tuple[images.Data, dict[str, NDArray[np.int64]]]:
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("clean", "aggregate", "random1", "worst")
    return images.CIFAR10.load(folder), {
        name: np.array([int(row[name]) for row in rows]) for name in names
    }


def cifar(column: str, folder: Path, seed: int) -> Labeled:
    """Returns images of CIFAR-10, drawn by the seed, with one column of the labels by people."""
    data, labels = _cifar(folder)
    drawn = np.random.default_rng(seed).permutation(len(labels["clean"]))[:CIFAR_SAMPLES]
    given, right = (torch.from_numpy(labels[name][drawn]) for name in (column, "clean"))
    pixels = data.train.tensors[0][torch.from_numpy(drawn)]
    return Labeled(pixels, given, right, data.test_inputs, data.test_targets)


def hashed_words(text: str) -> list[int]:
    """Returns the numbers of the words and pairs of words of a text, 1 to VOCABULARY - 1, and 0 to fill up."""
    words = re.findall(r"[a-z']+|[!?:;()]+", text.lower())
    parts = words + [" ".join(pair) for pair in pairwise(words)]
    numbers = [1 + zlib.crc32(part.encode()) % (VOCABULARY - 1) for part in parts[:WORDS]]
    return numbers + [0] * (WORDS - len(numbers))


@cache
def read_ratings(path: Path) -> tuple[list[str], list[list[int]]]:
    """Returns the texts, and the ratings of each by several people, -4 to 4."""
    with tarfile.open(path) as package:
        name = next(name for name in package.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        inner: Any = package.extractfile(name)
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as study:

            def columns(name: str) -> list[list[str]]:
                found: Any = study.extractfile(f"hutto_ICWSM_2014/{name}.txt")
                lines = found.read().decode(errors="replace").split("\n")
                return [line.split("\t") for line in lines if line.strip()]

            texts = [row[2] for of in TEXT_DOMAINS for row in columns(f"{of}_GroundTruth")]
            rated = [row[3] for of in TEXT_DOMAINS for row in columns(f"{of}_anonDataRatings")]
    return texts, [ast.literal_eval(row) for row in rated]


@cache
def _ratings(path: Path) -> tuple[Tensor, list[NDArray[np.int64]]]:
    """Returns the texts as hashed words, and the signs of their ratings plus 1: negative, neutral, positive."""
    texts, rated = read_ratings(path)
    signs = [np.sign(of).astype(np.int64) + 1 for of in rated]
    return torch.tensor([hashed_words(text) for text in texts]), signs


def ratings(path: Path, seed: int) -> Labeled:
    """Returns texts with the sign of the rating of one person each; every fifth is for the test."""
    inputs, signs = _ratings(path)
    generator = np.random.default_rng(seed)
    given = torch.tensor([int(generator.choice(of)) for of in signs])
    right = torch.tensor([int(np.bincount(of, minlength=3).argmax()) for of in signs])
    held = torch.arange(len(inputs)) % 5 == 4
    return Labeled(inputs[~held], given[~held], right[~held], inputs[held], right[held])


SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4)
SOURCES: Mapping[str, Source] = {
    **{
        f"CIFAR-10, {column}": Source(
            partial(cifar, column), image_network, SGD, 0.1, 10, images.CROPS, 2, 3
        )
        for column in ("aggregate", "random1", "worst")
    },
    "texts, one rater": Source(ratings, Text, torch.optim.Adam, 0.01, 8, nn.Identity(), 5, 5),
}


@dataclass(frozen=True)
class Job:
    """All trainings of a source with one seed.

    Args:
        source: Name of the source.
        seed: Seed of the drawn samples and raters, the networks and the batches.
    """

    source: str
    seed: int


def trained(
    source: Source, inputs: Tensor, labels: Tensor, seed: int, *, read_after: Sequence[int] = ()
) -> tuple[nn.Module, list[Any]]:
    """Trains a network; returns it, and the data maps that were read.

    Args:
        source: How to train.
        inputs: Inputs, shape (N, ...).
        labels: Classes, shape (N,), int64.
        seed: Seed of the network and of the batches.
        read_after: Numbers of epochs after which the data map is read; () does not observe.
    """
    torch.manual_seed(seed)
    model: nn.Module = source.network()
    optimizer = source.optimizer(model.parameters(), lr=source.lr)
    loader: Any = DataLoader(TensorDataset(inputs, labels), 128, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, source.lr, total_steps=source.epochs * len(loader)
    )
    forward: Callable[..., Tensor] = model
    criterion: Callable[..., Tensor] = nn.CrossEntropyLoss()
    run: Any = None
    if read_after:
        run = thresher.observe(
            loader=loader,
            criterion=criterion,
            model=model,
            optimizer=optimizer,
            epochs=source.epochs,
        )
        loader, forward, criterion = run.loader, run.model, run.criterion
    maps = []
    for epoch in range(1, source.epochs + 1):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dim() == 4):
                outputs = forward(source.augment(x))
            criterion(outputs.float(), y).backward()
            optimizer.step()
            schedule.step()
        if epoch in read_after:
            maps.append(run.data_map())
    return model, maps


def probabilities(source: Source, of: Labeled, seed: int) -> NDArray[np.float64]:
    """Returns class probabilities by networks that have not seen the sample, shape (N, classes)."""
    order = torch.randperm(len(of.labels), generator=torch.Generator().manual_seed(seed))
    found = []
    for fold in range(FOLDS):
        held = torch.zeros(len(of.labels), dtype=torch.bool)
        held[order[fold::FOLDS]] = True
        model, _ = trained(source, of.inputs[~held], of.labels[~held], seed)
        model.eval()
        with torch.no_grad():
            out = torch.cat([model(part) for part in of.inputs[held].split(512)])
        found.append((held, out.double().softmax(1)))
    together = torch.zeros(len(of.labels), found[0][1].shape[1], dtype=torch.float64)
    for held, probability in found:
        together[held] = probability
    return together.numpy()


def judged(suspicion: NDArray[np.floating], wrong: NDArray[np.bool_]) -> dict[str, float]:
    """Returns the AUROC of a score, and the share of wrong labels in the first 100 and among as many as are wrong."""
    order = np.argsort(-suspicion, kind="stable")
    return {
        "auroc": float(roc_auc_score(wrong, suspicion)),
        "first": float(wrong[order[:FIRST]].mean()),
        "precision": float(wrong[order[: wrong.sum()]].mean()),
    }


def scores_of(found: Any, wrong: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """Returns how three columns of a data map are judged."""
    columns = {"suspicion": found["suspicion"], "aum": -found["aum"], "last loss": found["loss"]}
    return {name: judged(values, wrong) for name, values in columns.items()}


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Trains with an observer, by cross-validation, and again on changed labels; returns what was measured.

    Args:
        job: Source and seed.
        folder: Folder or file of the source.
    """
    # Only this benchmark needs cleanlab, which `make .venv/for-verify` installs.
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]

    source = SOURCES[job.source]
    of = source.load(folder, job.seed)
    wrong = (of.labels != of.right).numpy()
    count = int(wrong.sum())

    def tested(model: nn.Module) -> float:
        parts = zip(of.test_inputs.split(512), of.test_labels.split(512), strict=True)
        return accuracy(model, list(parts))

    began = time.process_time()
    model, (early, found) = trained(
        source, of.inputs, of.labels, job.seed, read_after=(EARLY, source.epochs)
    )
    result: dict[str, Any] = {
        "wrong": count / len(wrong),
        "cpu_s": time.process_time() - began,
        "early": scores_of(early, wrong),
        "end": scores_of(found, wrong),
        "accuracy": {"all": tested(model)},
    }
    suspects = found.suspects()
    random = np.random.default_rng(job.seed).permutation(len(wrong))
    left_out = {
        "suspects": suspects[:count],
        "random ones": random[:count],
        "wrong ones": np.flatnonzero(wrong),
    }
    if job.seed < source.validated:
        began = time.process_time()
        probability = probabilities(source, of, job.seed)
        given = of.labels.numpy()
        result["cross_validation_cpu_s"] = time.process_time() - began
        confidence = probability[np.arange(len(given)), given]
        result["end"]["cross-validation"] = judged(1 - confidence, wrong)
        issues = np.flatnonzero(find_label_issues(given, probability))
        result["cleanlab"] = {
            "number": len(issues),
            "precision": float(wrong[issues].mean()),
            "suspicion": float(wrong[suspects[: len(issues)]].mean()),
        }
        left_out["issues of cleanlab"] = issues
    if job.seed < source.retrained:
        for name, ids in left_out.items():
            kept = np.ones(len(wrong), dtype=np.bool_)
            kept[ids] = False
            inputs, labels = (part[torch.from_numpy(kept)] for part in (of.inputs, of.labels))
            result["accuracy"][name] = tested(trained(source, inputs, labels, job.seed)[0])
        relabeled = of.labels.clone()
        first = torch.from_numpy(suspects[:count])
        relabeled[first] = torch.from_numpy(found["predicted"])[first]
        result["accuracy"]["relabeled"] = tested(trained(source, of.inputs, relabeled, job.seed)[0])
        result["wrong_after_relabeling"] = float((relabeled != of.right).double().mean())
    return result


Done = Mapping[Job, Mapping[str, Any]]


def planned() -> list[Job]:
    """Returns all jobs, a seed of every source after the other."""
    return [Job(source, seed) for seed in range(SEEDS) for source in SOURCES]


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the results in a file of JSON lines; {} if there is no such file."""
    return {Job(**line["job"]): line["result"] for line in read_lines(path)}


def by_source(done: Done) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the results of each source, in the order of seeds."""
    found = {
        source: [done[job] for job in planned() if job.source == source and job in done]
        for source in SOURCES
    }
    return {source: results for source, results in found.items() if results}


def change_of_suspicion(done: Done, planted: observe.Done) -> dict[str, float]:
    """Returns the mean AUROC of `aum` less that of `suspicion`, for each of the four that decide.

    Args:
        done: Results of this benchmark.
        planted: Results of benchmarks.observe.
    """
    of = {source: [one["end"] for one in rows] for source, rows in by_source(done).items()}
    of["planted"] = [result for job, result in planted.items() if job.noise == "10 %"]
    return {
        name: float(np.mean([one["aum"]["auroc"] - one["suspicion"]["auroc"] for one in of[name]]))
        for name in ("planted", "texts, one rater", "CIFAR-10, random1", "CIFAR-10, worst")
        if of.get(name)
    }


def suspicion_becomes_aum(change: Mapping[str, float]) -> bool:
    """Returns whether the change of `suspicion` that was declared is made, from the differences that decide."""
    return sum(value > 0 for value in change.values()) >= 3 and min(change.values()) >= -0.01


def _means(results: Sequence[Mapping[str, Any]], part: str, score: str) -> str:
    of = [result[part][score] for result in results if score in result[part]]
    mean = {name: float(np.mean([one[name] for one in of])) for name in of[0]}
    return f"{mean['auroc']:.3f} ({mean['first']:.2f}, {mean['precision']:.2f})"


def table_of_scores(done: Done) -> str:
    """Returns how well each score finds the wrong labels, in Markdown."""
    scores = ("suspicion", "aum", "last loss", "cross-validation")
    header = ("labels", "wrong", f"suspicion after {EARLY} epochs", *scores, "more CPU time")
    rows = []
    for source, results in by_source(done).items():
        validated = [result for result in results if "cleanlab" in result]
        extra = [result["cross_validation_cpu_s"] / result["cpu_s"] for result in validated]
        wrong = np.mean([result["wrong"] for result in results])
        cells = [_means(results, "end", score) for score in scores]
        early = _means(results, "early", "suspicion")
        rows.append((source, f"{100 * wrong:.1f} %", early, *cells, f"{np.mean(extra):.1f} times"))
    return markdown_table(header, rows)


def table_of_issues(done: Done) -> str:
    """Returns cleanlab's issues beside as many suspects, in Markdown."""
    rows = []
    for source, results in by_source(done).items():
        issues = [result["cleanlab"] for result in results if "cleanlab" in result]
        number, precision, own = (
            float(np.mean([one[name] for one in issues]))
            for name in ("number", "precision", "suspicion")
        )
        rows.append((source, f"{number:,.0f}", f"{precision:.2f}", f"{own:.2f}"))
    return markdown_table(
        ("labels", "issues of cleanlab", "wrong", "wrong of as many suspects"), rows
    )


def table_of_accuracies(done: Done) -> str:
    """Returns the accuracy on right labels, and its changes in percentage points where labels are left out or replaced, in Markdown."""
    arms = ("suspects", "random ones", "issues of cleanlab", "wrong ones", "relabeled")
    header = ("labels", "all", *(f"without the {arm}" for arm in arms[:-1]), "suspects relabeled")
    rows = []
    for source, results in by_source(done).items():
        cells = [source]
        again = [result["accuracy"] for result in results if len(result["accuracy"]) > 1]
        cells.append(f"{100 * np.mean([one['all'] for one in again]):.1f}")
        for arm in arms:
            paired = Paired.of([100 * (one[arm] - one["all"]) for one in again if arm in one])
            ends = "" if paired.low is None else f" [{paired.low:+.1f}, {paired.high:+.1f}]"
            cells.append(f"{paired.mean:+.1f}{ends}")
        after = [
            one["wrong_after_relabeling"] for one in results if "wrong_after_relabeling" in one
        ]
        cells[-1] += f"; {100 * np.mean(after):.1f} % are wrong then"
        rows.append(cells)
    return markdown_table(header, rows)


def text(done: Done, planted: observe.Done) -> str:
    """Returns the tables and the verdict about `suspicion` in Markdown."""
    change = change_of_suspicion(done, planted)
    becomes = "becomes" if suspicion_becomes_aum(change) else "does not become"
    verdict = (
        f"The mean AUROC of `aum` less that of `suspicion`: {', '.join(f'{name} {value:+.3f}' for name, value in change.items())}. "
        f"So `suspicion` {becomes} `aum`: it would have to be ahead on three of these four, and "
        "behind by more than 0.01 on none."
    )
    return "\n\n".join(
        (
            f"AUROC (share of wrong labels in the first {FIRST}, and among as many as are wrong):",
            table_of_scores(done),
            table_of_issues(done),
            "Accuracy on right labels, in percent, and its change in points:",
            table_of_accuracies(done),
            verdict,
        )
    )


def main() -> None:
    """Runs what is missing, and writes the tables. It goes on where it was stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.people",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cifar", type=Path, help="Folder of CIFAR-10 with labels.csv.")
    parser.add_argument("--ratings", type=Path, help="vaderSentiment-3.3.2.tar.gz.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Default: no limit.")
    parser.add_argument("--runs", type=Path, default=RUNS, help="JSON lines of the trainings.")
    parser.add_argument("--page", type=Path, default=PAGE, help="Page with the tables.")
    parser.add_argument("--show", action="store_true", help="Run nothing; write the tables.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = load(given.runs)
    waiting = [] if given.show else [job for job in planned() if job not in done]
    if waiting and not (given.cifar and (given.cifar / "labels.csv").is_file()):
        parser.error("--cifar must be a folder with cifar-10-batches-py and labels.csv; see --help")
    if waiting and not (given.ratings and given.ratings.is_file()):
        parser.error(
            "--ratings must be vaderSentiment-3.3.2.tar.gz: pip download vaderSentiment==3.3.2 --no-binary :all: --no-deps"
        )
    end = time.monotonic() + 60 * given.minutes
    for job in waiting:
        if time.monotonic() < end:
            folder = given.ratings if job.source.startswith("texts") else given.cifar
            done[job] = run(job, folder)
            add_line(given.runs, {"job": asdict(job), "result": done[job]})
    pack(given.runs)
    page = given.page.read_text()
    given.page.write_text(between_marks(page, *MARKS, text(done, observe.load(observe.RUNS))))


if __name__ == "__main__":
    main()
