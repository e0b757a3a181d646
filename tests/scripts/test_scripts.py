"""The loops of public scripts, with five methods each: right, or refused before the second batch; never wrong."""

from pathlib import Path

import pytest
import torch
from benchmarks.marks import between_marks

import thresher
from depth import depth
from helpers import assert_same
from scripts import generative, images, language, tables  # noqa: F401  # they add their loops
from scripts.kit import SCRIPTS, Kit, N, Plain, Script
from scripts.page import MARKS, table

METHODS = {
    "full": thresher.FullData(),
    "half": 0.5,
    "kakurenbo": "kakurenbo",
    "infobatch": "infobatch",
    "selective-backprop": thresher.SelectiveBackprop(keep=1 / 3),
}
pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
each = pytest.mark.parametrize("one", SCRIPTS, ids=lambda one: one.name)


def trained(one: Script, method, rate: float, *, counts: bool = True) -> Kit:
    torch.manual_seed(0)
    kit = Kit(method, rate, **({} if one.rows is None else {"rows_of": one.rows}), counts=counts)
    one.train(kit)
    return kit


@each
def test_full_data_trains_the_same_bits(one):
    """Nothing that a run adds to a loop changes its numbers."""
    with_run, without = (
        trained(one, method, 0.05).models[0].state_dict() for method in (thresher.FullData(), None)
    )
    assert_same(with_run, without)


@pytest.mark.parametrize("counts", [False, True], ids=["traced", "not traceable"])
@pytest.mark.parametrize("method", depth(["half", "selective-backprop"], list(METHODS)))
@each
def test_losses_are_of_their_samples(one, method, counts):
    """The model stays as it is, so that each sample has a loss of its own, which the script does not compute."""
    if method in one.refused:
        return
    kit = trained(one, METHODS[method], 0.0, counts=counts)
    records = kit.run.records
    if one.losses is None or "loss" not in records:
        return
    with torch.no_grad():
        expected = one.losses(kit.models[0])
    recorded = records["loss"]
    seen = recorded.isfinite()
    assert seen.sum() >= N // 3
    assert expected.unique().numel() > N // 2
    precise = recorded.dtype != torch.bfloat16
    torch.testing.assert_close(
        recorded[seen].float(), expected[seen], rtol=1e-4 if precise else 1e-2, atol=1e-5
    )


@pytest.mark.parametrize(
    ("one", "method"),
    [(one, method) for one in SCRIPTS for method in one.refused],
    ids=lambda v: getattr(v, "name", v),
)
def test_refused_before_the_second_batch(one, method):
    with pytest.raises(
        (ValueError, thresher.AttributionError), match=one.refused[method]
    ) as refused:
        trained(one, METHODS[method], 0.05)
    run = next(
        kit.run
        for frame in refused.traceback
        if (kit := frame.frame.f_locals.get("kit")) is not None
    )
    assert isinstance(run, Plain) or run.cost.backward == 0


@pytest.mark.parametrize("method", depth(["half"], ["full", "half", "kakurenbo", "infobatch"]))
@each
def test_counted_rows_are_those_that_ran(one, method):
    if method in one.refused:
        return
    kit = trained(one, METHODS[method], 0.0)
    cost = kit.run.cost
    if cost.unknown is None:
        assert cost.forward - cost.refresh - cost.comparing == kit.forward
        assert cost.full_forward >= kit.forward


def test_the_page_has_every_script():
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    assert between_marks(page, *MARKS, table()) == page
