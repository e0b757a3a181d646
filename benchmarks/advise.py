"""Checks whether `thresher advise` is right: compares its estimates with what whole trainings save.

There are three trainings: a small network, a residual network, and one that waits for its input, `build` of this file, whose
images are decompressed when they are read. Each method trains for a few epochs in turns with a plain loop of full training,
without thresher. Times are CPU seconds: with one thread and no workers, they are the wall seconds of an idle machine. Run it as
`python -m benchmarks.advise [--quick] [--out FILE.json]`; the exit code is 1 where an estimate is more than 10 points off, or
where the saving is more than 10 points above the estimated maximum.
"""

import argparse
import statistics
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import thresher
from benchmarks.measure import Side, lines, seconds_in_turns
from benchmarks.overhead import about
from thresher_lab.advise.advise import Advice, advise
from thresher_lab.cli.advise import ADVISED_METHODS
from thresher_lab.recipes.running import task_of
from thresher_lab.training.specs import Spec, parse_methods
from thresher_lab.training.store import write_json
from thresher_lab.training.trainable import Training

RESULTS = Path(__file__).resolve().parent / "results" / "advise.json"
TASKS = {"mnist-5k": "mnist-5k", "resnet8": "fashion-mnist-resnet8@1280", "input": "benchmarks/advise.py:build"}
ALLOWED = 0.1
SEED = 0
SCALE = 64
"""Side of a compressed image, as a multiple of the side of the digit in it."""


class Compressed(Dataset[tuple[Tensor, int]]):
    """Digits as large compressed images, which are decompressed and made smaller when they are read."""

    def __init__(self, pixels: NDArray[np.uint8], labels: Sequence[int]) -> None:
        large = (np.kron(image, np.ones((SCALE, SCALE), np.uint8)) for image in pixels)
        self._images = [zlib.compress(image.tobytes(), 1) for image in large]
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        pixels = np.frombuffer(zlib.decompress(self._images[i]), np.uint8)
        means = pixels.reshape(8, SCALE, 8, SCALE).mean((1, 3), dtype=np.float32)
        return torch.from_numpy(means).flatten() / 16, self._labels[i]


def build(seed: int) -> tuple[Any, ...]:
    """Returns a training that waits for its input."""
    torch.manual_seed(seed)
    pixels, labels = load_digits(return_X_y=True)
    images = np.reshape(pixels, (-1, 8, 8)).astype(np.uint8)
    data = Compressed(images[:768], labels[:768].tolist())
    test = torch.from_numpy(np.asarray(pixels[768:], np.float32)) / 16, torch.from_numpy(labels[768:])
    loader = DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(seed))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def accuracy(model: nn.Module) -> float:
        with torch.inference_mode():
            return (model(test[0]).argmax(1) == test[1]).float().mean().item()

    return model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), accuracy


def plain_epochs(training: Training) -> Callable[[object], None]:
    """Returns a function that trains one epoch of full training, without thresher."""

    def epoch(_: object) -> None:
        for x, y in training.loader:
            training.criterion(training.model(x), y).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

    return epoch


def epochs_of(training: Training, spec: Spec, epochs: int) -> Callable[[object], None]:
    """Returns a function that trains one epoch with a method; a model that must be traced is traced here."""
    model = training.model
    if spec.batch.get("forward_passes") == "once":
        model = thresher.subset_backward(model)
        model(next(iter(training.loader))[0])
    settings: dict[str, Any] = {"model": model, "optimizer": training.optimizer, "epochs": epochs, **spec.attachment()}
    run = thresher.attach(spec.create(), loader=training.loader, criterion=training.criterion, **settings)
    schedule = thresher.ProgressLR(training.optimizer, run, training.schedule)

    def epoch(_: object) -> None:
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            training.optimizer.step()
            schedule.step()
            training.optimizer.zero_grad()

    return epoch


