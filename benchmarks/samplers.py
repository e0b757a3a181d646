"""Measures the samplers: time and memory of the order of an epoch, beside torch, and how often each sample came.

`python -m benchmarks.samplers [--samples 1e7] [--out FILE.json] [--figure FILE.svg]`. Times are CPU seconds on one thread, the
best of three; memory is the peak of the process above its data, in bytes a sample.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import WeightedRandomSampler

from benchmarks.drawn import svg
from thresher.permutation import PIECE
from thresher.samplers import WeightedSampler
from thresher_lab.training.store import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURE = (
    ROOT / "benchmarks" / "results" / "samplers.json",
    ROOT / "docs" / "figures" / "samplers.svg",
)
EPOCHS, SHOWN = 10, 400
KINDS = {"paced (default)": "paced", "replacement=True": True}
"""Values of `replacement` that are drawn, by title."""


def read(weights: np.ndarray, **settings: Any) -> Callable[[], None]:
    """Returns a function that makes the second epoch's order of a WeightedSampler, and reads all of it."""
    sampler = WeightedSampler(weights, **settings)
    sampler.order(0)

    def run() -> None:
        sampler.set_epoch(sampler.epoch + 1)
        order = sampler.order(sampler.epoch)
        for begin in range(0, sampler.total, PIECE):
            order.piece(begin, min(begin + PIECE, sampler.total))

    return run


def torch_draw(weights: np.ndarray, *, replacement: bool) -> Callable[[], Any]:
    """Returns a function that draws an epoch with torch.multinomial; half of the samples without replacement."""
    values, k = torch.from_numpy(weights), len(weights) // (1 if replacement else 2)
    return lambda: torch.multinomial(values, k, replacement=replacement)


SIDES: dict[str, Callable[[np.ndarray], Callable[[], Any]]] = {
    "torch.randperm": lambda weights: lambda: torch.randperm(len(weights)),
    "WeightedSampler, paced": read,
    "WeightedSampler, replacement=True": lambda weights: read(weights, replacement=True),
    "WeightedSampler, replacement=False": lambda weights: read(
        weights, num_samples=len(weights) // 2, replacement=False
    ),
    "torch.multinomial, replacement": lambda weights: torch_draw(weights, replacement=True),
    "torch.multinomial, no replacement": lambda weights: torch_draw(weights, replacement=False),
    "WeightedRandomSampler, as Python numbers": lambda weights: (
        lambda: list(WeightedRandomSampler(weights, len(weights)))  # pyright: ignore[reportArgumentType]
    ),
}


def memory(name: str) -> int:
    """Returns the memory of this process, in bytes: VmRSS for that of now, VmHWM for the largest since `memory` was reset."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def measure(side: str, samples: int, rounds: int) -> dict[str, Any]:
    """Returns seconds and bytes a sample of one side; the error where torch refuses it.

    Args:
        side: Name of the side.
        samples: Number of samples.
        rounds: Number of times, of which the best counts.
    """
    torch.set_num_threads(1)
    run = SIDES[side](np.random.default_rng(0).random(samples) ** 2)
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="utf-8"
    )  # the largest memory begins again with that of now
    before, seconds = memory("VmRSS"), []
    try:
        for _ in range(rounds):
            begin = time.process_time()
            run()
            seconds.append(time.process_time() - begin)
    except RuntimeError as error:
        return {"side": side, "samples": samples, "error": str(error).splitlines()[0]}
    return {
        "side": side,
        "samples": samples,
        "seconds": min(seconds),
        "bytes": (memory("VmHWM") - before) / samples,
    }


def visits(replacement: Any, weights: np.ndarray) -> np.ndarray:
    """Returns how often each sample came in `EPOCHS` epochs.

    Args:
        replacement: Argument of WeightedSampler.
        weights: Weights.
    """
    sampler = WeightedSampler(weights, replacement=replacement)
    return np.bincount([i for _ in range(EPOCHS) for i in sampler], minlength=len(weights))


def figure() -> bytes:
    """Draws the wanted and the actual number of visits of each sample, as SVG."""
    weights = np.random.default_rng(1).random(1000) ** 2
    asked = EPOCHS * len(weights) * weights / weights.sum()

    def draw(drawn: Any) -> None:
        panels = drawn.subplots(1, 2, sharey=True)
        for axes, (title, kind) in zip(panels, KINDS.items(), strict=True):
            axes.set(title=title, xlabel=f"asked for, in {EPOCHS} epochs", aspect="equal")
            axes.axline((0, 0), slope=1, color="#999999", linewidth=0.8)
            axes.scatter(asked[:SHOWN], visits(kind, weights)[:SHOWN], s=6, color="#d9632a")
        panels[0].set_ylabel("got")

    return svg(draw, 7, 3.6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes what was asked for.

    Args:
        arguments: Arguments of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--samples", type=float, nargs="+", default=[1e7], help="numbers of samples"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each side, of which the best counts"
    )
    parser.add_argument("--side", choices=SIDES, help="measures one side in this process")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--figure", type=Path, help="write the figure to this file, and measure nothing"
    )
    given = parser.parse_args(arguments)
    if given.figure:
        given.figure.write_bytes(figure())
        return 0
    if given.side:
        write_json(given.out, measure(given.side, int(given.samples[0]), given.rounds))
        return 0
    rows = []
    for samples in map(int, given.samples):
        for side in SIDES:  # each in a process of its own, whose peak of memory is that of one side
            part = (given.out or RESULTS).with_suffix(".part")
            command = [
                sys.executable,
                "-m",
                "benchmarks.samplers",
                "--side",
                side,
                "--samples",
                str(samples),
            ]
            subprocess.run(
                [*command, "--rounds", str(given.rounds), "--out", str(part)], check=True
            )
            rows.append(json.loads(part.read_text(encoding="utf-8")))
            part.unlink()
            print(rows[-1], flush=True)
    write_json(given.out or RESULTS, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
