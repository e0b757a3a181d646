import json
import subprocess
import sys

import pytest

from depth import in_verify
from thresher_lab.advise.pace import Pace
from thresher_lab.comparison import dry_run
from thresher_lab.comparison.dry_run import Passes, Prices

MADE_UP = Prices(2.0, 3.0, 1.0, 10.0, 0.5, 0.0, Pace(0.0, 1.0, 2.0, 0.0, 1.0), {"infobatch": Passes(0.5, 0.75, 0.75)})


@pytest.fixture
def priced(monkeypatch):
    """Takes made-up prices in the place of a probe."""
    monkeypatch.setattr(dry_run, "measured_prices", lambda *_, **__: MADE_UP)
    monkeypatch.setattr(dry_run, "available_cores", lambda: 2)


@in_verify
def test_a_real_one_says_what_it_does_and_writes_nothing(tmp_path):
    out = tmp_path / "out"
    given = ["--methods", "uniform:keep=0.5", "--epochs", "1", "--seeds", "0", "--out", str(out), "--dry-run"]
    command = [sys.executable, "-W", "error", "-m", "thresher_lab.cli", "compare", "digits@200", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("compare --dry-run: ") for line in done.stderr.splitlines())
    assert done.stdout.startswith("full: 1 run of 1 epoch; about") and "2 runs to train, 0 finished: about" in done.stdout
    assert not out.exists()


def test_what_is_finished_is_said(tmp_path, called, priced):
    given = ("compare", "digits@200", "--methods", "infobatch", "--epochs", 1, "--quick", "--out", tmp_path)
    assert called(*given).returncode == 0
    done = called(*given, "--dry-run")
    assert "All 2 runs are finished; the command only writes the report." in done.stdout
    done = called(*given, "--dry-run", "--json", "-")
    assert [run["finished"] for run in json.loads(done.stdout)["runs"]] == [True, True]


def test_with_more_seeds_it_may_take_longer(tmp_path, called, priced):
    given = ("compare", "digits@200", "--methods", "infobatch", "--epochs", 4, "--out", tmp_path / "out", "--dry-run")
    done = called(*given, "--until-decided")
    assert "With --until-decided, up to 12 seeds: at most 4 times as long." in " ".join(done.stdout.split())
    assert "infobatch: 3 runs of 4 epochs; about 23 s each\n  " in done.stdout
    assert "21 runs to train, 0 finished: about" in done.stdout
    assert not (tmp_path / "out").exists()


def test_nothing_is_deleted(tmp_path, called):
    done = called("compare", "digits@200", "--methods", "infobatch", "--epochs", 1, "--out", tmp_path, "--dry-run", "--restart")
    assert done.returncode == 2 and "--dry-run deletes nothing; leave out --restart" in done.stderr


def test_the_runs_that_choose_rates_are_counted(tmp_path, called, priced):
    out = tmp_path / "out"
    given = ("compare", "digits@200", "--methods", "infobatch", "--epochs", 1, "--seeds", 0, "--controls", "", "--out", out)
    assert called(*given).returncode == 0
    done = called(*given, "--rates", "0.5,1", "--dry-run", "--json", tmp_path / "found.json")
    said = " ".join(done.stdout.split())
    # Two arms with two factors and two seeds; what is finished at the rate of the training is not tried yet.
    assert "First, to choose the rates: 8 runs to train, 0 finished: about" in said and "only writes the report" not in said
    assert "Then, if all arms keep the rate of the training: 0 runs to train, 2 finished" in said
    looks = json.loads((tmp_path / "found.json").read_text())["looks"]
    assert (looks["runs"], looks["finished"]) == (8, 0) and looks["cpu_s"] > looks["wall_s"] > 8 * 2
    assert called(*given, "--rates", "0.5,1").returncode == 0
    done = called(*given, "--rates", "0.5,1", "--dry-run")
    assert "First, to choose the rates: 0 runs to train, 8 finished" in " ".join(done.stdout.split())