def saved(name: str, specs: Sequence[Spec], epochs: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Returns the shares of wall and CPU time that each method saves, per repeat; "again" is full training once more."""
    task = task_of(name)
    data = task.load(task.find(None))
    found: dict[str, dict[str, list[float]]] = {}
    for repeat in range(repeats):
        trainings = [task.training(data, SEED + repeat) for _ in range(len(specs) + 2)]
        full = [Side(side, plain_epochs(trainings.pop())) for side in ("full", "again")]
        methods = [Side(spec.label, epochs_of(trainings.pop(), spec, epochs)) for spec in specs]
        cpu, wall = seconds_in_turns([*full, *methods], pairs=epochs, warm_up=0, seed=repeat)
        for i, side in enumerate([*full, *methods][1:], start=1):
            figures = found.setdefault(side.name, {"wall": [], "cpu": []})
            figures["wall"].append(1 - sum(wall[i]) / sum(wall[0]))
            figures["cpu"].append(1 - sum(cpu[i]) / sum(cpu[0]))
    return found


def compare(name: str, epochs: int, repeats: int) -> dict[str, Any]:
    """Returns the advice for a training, and estimated and measured savings as shares of the time of full training."""
    specs = parse_methods(ADVISED_METHODS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* with two forward passes it saves time on this")
        advice = advise(name, specs, epochs=epochs)
        measured = saved(name, specs, epochs, repeats)
    again = statistics.median(measured.pop("again")["cpu"])
    rows = [row_of(row, measured[row["method"]]) for row in advice["methods"]]
    largest = {"predicted": max(row["saves"] for row in rows), "measured": max(row["cpu"] for row in rows)}
    return {"advice": advice, "again": again, "largest": largest, "rows": rows}


def row_of(predicted: dict[str, Any], measured: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the row of one method: estimated and measured savings, medians over the repeats."""
    wall, cpu = (statistics.median(measured[clock]) for clock in ("wall", "cpu"))
    row = {
        "method": predicted["method"],
        "saves": predicted["saves"],
        "at_most": predicted["at_most"],
        "wall": wall,
        "cpu": cpu,
    }
    ok = abs(predicted["saves"] - cpu) <= ALLOWED and cpu <= predicted["at_most"] + ALLOWED
    return {**row, "repeats": measured["cpu"], "ok": ok}


def names_what_helps(advice: Advice) -> bool:
    """Returns whether the advice names methods that can help, and states that methods that select in the batch cannot."""
    said = " ".join(advice["sentences"])
    return "Methods that select in the batch load every candidate: they cannot help." in said and "can help." in said


def table(found: dict[str, dict[str, Any]]) -> str:
    """Returns the savings as text, in percent."""
    header = ("", "predicted", "most", "measured CPU", "wall", "")
    rows = []
    for name, one in found.items():
        largest = (f"{100 * one['largest'][figure]:.1f}" for figure in ("predicted", "measured"))
        rows.append((f"{name}, {one['advice']['epochs']} epochs; A/A {100 * one['again']:+.1f}", "", "", "", "", ""))
        rows.append((f"  largest: {' predicted, '.join(largest)} measured", "", "", "", "", ""))
        for row in one["rows"]:
            figures = (f"{100 * row[figure]:.1f}" for figure in ("saves", "at_most", "cpu", "wall"))
            rows.append((f"  {row['method']}", *figures, "ok" if row["ok"] else "MISSED"))
    return lines(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimates, measures, prints and writes; returns 1 where an estimate is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="train for two epochs, once")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, help="trainings to measure")
    given = parser.parse_args(arguments)
    epochs, repeats = (2, 1) if given.quick else (6, 2)
    found = {name: compare(TASKS[name], epochs, repeats) for name in given.only}
    print(table(found))
    missed = [f"{name}: {row['method']}" for name, one in found.items() for row in one["rows"] if not row["ok"]]
    if "input" in found and not names_what_helps(found["input"]["advice"]):
        missed.append("input: sentences on methods that select in the batch and on methods that plan epochs")
    for one in found.values():
        print("", *one["advice"]["sentences"], sep="\n")
    results = {"benchmark": "advise", "quick": given.quick, **about(torch.device("cpu")), "missed": missed, "found": found}
    write_json(given.out, results)
    print(f"\n{len(missed)} predictions missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
