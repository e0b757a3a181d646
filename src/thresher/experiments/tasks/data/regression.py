"""Values to be predicted: a line with outliers, and how many bicycles are hired in an hour.

AdaSelection (arXiv:2306.10728) trains a "simple regression" and a "bike regression". Of the first its text to be had says
"artificial simple linear regression", a simple MLP, batches of 100, learning rate .01; the formula, the number of points and
what makes it hard are lost or not told. That Big Loss ends with five times the error of full training, and the largest
gradients with twice, points to outliers. Of the second it names a public set of hourly bicycle hire and a two-layer MLP.
"""

import csv
from datetime import date, timedelta
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from thresher.experiments.tasks.data.base import Data

POINTS = 5000
"""Of the line, to train on; a fifth of that to test on."""
OUTLIERS = 0.1
"""Share of the points to train on."""

ROWS = 8645
"""Hours in Bikeshare.csv."""
DAYS = 365
"""Of the year 2011."""
LAST_DAY = 24
"""Of a month, to train on."""
ONE_OF: dict[str, tuple[str, ...]] = {
    "hr": tuple(map(str, range(24))),
    "weekday": tuple(map(str, range(7))),
    "weathersit": ("clear", "cloudy/misty", "light rain/snow", "heavy rain/snow"),
}
"""Columns of categories, and what they may be."""
FLAGS = ("holiday", "workingday")
AMOUNTS = ("temp", "atemp", "hum", "windspeed")
DAY, TARGET = "day", "bikers"


def line(_: Path | None = None) -> Data:
    """Points of the line y = 2x + 1, the same every time.

    Our choice: x uniform within [-1, 1], normal noise of deviation 0.2, 5,000 points to train on and 1,000 to test on. Of the
    targets to train on exactly one in ten is off by 3, up or down by chance; of those to test on none is.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = _points(POINTS, generator)
    outliers = torch.randperm(POINTS, generator=generator)[: int(OUTLIERS * POINTS)]
    y[outliers] += 3 * (2 * torch.randint(2, (len(outliers), 1), generator=generator) - 1)
    return Data(TensorDataset(x, y), *_points(POINTS // 5, generator))


def _points(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(n, 1, generator=generator) - 1
    return x, 2 * x + 1 + 0.2 * torch.randn(n, 1, generator=generator)


def find_bike() -> Path:
    """The file that the package islp brings; the package itself is not imported.

    Raises:
        FileNotFoundError: islp is not installed, or has no such file.
    """
    spec = find_spec("ISLP")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / "data" / "Bikeshare.csv"
        if path.is_file():
            return path
    raise FileNotFoundError("bike is a file of the package islp, which was not found: pip install --no-deps islp")


def bike(path: Path | None = None) -> Data:
    """Hours of 2011 in Washington: how many bicycles were hired, from the hour, the day and the weather.

    Days of a month up to the 24th are to train on, 6,848 hours, the others to test on, 1,797. Inputs are the hour, the day of
    the week and the kind of weather, each as one of so many; whether it is a holiday or a working day; the time of the year as
    sine and cosine; temperatures, humidity and wind. These last and the target, `bikers`, are scaled to mean 0 and deviation 1
    in training. `casual` and `registered`, which add up to the target, are left out.

    Raises:
        FileNotFoundError: See `find_bike`.
        ValueError: The file is damaged.
    """
    path = path or find_bike()
    try:
        columns = _columns(path)
        days = np.array([_day(day) for day in columns[DAY]])
        amounts = np.stack([_numbers(name, columns[name]) for name in (*AMOUNTS, TARGET)], axis=1)
        categories = [_one_of(name, columns[name], allowed) for name, allowed in ONE_OF.items()]
        flags = [_one_of(name, columns[name], ("0", "1"))[:, 1:] for name in FLAGS]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: truncated or damaged: {error}") from error
    test = np.array([(date(2010, 12, 31) + timedelta(int(day))).day > LAST_DAY for day in days])
    scaled = (amounts - amounts[~test].mean(0)) / amounts[~test].std(0)
    turn = 2 * np.pi * days[:, None] / DAYS
    x = np.hstack([*categories, *flags, np.sin(turn), np.cos(turn), scaled[:, :-1]])
    inputs, targets = (torch.from_numpy(each.astype(np.float32)) for each in (x, scaled[:, -1:]))
    return Data(TensorDataset(inputs[~test], targets[~test]), inputs[test], targets[test])


def _columns(path: Path) -> dict[str, tuple[str, ...]]:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = [*csv.reader(file)] or [[]]
    missing = [name for name in (*ONE_OF, *FLAGS, DAY, *AMOUNTS, TARGET) if name not in header]
    if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"line {number} has {len(row)} values instead of {len(header)}")
    if len(rows) != ROWS:
        raise ValueError(f"{len(rows)} rows instead of {ROWS}")
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def _one_of(name: str, column: tuple[str, ...], allowed: tuple[str, ...]) -> NDArray[np.bool_]:
    if unknown := set(column) - set(allowed):
        raise ValueError(f"{name} is one of {', '.join(allowed)}, got {min(unknown)!r}")
    return np.array(column)[:, None] == np.array(allowed)


def _numbers(name: str, column: tuple[str, ...]) -> NDArray[np.float64]:
    numbers = np.array([float(value) for value in column])
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} is a finite number, got {column[int(np.isfinite(numbers).argmin())]!r}")
    return numbers


def _day(day: str) -> int:
    if not (day.isdecimal() and 1 <= int(day) <= DAYS):
        raise ValueError(f"{DAY} is a day of the year 2011, 1 to {DAYS}, got {day!r}")
    return int(day)
