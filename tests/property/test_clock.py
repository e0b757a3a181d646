"""After step i of the n steps of epoch e, every clock of a training stands within a step of (e + i / n) / E."""

from itertools import cycle, islice, product
from typing import Any

import pytest

from clock_cases import METHODS, Case, assert_right, clocks_of
from depth import DEEP, depth

IGNORED = "ignore:(?!subset_backward needs):UserWarning"
SPENT: list[dict[str, Any]] = [{"spend": spend} for spend in (None, "steps", "batches")]
ORDERED: list[dict[str, Any]] = [{}, {"stratify": None}, {"stratify": "class"}]
PASSES: list[dict[str, Any]] = [{"forward_passes": "once"}, {"forward_passes": "twice"}]
LOOPS: list[dict[str, Any]] = [
    {
        "epochs": epochs,
        "drop_last": drop,
        "samples": samples,
        "accumulate": every,
        "resume_after": resume,
        "ahead": ahead,
    }
    for epochs, drop, samples, every, (resume, ahead) in product(
        (1, 2, 3, 4), (False, True), (96, 91), (1, 3), ((None, 0), (6, 0), (None, 2))
    )
    if resume is None
    or every == 1  # a loop that accumulates looks a batch ahead, which a saved state would lose
]
STRIDE = 29
"""Coprime to the number of loops: the first few of them differ in everything."""


def loops(place: int) -> list[dict[str, Any]]:
    """Returns some loops for a combination, which differ from those of its neighbors."""
    return [LOOPS[(place + more) * STRIDE % len(LOOPS)] for more in range(8 if DEEP else 1)]


def read(case: Case) -> None:
    try:
        clocks = clocks_of(case)
    except (TypeError, ValueError) as error:  # a combination that attach refuses
        if not any(word in str(error) for word in REFUSED):
            raise
        return
    fills = case.settings.get("forward_passes") == "twice"
    # How many batches the chosen rows fill is not known before the losses are.
    assert_right(case, clocks, within=2 if fills else 1, end_is_known=not fills)


REFUSED = (
    "stratif",
    "forward_passes",
    "smaller batches",
    "samples",
    "spend",
    "order of training",
    "two batches",
    "validation batch",
)


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name):
    place = [*METHODS].index(name)
    combinations = [{**spent, **ordered} for spent, ordered in product(SPENT, ORDERED)]
    for settings in depth(combinations[place % 6 :: 6], combinations):
        for loop in loops(place):
            read(Case(METHODS[name], settings, **loop))
        place += len(METHODS)


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("passes", PASSES, ids=str)
@pytest.mark.parametrize("name", ["selective_backprop", "big_loss", "pruned, then chosen"])
def test_batch_methods(name, passes):
    for place in range(4):
        for loop in loops(place):
            read(Case(METHODS[name], passes, **loop))


@pytest.mark.filterwarnings(IGNORED)
def test_workers():
    for method, loop in islice(
        zip(cycle((0.5, "kakurenbo", "infobatch")), LOOPS[:: 12 if DEEP else 48], strict=False), 99
    ):
        read(Case(METHODS.get(str(method), method), {}, **{**loop, "workers": 2}))
