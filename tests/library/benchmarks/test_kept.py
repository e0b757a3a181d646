import gzip
import json
import re
from pathlib import Path

import pytest
from benchmarks import kept

ROOT = Path(__file__).parents[3]
COMPARED = {"fashion-cnn", "fashion-resnet8", "demo-mnist-5k", "further-methods", "diet-sb"}


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_lines_that_are_added_are_read_before_and_after_packing(name, tmp_path):
    path, lines = tmp_path / name, [{"job": number, "text": "ü" * number} for number in range(20)]
    assert kept.read_lines(path) == []
    for number, line in enumerate(lines, 1):
        kept.add_line(path, line)
        assert kept.read_lines(path) == lines[:number]
    size = path.stat().st_size
    kept.pack(path)
    kept.pack(tmp_path / "none.jsonl.gz")
    assert kept.read_lines(path) == lines and [file.name for file in tmp_path.iterdir()] == [name]
    assert (path.stat().st_size < size) == name.endswith(".gz")
    kept.add_line(path, "more")
    assert kept.read_lines(path) == [*lines, "more"]


def test_a_packed_file_is_packed_once_to_the_same_bytes(tmp_path):
    path = tmp_path / "runs.jsonl.gz"
    for number in range(50):
        kept.add_line(path, number)
    kept.pack(path)
    packed = path.read_bytes()
    kept.pack(path)
    assert (
        path.read_bytes()
        == packed
        == gzip.compress(b"".join(b"%d\n" % number for number in range(50)), 9, mtime=0)
    )


def test_a_comparison_is_copied_without_the_details_of_epochs(tmp_path):
    epoch = {
        "epoch": 0,
        "cost": 0.5,
        "nonfinite": 0,
        "backward": 3,
        "loss": 0.7,
        "loss_histogram": [1, 2],
        "step_s": 0.1,
    }
    run = {"method": "full", "metric": {"name": "loss", "value": 0.7}, "history": [epoch]}
    content = {
        "task": "t",
        "runs": [run, run],
        "summary": [{"method": "full", "verdict": "a | b"}],
        "rates": None,
    }
    (tmp_path / "results.json").write_text(json.dumps(content))
    kept.main([str(tmp_path / "results.json"), str(tmp_path / "kept.json")])
    text = (tmp_path / "kept.json").read_text()
    short = run | {
        "history": [
            {name: epoch[name] for name in ("epoch", "cost", "backward", "nonfinite", "loss")}
        ]
    }
    assert json.loads(text) == content | {"runs": [short, short]}
    assert len(text.splitlines()) == 11


def test_the_folder_is_below_6_megabytes_and_has_no_details():
    assert (
        sum(path.stat().st_size for path in kept.RESULTS.rglob("*") if path.is_file()) <= 6_000_000
    )
    for name in COMPARED:
        text = (kept.RESULTS / f"{name}.json").read_text()
        found = json.loads(text)
        assert kept.as_text(kept.without_details(found)) == text and all(
            run["history"] for run in found["runs"]
        )


def test_links_of_pages_to_results_are_files():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    linked = {
        file
        for page in pages
        for file in re.findall(r"benchmarks/results/([\w./-]+)\)", page.read_text())
    }
    assert (
        len(linked) > 15 and [file for file in linked if not (kept.RESULTS / file).is_file()] == []
    )
