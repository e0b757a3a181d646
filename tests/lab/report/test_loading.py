import json
from dataclasses import replace

import numpy as np
import pytest

from lab.report.cases import EPOCHS, SAMPLES, comparison, history, save
from thresher_lab.report.loading import (
    by_epoch,
    controls,
    histories,
    load_comparison,
    load_shown,
    runs_by_method,
)


def test_what_was_saved_is_what_is_loaded(tmp_path):
    results, samples = comparison()
    loaded, found = load_comparison(save(tmp_path, results, samples))
    assert loaded == json.loads(json.dumps(results)) and found.keys() == samples.keys()
    for name, of in samples.items():
        assert found[name].losses.shape == found[name].trained.shape == (SAMPLES, EPOCHS)
        for field in ("ids", "targets", "losses", "trained"):
            np.testing.assert_array_equal(getattr(found[name], field), getattr(of, field))


def test_histories_that_are_not_there_are_left_out(tmp_path):
    results, samples = comparison(classes=0)
    save(tmp_path, results, samples)
    (tmp_path / results["runs"][0]["samples"]).unlink()
    del results["runs"][1]["samples"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    loaded, found = load_comparison(tmp_path)
    assert len(found) == len(samples) - 2 and all(of.targets is None for of in found.values())
    assert [*histories(loaded, found)["full"]] == [2]


def test_mistakes_say_what_to_do(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=f"results.json is not there; `thresher compare --out {tmp_path}` makes it",
    ):
        load_comparison(tmp_path)
    (tmp_path / "results.json").write_text('{"runs": []}')
    with pytest.raises(
        ValueError,
        match="`task` is missing.* and 3 more. Delete the file; `thresher compare --out .*` makes it again",
    ):
        load_comparison(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match="results.json is damaged"):
        load_comparison(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1 nothing of the kind PAR1"])
def test_damaged_histories_are_named(tmp_path, content):
    results, samples = comparison()
    save(tmp_path, results, samples)
    (tmp_path / "runs" / "0.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"0.parquet is damaged .*; delete the run's files"):
        load_comparison(tmp_path)


def test_methods_and_controls_are_told_apart():
    results, _ = comparison(seeds=(0, 1))
    assert {method: len(runs) for method, runs in runs_by_method(results).items()} == {
        "full": 2,
        "kakurenbo": 2,
        "infobatch": 2,
    }
    assert {kind: [*held] for kind, held in controls(results).items()} == {
        kind: ["kakurenbo", "infobatch"] for kind in ("uniform", "shorter")
    }


def test_facts_by_epoch_are_those_that_all_runs_have():
    runs = [
        {"history": [{"a": 1.0}, {"a": None}, {"a": 3}, {"a": 4}]},
        {"history": [{"a": 5.0}, {"a": 6.0}, {"a": 7}]},
    ]
    epochs, values = by_epoch(runs, "a")
    assert epochs.tolist() == [1, 3] and values.tolist() == [[1, 3], [5, 7]]
    assert by_epoch(runs, "b") is None and by_epoch([{}, *runs], "a") is None


def test_what_full_training_did_not_get_is_not_left_out():
    results, samples = comparison({"full": 0.0, "kakurenbo": 0.3}, seeds=(0, 1))
    name, full = next(iter(samples.items()))
    before = histories(results, samples)
    full.trained[:10, 3] = 0
    after = histories(results, samples)
    assert not after["full"][0].dropped.any()
    hidden = before["kakurenbo"][0].dropped
    assert hidden[:10, 3].any() and not after["kakurenbo"][0].dropped[:10, 3].any()
    hidden[:10, 3] = False
    np.testing.assert_array_equal(after["kakurenbo"][0].dropped, hidden)
    np.testing.assert_array_equal(after["kakurenbo"][0].hidden, hidden.sum(axis=1))
    np.testing.assert_array_equal(after["kakurenbo"][1].dropped, before["kakurenbo"][1].dropped)
    samples[name] = replace(full, ids=full.ids + 1)
    np.testing.assert_array_equal(
        histories(results, samples)["kakurenbo"][0].dropped, before["kakurenbo"][0].dropped
    )
    samples[name] = replace(full, trained=full.trained[:, 1:])
    np.testing.assert_array_equal(
        histories(results, samples)["kakurenbo"][0].dropped, before["kakurenbo"][0].dropped
    )


def test_cases_are_the_same_every_time():
    assert (history("a", 0, 0.3).losses == history("a", 0, 0.3).losses).all()
    assert (history("a", 0, 0.3).losses != history("a", 1, 0.3).losses).any()


SHOWN = {"shown": {"3": {"text": "three"}, "17": {"png": "AAAA"}}}


def test_what_samples_look_like_is_read_as_far_as_it_is_there(tmp_path):
    results, samples = comparison(seeds=(0,))
    save(tmp_path, results, samples)
    (tmp_path / "runs" / "0.shown").write_text(json.dumps(SHOWN))
    named = {"runs": [{"shown": "runs/0.shown"}, {"shown": "runs/1.shown"}, {"shown": None}, {}]}
    assert load_shown(tmp_path, named) == {
        "runs/0.shown": {3: {"text": "three"}, 17: {"png": "AAAA"}}
    }


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"shown": {"x": {}}}', '{"shown": {"1": {"png": 3}}}']
)
def test_damage_to_it_is_named(tmp_path, content):
    (tmp_path / "a.shown").write_text(content)
    with pytest.raises(
        ValueError, match=r"a\.shown.* is damaged|a\.shown: .*Delete the run's files"
    ):
        load_shown(tmp_path, {"runs": [{"shown": "a.shown"}]})
