"""Epochs of every loader, plan and number of processes: equal to those on record, and the same after a resume at any batch."""

import json

import pytest

import epochs_of_today as epochs
from depth import depth

RECORDED = json.loads(epochs.KNOWN.read_text())
"""Digests of 2026-11-29, before orders were rewritten; `epochs_of_today.py` writes them."""


def test_every_case_is_on_record():
    assert [*epochs.cases()] == [*RECORDED]


@pytest.mark.parametrize("name", [*RECORDED][:: depth(9, 1)])
def test_epochs_are_those_on_record(name):
    assert epochs.digest(name) == RECORDED[name]


TRAINED = [name for name, digest in RECORDED.items() if "Error" not in digest]


@pytest.mark.parametrize("name", TRAINED[:: depth(17, 2)])
def test_a_resumed_epoch_is_the_interrupted_one(name):
    whole = epochs.result(name)
    batches = len(whole[0][0][-1])
    for stop in depth([1], [*range(1, batches)])[: batches - 1]:
        resumed = epochs.result(name, stop)
        for first, second in zip(whole, resumed, strict=True):
            assert first[:2] == second[:2]
