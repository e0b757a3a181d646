"""What it costs to compute the statistics of BatchNorm anew on all samples, after a training on drawn rows.

Each network is measured with the statistics that it has at the end of its training, and again after
`torch.optim.swa_utils.update_bn` on all training samples. All arms have the same learning rate; none was chosen by results.
It goes on where it was stopped.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from benchmarks.winnow.measures import measures_of
from benchmarks.winnow.table import between_marks, said
from benchmarks.winnow.tasks import problem_of
from thresher.experiments.comparison.controls import FULL_TRAINING
from thresher.experiments.comparison.statistics import Paired
from thresher.experiments.training.loop import train
from thresher.experiments.training.specs import MethodSpec, Spec
from thresher.experiments.training.trainable import Training

TASK, SHARE, SEEDS = "fashion-resnet8", 0.5, 5

BUDGET = {"share": SHARE, "lr_scale": 1.0}
ARMS: Mapping[str, Spec] = {
    "full": FULL_TRAINING,
    "smaller": MethodSpec("uniform", {"keep": SHARE}, {"spend": "batches"}),
    "winnow, drawn": MethodSpec("winnow", BUDGET),
    "winnow, weighted": MethodSpec("winnow", {**BUDGET, "batch_norm": "weighted"}),
}
"""Ways to train, full training first."""

BEGIN, END = "<!-- table of benchmarks.winnow.batch_norm -->", "<!-- end of the table -->"
"""Lines of a page that the table stands between."""


@dataclass(frozen=True)
class Trained:
    """One training.

    Attributes:
        arm: Name of the arm.
        seed: Random seed.
        cost: Cost as a share of full training.
        own: Metric with the statistics at the end of the training, in points.
        anew: Metric after they were computed anew on all training samples, in points.
        cpu_s: CPU time of the training, in seconds.
    """

    arm: str
    seed: int
    cost: float
    own: float
    anew: float
    cpu_s: float


def run(arm: str, seed: int) -> Trained:
    """Trains once, and measures twice."""
    problem = problem_of(TASK)
    sets, measured = problem.sets(), list[float]()

    def measure(training: Training) -> None:
        measured.append(measures_of(problem, training.model, sets.test).metric)
        order = torch.Generator().manual_seed(0)
        update_bn(DataLoader(sets.train, problem.task.batch_size, shuffle=True, generator=order), training.model)
        measured.append(measures_of(problem, training.model, sets.test).metric)

    trained = train(problem.at(1.0), sets.data, ARMS[arm], seed=seed, epochs=problem.epochs, on_end=measure)
    own, anew = (round(metric, 3) for metric in measured)
    return Trained(arm, seed, round(trained["cost"]["ratio"], 4), own, anew, round(trained["cpu_s"], 1))


@dataclass(frozen=True)
class Row:
    """The trainings of one arm, with the seeds that every arm has.

    Attributes:
        n: Number of these seeds.
        cost: Mean cost as a share of full training.
        own: Mean metric with the statistics at the end of the training, in points.
        anew: Mean metric after they were computed anew.
        to_full: Differences of `own` to full training; None for full training.
        to_smaller: Differences of `own` to smaller batches; None for full training and for smaller batches.
        change: Differences of `anew` to `own`.
    """

    n: int
    cost: float
    own: float
    anew: float
    to_full: Paired | None
    to_smaller: Paired | None
    change: Paired


def load(path: Path) -> list[Trained]:
    """Returns the trainings in a file of results; none where there is no such file."""
    return [Trained(**one) for one in json.loads(path.read_text())["trainings"]] if path.exists() else []


def results(done: Sequence[Trained]) -> dict[str, Any]:
    """Returns the content of the file of results.

    Args:
        done: All trainings so far.
    """
    by_seed = sorted(done, key=lambda one: (one.seed, list(ARMS).index(one.arm)))
    rows = {arm: asdict(row) for arm, row in rows_of(done).items()}
    return {"task": TASK, "share": SHARE, "rows": rows, "trainings": [asdict(one) for one in by_seed]}


def rows_of(done: Sequence[Trained]) -> dict[str, Row]:
    """Returns mean metrics by arm, and paired differences, of the seeds that every arm has."""
    of = {arm: {one.seed: one for one in done if one.arm == arm} for arm in ARMS}
    seeds = [seed for seed in range(SEEDS) if all(seed in trained for trained in of.values())]
    if not seeds:
        return {}
    by_arm = {arm: [trained[seed] for seed in seeds] for arm, trained in of.items()}
    return {arm: _row(arm, own, by_arm) for arm, own in by_arm.items()}


def _row(arm: str, own: Sequence[Trained], by_arm: Mapping[str, Sequence[Trained]]) -> Row:
    def to(other: str) -> Paired:
        return Paired.of([one.own - there.own for one, there in zip(own, by_arm[other], strict=True)])

    return Row(
        n=len(own),
        cost=fmean(one.cost for one in own),
        own=fmean(one.own for one in own),
        anew=fmean(one.anew for one in own),
        to_full=None if arm == "full" else to("full"),
        to_smaller=None if arm in ("full", "smaller") else to("smaller"),
        change=Paired.of([one.anew - one.own for one in own]),
    )


def markdown(rows: Mapping[str, Row]) -> str:
    """Returns the table in Markdown, one arm a line."""
    lines = [
        "| arm | cost | accuracy | to full | to smaller | after update_bn | change by update_bn | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in rows.items():
        parts = [arm, f"{row.cost:.3f}", f"{row.own:.2f}", said(row.to_full), said(row.to_smaller), f"{row.anew:.2f}"]
        lines.append("| " + " | ".join([*parts, said(row.change), str(row.n)]) + " |")
    return "\n".join(lines)


def with_table(page: str, done: Sequence[Trained]) -> str:
    """Returns a page in Markdown with the table between its two marks.

    Args:
        page: Text with the lines `BEGIN` and `END`.
        done: All trainings so far.
    """
    return between_marks(page, BEGIN, END, markdown(rows_of(done)))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.winnow.batch_norm", description=__doc__)
    path = Path("benchmarks/results/winnow-batch-norm.json")
    parser.add_argument("--results", type=Path, default=path, help=f"File of the results. Default: {path}.")
    parser.add_argument("--page", type=Path, help="Page in Markdown whose table is written anew. Default: none.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = load(given.results)
    for seed in range(SEEDS):
        for arm in ARMS:
            if not any((one.arm, one.seed) == (arm, seed) for one in done):
                done.append(run(arm, seed))
                given.results.write_text(json.dumps(results(done), indent=1) + "\n")
                print(done[-1], flush=True)
    if given.page is not None:
        given.page.write_text(with_table(given.page.read_text(), done))
    print(markdown(rows_of(done)))


if __name__ == "__main__":
    main()
