"""How well the columns of a data map find wrong labels, beside out-of-sample probabilities of a five-fold cross-validation.

`python -m benchmarks.observe [--minutes M] [--page docs/evidence/wrong-labels.md]` trains on data some of whose labels were
replaced, with `thresher.observe`. Every column is judged by the area under its ROC curve (AUROC), which is the chance that a
wrong label has a larger suspicion than a right one, and by its precision at the true number of wrong labels. The comparison
trains five networks, each on four fifths, and takes the probability of the label by the network that has not seen the sample:
the score `self_confidence` of confident learning (Northcutt et al., arXiv:1911.00068), which cleanlab ranks by. It costs four
trainings and a pass more; a data map costs none.

What was decided before the first counted training: five tasks; 5, 10 and 20 % of the labels replaced by a random other class,
and 10 % by the class that is next in number; ten seeds at 10 %, else five, of which each draws other wrong labels; paired
differences with 95 % intervals. The goal: at 10 %, the lower end of the interval of AUROC, `suspicion` less cross-validation,
lies above -0.01 on four of the five tasks.

`--counts` asks how many labels are wrong instead, by two estimates: the labels whose `aum` is below 0, and those of the lower
one of two Gaussians that are fitted to `aum`.
"""

import argparse
import inspect
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from benchmarks.kept import add_line, pack, read_lines
from benchmarks.marks import between_marks
from benchmarks.measure import Side, compare
from thresher_lab.comparison.statistics import Paired
from thresher_lab.tasks import TASKS
from thresher_lab.tasks.networks import perceptron, small_cnn
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "observe-runs.jsonl.gz"
COUNTS = RUNS.with_name("observe-counts.json")
TIMES = RUNS.with_name("observe-times.json")
MARKS_OF_COUNTS = "<!-- counts of benchmarks.observe -->", "<!-- end of the counts of observe -->"
COUNTED, COUNT_SEEDS = ("0 %", "5 %", "10 %", "20 %"), 2
"""Shares of wrong labels that are counted, and seeds."""
MARKS = "<!-- tables of benchmarks.observe -->", "<!-- end of the tables of observe -->"
FOLDS = 5
NOISES = {"10 %": 10, "5 %": 5, "20 %": 5, "10 %, the next class": 5}
"""Wrong labels, with the number of seeds."""
LEAST = -0.01
"""Difference of AUROC to the cross-validation that the goal allows."""
MODULES = ("argparse", "ast", "asyncio.base_events", "decimal", "email.message", "http.client", "inspect", "logging", "tarfile",
           "typing")  # fmt: skip
"""Modules of the standard library, a few lines of which are the samples of the task of texts."""


@dataclass(frozen=True)
class Problem:
    """A task.

    Args:
        data: Function that returns inputs, shape (N, ...), and classes, shape (N,), int64.
        network: Function that returns a new network.
        epochs: Number of epochs.
        lr: Learning rate of SGD with momentum, of a one-cycle schedule.
        batch_size: Number of samples of a batch.
    """

    data: Callable[[], tuple[Tensor, Tensor]]
    network: Callable[[], nn.Module]
    epochs: int
    lr: float = 0.05
    batch_size: int = 64


def _images(name: str, samples: int) -> tuple[Tensor, Tensor]:
    inputs, targets = TASKS[name].load(TASKS[name].find(None)).train.tensors
    return inputs[:samples], targets[:samples].long()


def _digits() -> tuple[Tensor, Tensor]:
    found: Any = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def _table() -> tuple[Tensor, Tensor]:
    found: Any = load_breast_cancer()
    inputs = torch.tensor(found.data, dtype=torch.float32)
    return (inputs - inputs.mean(0)) / inputs.std(0), torch.tensor(found.target)


def _texts() -> tuple[Tensor, Tensor]:
    """Pieces of 160 bytes of modules of the standard library, as counts of hashed groups of three bytes."""
    inputs, targets = [], []
    for number, name in enumerate(MODULES):
        text = inspect.getsource(import_module(name)).encode()
        for start in range(0, min(len(text), 48_000) - 160, 160):
            piece = np.frombuffer(text[start : start + 160], dtype=np.uint8).astype(np.int64)
            hashed = (piece[:-2] * 65_599 + piece[1:-1] * 257 + piece[2:]) % 1024
            inputs.append(np.bincount(hashed, minlength=1024))
            targets.append(number)
    return torch.tensor(np.array(inputs), dtype=torch.float32).sqrt(), torch.tensor(targets)


