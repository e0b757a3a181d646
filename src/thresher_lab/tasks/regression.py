"""Regression: a line with outliers, and the number of bicycles that are hired per hour.

AdaSelection (arXiv:2306.10728) trains a "simple regression" and a "bike regression". About the first, the available text says
"artificial simple linear regression", a simple MLP, batches of 100, learning rate .01; it does not give the formula, the number
of points or the source of difficulty. In the paper the error of Big Loss is five times that of full training, and the error of
the largest gradients is twice that; this indicates outliers. The second uses a public data set of hourly bicycle hire and a
two-layer MLP.
"""

import csv
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from thresher_lab.tasks.base import (
    Data,
    EvaluationBatches,
    Task,
    find_in_package,
    outputs_of,
    without_folder,
)
from thresher_lab.tasks.networks import perceptron

POINTS = 5000
"""Number of training points of the line; there is one test point for every five of them."""
OUTLIERS = 0.1
"""Share of the training points that are outliers."""

OFF = 3.0
"""Distance of an outlier from its place, in units of the target."""

BIKE_ROWS = 8645
"""Hours in Bikeshare.csv."""
DAYS = 365
"""Number of days of the year 2011."""
LAST_DAY = 24
"""Last day of each month that is for training."""
CATEGORY_COLUMNS: dict[str, tuple[str, ...]] = {
    "hr": tuple(map(str, range(24))),
    "weekday": tuple(map(str, range(7))),
    "weathersit": ("clear", "cloudy/misty", "light rain/snow", "heavy rain/snow"),
}
"""Columns of categories, and the values of each."""
YES_NO_COLUMNS = ("holiday", "workingday")
NUMBER_COLUMNS = ("temp", "atemp", "hum", "windspeed")
DAY = "day"
TARGET = "bikers"


def noisy_line(_: Path | None = None, *, one_sided: bool = False) -> Data:
    """Returns noisy points of the line y = 2x + 1, always the same.

    The details are our choice: x is uniform in [-1, 1], the noise is normal with standard deviation 0.2, and there are 5,000
    training points and 1,000 test points. Exactly one in ten training targets is shifted by `OFF`; no test target is.

    Args:
        one_sided: Whether all shifts go up. Large losses then pull in one direction, as it seems to be in the paper, where the
            error of Big Loss is five times that of full training. Default False: up or down at random, which cancels out.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = _line_points(POINTS, generator)
    outliers = torch.randperm(POINTS, generator=generator)[: int(OUTLIERS * POINTS)]
    y[outliers] += (
        OFF
        if one_sided
        else OFF * (2 * torch.randint(2, (len(outliers), 1), generator=generator) - 1)
    )
    return Data(TensorDataset(x, y), *_line_points(POINTS // 5, generator))


def _line_points(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(n, 1, generator=generator) - 1
    return x, 2 * x + 1 + 0.2 * torch.randn(n, 1, generator=generator)


def find_bike() -> Path:
    """Returns the path of the file in the package islp, which is not imported.

    Raises:
        FileNotFoundError: islp is not installed, or has no such file.
    """
    return find_in_package("bike", "ISLP", "data", "Bikeshare.csv")


def bike(path: Path | None = None) -> Data:
    """Returns the hours of 2011 in Washington: the number of hired bicycles, given the hour, the day and the weather.

    The days of a month up to the 24th are for training, 6,848 hours, and the others for testing, 1,797. The inputs are the
    hour, the day of the week and the kind of weather, one-hot; whether the day is a holiday or a working day; the time of the
    year as sine and cosine; temperatures, humidity and wind. Temperatures, humidity, wind and the target, `bikers`, are scaled
    to mean 0 and standard deviation 1 over the training hours. `casual` and `registered`, whose sum is the target, are left
    out.

    Raises:
        FileNotFoundError: See `find_bike`.
        ValueError: The file is damaged.
    """
    path = path or find_bike()
    try:
        columns = _read_columns(path)
        days = np.array([_day(day) for day in columns[DAY]])
        amounts = np.stack(
            [_numbers(name, columns[name]) for name in (*NUMBER_COLUMNS, TARGET)], axis=1
        )
        categories = [
            _one_hot(name, columns[name], allowed) for name, allowed in CATEGORY_COLUMNS.items()
        ]
        yes_no = [_one_hot(name, columns[name], ("0", "1"))[:, 1:] for name in YES_NO_COLUMNS]
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: truncated or damaged: {error}") from error
    test = np.array([(date(2010, 12, 31) + timedelta(int(day))).day > LAST_DAY for day in days])
    scaled = (amounts - amounts[~test].mean(0)) / amounts[~test].std(0)
    turn = 2 * np.pi * days[:, None] / DAYS
    x = np.hstack([*categories, *yes_no, np.sin(turn), np.cos(turn), scaled[:, :-1]])
    inputs, targets = (torch.from_numpy(each.astype(np.float32)) for each in (x, scaled[:, -1:]))
    return Data(TensorDataset(inputs[~test], targets[~test]), inputs[test], targets[test])


def _read_columns(path: Path) -> dict[str, tuple[str, ...]]:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = [*csv.reader(file)] or [[]]
    missing = [
        name
        for name in (*CATEGORY_COLUMNS, *YES_NO_COLUMNS, DAY, *NUMBER_COLUMNS, TARGET)
        if name not in header
    ]
    if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"line {number} has {len(row)} values instead of {len(header)}")
    if len(rows) != BIKE_ROWS:
        raise ValueError(f"{len(rows)} rows instead of {BIKE_ROWS}")
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def _one_hot(name: str, column: tuple[str, ...], allowed: tuple[str, ...]) -> NDArray[np.bool_]:
    if unknown := set(column) - set(allowed):
        raise ValueError(f"{name} is one of {', '.join(allowed)}, got {min(unknown)!r}")
    return np.array(column)[:, None] == np.array(allowed)


def _numbers(name: str, column: tuple[str, ...]) -> NDArray[np.float64]:
    numbers = np.array([float(value) for value in column])
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"{name} is a finite number, got {column[int(np.isfinite(numbers).argmin())]!r}"
        )
    return numbers


def _day(day: str) -> int:
    if not (day.isdecimal() and 1 <= int(day) <= DAYS):
        raise ValueError(f"{DAY} is a day of the year 2011, 1 to {DAYS}, got {day!r}")
    return int(day)


def r_squared(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns R2, the share of the variance of the targets that the outputs explain: at most 1, and 0 for their mean."""
    outputs, targets = (
        torch.cat(parts).cpu().double() for parts in zip(*outputs_of(model, batches), strict=True)
    )
    return 1 - float(
        (outputs - targets).square().sum() / (targets - targets.mean(0)).square().sum()
    )


REGRESSION_TASKS = tuple(
    Task(
        name,
        partial(without_folder, name, find),
        load,
        partial(perceptron, inputs, classes=1),
        lr=lr,
        batch_size=100,
        loss=nn.MSELoss,
        evaluate=r_squared,
        metric="R2",
        has_images=False,
    )
    for name, find, load, inputs, lr in (
        ("line", lambda: None, noisy_line, 1, 0.02),
        ("line-one-sided", lambda: None, partial(noisy_line, one_sided=True), 1, 0.02),
        ("bike", find_bike, bike, 43, 0.05),
    )
)
