from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from depth import DEEP, depth
from loss_cases import signals
from thresher.losses import adapt
from thresher_lab.tasks import built_in
from thresher_lab.tasks.base import accuracy
from thresher_lab.tasks.networks import CausalTransformer
from thresher_lab.tasks.text import next_token_accuracy
from thresher_lab.training.loop import train
from thresher_lab.training.specs import MethodSpec, parse_methods

ONCE = "" if DEEP else ":forward_passes=twice"
"""Tracing the network for one forward pass takes seconds; in make test ada_selection alone does it."""
METHODS = (
    f"uniform:keep=0.3,big_loss:keep=0.3{ONCE},infobatch,"
    "ada_selection:keep=0.3:pool=('big_loss','small_loss','uniform','gradient_norm'),"
    "ada_selection:keep=0.3:pool=('uniform','gradient_norm'):forward_passes=twice"
)


def tokens(n=3, length=64, vocabulary=256, seed=0):
    return torch.randint(vocabulary, (n, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A task on a text that is easy to go on with, and its data."""
    file = tmp_path_factory.mktemp("text") / "counting.txt"
    file.write_text("".join(f"{n % 10} and " for n in range(1400)))
    task = built_in("text@96")
    return task, task.load(task.find(file))


@pytest.mark.parametrize(
    ("name", "vocabulary"), [("text", 256), ("text-words", 8192), ("wikitext2-transformer", 8192)]
)
def test_networks_score_every_next_token_and_seeds_fix_them(name, vocabulary):
    task, x = built_in(name), tokens()
    state = torch.get_rng_state()
    model, same, other = task.build(3), task.build(3), task.build(4)
    assert torch.equal(torch.get_rng_state(), state)
    assert model(x).shape == (3, vocabulary, 64)
    assert torch.equal(model(x), same(x)) and not torch.equal(model(x), other(x))
    assert task.optimize == "adamw" and not task.has_images


def test_no_position_sees_a_later_token():
    model, x = built_in("text").build(0), tokens()
    changed = x.clone()
    changed[:, 40] = (x[:, 40] + 1) % 256
    before, after = model(x), model(changed)
    assert torch.allclose(before[..., :40], after[..., :40], atol=1e-6)
    assert all(
        not torch.allclose(before[..., at], after[..., at], atol=1e-4) for at in (40, 41, 63)
    )


def test_positions_tell_equal_tokens_apart():
    scores = CausalTransformer(5, context=8, width=8, heads=2)(torch.zeros(1, 6, dtype=torch.int64))
    assert scores.shape == (1, 5, 6) and not torch.allclose(
        scores[..., 0], scores[..., 1], atol=1e-4
    )


def test_losses_and_gradient_norms_are_of_means_over_positions():
    task, x, y = built_in("text"), tokens(), tokens(seed=1)
    outputs = task.build(0)(x)
    found = signals(adapt(task.criterion()), outputs, y, 3, wanted={"grad_norm"})
    losses = F.cross_entropy(outputs, y, reduction="none").mean(1)
    assert torch.allclose(found["loss"], losses, atol=1e-6)
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    assert torch.allclose(found["grad_norm"], gradient.flatten(1).norm(dim=1), rtol=1e-4)


def test_right_answers_are_counted_over_all_pieces():
    model, x = built_in("text").build(0), tokens(120, 8)
    y = torch.where(tokens(120, 8, 3, seed=2) == 0, tokens(120, 8, seed=3), model(x).argmax(1))
    batches = [(x[:70], y[:70]), (x[70:], y[70:])]
    assert (
        next_token_accuracy(model, batches)
        == pytest.approx(accuracy(model, batches))
        == pytest.approx(2 / 3, abs=0.05)
    )
    assert model.training


@pytest.mark.parametrize("spec", parse_methods(METHODS), ids=lambda spec: spec.label)
def test_selection_in_the_batch_trains_a_language_model(counting, spec):
    task, data = counting
    task = replace(task, network=partial(CausalTransformer, 256, context=64, layers=depth(1, 2)))
    run = train(task, data, spec, seed=0, epochs=1)
    assert run["metric"]["name"] == "accuracy" and 0 < run["metric"]["value"] < 1
    assert run["cost"]["full_forward"] == 96
    assert run["cost"]["backward"] == (
        96 if spec.name == "infobatch" else pytest.approx(0.3 * 96, abs=2)
    )
    if spec.name == "ada_selection":
        assert 0 < run["history"][0]["weight_gradient_norm"] < 1


def test_a_text_is_learnt(counting):
    task, data = counting
    most_frequent = data.test_targets.flatten().bincount().max() / data.test_targets.numel()
    assert (
        train(task, data, MethodSpec("full"), seed=0, epochs=12)["metric"]["value"]
        > most_frequent + 0.3
    )


def test_no_other_text_stands_for_wikitext():
    with pytest.raises(
        FileNotFoundError, match=r"give a part of WikiText-2 as published, .*--data FILE"
    ):
        built_in("wikitext2-transformer").find(None)


@pytest.mark.parametrize("name", ["text-words@8", "wikitext2-transformer@8"])
def test_words_are_trained(name, tmp_path):
    file = tmp_path / "my.txt"
    file.write_text("the cat sat on the mat\n" * 120)
    task = built_in(name)
    spec = MethodSpec("gradient_norm", {"keep": 0.5}, {"forward_passes": "twice"})
    run = train(task, task.load(task.find(file)), spec, seed=0, epochs=1)
    assert run["cost"]["backward"] == 4 and 0 <= run["metric"]["value"] <= 1
