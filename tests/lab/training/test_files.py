"""Valid JSON of the wrong shape: one message with the file, the field and what to do, from every command that reads it."""

import copy
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lab.report.cases import comparison, save
from thresher.scores.runs import from_run
from thresher_lab import cli
from thresher_lab.report.loading import load_comparison
from thresher_lab.training.files import Manifest, Reproduced, Results, read_checked
from thresher_lab.training.store import Store, write_json


@pytest.fixture(scope="module")
def results():
    return json.loads(json.dumps(comparison({"full": 0.0, "kakurenbo": 0.3}, seeds=(0, 1))[0]))


def damaged(content, path, change):
    """A copy with one entry replaced; with `Ellipsis` the entry is taken away."""
    content = copy.deepcopy(content)
    inside, (*way, last) = content, path
    for name in way:
        inside = inside[name]
    if change is ...:
        del inside[last]
    else:
        inside[last] = change
    return content


WRONG = [
    (("task",), 3),
    (("epochs",), "six"),
    (("device",), ...),
    (("versions",), []),
    (("runs",), {}),
    (("runs",), []),
    (("runs", 0), "run"),
    (("runs", 0, "method"), None),
    (("runs", 1, "seed"), "0"),
    (("runs", 0, "metric"), "accuracy"),
    (("runs", 0, "metric", "value"), ...),
    (("runs", 0, "cost"), 2.0),
    (("runs", 0, "cost", "ratio"), "1"),
    (("runs", 0, "cpu_s"), None),
    (("runs", 0, "control_of"), ...),
    (("runs", 0, "history"), {}),
    (("runs", 0, "history", 0), 7),
    (("runs", 0, "history", 0, "epoch"), ...),
    (("runs", 0, "history", 0, "accuracy"), "high"),
    (("runs", 0, "history", 0, "loss_histogram"), [1, 2]),
    (("runs", 0, "history", 0, "actual_fraction"), []),
    (("runs", 0, "samples"), 5),
    (("summary",), None),
    (("summary", 0, "mean"), "0.9"),
    (("summary", 1, "ci95"), [0.1]),
    (("summary", 0, "cost_ratio"), ...),
    (("summary", 0, "method"), "half"),
    (("loss_bins",), 3),
    (("left_out",), [{"method": "m", "control": "placebo", "why": None}]),
]


@pytest.mark.parametrize(
    ("path", "change"),
    WRONG,
    ids=lambda value: ".".join(map(str, value)) if type(value) is tuple else "",
)
def test_results_of_the_wrong_shape_are_refused(tmp_path, results, path, change):
    write_json(tmp_path / "results.json", damaged(results, path, change))
    with pytest.raises(
        ValueError, match=r"results\.json: .*`thresher compare --out .*` makes it again"
    ) as error:
        load_comparison(tmp_path)
    assert str([name for name in path if isinstance(name, str)][-1]) in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) < 500


@pytest.mark.parametrize("content", [[], 3, None, "results", [[]]])
def test_content_that_is_no_object_is_refused(tmp_path, content):
    write_json(tmp_path / "results.json", content)
    with pytest.raises(ValueError, match="the content should be an object with fields, got"):
        load_comparison(tmp_path)


def test_true_results_are_taken_as_they_are(tmp_path, results):
    write_json(tmp_path / "results.json", {**results, "of a later version": 1})
    assert read_checked(tmp_path / "results.json", Results, "") == {
        **results,
        "of a later version": 1,
    }


def test_many_problems_are_counted(tmp_path):
    write_json(tmp_path / "results.json", {"epochs": 3})
    with pytest.raises(
        ValueError,
        match=r"`task` is missing; .*`device` is missing; .*`versions` is missing; and 2 more",
    ):
        read_checked(tmp_path / "results.json", Results, "")