PROBLEMS: Mapping[str, Problem] = {
    "MNIST, 4,000 images": Problem(partial(_images, "mnist-5k", 4000), partial(small_cnn, 28), 8),
    "Fashion-MNIST, 4,000 images": Problem(
        partial(_images, "fashion-mnist", 4000), partial(small_cnn, 28), 10
    ),
    "digits, 1,797 images of 8 x 8": Problem(_digits, partial(perceptron, 64), 20),
    "texts, 10 modules of Python": Problem(_texts, partial(perceptron, 1024), 12),
    "table, breast cancer": Problem(_table, partial(perceptron, 30), 30, 0.02, 32),
}


@dataclass(frozen=True)
class Job:
    """A training and its cross-validation.

    Args:
        task: Name of the task.
        noise: One of `NOISES`.
        seed: Seed of the wrong labels, the networks and the batches.
    """

    task: str
    noise: str
    seed: int


def with_wrong_labels(labels: Tensor, noise: str, seed: int) -> tuple[Tensor, NDArray[np.bool_]]:
    """Returns labels some of which are wrong, and which.

    Args:
        labels: The right classes, shape (N,), int64.
        noise: One of `NOISES`.
        seed: Random seed.
    """
    generator = torch.Generator().manual_seed(seed)
    share, classes = float(noise.split(" ")[0]) / 100, int(labels.max()) + 1
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    step = 1 if "next" in noise else torch.randint(1, classes, (len(wrong),), generator=generator)
    found, marks = labels.clone(), np.zeros(len(labels), dtype=np.bool_)
    found[wrong], marks[wrong.numpy()] = (labels[wrong] + step) % classes, True
    return found, marks


