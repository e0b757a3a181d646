"""Parts of RHO-LOSS by hand; the whole of it is in tests/reference."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher import RhoLoss, methods
from thresher.methods.rho_loss import table_entries
from thresher.rng import seeded
from thresher.scores import Scores

NAN = math.nan


def scores(values: list[float], ids: list[int] | None = None) -> Scores:
    return Scores(
        torch.arange(len(values)) if ids is None else torch.tensor(ids), torch.tensor(values)
    )


def planned(
    method: RhoLoss, loss: Any, ids: Any = None, state: Any = None
) -> tuple[list[int], Any]:
    loss = torch.as_tensor(loss)
    signals = {"id": torch.arange(len(loss)) if ids is None else torch.as_tensor(ids), "loss": loss}
    state = method.init_state() if state is None else state
    plan, after = method.plan_batch(signals, state, step=0, generator=seeded(0))
    return plan.rows.tolist(), after


def test_published_defaults() -> None:
    method = RhoLoss(scores([1.0]))
    assert (method.keep, method.requires.signals, method.count(320)) == (0.1, ("loss",), 32)
    assert method.card.bytes_per_sample == 4


@pytest.mark.parametrize("keep", [0, -0.1, 1.01, NAN, "half"])
def test_a_share_out_of_range(keep: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^RhoLoss: `keep` is the share kept, within \(0, 1\], got {keep!r}"
    ):
        RhoLoss(scores([1.0]), keep=keep)


@pytest.mark.parametrize("irreducible", [None, 3, torch.ones(3)])
def test_neither_scores_nor_a_path(irreducible: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"^RhoLoss: `irreducible` must be a thresher.scores.Scores or the path .*, got ",
    ):
        RhoLoss(irreducible)


def test_no_scores_in_it() -> None:
    with pytest.raises(ValueError, match="^RhoLoss: `irreducible` has no losses"):
        RhoLoss(scores([])).init_state()


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "irreducible.parquet"
    scores([1.0, 0.5, 3.0]).save(path)
    method = methods.create("rho_loss", irreducible=str(path), keep=0.4)
    assert method == RhoLoss(path, keep=0.4) != RhoLoss(path) and hash(method) == hash(
        RhoLoss(path, keep=0.4)
    )  # type: ignore
    assert (
        eval(repr(method)) == pickle.loads(pickle.dumps(method)) == copy.deepcopy(method) == method
    )
    assert method.init_state()["irreducible"].tolist() == [1, 0.5, 3]
    assert planned(method, [1.0, 1.0, 1.0])[0] == [1]


def test_no_such_file() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RhoLoss("nowhere.parquet").init_state()


def test_scores_are_compared_by_content() -> None:
    one, same, other = (RhoLoss(scores(values)) for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0]))
    assert one == same != other and hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_looked_up() -> None:
    table = torch.tensor([1.0, NAN, 3.0])
    found = table_entries(table, torch.tensor([2, 0, 1, 3, 2**62, 2]))
    assert [None if math.isnan(value) else value for value in found.tolist()] == [
        3,
        1,
        None,
        None,
        None,
        3,
    ]


def test_the_table_is_part_of_the_state() -> None:
    method = RhoLoss(scores([0.0, 5.0, 0.0]), keep=0.5)
    state = method.init_state()
    rows, after = planned(method, [1.0, 2.0, 0.5])
    assert (
        rows == [0]
        and after is not state
        and torch.equal(after["irreducible"], state["irreducible"])
    )
    # What was saved decides, not what the method would load now.
    assert planned(method, [1.0, 2.0, 0.5], state={"irreducible": torch.tensor([5.0, 0.0, 0.0])})[
        0
    ] == [1]


def test_what_is_unknown_is_kept_before_all_others() -> None:
    method = RhoLoss(scores([0.0, 0.0, NAN], ids=[0, 2, 3]), keep=0.6)
    assert planned(method, [9.0, 0.1, 8.0, 0.1, 0.1])[0] == [1, 3, 4]


def test_a_dataset_that_it_covers_or_not() -> None:
    method = RhoLoss(scores([1.0, 2.0, math.inf, 4.0], ids=[0, 1, 2, 5]))
    method.check(torch.tensor([0, 1, 5]))
    with pytest.raises(
        ValueError,
        match=r"has no finite loss for 4 of 7 samples; the first is sample 2. Compute it",
    ):
        method.check(torch.arange(7))


def test_half_precision_losses_are_compared_in_single() -> None:
    method = RhoLoss(scores([0.0, 0.001]), keep=0.5)
    assert planned(method, torch.ones(2, dtype=torch.bfloat16))[0] == [0]


def test_an_empty_batch() -> None:
    assert (
        planned(RhoLoss(scores([1.0])), torch.empty(0), ids=torch.empty(0, dtype=torch.int64))[0]
        == []
    )
