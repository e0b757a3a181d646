import csv
import sys
from importlib.util import find_spec

import pytest
import torch

from thresher_lab.tasks import base
from thresher_lab.tasks import regression as data

AMOUNTS = ("day", "temp", "atemp", "hum", "windspeed", "casual", "registered", "bikers")
NAMES = ("season", "mnth", "hr", "weekday", "holiday", "workingday", "weathersit", *AMOUNTS)
WEATHER = ("clear", "cloudy/misty", "light rain/snow", "heavy rain/snow")


def hours(days=40):
    """Two a day, from the first of January."""
    rows = []
    for n in range(2 * days):
        categories = (1, "Jan", n % 24, n % 7, n % 7 // 6, n % 2, WEATHER[n % 4])
        amounts = (1 + n // 2, n / 100, n % 9, n % 5, n % 3, 1, n, n + 1)
        rows.append(dict(zip(NAMES, categories + amounts, strict=True)))
    return rows


def write(path, rows, names=NAMES):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BIKE_ROWS", 80)
    return tmp_path / "Bikeshare.csv"


def test_the_line_is_the_same_every_time_and_draws_from_its_own_generator():
    state = torch.get_rng_state()
    first, again = data.noisy_line(), data.noisy_line()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b) for a, b in zip(first.train.tensors, again.train.tensors, strict=True)
    )
    assert torch.equal(first.test_inputs, again.test_inputs) and torch.equal(
        first.test_targets, again.test_targets
    )


def test_one_in_ten_points_of_the_line_is_off_and_none_that_is_tested():
    line = data.noisy_line()
    x, y = line.train.tensors
    assert (x.shape, y.shape, line.test_inputs.shape, y.dtype) == (
        (5000, 1),
        (5000, 1),
        (1000, 1),
        torch.float32,
    )
    error = y - (2 * x + 1)
    off = error.abs() > 1.5
    assert int(off.sum()) == 500 and 200 < int((error[off] > 0).sum()) < 300
    assert error[~off].std() == pytest.approx(0.2, abs=0.01) and (
        error[off].abs() - 3
    ).std() == pytest.approx(0.2, abs=0.02)
    assert (line.test_targets - (2 * line.test_inputs + 1)).abs().max() < 1
    assert -1 <= x.min() < -0.99 and 0.99 < x.max() <= 1


def test_all_outliers_of_a_one_sided_line_are_above_it():
    x, y = data.noisy_line(one_sided=True).train.tensors
    error = y - (2 * x + 1)
    off = error.abs() > 1.5
    assert int(off.sum()) == 500 and bool((error[off] > 0).all())
    both = data.noisy_line().train.tensors
    assert torch.equal(x, both[0]) and torch.equal(y[~off], both[1][~off])


def test_bike_tests_on_the_last_days_of_each_month(file):
    bike = data.bike(write(file, hours()))
    assert bike.train.tensors[0].shape == (2 * (24 + 9), 43) and bike.test_inputs.shape == (
        2 * 7,
        43,
    )
    assert (
        bike.train.tensors[1].shape == (66, 1)
        and bike.test_targets.dtype == bike.test_inputs.dtype == torch.float32
    )


def test_bike_has_categories_apart_and_amounts_scaled_by_training(file):
    bike = data.bike(write(file, hours()))
    x, y = bike.train.tensors
    hour, weekday, weather, flags, year, amounts = x.split((24, 7, 4, 2, 2, 4), dim=1)
    assert all(torch.equal(part.sum(1), torch.ones(66)) for part in (hour, weekday, weather))
    assert hour.argmax(1)[:30].tolist() == [n % 24 for n in range(30)] and weather.argmax(1)[
        :5
    ].tolist() == [0, 1, 2, 3, 0]
    assert flags[:7].tolist() == [[n // 6, n % 2] for n in range(7)]
    assert (
        torch.allclose(year.norm(dim=1), torch.ones(66))
        and 0 < year[0, 0] == year[1, 0] < year[2, 0] < year[-1, 0] < 1
    )
    for scaled in (amounts, y):
        assert torch.allclose(scaled.mean(0), torch.zeros(1), atol=1e-5)
        assert torch.allclose(scaled.std(0, correction=0), torch.ones(1), atol=1e-5)
    assert bike.test_targets.mean().abs() > 0.1


def test_bike_sees_neither_what_adds_up_to_the_target_nor_the_test_days(file):
    rows = hours()
    before = data.bike(write(file, rows))
    for row in rows:
        row |= {"casual": 100 - row["casual"], "registered": 7}
        if 24 < row["day"] <= 31:
            row |= {"temp": 5, "bikers": 1000}
    after = data.bike(write(file, rows))
    assert all(
        torch.equal(a, b) for a, b in zip(before.train.tensors, after.train.tensors, strict=True)
    )
    assert not torch.equal(before.test_targets, after.test_targets)


@pytest.mark.skipif(find_spec("ISLP") is None, reason="islp is not installed")
def test_bike_is_read_without_importing_islp():
    bike = data.bike(data.find_bike())
    assert (len(bike.train), len(bike.test_targets)) == (6848, 1797)
    assert bike.train.tensors[0].shape[1] == 43 and bool(bike.train.tensors[0].isfinite().all())
    assert "ISLP" not in sys.modules


def test_bike_absent(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda _: None)
    with pytest.raises(
        FileNotFoundError, match="bike is a file of the package islp.*pip install --no-deps islp"
    ):
        data.find_bike()


def test_bike_without_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(
        base,
        "find_spec",
        lambda _: type("Spec", (), {"submodule_search_locations": [str(tmp_path)]}),
    )
    with pytest.raises(FileNotFoundError, match="pip install --no-deps islp"):
        data.find_bike()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Bikeshare.csv").touch()
    assert data.find_bike() == tmp_path / "data" / "Bikeshare.csv"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hr", 24, "hr is one of 0, .*, 23, got '24'"),
        ("weathersit", "hail", "weathersit is one of clear, .*, got 'hail'"),
        ("holiday", "", "holiday is one of 0, 1, got ''"),
        ("temp", "warm", "could not convert string to float: 'warm'"),
        ("bikers", "nan", "bikers is a finite number, got 'nan'"),
        ("day", 366, "day is a day of the year 2011, 1 to 365, got '366'"),
        ("day", "1.5", "day is a day of the year"),
    ],
)
def test_bike_with_a_value_that_cannot_be(file, name, value, message):
    rows = hours()
    rows[17][name] = value
    with pytest.raises(ValueError, match=rf"Bikeshare.csv: truncated or damaged: {message}"):
        data.bike(write(file, rows))


def test_bike_truncated_or_without_a_column(file):
    write(file, hours())
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(
        ValueError,
        match=r"Bikeshare.csv: truncated or damaged: line 81 has \d+ values instead of 15",
    ):
        data.bike(file)
    with pytest.raises(
        ValueError, match=r"Bikeshare.csv: truncated or damaged: 79 rows instead of 80"
    ):
        data.bike(write(file, hours()[:-1]))
    with pytest.raises(
        ValueError, match=r"Bikeshare.csv: truncated or damaged: it has no column hum, bikers"
    ):
        data.bike(write(file, hours(), [name for name in NAMES if name not in ("hum", "bikers")]))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'day,hr\n"1,2\n'])
def test_bike_of_another_kind(file, content):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"Bikeshare.csv: truncated or damaged: "):
        data.bike(file)