def trained(
    problem: Problem, inputs: Tensor, labels: Tensor, seed: int, *, observed: bool
) -> tuple[nn.Module, Any]:
    """Trains a network; returns it, and what was observed.

    Args:
        problem: The task.
        inputs: Inputs, shape (N, ...).
        labels: Classes, shape (N,), int64.
        seed: Seed of the network and of the batches.
        observed: Whether the run observes.
    """
    torch.manual_seed(seed)
    model, criterion = problem.network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), problem.lr, momentum=0.9, weight_decay=5e-4)
    loader: Any = DataLoader(TensorDataset(inputs, labels), problem.batch_size, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, problem.lr, total_steps=problem.epochs * len(loader)
    )
    run: Any = None
    if observed:
        run = thresher.observe(
            loader=loader,
            criterion=criterion,
            model=model,
            optimizer=optimizer,
            epochs=problem.epochs,
        )
        loader, model, criterion = run.loader, run.model, run.criterion
    for _ in range(problem.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model, None if run is None else run.data_map()


def out_of_sample(
    problem: Problem, inputs: Tensor, labels: Tensor, seed: int
) -> NDArray[np.float64]:
    """Returns the probability of each label by a network that has not seen the sample, shape (N,)."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    found = torch.zeros(len(labels), dtype=torch.float64)
    for fold in range(FOLDS):
        held = torch.zeros(len(labels), dtype=torch.bool)
        held[order[fold::FOLDS]] = True
        model, _ = trained(problem, inputs[~held], labels[~held], seed, observed=False)
        model.eval()
        with torch.no_grad():
            found[held] = (
                model(inputs[held])
                .double()
                .softmax(1)
                .gather(1, labels[held].unsqueeze(1))
                .squeeze(1)
            )
    return found.numpy()


def judged(suspicion: NDArray[np.float64], wrong: NDArray[np.bool_]) -> dict[str, float]:
    """Returns the AUROC, and the precision at the true number of wrong labels, of a score.

    Args:
        suspicion: Score of each sample, larger for likelier wrong labels, shape (N,).
        wrong: Which labels are wrong, shape (N,).
    """
    most = np.argsort(-suspicion, kind="stable")[: wrong.sum()]
    return {"auroc": float(roc_auc_score(wrong, suspicion)), "precision": float(wrong[most].mean())}


def run(job: Job) -> dict[str, Any]:
    """Trains with an observer, and by cross-validation, and judges all scores."""
    torch.set_num_threads(1)
    problem = PROBLEMS[job.task]
    inputs, right = _loaded(job.task)
    labels, wrong = with_wrong_labels(right, job.noise, 1000 + job.seed)
    began = time.process_time()
    _, found = trained(problem, inputs, labels, job.seed, observed=True)
    observed = time.process_time()
    probability = out_of_sample(problem, inputs, labels, job.seed)
    validated = time.process_time()
    scores = {
        "suspicion": found["suspicion"],
        "aum": -found["aum"],
        "variability": found["variability"],
        "forgetting": found["forgetting"].astype(float),
        "last loss": found["loss"],
        "cross-validation": 1 - probability,
    }
    return {name: judged(values, wrong) for name, values in scores.items()} | {
        "cpu_s": observed - began,
        "cross_validation_cpu_s": validated - observed,
    }


def counts(aum: NDArray[np.float64]) -> dict[str, float]:
    """Returns two estimates of the share of wrong labels.

    Args:
        aum: Mean margin of the label of each sample, shape (N,).
    """
    mixture: Any = GaussianMixture(2, n_init=3, random_state=0).fit(aum[:, None])
    lower = mixture.predict(aum[:, None]) == np.argmin(mixture.means_[:, 0])
    return {"below 0": float((aum < 0).mean()), "mixture": float(lower.mean())}


def counted() -> dict[str, Any]:
    """Returns both estimates of every task and share, a value of each seed."""
    found: dict[str, Any] = {}
    for task, problem in PROBLEMS.items():
        inputs, right = _loaded(task)
        for noise in COUNTED:
            for seed in range(COUNT_SEEDS):
                labels, _ = with_wrong_labels(right, noise, 1000 + seed)
                _, observed = trained(problem, inputs, labels, seed, observed=True)
                for name, share in counts(observed["aum"].astype(np.float64)).items():
                    found.setdefault(task, {}).setdefault(noise, {}).setdefault(name, []).append(
                        share
                    )
    return found


def text_of_counts(found: Mapping[str, Any]) -> str:
    """Returns the estimates as a table in Markdown."""

    def cell(of: Mapping[str, list[float]]) -> str:
        return " and ".join(f"{100 * fmean(of[name]):.1f}" for name in ("below 0", "mixture"))

    rows = [
        (task, *(cell(by_noise[noise]) for noise in COUNTED)) for task, by_noise in found.items()
    ]
    return markdown_table(("task", *(f"{noise} are wrong" for noise in COUNTED)), rows)


@cache
def _loaded(task: str) -> tuple[Tensor, Tensor]:
    return PROBLEMS[task].data()


Done = Mapping[Job, Mapping[str, Any]]


def planned() -> list[Job]:
    """Returns all trainings, those at 10 % first."""
    return [
        Job(task, noise, seed)
        for noise, seeds in NOISES.items()
        for seed in range(seeds)
        for task in PROBLEMS
    ]


def load(path: Path) -> dict[Job, dict[str, Any]]:
    """Returns the results in a file of JSON lines; {} where there is no such file."""
    return {Job(**line["job"]): line["result"] for line in read_lines(path)}


SCORES = ("suspicion", "aum", "last loss", "variability", "forgetting", "cross-validation")


def differences(done: Done, noise: str) -> dict[str, Paired]:
    """Returns AUROC of `suspicion` less that of the cross-validation, by task, paired by seed."""
    found = {}
    for task in PROBLEMS:
        rows = [
            done[job] for seed in range(NOISES[noise]) if (job := Job(task, noise, seed)) in done
        ]
        if len(rows) > 1:
            found[task] = Paired.of(
                [row["suspicion"]["auroc"] - row["cross-validation"]["auroc"] for row in rows]
            )
    return found


def text(done: Done) -> str:
    """Returns the verdict and the tables in Markdown."""
    at_goal = differences(done, "10 %")
    met = [
        task for task, paired in at_goal.items() if paired.low is not None and paired.low > LEAST
    ]
    times = [row["cross_validation_cpu_s"] / row["cpu_s"] for row in done.values()]
    verdict = "Not measured yet."
    if done:
        verdict = (
            f"At 10 % of wrong labels, the AUROC of `suspicion` is shown to be less than {-LEAST:g} below that of the "
            f"cross-validation on {len(met)} of {len(at_goal)} tasks (4 of {len(PROBLEMS)} were the goal). The cross-validation"
            f" took {fmean(times):.1f} times as long as the training that it is beside."
        )
    parts = [verdict]
    for noise in NOISES:
        rows = []
        for task, paired in differences(done, noise).items():
            results = [
                done[job]
                for seed in range(NOISES[noise])
                if (job := Job(task, noise, seed)) in done
            ]
            means = [
                f"{fmean(one[name]['auroc'] for one in results):.3f} ({fmean(one[name]['precision'] for one in results):.2f})"
                for name in SCORES
            ]
            rows.append(
                (task, *means, f"{paired.mean:+.3f} [{paired.low:+.3f}, {paired.high:+.3f}]")
            )
        if rows:
            header = ("task", *SCORES, "suspicion - cross-validation")
            seeds = len({job.seed for job in done if job.noise == noise})
            parts.append(
                f"**{noise} of the labels are wrong**: AUROC (precision), {seeds} seeds\n\n{markdown_table(header, rows)}"
            )
    return "\n\n".join(parts)


TIMED = (
    "MNIST, 4,000 images",
    "digits, 1,797 images of 8 x 8",
    "table, breast cancer",
)
"""Tasks whose times are compared, the largest network first."""


def measure_times(rounds: int = 25) -> dict[str, dict[str, Any]]:
    """Returns, for each of `TIMED`, the CPU time of two epochs with `observe` over that of the plain loop, in turns."""
    found = {}
    for name in TIMED:
        problem = replace(PROBLEMS[name], epochs=2)
        inputs, labels = problem.data()
        sides = {
            seen: Side(
                "observe" if seen else "plain loop",
                lambda _, seen=seen: trained(problem, inputs, labels, 0, observed=seen),  # noqa: B023
            )
            for seen in (False, True)
        }
        again, observed = compare(sides[False], [sides[True]], pairs=rounds)
        steps = 2 * -(-len(labels) // problem.batch_size)
        found[name] = {
            "ratio": asdict(observed.cpu),
            "again": asdict(again.cpu),
            "step_us": round(1e6 * (observed.cpu_s - observed.cpu_s / observed.cpu.median) / steps),
            "plain_step_us": round(1e6 * observed.cpu_s / observed.cpu.median / steps),
        }
    return found


def main() -> None:
    """Runs what is missing, and writes the tables. It goes on where it was stopped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observe", description=main.__doc__)
    parser.add_argument(
        "--jobs", type=int, default=2, help="Number of processes, each with one thread. Default: 2."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="Minutes after which nothing begins. Default: no limit.",
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="JSON lines of the trainings.")
    parser.add_argument(
        "--page", type=Path, help="Page in Markdown whose tables are written anew. Default: none."
    )
    parser.add_argument(
        "--show", action="store_true", help="Run nothing; print and write what there is."
    )
    parser.add_argument(
        "--counts",
        action="store_true",
        help="Estimate how many labels are wrong, which takes six minutes.",
    )
    parser.add_argument(
        "--time", action="store_true", help="Compare times with those of the plain loop, only."
    )
    given = parser.parse_args()
    if given.time:
        torch.set_num_threads(1)
        TIMES.write_text(json.dumps(measure_times(), indent=1) + "\n")
        return
    if given.counts:
        torch.set_num_threads(1)
        COUNTS.write_text(json.dumps(counted(), indent=1) + "\n")
    end, done = time.monotonic() + 60 * given.minutes, load(given.runs)
    waiting = iter(
        [] if given.show or given.counts else [job for job in planned() if job not in done]
    )
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        running = {
            pool.submit(run, job): job for _, job in zip(range(given.jobs), waiting, strict=False)
        }
        while running:
            finished = next(as_completed(running))
            job = running.pop(finished)
            done[job] = finished.result()
            add_line(given.runs, {"job": asdict(job), "result": done[job]})
            if time.monotonic() < end and (following := next(waiting, None)) is not None:
                running[pool.submit(run, following)] = following
    pack(given.runs)
    if given.page is not None:
        page = between_marks(given.page.read_text(), *MARKS, text(done))
        given.page.write_text(
            between_marks(page, *MARKS_OF_COUNTS, text_of_counts(json.loads(COUNTS.read_text())))
        )
    print(text(done))


if __name__ == "__main__":
    main()
