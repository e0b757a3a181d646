"""Times a selection of GRAD-MATCH: `plan_epoch` of 10,000 samples of 100 classes, without the forward pass before it.

`python -m benchmarks.grad_match [--quick] [--out FILE.json]`; exit code 1 where a selection by mini-batches takes more than
5 seconds of CPU time. It also prints the sine of the angle between the gradient of the subset and that of all samples, and the
length of the former along the latter (1: the same length); and both for random subsets of the same size.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thresher
from benchmarks.measure import Side, judgment, lines, seconds_in_turns
from benchmarks.overhead import about
from thresher import rng
from thresher_lab.training.store import write_json

RESULTS = Path(__file__).resolve().parent / "results" / "grad_match.json"
LIMIT = 5.0
CASES: dict[str, dict[str, Any]] = {
    "batches of 128, bias": {"batch_size": 128, "gradient": "bias"},
    "batches of 64, bias": {"batch_size": 64, "gradient": "bias"},
    "batches of 20, bias": {"batch_size": 20, "gradient": "bias"},
    "batches of 128, full": {"batch_size": 128},
    "batches of 64, full": {"batch_size": 64},
    "batches of 20, full": {"batch_size": 20},
    "classes, bias": {"per": "class", "gradient": "bias", "penalty": 0.5},
    "classes, full": {"per": "class", "penalty": 0.5},
    "classes, own row": {"per": "class_gradient", "penalty": 0.5},
}
"""Settings by name; selections by mini-batches must stay within the limit."""
KEEP = 0.1
EPOCH, EPOCHS = 1, 2


def made_up_layer(n: int, classes: int, width: int) -> dict[str, Tensor]:
    """Returns errors (n, classes), features (n, width) and labels (n,) of a layer that is right for half of the samples."""
    generator = rng.seeded(0)
    labels = torch.randint(classes, (n,), generator=generator)
    centers = torch.randn(classes, width, generator=generator) / 6
    feature = (centers[labels] + torch.randn(n, width, generator=generator)).relu()
    scores = (feature - feature.mean(0)) @ centers.T
    error = scores.softmax(1)
    error[torch.arange(n), labels] -= 1
    return {"error": error, "feature": feature, "label": labels}


def similarity(
    layer: Mapping[str, Tensor], plan: thresher.EpochPlan, *, full: bool
) -> tuple[float, float]:
    """Compares the weighted mean gradient of the last layer over a subset with that over all samples.

    Args:
        layer: Errors and features of all samples, see `made_up_layer`.
        plan: Plan of the subset, with its weights.
        full: Whether the gradient of the weights counts, too, beside that of the bias.

    Returns:
        The sine of the angle between both, and the length along the gradient over all samples, as a share of that gradient.
    """
    feature = torch.ones(len(layer["error"]), 1)
    if full:
        feature = torch.cat([feature, layer["feature"]], 1)
    error, feature = layer["error"].double(), feature.double()
    weights = torch.ones(len(plan.ids)) if plan.weights is None else plan.weights
    wanted = error.T @ feature / len(feature)
    found = (error[plan.ids] * weights.double()[:, None]).T @ feature[plan.ids] / len(plan.ids)
    product, energy = float((wanted * found).sum()), float((wanted**2).sum())
    return max(0.0, 1 - product**2 / (energy * float((found**2).sum()))) ** 0.5, product / energy


def measure(n: int, classes: int, width: int, rounds: int) -> list[dict[str, Any]]:
    """Returns CPU and wall seconds of every case, medians over the rounds, and the similarity of the subset's gradient."""
    layer = made_up_layer(n, classes, width)
    records = {"weight": torch.zeros(n), **layer}

    def planned(settings: Mapping[str, Any]) -> thresher.EpochPlan:
        method = thresher.GradMatch(KEEP, **settings)
        return method.plan_epoch(
            records, epoch=EPOCH, epochs=EPOCHS, generator=rng.seeded(0, EPOCH)
        )

    cpu, wall = seconds_in_turns(
        [Side(name, lambda _, s=s: planned(s)) for name, s in CASES.items()], pairs=rounds
    )
    found = []
    for name, settings, cpu_s, wall_s in zip(CASES, CASES.values(), cpu, wall, strict=True):
        plan, full = planned(settings), settings.get("gradient") != "bias"
        drawn = (
            torch.randperm(n, generator=rng.seeded(1, seed))[: len(plan.ids)] for seed in range(5)
        )
        others = [
            similarity(layer, thresher.EpochPlan(ids.sort().values), full=full) for ids in drawn
        ]
        (sine, along), (sine_at_random, along_at_random) = (
            similarity(layer, plan, full=full),
            map(statistics.median, zip(*others, strict=True)),
        )
        limit, seconds = (None if "per" in settings else LIMIT), statistics.median(cpu_s)
        found.append(
            {
                "name": name,
                "settings": settings,
                "kept": len(plan.ids),
                "matched": plan.facts["matched"],
                "cpu_s": seconds,
                "wall_s": statistics.median(wall_s),
                "limit": limit,
                "ok": limit is None or seconds <= limit,
                "sine": sine,
                "along": along,
                "sine_at_random": sine_at_random,
                "along_at_random": along_at_random,
            }
        )
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as text."""
    header = (
        "",
        "kept",
        "matched",
        "CPU s",
        "wall s",
        "limit",
        "sine",
        "at random",
        "along",
        "at random",
    )
    return lines(
        header,
        [
            (
                row["name"],
                f"{row['kept']}",
                f"{row['matched']}",
                f"{row['cpu_s']:.3f}",
                f"{row['wall_s']:.3f}",
                judgment(row["limit"], row["ok"]),
                *(
                    f"{row[figure]:.3f}"
                    for figure in ("sine", "sine_at_random", "along", "along_at_random")
                ),
            )
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grad_match", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="time each selection once")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--n", type=int, default=10_000, help="number of samples (default: %(default)s)"
    )
    parser.add_argument(
        "--classes", type=int, default=100, help="number of classes (default: %(default)s)"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=512,
        help="number of features per sample (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    rounds = 1 if given.quick else 7
    rows = measure(given.n, given.classes, given.width, rounds)
    print(table(rows))
    missed = [row["name"] for row in rows if not row["ok"]]
    sizes = {
        "n": given.n,
        "classes": given.classes,
        "width": given.width,
        "keep": KEEP,
        "rounds": rounds,
    }
    about_it = about(torch.device("cpu"))
    write_json(
        given.out,
        {
            "benchmark": "grad_match",
            "quick": given.quick,
            **about_it,
            **sizes,
            "missed": missed,
            "rows": rows,
        },
    )
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
