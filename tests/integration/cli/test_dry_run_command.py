import json


def test_what_is_finished_is_said(tmp_path, called):
    given = (
        "compare",
        "digits@200",
        "--methods",
        "infobatch",
        "--epochs",
        1,
        "--quick",
        "--out",
        tmp_path,
    )
    assert called(*given).returncode == 0
    done = called(*given, "--dry-run")
    assert "2 of 2 runs are finished." in done.stdout and not done.stderr
    done = called(*given, "--dry-run", "--json", "-")
    assert [run["finished"] for run in json.loads(done.stdout)["runs"]] == [True, True]


def test_nothing_is_deleted(tmp_path, called):
    done = called(
        "compare",
        "digits@200",
        "--methods",
        "infobatch",
        "--epochs",
        1,
        "--out",
        tmp_path,
        "--dry-run",
        "--restart",
    )
    assert done.returncode == 2 and "--dry-run deletes nothing; leave out --restart" in done.stderr


def test_the_runs_that_choose_rates_are_counted(tmp_path, called):
    out = tmp_path / "out"
    given = (
        "compare",
        "digits@200",
        "--methods",
        "infobatch",
        "--epochs",
        1,
        "--seeds",
        0,
        "--controls",
        "",
        "--out",
        out,
    )
    assert called(*given).returncode == 0
    done = called(*given, "--rates", "0.5,1", "--dry-run", "--json", tmp_path / "plan.json")
    # Two arms with two factors and two seeds.
    assert (
        "To choose the rates: 8 runs, 0 finished" in done.stdout
        and "2 of 10 runs are finished." in done.stdout
    )
    assert len(json.loads((tmp_path / "plan.json").read_text())["looks"]) == 8
    done = called(*given, "--until", "decided", "--dry-run")
    assert "This is the maximum: training stops when every verdict is decided." in done.stdout
