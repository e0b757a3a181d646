"""Token selection against a transcription that sorts tuples in NumPy's float32, and the problem of its paper: noisy tokens."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from helpers import over_instances
from thresher import TokenSelection


def transcribed(
    losses: np.ndarray, valid: np.ndarray, reference: np.ndarray | None, keep: str
) -> list[tuple[int, int]]:
    queue = []
    for place in np.ndindex(losses.shape):
        if not valid[place]:
            continue
        with np.errstate(all="ignore"):
            excess = losses[place] if reference is None else losses[place] - reference[place]
        queue.append((0, float(excess), place) if math.isfinite(excess) else (1, 0.0, place))
    queue.sort()
    if not queue:
        return []
    count = max(1, math.floor(Fraction(keep) * len(queue)))
    return sorted(place for *_, place in queue[len(queue) - count :])


def instance(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, str]:
    """Losses of 1 to 12 rows; rows without a valid token, ties, and numbers that are not finite."""
    r = np.random.default_rng(seed)
    shape = int(r.choice([1, 2, 5, 12])), int(r.choice([1, 3, 10]))
    kind = r.integers(3)
    losses = [r.gamma(1.0, 1.0, shape), r.choice([0.0, 0.5, 3.0], shape), np.full(shape, 2.5)][
        kind
    ].astype(np.float32)
    reference = r.choice([0.0, 0.25, 2.0], shape).astype(np.float32)
    for numbers in (losses, reference):
        spoilt = r.random(shape) < r.choice([0.0, 0.2, 1.0], p=[0.6, 0.35, 0.05])
        numbers[spoilt] = r.choice([math.nan, math.inf, -math.inf], int(spoilt.sum()))
    valid = r.random(shape) < r.choice([0.0, 0.5, 1.0], p=[0.1, 0.5, 0.4])
    valid[r.random(shape[0]) < 0.2] = False
    return (
        losses,
        valid,
        None if r.random() < 0.2 else reference,
        str(r.choice(["0.01", "0.29", "0.5", "0.6", "0.7", "1"])),
    )


@over_instances(range(depth(300, 5000)))
def test_it_keeps_what_the_transcription_keeps(seed):
    losses, valid, reference, keep = instance(seed)
    given = [None if one is None else torch.from_numpy(one) for one in (losses, valid, reference)]
    found = TokenSelection(keep=float(keep)).chosen(*given)
    assert found.dtype == torch.bool and found.shape == losses.shape
    assert list(map(tuple, found.nonzero().tolist())) == transcribed(losses, valid, reference, keep)


def test_the_example_of_the_paper_has_ties():
    """Tokens 0 and 4, and the last one of three with the same excess loss."""
    losses, reference = (
        torch.tensor([3.0, 0.25, 1.5, 4.0, 1.0]),
        torch.tensor([1.0, 0.125, 1.375, 3.875, 0.25]),
    )
    assert TokenSelection(keep=0.6).chosen(losses, None, reference).tolist() == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_counts_are_exact():
    for n in (10, 100, 1000):
        for percent in range(1, 101):
            found = TokenSelection(keep=percent / 100).chosen(torch.arange(float(n)))
            assert int(found.sum()) == max(1, n * percent // 100)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="`keep` is the share kept"):
        TokenSelection(keep=0)
    with pytest.raises(TypeError, match="`reference` must be a torch.nn.Module, got Tensor"):
        TokenSelection(reference=torch.ones(3))
    with pytest.raises(ValueError, match=r"`reference` has shape \(2,\), but `losses` has \(3,\)"):
        TokenSelection().chosen(torch.ones(3), None, torch.ones(2))
    with pytest.raises(ValueError, match="`valid` must be a mask of bool"):
        TokenSelection().chosen(torch.ones(3), torch.ones(3))


def test_it_is_no_method_of_attach():
    loader = DataLoader(TensorDataset(torch.zeros(4, 1), torch.zeros(4)), 2)
    for method in (TokenSelection(), [thresher.InfoBatch(), TokenSelection()]):
        with pytest.raises(
            TypeError, match=r"TokenSelection chooses among the positions.*run.reduce\(losses"
        ):
            thresher.attach(method, loader=loader, criterion=nn.MSELoss(), epochs=1)


# The planted problem: each word is followed by a certain one, but many words of the sequences are random

WORDS, LENGTH, SEQUENCES, BATCH, RATE = 20, 16, 60, 10, 20.0


def sequences(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, the words that follow them, and the language: the certain follower of each word."""
    generator = torch.Generator().manual_seed(seed)
    language = torch.randperm(WORDS, generator=generator)
    words = torch.randint(WORDS, (SEQUENCES, LENGTH), generator=generator)
    random = torch.randint(WORDS, words.shape, generator=generator)
    return (
        words,
        language[words].where(torch.rand(words.shape, generator=generator) >= noise, random),
        language,
    )


def loss_on_the_language(
    seed: int, noise: float, keep: float | None, *, reference: bool = True
) -> float:
    """Mean loss of the certain followers, after a training in a plain loop; `keep` None trains on all tokens."""
    words, followers, language = sequences(seed, noise)
    model = nn.Embedding(WORDS, WORDS)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(
        TensorDataset(words, followers),
        BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )
    run = thresher.attach(
        thresher.FullData(),
        loader=loader,
        criterion=None,
        model=model,
        optimizer=optimizer,
        epochs=5,
    )
    of_reference = F.cross_entropy(
        6 * F.one_hot(language[words], WORDS).float().mT, followers, reduction="none"
    )
    draws = torch.Generator().manual_seed(seed)
    for _ in range(run.epochs):
        for x, y in run.loader:
            losses = F.cross_entropy(run.model(x).mT, y, reduction="none")
            known = (
                of_reference[run.ids] if reference else torch.rand(losses.shape, generator=draws)
            )
            by = losses if reference else 0 * losses
            chosen = None if keep is None else TokenSelection(keep=keep).chosen(by, None, known)
            run.reduce(losses, targets=y, keep=chosen).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.cost.backward == run.cost.full_backward == 5 * SEQUENCES
    return F.cross_entropy(model.weight.detach(), language).item()


def test_the_numbers_on_the_card():
    found = [loss_on_the_language(0, noise, keep) for noise in (0.5, 0.0) for keep in (0.5, None)]
    assert found == pytest.approx([0.08, 0.73, 0.033, 0.037], abs=0.005)
    assert loss_on_the_language(0, 0.5, 0.5, reference=False) == pytest.approx(0.82, abs=0.005)


def test_it_wins_where_tokens_are_noise():
    for seed in range(depth(3, 20)):
        ours = loss_on_the_language(seed, 0.5, 0.5)
        assert ours < 0.5 * loss_on_the_language(seed, 0.5, None)
        assert ours < 0.5 * loss_on_the_language(seed, 0.5, 0.5, reference=False)
