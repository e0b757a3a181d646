import json
import subprocess
import sys
import xml.etree.ElementTree as ET

PROCESS = [sys.executable, "-W", "error", "-m", "thresher_lab.cli"]
ARGUMENTS = ["time-to-target", "--task", "digits@400", "--epochs", "2", "--jobs", "1"]


def test_times_curves_and_a_figure(tmp_path, called):
    out, results, figure = (
        tmp_path / "out",
        tmp_path / "benchmarks" / "r.json",
        tmp_path / "docs" / "f.svg",
    )
    more = [
        "--methods",
        "uniform:keep=0.5,kakurenbo",
        "--seeds",
        "0",
        "--out",
        out,
        "--results",
        results,
        "--figure",
        figure,
    ]
    done = called(*ARGUMENTS, *more)
    assert done.returncode == 0, done.stderr
    assert not done.stderr and done.stdout.rstrip().endswith(f"{results}\n{figure}")
    measured = json.loads(results.read_text())
    assert [arm["method"] for arm in measured["arms"]] == ["full", "uniform:keep=0.5", "kakurenbo"]
    assert measured["task"] == "digits@400" and [
        target["factor"] for target in measured["targets"]
    ] == [1.4, 1.2, 1.1]
    full = measured["arms"][0]
    assert [point["cost"] for point in full["curve"]] == [0.5, 1.0]
    assert all(
        reached["cost_to_full"] == reached["cpu_to_full"] == 1 for reached in full["reached"]
    )
    words = [
        text.text for text in ET.parse(figure).getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert words.count("digits@400, 2 epochs") == 2 and words.count("kakurenbo") == 1
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert len(runs) == 3 and not any(run["control_of"] for run in runs)


def test_a_mistake_is_one_message(tmp_path):
    """In a real process."""
    command = [
        *PROCESS,
        *ARGUMENTS,
        "--methods",
        "kakurenbo:forward_passes=once",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        "kakurenbo has no setting 'forward_passes'" in done.stderr
        and not (tmp_path / "out").exists()
    )
