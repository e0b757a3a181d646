"""The table of scores: its errors, when two tables are equal, and its file."""

import copy
import json
import math
import pickle
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from thresher.scores import Scores


def full(**changes):
    given = {
        "ids": torch.tensor([0, 2, 5]),
        "values": torch.tensor([0.5, math.nan, -math.inf]),
        "name": "el2n",
        "labels": torch.tensor([3, 1, 3]),
        "forward": 70,
        "backward": 60,
        "provenance": {"seeds": [0, 1], "note": "é"},
    }
    return Scores(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"ids": torch.tensor([0.0, 1, 2])},
            TypeError,
            "Scores: `ids` must be int64, got torch.float32",
        ),
        (
            {"labels": torch.tensor([0.0, 1, 2])},
            TypeError,
            "Scores: `labels` must be int64, got torch.float32",
        ),
        (
            {"values": torch.zeros(2)},
            ValueError,
            r"must have the same shape \(K,\), got \[\(3,\), \(2,\), \(3,\)\]",
        ),
        ({"labels": torch.tensor([0])}, ValueError, "must have the same shape"),
        (
            {"ids": torch.tensor([[0]]), "values": torch.zeros(1, 1), "labels": None},
            ValueError,
            "must have the same shape",
        ),
        (
            {"ids": torch.tensor([0, 2, 2])},
            ValueError,
            "`ids` must be ascending from 0 on, without repeats",
        ),
        ({"ids": torch.tensor([-1, 2, 3])}, ValueError, "`ids` must be ascending from 0 on"),
        ({"backward": -1}, ValueError, "`forward` and `backward` must be 0 or more, got 70 and -1"),
        (
            {"provenance": {"model": object()}},
            TypeError,
            "`provenance` must have types that JSON can hold",
        ),
    ],
)
def test_what_it_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        full(**changes)


def test_equal_where_the_content_is():
    table = full()
    for same in (
        full(),
        copy.deepcopy(table),
        pickle.loads(pickle.dumps(table)),
        full(values=np.float32([0.5, np.nan, -np.inf])),
    ):
        assert same == table and hash(same) == hash(table) and len({same, table}) == 1
    others = [
        full(ids=torch.tensor([0, 2, 6])),
        full(values=torch.tensor([0.5, math.nan, math.inf])),
        full(name="x"),
        full(labels=None),
        full(labels=torch.tensor([3, 1, 2])),
        full(forward=71),
        full(backward=61),
        full(provenance={}),
    ]
    assert (
        len({table, *others}) == len(others) + 1
        and len({repr(one) for one in (table, *others)}) == len(others) + 1
    )
    assert table != "table"
    zero, minus = (Scores(torch.tensor([0]), torch.tensor([value])) for value in (0.0, -0.0))
    assert zero == minus


def test_it_holds_copies():
    values, ids, provenance = torch.ones(2), torch.arange(2), {"seeds": [1]}
    table = Scores(ids, values, provenance=provenance)
    values[0], ids[0] = 5, 9
    provenance["seeds"].append(2)
    assert table == Scores(torch.arange(2), torch.ones(2), provenance={"seeds": [1]})


