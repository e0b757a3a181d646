"""compare, train and recipes in several processes: the results are those of one, and the first process writes them."""

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.multiprocessing as mp

import launched_processes as cases
from made_once import made_once
from thresher_lab.comparison.compare import compare
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.store import Checkpoint

SIZE = 2
MEASURED = (
    "wall_s",
    "cpu_s",
    "step_s",
    "step_memory",
    "backward_to_forward",
    "ratio",
    "cost",
    "device",
    "busy",
)
"""Entries of results that differ between two trainings of one method."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where several processes have run every case."""

    def run(folder):
        (folder / "mine.py").write_text(cases.SCRIPT)
        mp.spawn(cases.run_cases, (SIZE, str(folder)), nprocs=SIZE)

    return made_once(tmp_path_factory, "launched", run)


@pytest.fixture(scope="module")
def results(folder):
    """What every case returned in each process."""
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What some cases return in one process."""
    folder, before = tmp_path_factory.mktemp("alone"), Path.cwd()
    os.chdir(folder)
    with warnings.catch_warnings(action="ignore"):
        found = {
            case.__name__: case()
            for case in (cases.runs, cases.orders, cases.accumulated, cases.padded)
        }
    os.chdir(before)
    return folder, found


def comparable(run):
    """A run without what was measured."""
    cost = {name: value for name, value in run["cost"].items() if name not in MEASURED}
    history = [
        {name: value for name, value in entry.items() if name not in MEASURED}
        for entry in run["history"]
    ]
    return {name: value for name, value in run.items() if name not in MEASURED} | {
        "cost": cost,
        "history": history,
    }


def assert_equal(own, expected, place=""):
    """Checks that two results are the same up to the rounding of numbers."""
    assert type(own) is type(expected), place
    if isinstance(own, dict):
        assert own.keys() == expected.keys(), place
        for name, value in own.items():
            assert_equal(value, expected[name], f"{place}.{name}")
    elif isinstance(own, list):
        assert len(own) == len(expected), place
        for number, (one, other) in enumerate(zip(own, expected, strict=True)):
            assert_equal(one, other, f"{place}.{number}")
    elif isinstance(own, float):
        assert own == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True), place
    else:
        assert own == expected, place


@pytest.mark.parametrize("name", cases.JOBS)
def test_the_results_are_those_of_one_process(results, alone, folder, name):
    place, found = alone
    for one in results:
        assert one["runs"][name] == results[0]["runs"][name]
    own, whole = results[0]["runs"][name], found["runs"][name]
    assert own["device"] == "2 x cpu" and whole["device"] == "cpu"
    assert own["metric"]["value"] == pytest.approx(whole["metric"]["value"], abs=1e-12)
    assert_equal(comparable(own), comparable(whole))
    tables = [pq.read_table(path / f"{name}.parquet") for path in (folder, place)]
    assert tables[0].schema == tables[1].schema and tables[0].num_rows == cases.WHOLE
    for column in tables[0].column_names:
        own, expected = (np.array(table[column].to_pylist(), dtype=float) for table in tables)
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6, err_msg=column)


@pytest.mark.parametrize("order", cases.ORDERS)
def test_a_last_batch_that_is_not_full_is_shared_out_and_one_process_evaluates(
    results, alone, order
):
    (own, evaluated), (other, not_evaluated) = (one["orders"][order] for one in results)
    whole, _ = alone[1]["orders"][order]
    assert (evaluated, not_evaluated) == (cases.EPOCHS, 0) and own == other
    assert_equal(comparable(own), comparable(whole))


def test_steps_of_several_batches(results, alone):
    own, whole = results[0]["accumulated"], alone[1]["accumulated"]
    assert_equal(comparable(own["full"]), comparable(whole["full"]))
    assert own["full"]["metric"]["value"] == pytest.approx(
        whole["full"]["metric"]["value"], abs=1e-12
    )
    assert own["full"]["cost"]["steps"] == cases.EPOCHS * 6
    other = results[1]["accumulated"]
    assert (
        other["weights"] == own["weights"]
        and other["by chance"]["cost"]["steps"] == own["by chance"]["cost"]["steps"]
    )


def test_costs_are_those_of_all_processes(results, alone):
    """An odd number of kept samples is made even by one of them that comes twice, and the cost says so."""
    own, whole = (found["padded"]["infobatch"] for found in (results[0], alone[1]))
    assert [entry["kept"] for entry in own["history"]] == [
        entry["kept"] for entry in whole["history"]
    ]
    for entry in own["history"]:
        assert entry["forward"] == entry["backward"] == entry["kept"] + entry["kept"] % SIZE
    assert any(entry["kept"] % SIZE for entry in own["history"])
    for name in cases.PASSES:
        forwards = {"once": 1, "twice": 1.25}[name]
        own, whole = (found["padded"][name] for found in (results[0], alone[1]))
        assert (
            own["cost"]["full_forward"]
            == whole["cost"]["full_forward"]
            == cases.PARTS * cases.EPOCHS
        )
        forward = own["cost"]["forward"] - own["cost"]["comparing"]
        assert forward == pytest.approx(forwards * cases.PARTS * cases.EPOCHS, rel=0.02)
        for entry in own["history"]:
            assert entry["candidates"] == cases.PARTS
            assert (
                entry["selected"]
                == entry["backward"]
                == pytest.approx(0.25 * cases.PARTS, rel=0.05)
            )
            assert entry["actual_fraction"] == pytest.approx(
                1 - entry["selected"] / entry["candidates"]
            )


@pytest.mark.parametrize("order", ["DistributedSampler", "without a generator"])
def test_loaders_that_deal_out_their_samples_or_draw_from_the_global_state(results, order):
    for one in results:
        run = one["padded"][order]
        assert run == results[0]["padded"][order]
        assert run["cost"]["forward"] == run["cost"]["full_forward"] == cases.PARTS * cases.EPOCHS
        assert [entry["steps"] for entry in run["history"]] == [
            -(-cases.PARTS // cases.BATCH)
        ] * cases.EPOCHS


def test_a_recipe_goes_on_after_an_interruption_with_the_same_numbers(results, folder):
    found = [one["recipes"] for one in results]
    assert found[0]["after the second epoch"] == ["checkpoint.pt"]
    (whole, weights), (resumed, own_weights) = found[0]["whole"], found[0]["stopped"]
    assert found[1]["whole"][0] == whole and found[1]["stopped"][0] == resumed
    assert whole["processes"] == SIZE and len(whole["runs"][0]["history"]) == cases.EPOCHS
    assert_equal(comparable(resumed["runs"][0]), comparable(whole["runs"][0]))
    assert all(torch.equal(own_weights[name], weights[name]) for name in weights)
    for name in ("whole", "stopped"):
        assert sorted(path.name for path in (folder / name).iterdir()) == [
            "model.pt",
            "results.json",
        ]


def test_a_comparison_trains_what_is_missing_and_records_the_processes(results, folder):
    for name in ("first", "again"):
        assert results[0]["comparisons"][name][0] == results[1]["comparisons"][name][0]
        assert results[1]["comparisons"][name][1] == []
    written = json.loads((folder / "compared/results.json").read_text())
    assert written["processes"] == SIZE and written["device"] == "2 x cpu"
    first, again = (results[0]["comparisons"][name][1] for name in ("first", "again"))
    assert first[:3] == ["full 1", "full 2", "full"] and "infobatch 2" in first
    assert [line for line in again if "kept" in line] == ["full kept", first[-1] + " kept"]
    assert "infobatch 2" in again and "full 2" not in again
    samples = folder / "compared" / written["runs"][0]["samples"]
    assert pq.read_metadata(samples).num_rows == cases.PARTS


def test_another_number_of_processes_is_refused(results, folder, monkeypatch):
    message = "holds another comparison: its processes is 2, here it is 1; give another folder"
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        compare(
            cases.COMPARED, parse_methods("infobatch"), [0], 2, folder / "compared", controls=()
        )

    torch.save(
        {"identity": {"number of processes": 2}, "parts": {}, "own": [], "values": {}},
        folder / "checkpoint.pt",
    )
    with pytest.raises(ValueError, match="its number of processes is 2, here it is 1"):
        Checkpoint(folder / "checkpoint.pt", {}).load({})


def test_what_several_processes_cannot_train_is_refused_before_anything_is_written(results):
    messages = {
        "jobs": "--jobs 2: 2 processes train each run together, one run after the other. Leave the option out",
        "batch": "the training loader has batches of 63 samples, of which 2 processes cannot have equal parts",
        "batch sampler": "the training loader has a batch sampler of its own, of which 2 processes",
        "some": "has a SubsetRandomSampler, whose order is divided among several processes",
    }
    for one in results:
        assert one["refusals"]["refused"] == "False"
        for name, message in messages.items():
            assert re.search(re.escape(message), one["refusals"][name]), name
