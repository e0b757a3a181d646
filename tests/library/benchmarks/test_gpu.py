"""The pack for a machine with a GPU: its parts run on a CPU, without the packages that such a machine lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import check, speed
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.json_lines import JsonLines, OtherResultsError

from depth import in_verify

ROOT = Path(__file__).parents[3]
MISSING = ("accelerate", "plotly", "pydantic", "rich", "typer")


@pytest.fixture
def run_part(tmp_path):
    """Runs a part at its smallest size, in a process in which some packages cannot be imported."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in MISSING:
        (absent / f"{name}.py").write_text(f"raise ImportError('{name} is not here')\n")

    def run(part, *options):
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            part,
            "--device",
            "cpu",
            "--smoke",
            "--out",
            str(tmp_path),
            *options,
        ]
        path = os.pathsep.join([str(absent), str(ROOT / "src")])
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        file = tmp_path / f"gpu-{part}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()], done.stdout

    return run


def test_a_part_starts_without_the_packages_and_stops_in_time(run_part):
    _, printed = run_part("speed", "--minutes", "0")
    assert "the minutes are over" in printed


@in_verify
def test_check_writes_a_line_per_test_and_goes_on_where_it_stopped(run_part):
    (first, *begun), _ = run_part("check", "--minutes", "0.001")  # over when the first test ends
    assert first["device"] == "cpu" and first["torch"] == torch.__version__ and len(begun) <= 1
    (_, *results), printed = run_part("check")
    assert results[: len(begun)] == begun
    outcomes = {result["name"]: result["outcome"] for result in results}
    assert len(outcomes) == len(results) > 10 and set(outcomes.values()) == {"passed", "skipped"}
    assert [name.split("/")[1] for name in outcomes] == sorted(
        name.split("/")[1] for name in outcomes
    )
    assert "needs a GPU" in printed


@in_verify
def test_speed_writes_a_line_per_measurement_and_goes_on_where_it_stopped(run_part, tmp_path):
    here = ["speed", "--device", "cpu", "--smoke", "--out", str(tmp_path)]
    (_, *results), printed = run_part("speed")
    assert [result["name"] for result in results] == list(
        speed.measurements(speed.SMALL, torch.device("cpu"))
    )
    by_name = {result["name"]: result for result in results}
    assert set(by_name["overhead: mlp"]["arms"]) == {"plain", "plain, half batches", *speed.ARMS}
    assert all(value > 0 for value in by_name["subset: gpt2"]["over_limit"].values())
    assert set(by_name["half batches: blocks, 64"]["rows"]) == {"4", "8"}
    assert "keep 0.33" in printed and "half over whole" in printed
    written = (tmp_path / "gpu-speed.jsonl").read_text()
    assert main(here) == 0 and (tmp_path / "gpu-speed.jsonl").read_text() == written


BROKEN_TESTS = """
import os
import pytest

def test_fails():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="no device")
def test_skips():
    pass

def test_crashes():
    os.abort()

def test_breaks_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_passes():
    pass
"""


def test_check_goes_on_after_a_test_that_breaks_the_process(tmp_path, monkeypatch, capsys):
    file = tmp_path / "test_broken.py"
    file.write_text(BROKEN_TESTS)
    unloadable = tmp_path / "test_unloadable.py"
    unloadable.write_text("import a_package_that_is_not_there\n")
    monkeypatch.setattr(check, "TESTS", (str(file), str(unloadable)))
    device, lines = (
        torch.device("cpu"),
        JsonLines(tmp_path / "gpu-check.jsonl", torch.device("cpu"), smoke=False),
    )
    assert check.run(lines, device, until=float("inf"), smoke=False) == 1
    outcomes = {
        result["name"].rpartition("::")[2].rpartition("/")[2]: result["outcome"]
        for result in lines.results()
    }
    assert outcomes == {
        "test_unloadable.py": "error",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_crashes": "crashed",
        "test_breaks_the_device": "failed",
        "test_passes": "passed",
    }
    printed = capsys.readouterr().out
    assert (
        "one is not two" in printed
        and "a_package_that_is_not_there" in printed
        and "no device" in printed
    )
    lines.forget_failures()
    assert {result["outcome"] for result in lines.results()} == {"skipped", "passed"}


def test_a_measurement_that_fails_is_a_line_and_the_others_are_made(tmp_path, monkeypatch, capsys):
    def fail():
        raise RuntimeError("too large")

    made = {"planning: a": fail, "planning: b": lambda: {"seconds": 1.0}}
    monkeypatch.setattr(speed, "measurements", lambda *_: made)
    lines = JsonLines(tmp_path / "gpu-speed.jsonl", torch.device("cpu"), smoke=True)
    assert speed.run(lines, torch.device("cpu"), until=float("inf"), smoke=True) == 1
    assert [result.get("error") for result in lines.results()] == ["RuntimeError: too large", None]
    assert "too large" in capsys.readouterr().out


SIZES = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vit_b": 86_567_656,
    "gpt2": 124_439_808 + 50_257 * 768,
}
"""Numbers of parameters of the papers' networks; the layers at both ends of GPT-2 share none here."""


@pytest.mark.parametrize("name", SIZES)
def test_networks_have_the_shapes_of_the_papers(name):
    case = speed.cases(speed.LARGE)[name]
    with torch.device("meta"):
        model = case.make()
        x, _ = case.data(2, torch.device("meta"))
        outputs = model(x)
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]
    assert outputs.shape == (2, *(case.shape if case.tokens else ()), case.classes)


def test_results_of_other_sizes_are_not_mixed(tmp_path):
    JsonLines(tmp_path / "gpu-speed.jsonl", torch.device("cpu"), smoke=True)
    with pytest.raises(OtherResultsError, match="smoke True and not False"):
        JsonLines(tmp_path / "gpu-speed.jsonl", torch.device("cpu"), smoke=False)
