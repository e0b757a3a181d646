import json

import pytest
from typer.testing import CliRunner

from thresher_lab.cli.app import app
from thresher_lab.comparison.histories import (
    _history_from,
    _skip_reason,
    history_of,
    rule_of,
    run_named,
)
from thresher_lab.recipes.running import task_of
from thresher_lab.training.loop import train
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.store import write_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    task = task_of("digits")
    data = task.load(task.find(None))
    for name, text in (
        ("hiding", "kakurenbo:max_fraction=0.4:tau=0.5"),
        ("drawn", "random_backprop:keep=0.5"),
    ):
        run = train(
            task,
            data,
            parse_methods(text)[0],
            seed=0,
            epochs=4,
            samples_to=folder / f"{name}.parquet",
        )
        write_json(folder / f"{name}.json", run)
    return folder


@pytest.mark.parametrize("ending", ["", ".parquet", ".json"])
def test_it_says_when_and_why_a_sample_was_skipped(folder, ending):
    histories = [history_of(folder / f"hiding{ending}", sample) for sample in range(40)]
    skipped = [
        epoch for history in histories for epoch in history["epochs"] if not epoch["trained"]
    ]
    trained = [epoch for history in histories for epoch in history["epochs"] if epoch["trained"]]
    assert skipped and trained and all(epoch["rule"] == "" for epoch in trained)
    said = ("right with confidence 0.5 or more", "of the samples were skipped)")
    assert all(words in epoch["rule"] for epoch in skipped for words in said)
    for sample, history in enumerate(histories):
        times = [epoch["trained"] for epoch in history["epochs"]]
        assert (
            history["title"].startswith(f"sample {sample} (class ")
            and "under kakurenbo:max_fraction=0.4:tau=0.5, seed 0" in history["title"]
        )
        assert (
            f"trained on {sum(times)} times, skipped in {times.count(0)} of 4 epochs"
            in history["title"]
        )


def test_the_rule_of_a_batch_method(folder):
    rules = {
        epoch["rule"].partition(" (")[0]
        for sample in range(20)
        for epoch in history_of(folder / "drawn", sample)["epochs"]
    }
    assert rules == {"", "not drawn in its batch"}


@pytest.mark.parametrize(
    ("method", "settings", "rule"),
    [
        (
            "infobatch",
            {"prune_fraction": 0.5, "threshold": "mean"},
            "pruned: its loss was below the mean, and it was drawn with chance 0.5",
        ),
        (
            "selective_backprop:keep=0.3 once",
            {},
            "not chosen in its batch, by the rank of its loss",
        ),
        ("uniform@0.500", {"keep": 0.5}, "not in the random subset"),
        ("shorter@0.500", {"epochs": 5}, "not reached: training had ended"),
        ("smaller@0.500", {"keep": 0.5}, "not in the random subset"),
        (
            "placebo@0.500",
            {},
            "left out by the rule of the method, with the losses or scores of another sample",
        ),
        ("somebody's", {}, "left out by its plan"),
        (
            "kakurenbo",
            {},
            "hidden: its loss was among the lowest, and it was right with confidence its setting or more",
        ),
    ],
)
def test_rules(method, settings, rule):
    assert rule_of({"method": method, "settings": settings}) == rule


def test_no_such_run_or_sample(folder):
    with pytest.raises(
        FileNotFoundError, match="0000: no such run of a comparison; there are drawn, hiding"
    ):
        history_of(folder / "0000", 0)
    with pytest.raises(ValueError, match="has no sample 1438; ids are 0 to 1437"):
        history_of(folder / "hiding", 1438)


def test_the_beginning_of_a_name_is_enough_where_one_run_has_it(folder, tmp_path):
    assert (
        history_of(folder / "draw", 3)
        == history_of(folder / "drawn", 3)
        == history_of(folder / "drawn.parquet", 3)
    )
    for name in ("drawn-again", "drawn-twice"):
        for suffix in (".json", ".parquet"):
            (tmp_path / f"{name}{suffix}").write_bytes((folder / f"drawn{suffix}").read_bytes())
    with pytest.raises(
        ValueError,
        match="drawn: several runs begin so: drawn-again, drawn-twice; give more of the name",
    ):
        history_of(tmp_path / "drawn", 3)


def test_of_several_seeds_the_lowest_is_read(folder, tmp_path):
    for seed in (10, 2):
        for suffix in (".json", ".parquet"):
            (tmp_path / f"winnow_share=0.5-seed{seed}-0123{suffix}").write_bytes(
                (folder / f"drawn{suffix}").read_bytes()
            )
    assert run_named(tmp_path / "winnow").name == "winnow_share=0.5-seed2-0123"
    with pytest.raises(FileNotFoundError, match="there are winnow_share=0.5$"):
        run_named(tmp_path / "nothing")
    assert history_of(tmp_path / "winnow", 3) == history_of(folder / "drawn", 3)
    assert history_of(tmp_path / "winnow:share=0.5", 3) == history_of(
        folder / "drawn", 3
    )  # as tables name it


def test_what_the_loader_does_not_give_is_not_told_as_the_rule():
    entry = {"epoch": 0, "actual_fraction": 0.0}
    row = {
        "id": 3,
        "loss_by_epoch": [float("-inf")],
        "trained_by_epoch": [0],
        "trained": 0,
        "hidden": 1,
    }
    history = _history_from(
        row, {"method": "kakurenbo", "settings": {"tau": 0.7}, "seed": 0, "history": [entry]}
    )
    assert "by its sampler or drop_last" in history["epochs"][0]["rule"]


def test_a_sample_that_was_dropped_was_among_those_of_the_loader():
    assert _skip_reason("hidden", {"actual_fraction": 0.0}).startswith(
        "not among the samples of the loader's epoch"
    )
    assert (
        _skip_reason("hidden", {"actual_fraction": 0.0, "dropped_fraction": 0.1})
        == "hidden (10.0% of the samples were skipped)"
    )


def test_a_class_has_its_name(folder):
    run = json.loads((folder / "hiding.json").read_text()) | {
        "classes": [f"the {number}" for number in range(10)]
    }
    write_json(folder / "named.json", run)
    (folder / "named.parquet").write_bytes((folder / "hiding.parquet").read_bytes())
    number = history_of(folder / "hiding", 3)["title"].partition("(class ")[2].partition(")")[0]
    assert f"sample 3 (class the {number}) under" in history_of(folder / "named", 3)["title"]


def test_a_rule_is_printed_once(folder):
    rules = [
        [epoch["rule"] for epoch in history_of(folder / "drawn", sample)["epochs"] if epoch["rule"]]
        for sample in range(60)
    ]
    often = next(
        sample for sample, found in enumerate(rules) if len(found) > 1 and len(set(found)) == 1
    )
    done = CliRunner().invoke(app, ["why", str(folder / "drawn"), str(often)])
    assert (
        done.exit_code == 0
        and done.output.count("not drawn in its") == 1
        and "as above" in done.output
    )
