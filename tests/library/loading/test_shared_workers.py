"""Runs one after the other on a loader whose workers persist draw the random numbers of a plain loop."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import thresher


def seen_by(kinds, *, generator):
    """The batches of a plain loop, or a run with all data, for two epochs each, and the random number that comes next."""
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(4) if generator else None
    data = TensorDataset(torch.arange(24.0))
    loader = DataLoader(
        data, 8, shuffle=True, num_workers=1, persistent_workers=True, generator=own
    )
    seen = []
    for kind in kinds:
        run = (
            None
            if kind == "plain"
            else thresher.attach(thresher.FullData(), loader=loader, criterion=None, epochs=2)
        )
        for _ in range(2):
            for (x,) in loader if run is None else run.loader:
                seen.append(x.tolist())
                if run is not None:
                    run.reduce(x * torch.ones((), requires_grad=True), ids=run.ids).backward()
        if run is not None:
            run.detach()
    return seen, torch.rand(1, generator=own).item()


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("kinds", [("run", "run", "run"), ("plain", "run")], ids="-".join)
def test_workers_that_another_run_has_started(kinds, generator):
    assert seen_by(kinds, generator=generator) == seen_by(
        ["plain"] * len(kinds), generator=generator
    )
