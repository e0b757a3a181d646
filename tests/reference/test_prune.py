"""Prune against the official rule: sort the scores, and take the last ones or those from an offset on."""

import numpy as np
import pytest
import torch

from thresher import Prune
from thresher.scores import Scores


@pytest.mark.parametrize(("n", "kept", "dropped"), [(20, 5, 0), (20, 5, 3), (20, 15, 5), (7, 1, 6)])
def test_slices_of_the_sorted_scores(n: int, kept: int, dropped: int) -> None:
    values = np.random.default_rng(n + dropped).permutation(n).astype(np.float64)
    by_score = values.argsort()
    scores = Scores(torch.arange(n), torch.from_numpy(values))
    hardest = Prune(scores, keep=kept / n).kept(n)
    assert hardest.tolist() == sorted(by_score[-kept:].tolist())
    offset = n - dropped - kept  # the code counts it from the smallest score
    window = Prune(scores, keep=kept / n, which="window", offset=dropped / n).kept(n)
    assert window.tolist() == sorted(by_score[offset : offset + kept].tolist())


def test_equal_scores_go_by_id_and_unknown_ones_come_first() -> None:
    values = torch.tensor([1.0, 1.0, float("nan"), 1.0, 0.0, 1.0])
    assert Prune(Scores(torch.arange(6), values), keep=0.5).kept(6).tolist() == [2, 3, 5]