def test_a_history_of_other_epochs_than_its_samples_is_refused(tmp_path):
    made, samples = comparison({"full": 0.0}, seeds=(0,))
    save(tmp_path, made, samples)
    write_json(
        tmp_path / "results.json",
        damaged(
            json.loads((tmp_path / "results.json").read_text()), ("runs", 0, "history", 0), ...
        ),
    )
    with pytest.raises(
        ValueError, match=r"the `history` of full, seed 0, has 11 epochs, runs/0.parquet has 12"
    ):
        load_comparison(tmp_path)


def ends(monkeypatch, capsys, *command):
    """The message with which a command leaves."""
    monkeypatch.setattr(sys, "argv", ["thresher", *map(str, command)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("thresher: ")
    assert message.count("\n") == 1
    return message


def stored(folder, run):
    """A run as DIR/runs has it, with the file of its samples."""
    write_json(folder / "runs" / "full-0.json", run)
    columns = {"id": [0, 1], "target": [0, 1], "trained": [2, 2], "hidden": [0, 0]}
    columns |= {"loss_by_epoch": [[1.0] * 6] * 2, "trained_by_epoch": [[1] * 6] * 2}
    pq.write_table(pa.table(columns), folder / "runs" / "full-0.parquet")
    return folder / "runs" / "full-0"


def test_commands_end_with_one_message(monkeypatch, capsys, tmp_path, results):
    write_json(tmp_path / "results.json", damaged(results, ("runs", 0, "metric"), 1))
    assert "results.json: `runs.0.metric` should be an object" in ends(
        monkeypatch, capsys, "report", tmp_path
    )
    run = stored(tmp_path, damaged(results["runs"][0], ("settings",), []))
    message = ends(monkeypatch, capsys, "why", run, 0)
    assert (
        "full-0.json: `settings` should be a valid dictionary, got []. Delete the files of the run"
        in message
    )
    stored(tmp_path, damaged(results["runs"][0], ("history", 0), ...))
    assert "`history` has 11 epochs, full-0.parquet has 6" in ends(
        monkeypatch, capsys, "why", run, 0
    )
    pq.write_table(pa.table({"id": [0]}), run.with_name("full-0.parquet"))
    assert "full-0.parquet: the columns trained, hidden" in ends(monkeypatch, capsys, "why", run, 0)
    write_json(tmp_path / "comparison.json", {"task": "digits", "epochs": 3})
    compare = (
        "compare",
        "--task",
        "digits",
        "--methods",
        "full",
        "--epochs",
        "3",
        "--out",
        tmp_path,
        "--seeds",
        "0",
    )
    message = ends(monkeypatch, capsys, *compare)
    assert (
        "comparison.json: the field `backward_to_forward` is missing. Give another --out, or delete the folder"
        in message
    )


def test_stored_runs_are_checked_before_they_are_used(tmp_path, results):
    store = Store(tmp_path, {"task": "digits", "epochs": 6})
    run = {**results["runs"][0], "device": "cpu"}
    run["cost"] |= {"full_forward": 9, "full_backward": 9}
    store.save_run("full", run)
    assert store.run("full") == run
    assert store.run("none") is None
    store.save_run("full", damaged(run, ("history", 1, "backward"), "many"))
    with pytest.raises(
        ValueError,
        match=r"full\.json: `history.1.backward` should be a valid integer, got 'many'. Delete the file",
    ):
        store.run("full")


def test_manifests_and_reproductions_are_checked(tmp_path):
    for kind, field in ((Manifest, "backward_to_forward"), (Reproduced, "name")):
        write_json(tmp_path / "file.json", {})
        with pytest.raises(
            ValueError, match=f"file.json: the field `{field}` is missing.* Do something"
        ):
            read_checked(tmp_path / "file.json", kind, "Do something")


@pytest.mark.parametrize(
    "content", [[], {"cost": []}, {"cost": {"forward": "9"}}, {"cost": {"backward": -1}}]
)
def test_scores_of_a_run_with_a_wrong_cost_are_refused(tmp_path, results, content):
    run = stored(tmp_path, content)
    with pytest.raises(
        ValueError, match=r"full-0\.json: `cost` must have whole numbers `forward` and `backward`"
    ):
        from_run(run.with_suffix(".parquet"))
