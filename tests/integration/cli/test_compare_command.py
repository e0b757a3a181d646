import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from depth import depth
from integration.inline import call_in_process, train_in_threads
from thresher_lab.comparison.summary import conclude
from thresher_lab.training.folders import sole_use

PROCESS = [sys.executable, "-W", "error", "-m", "thresher_lab.cli"]
N = 512
METHODS = "kakurenbo:tau=0.0,infobatch:prune_fraction=0.3"


def arguments(
    out,
    task=f"digits@{N}",
    methods=METHODS,
    seeds="0,1",
    epochs=3,
    margin=0.5,
    jobs=1,
    controls="uniform,shorter",
):
    given = {
        "task": task,
        "methods": methods,
        "seeds": seeds,
        "epochs": epochs,
        "margin": margin,
        "out": out,
        "jobs": jobs,
    }
    given |= {} if controls is None else {"controls": controls}
    return [
        "compare",
        *(part for name, value in given.items() for part in (f"--{name}", str(value))),
    ]


def written(out):
    return {path.name: path.stat().st_mtime_ns for path in sorted((out / "runs").glob("*.json"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "out"
    with pytest.MonkeyPatch.context() as patch:
        train_in_threads(patch)
        done = call_in_process(*arguments(out))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return out, done.stdout, json.loads((out / "results.json").read_text())


def test_results_have_the_schema(finished):
    _, _, results = finished
    names = [
        "task",
        "epochs",
        "device",
        "processes",
        "versions",
        "margin",
        "looks",
        "rates",
        "loss_bins",
        "classes",
    ]
    names += ["left_out", "equal_seeds", "runs", "summary"]
    assert list(results) == names
    assert [results[name] for name in names[:4]] == [f"digits@{N}", 3, "cpu", 1]
    assert {"thresher", "torch", "python"} <= set(results["versions"])
    for run in results["runs"]:
        fields = {
            "method",
            "settings",
            "seed",
            "rate",
            "control_of",
            "metric",
            "cost",
            "wall_s",
            "cpu_s",
        }
        fields |= {
            "busy",
            "other_runs",
            "tracing_s",
            "step_memory",
            "confusion",
            "history",
            "samples",
        }
        assert run["tracing_s"] == 0
        assert set(run) == fields and (finished[0] / run["samples"]).is_file()
        assert {"forward", "backward", "steps", "ratio"} <= set(run["cost"]) and set(
            run["metric"]
        ) == {"name", "value"}
        assert len(run["history"]) == (
            3 if not run["method"].startswith("shorter") else math.ceil(run["settings"]["epochs"])
        )
        assert all(
            {"accuracy", "cost", "cpu_s", "wall_s"} <= set(entry) for entry in run["history"]
        )
        assert run["history"][-1]["cost"] == pytest.approx(run["cost"]["ratio"])
    columns = {"method", "mean", "std", "difference", "ci95", "cost_ratio", "wall_ratio", "verdict"}
    assert all(columns <= set(row) for row in results["summary"])
    assert [row["control_of"] or row["method"] for row in results["summary"]] == [
        "full", *3 * ["kakurenbo:tau=0.0"], *3 * ["infobatch:prune_fraction=0.3"],
    ]  # fmt: skip


def test_every_run_has_controls_of_its_own_cost(finished):
    _, _, results = finished
    runs = {(run["control_of"], run["method"], run["seed"]): run for run in results["runs"]}
    assert Counter(run["control_of"] or run["method"] for run in results["runs"]) == {
        "full": 2, "kakurenbo:tau=0.0": 6, "infobatch:prune_fraction=0.3": 6,
    }  # fmt: skip
    assert len({run["cost"]["backward_to_forward"] for run in results["runs"]}) == 1
    kinds = Counter()
    for control in (run for run in results["runs"] if run["control_of"]):
        method = runs[None, control["control_of"], control["seed"]]
        kind, _, cost = control["method"].partition("@")
        kinds[kind] += 1
        assert cost == f"{method['cost']['ratio']:.3f}"
        assert (
            control["settings"]
            == {
                "uniform": {"keep": float(cost), "fixed": False},
                "shorter": {"epochs": 3 * float(cost)},
            }[kind]
        )
        nearest = {"uniform": 1 / N, "shorter": 0.5 * 64 / (3 * N)}[kind]
        assert control["cost"]["ratio"] == pytest.approx(
            method["cost"]["ratio"], abs=0.0005 + nearest
        )
        assert (
            control["cost"]["backward"]
            == control["cost"]["forward"]
            < method["cost"]["full_forward"]
        )
        assert control["cost"]["full_forward"] == method["cost"]["full_forward"]
    assert kinds == {"uniform": 4, "shorter": 4}


def test_the_table_and_the_path_are_printed(finished):
    out, stdout, results = finished
    assert stdout.rstrip().endswith(str(out / "results.json"))
    plain = " ".join(stdout.split())
    assert all(
        row["method"] in plain and row["verdict"].split()[0] in plain for row in results["summary"]
    )
    assert all(" ".join(sentence.split()) in plain for sentence in conclude(results).sentences)


def test_another_margin_trains_nothing_anew(finished, called):
    out, _, results = finished
    before = written(out)
    done = called(*arguments(out, margin=90))
    assert done.returncode == 0, done.stderr
    assert written(out) == before
    again = json.loads((out / "results.json").read_text())
    assert again["margin"] == 90 and again["runs"] == results["runs"]


def test_finished_runs_are_not_repeated_and_a_deleted_one_is(finished, called):
    out, _, results = finished
    before = written(out)
    gone = next(name for name in before if name.startswith("kakurenbo") and "-seed1" in name)
    (out / "runs" / gone).unlink()
    done = called(*arguments(out))
    assert done.returncode == 0, done.stderr
    after = written(out)
    assert set(after) == set(before)
    assert [name for name in after if after[name] != before[name]] == [gone]
    assert done.stdout.count("kept from before") == len(before) - 1
    full = sum(name.startswith("full-seed") and name.endswith(".json") for name in before)
    said = f"{full} of {full} runs of full training are from an earlier command, and so are their CPU time"
    assert full and said in " ".join(done.stdout.split())
    again = json.loads((out / "results.json").read_text())
    assert [run["metric"] for run in again["runs"]] == [run["metric"] for run in results["runs"]]


def test_a_folder_takes_more_methods_but_no_other_comparison(finished, called):
    out, _, _ = finished
    before = written(out)
    refused = called(*arguments(out, epochs=4))
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert (
        "holds another comparison: its epochs is 3, here it is 4; give another folder"
        in refused.stderr
    )
    more = called(*arguments(out, methods="uniform:keep=0.5", seeds="1"))
    assert more.returncode == 0, more.stderr
    assert (
        "The report no longer shows infobatch:prune_fraction=0.3 and kakurenbo:tau=0.0. The runs are kept"
        in " ".join(more.stdout.split())
    )
    new = set(written(out)) - set(before)
    assert len(new) == 1 and written(out).items() >= before.items()


def test_what_a_method_cannot_have_is_left_out_of_the_default_controls_and_said(tmp_path, called):
    out = tmp_path / "out"
    done = called(
        *arguments(
            out,
            task="digits@128",
            methods="random_backprop:keep=0.02",
            seeds="0",
            epochs=1,
            controls=None,
        )
    )
    assert done.returncode == 0, done.stderr
    said = [
        "Skipped the placebo control of random_backprop:keep=0.02: RandomBackprop chooses without losses or scores: there "
        "is nothing to permute.",
        "Skipped the smaller control of random_backprop:keep=0.02: An epoch has 2 batches, and 2 of its 128 samples are "
        "chosen, fewer than two per batch, which BatchNorm needs: the smallest share is 0.0313. Give the loader larger "
        "batches, raise the share, or leave out whole steps (spend=steps).",
    ]
    lines, page = done.stdout.splitlines(), (out / "report.html").read_text()
    assert all(sentence in lines and sentence in page for sentence in said)
    assert "up to 6 runs of 1 epochs" in done.stdout
    results = json.loads((out / "results.json").read_text())
    assert [row["method"].partition("@")[0] for row in results["summary"]][2:] == [
        "shorter",
        "uniform",
        "shorter",
    ]
    by_name = called(
        *arguments(tmp_path / "named", methods="random_backprop", controls="placebo", seeds="0")
    )
    assert (
        by_name.returncode == 2
        and "RandomBackprop chooses without losses or scores" in by_name.stderr
    )


@pytest.mark.parametrize("command", ["compare", "compare --restart", "time-to-target"])
def test_a_folder_in_use_is_one_message(tmp_path, called, command):
    """Two commands that wrote the histories of the same runs to the same files ended each other with a FileNotFoundError."""
    out = tmp_path / "out"
    given = ["--task", "digits@256", "--methods", "uniform:keep=0.3", "--epochs", "2", "--out", out]
    with sole_use(out):
        done = called(*command.split(), *given)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        f"thresher: the folder {out} is in use by another comparison: wait until"
    )
    assert [path.name for path in out.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "how", depth([signal.SIGINT], [signal.SIGINT, signal.SIGKILL]), ids=lambda how: how.name
)
def test_a_comparison_that_was_stopped_goes_on(tmp_path, interruptible, called, how):
    settings = {"task": "digits@256", "methods": "uniform:keep=0.3", "seeds": "0,1", "epochs": 4}
    out = tmp_path / "out"
    command = [*PROCESS, *arguments(out, **settings)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: (out / "report.html").exists())
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: everything in the group hears it
    else:
        process.send_signal(how)
    _, stderr = process.communicate(timeout=60)
    until(
        lambda: (
            not any(
                worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
                for worker in workers
            )
        )
    )
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert (
            "Stopped. Finished runs are kept" in stderr
            and "the same command goes on from there" in stderr
        )
    else:
        assert process.returncode == -how
    assert "Traceback" not in stderr
    kept = written(out)
    assert 0 < len(kept) < 4
    report = called("report", str(out))
    assert (
        report.returncode == 0 and f"Not finished: {len(kept)} of at most 4 runs." in report.stdout
    )
    assert how is signal.SIGKILL or 'http-equiv="refresh"' not in (out / "report.html").read_text()
    done = called(*arguments(out, **settings))
    assert done.returncode == 0, done.stderr
    assert len(written(out)) == 4 and written(out).items() >= kept.items()
    assert (
        json.loads((out / "results.json").read_text())["summary"][1]["method"] == "uniform:keep=0.3"
    )


def until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_a_recipe_with_another_batch(called, tmp_path):
    given = [
        "--methods",
        "random_backprop",
        "--epochs",
        "1",
        "--seeds",
        "0",
        "--controls",
        "",
        "--out",
        str(tmp_path / "out"),
    ]
    done = called(
        "compare", "smoke:adaselection-line", *given, "--batch-size", "8", "--accumulate", "4"
    )
    assert done.returncode == 0, done.stderr
    assert (
        "32 samples per step in place of 16: learning rate 0.01 -> 0.02 (sgd: in proportion"
        in done.stderr
    )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["task"] == "smoke:adaselection-line@8x4" and {
        run["cost"]["steps"] for run in results["runs"]
    } == {4}
    refused = called("compare", "digits", *given, "--batch-size", "8")
    assert refused.returncode == 2 and "are for recipes" in refused.stderr
