"""Pruning by hand; orders and counts against a transcription are in tests/reference/test_scores.py."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from thresher.methods.prune import Prune, floors, keep_in_batch, ranked
from thresher.methods.registry import create, name_of
from thresher.scores import Scores


def scores(values, labels=None, **more):
    return Scores(
        torch.arange(len(values)),
        values,
        labels=None if labels is None else torch.tensor(labels),
        **more,
    )


def test_defaults():
    assert Prune("a.parquet") == Prune(
        "a.parquet", keep=0.75, which="hard", offset=0.0, per_class_floor=0.0
    )
    assert (
        Prune.stage == "before"
        and name_of(Prune("a")) == "prune"
        and create("prune", scores="a") == Prune("a")
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": [1.0, 2.0]}, "Prune: `scores` must be a thresher.scores.Scores or the path"),
        ({"keep": 0}, r"Prune: `keep` is the share kept, within \(0, 1\], got 0"),
        ({"keep": 1.1}, "`keep` is the share kept"),
        ({"keep": True}, "`keep` is the share kept"),
        ({"keep": math.nan}, "`keep` is the share kept"),
        ({"which": "middle"}, "Prune: `which` must be one of .*'window'.*, got 'middle'"),
        (
            {"which": "window", "offset": 0.3},
            r"`offset` is the share to remove, within \[0, 1 - keep\], got 0.3 with keep=0.75",
        ),
        ({"which": "window", "offset": -0.1}, "`offset` is the share to remove"),
        ({"offset": 0.1}, "`offset` is for which='window' only, got 0.1 with which='hard'"),
        ({"per_class_floor": 1.5}, r"`per_class_floor` must be a number within \[0, 1\], got 1.5"),
        (
            {"per_class_floor": 0.5},
            "`per_class_floor` needs the classes of the samples, and the scores have no labels",
        ),
    ],
)
def test_what_it_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Prune(**({"scores": scores([1.0, 2.0])} | settings))


def test_labels_are_asked_for_when_a_file_is_read(tmp_path):
    scores([1.0, 2.0]).save(tmp_path / "s.parquet")
    method = Prune(tmp_path / "s.parquet", per_class_floor=0.5)
    with pytest.raises(ValueError, match="the scores have no labels"):
        method.kept(2)


def test_scores_of_another_dataset_are_refused():
    for n in (3, 1):
        with pytest.raises(ValueError, match=f"is of 2 samples, but the dataset has {n}"):
            Prune(scores([1.0, 2.0])).kept(n)
    with pytest.raises(ValueError, match="is of 8 or more samples, but the dataset has 5"):
        Prune(Scores(torch.tensor([0, 7]), [1.0, 2.0])).kept(5)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep": 0.5}, [1, 2, 5]),
        ({"keep": 0.5, "which": "easy"}, [2, 3, 4]),
        ({"keep": 0.34, "which": "window", "offset": 0.17}, [2, 5]),
        ({"keep": 0.01}, [2]),
        ({"keep": 1.0}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_what_is_kept(settings, kept):
    """Sample 2 has no score, so it is kept first; of the equal scores of 0 and 5 the higher id is the harder."""
    method = Prune(scores([0.5, 0.9, math.nan, 0.1, 0.2, 0.5]), **settings)
    assert method.kept(6).tolist() == kept


def test_a_share_of_every_class():
    table = scores([9, 8, 7, 6, 5, 4, 3, 2, 1.0], [0, 0, 0, 0, 0, 0, 1, 1, 1])
    assert Prune(table, keep=0.5).kept(9).tolist() == [0, 1, 2, 3]
    assert Prune(table, keep=0.5, per_class_floor=0.3).kept(9).tolist() == [0, 1, 2, 6]
    assert Prune(table, keep=0.5, per_class_floor=0.5).kept(9).tolist() == [0, 1, 2, 6, 7]
    assert Prune(table, keep=0.5, per_class_floor=1.0).kept(9).tolist() == list(range(9))
    assert Prune(table, keep=0.5, which="easy", per_class_floor=0.3).kept(9).tolist() == [
        4,
        5,
        7,
        8,
    ]


def test_a_class_that_is_too_hard_keeps_its_floor():
    table = scores([9, 8, 1, 2, 3, 4.0], [7, 7, 0, 0, 0, 0])
    assert Prune(table, keep=0.5, which="window", offset=0.34).kept(6).tolist() == [3, 4, 5]
    assert Prune(table, keep=0.5, which="window", offset=0.34, per_class_floor=0.25).kept(
        6
    ).tolist() == [1, 4, 5]


def test_ranked():
    values = np.array([2.0, np.nan, 2.0, 1.0, np.inf, 3.0])
    assert ranked(values, "hard").tolist() == [1, 4, 5, 2, 0, 3]
    assert ranked(values, "easy").tolist() == [1, 4, 3, 0, 2, 5]
    assert ranked(values, "window", drop=2).tolist() == [1, 4, 0, 3, 2, 5]
    assert (
        ranked(values, "window").tolist()
        == ranked(values, "hard").tolist()
        == ranked(values, "hard", drop=2).tolist()
    )


def test_floors():
    order = np.array([4, 2, 0, 1, 3])
    labels = np.array([0, 0, 1, 1, -1])
    assert floors(order, labels, 0.5).tolist() == [2, 0]
    assert floors(order, labels, 0.51).tolist() == [2, 0, 1, 3]
    assert floors(order, labels, 0.0).tolist() == []
    assert floors(order, np.full(5, -1), 1.0).tolist() == []


def test_a_file_is_as_good_as_its_scores(tmp_path):
    table = scores([3.0, 1.0, 2.0, 0.0], [0, 1, 0, 1], forward=40, backward=30)
    path = tmp_path / "deep" / "s.parquet"
    table.save(path)
    by_path, by_value = Prune(path, keep=0.5), Prune(table, keep=0.5)
    assert by_path.scores == str(path) and by_path.kept(4).tolist() == by_value.kept(
        4
    ).tolist() == [0, 2]
    assert by_path.cost == by_value.cost == (40, 30) and by_path.table == table
    assert eval(repr(by_path)) == by_path


def test_it_is_a_value():
    method = Prune(scores([3.0, 1.0, math.nan]), keep=0.5)
    for same in (
        copy.deepcopy(method),
        pickle.loads(pickle.dumps(method)),
        Prune(scores([3.0, 1.0, math.nan]), keep=0.5),
    ):
        assert same == method and hash(same) == hash(method) and repr(same) == repr(method)
    other = Prune(scores([3.0, 1.5, math.nan]), keep=0.5)
    assert other != method and repr(other) != repr(method)
    with pytest.raises(FrozenInstanceError):
        method.keep = 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (1.0, 1.0),
            r"keep_in_batch: `before_fraction` is the share to remove, within \[0, 1\), got 1.0",
        ),
        ((-0.1, 0.5), "`before_fraction` is the share to remove"),
        ((0.5, 0.25), r"`total_fraction` includes `before_fraction`, within \[0.5, 1\), got 0.25"),
        ((0.5, 1.0), "`total_fraction` includes"),
        ((math.nan, 0.5), "`before_fraction` is the share to remove"),
    ],
)
def test_shares_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        keep_in_batch(*arguments)


def test_nothing_is_left_to_the_batch():
    assert keep_in_batch(0.5, 0.5) == 1.0 and keep_in_batch(0.0, 0.5) == 0.5