def test_dense():
    assert full(ids=torch.tensor([0, 2, 3])).dense(6).nan_to_num(-1).tolist()[::2] == [0.5, -1, -1]
    found = full().dense(6)
    assert found.dtype == torch.float32 and found.isnan().tolist() == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    with pytest.raises(
        ValueError, match="Scores: `el2n` is of 6 or more samples, but the dataset has 5"
    ):
        full().dense(5)
    whole = Scores(torch.arange(3), torch.zeros(3), "el2n")
    assert whole.dense(3).tolist() == [0, 0, 0] and whole.samples == 3
    for n in (2, 4):
        with pytest.raises(ValueError, match=f"`el2n` is of 3 samples, but the dataset has {n}"):
            whole.dense(n)
    none = Scores(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert none.dense(0).tolist() == [] and none.samples == 0


def test_mean():
    one, two = (
        full(),
        full(values=torch.tensor([1.5, 1.0, math.inf]), forward=1, provenance={"seeds": [2]}),
    )
    mean = Scores.mean([one, two])
    assert mean.values[0] == 1.0 and not mean.values[1:].isfinite().any() and mean.name == "el2n"
    assert (mean.forward, mean.backward) == (71, 120) and torch.equal(mean.labels, one.labels)
    assert mean.provenance == {"mean_of": [one.provenance, two.provenance]}
    assert Scores.mean([one, full(name="grand")]).name == "mean of el2n, grand"
    for other in (
        full(ids=torch.tensor([0, 2, 4])),
        full(labels=None),
        full(labels=torch.tensor([3, 1, 1])),
    ):
        with pytest.raises(ValueError, match="has other samples or classes than"):
            Scores.mean([one, other])
    with pytest.raises(ValueError, match="pass one or more scores, got none"):
        Scores.mean([])


def test_without_cost():
    free = full().without_cost()
    assert (free.forward, free.backward) == (0, 0) and free == full(forward=0, backward=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"labels": None}, {"ids": [], "values": [], "labels": None}],
    ids=["all", "no", "none"],
)
def test_a_file_gives_back_what_was_saved(tmp_path, changes):
    if "ids" in changes:
        changes = {**changes, "ids": torch.empty(0, dtype=torch.int64), "values": torch.empty(0)}
    path = tmp_path / "deep" / "scores.parquet"
    full(**changes).save(path)
    assert Scores.load(path) == full(**changes) == Scores.load(str(path))
    names = ["id", "score", *(["label"] if "labels" not in changes else [])]
    assert pq.read_table(path).column_names == names
    assert list(path.parent.iterdir()) == [path]


def write(path, columns, metadata=None):
    table = pa.table(columns)
    pq.write_table(
        table if metadata is None else table.replace_schema_metadata({b"thresher": metadata}), path
    )
    return path


def test_a_file_that_was_not_written_by_save(tmp_path):
    path = write(
        tmp_path / "own.parquet",
        {"score": [2, None, 3], "note": ["a", "b", "c"], "id": pa.array([4, 0, 1], pa.int32())},
    )
    table = Scores.load(path)
    assert (
        table.ids.tolist() == [0, 1, 4]
        and table.values[1:].tolist() == [3, 2]
        and math.isnan(table.values[0])
    )
    assert (table.name, table.labels, table.forward, table.backward) == ("score", None, 0, 0)


@pytest.mark.parametrize(
    ("columns", "metadata", "message"),
    [
        (
            {"id": [0, 1], "loss": [0.1, 0.2]},
            None,
            "scores must have the columns id, score and, .* label; this file has id, loss",
        ),
        (
            {"id": [0, 0], "score": [0.1, 0.2]},
            None,
            "`ids` must be ascending from 0 on, without repeats",
        ),
        ({"id": [0, None], "score": [0.1, 0.2]}, None, "the column id has missing values"),
        (
            {"id": [0, 1], "score": [0.1, 0.2], "label": [None, 1]},
            None,
            "the column label has missing values",
        ),
        ({"id": ["a", "b"], "score": [0.1, 0.2]}, None, "a"),
        ({"id": [0.5, 1], "score": [0.1, 0.2]}, None, "truncated"),
        ({"id": [0, 1], "score": [[1], [2]]}, None, "cast"),
        ({"id": [0], "score": [0.1]}, "{", "damaged"),
        ({"id": [0], "score": [0.1]}, json.dumps({"forward": "many"}), "'<' not supported|invalid"),
        ({"id": [0], "score": [0.1]}, "[1]", "unexpected metadata"),
    ],
)
def test_wrong_columns_name_the_file(tmp_path, columns, metadata, message):
    path = write(tmp_path / "wrong.parquet", columns, metadata)
    with pytest.raises(ValueError, match=rf"wrong\.parquet: .*({message})"):
        Scores.load(path)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "scores.parquet"
    Scores(torch.arange(1000), torch.rand(1000, generator=torch.Generator().manual_seed(0))).save(
        path
    )
    whole = path.read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"id,score\n0,1\n",
        "one bit": whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:],
    }
    for content in damaged.values():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"scores\.parquet: damaged, or not a Parquet file"):
            Scores.load(path)
    with pytest.raises(FileNotFoundError, match="not-there"):
        Scores.load(tmp_path / "not-there.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (
        lambda: full().save(tmp_path / "s.parquet"),
        lambda: Scores.load(tmp_path / "s.parquet"),
    ):
        with pytest.raises(ImportError, match=r"pip install pyarrow"):
            call()


def test_a_failed_save_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "scores.parquet"
    full().save(path)

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        full(name="other").save(path)
    assert Scores.load(path) == full() and list(tmp_path.iterdir()) == [path]
