"""The page on composing batches quotes the committed trainings of mixtures, and shares add up."""

import json

import torch
from benchmarks import mixture


def test_the_page_has_what_was_measured():
    found = mixture.results(mixture.load(mixture.RUNS))
    assert json.loads(json.dumps(found)) == json.loads(mixture.RESULTS.read_text())
    assert mixture.page(found) == mixture.PAGE.read_text()


def test_shares_follow_the_progress():
    shares = mixture.Shares("loss progress")
    source = torch.arange(4)
    for step in range(2 * mixture.WINDOW):
        assert shares.counts() == [4, 4, 4, 4]
        # Only the first source makes progress.
        losses = torch.tensor([2.0 - (step >= mixture.WINDOW), 2.0, 2.0, 2.0])
        shares.observe(losses, source, step)
    assert torch.allclose(shares.shares, torch.tensor([0.7, 0.1, 0.1, 0.1]).double())
    rows = torch.tensor([shares.counts() for _ in range(10)])
    assert rows.sum(0).tolist() == [112, 16, 16, 16]
