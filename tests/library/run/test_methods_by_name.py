"""Methods by share and by name."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thresher

DATA = TensorDataset(torch.zeros(8, 2), torch.arange(8) % 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def attach(method, dataset=DATA):
    model = nn.Linear(2, 2)
    loader = DataLoader(dataset, 2, shuffle=None if dataset is not DATA else True)
    settings = {
        "model": model,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    return thresher.attach(method, loader=loader, epochs=4, **settings)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.5, thresher.Winnow(0.5)),
        (1, thresher.Winnow(1.0)),
        ("50%", thresher.Winnow(0.5)),
        ("75 %", thresher.Winnow(0.75)),
        ("kakurenbo", thresher.Kakurenbo()),
        ("full", thresher.FullData()),
        ("selective-backprop", thresher.SelectiveBackprop()),
        ("random-backprop:keep=0.3", thresher.RandomBackprop(keep=0.3)),
        (thresher.InfoBatch(), thresher.InfoBatch()),
    ],
)
def test_what_stands_for_a_method(given, expected):
    assert attach(given).method == expected


def test_names_in_a_list():
    run = attach(["infobatch", "selective_backprop:keep=0.5"])
    assert run.method == thresher.SelectiveBackprop(keep=0.5)
    assert run.plan.facts == attach(thresher.InfoBatch()).plan.facts


def test_a_share_of_a_stream_is_uniform():
    assert (
        attach(0.5, Stream()).method == attach([0.5], Stream()).method == thresher.UniformRows(0.5)
    )


def test_true_is_no_share():
    with pytest.raises(TypeError, match="stage = 'epoch'.*got bool"):
        attach(True)


@pytest.mark.parametrize("given", [0, -0.5, 1.01, float("nan"), "0%", "half%", "50", "", "%"])
def test_a_share_outside_is_refused(given):
    with pytest.raises(
        ValueError,
        match=r"`method`: the share .* must be within \(0, 1\], such as 0.5 or '50%', got ",
    ):
        attach(given)


def test_a_name_that_is_none_says_which_is_near():
    for given in ("kakurembo", "Kakurenb", "kakuren-bo"):
        with pytest.raises(
            ValueError,
            match=f"`method`: no method '{given}'; did you mean 'kakurenbo'\\? There are",
        ):
            attach(given)
    with pytest.raises(ValueError, match=r"`method`: no method 'zzzz'; there are .*winnow"):
        attach("zzzz")


def test_a_method_with_settings_that_are_needed_is_not_guessed():
    with pytest.raises(
        ValueError,
        match=r"`method`: prune has settings without a default; write prune:scores=... or Prune\(scores=...",
    ):
        attach("prune")


def test_settings_are_written_as_on_the_command_line():
    assert attach("kakurenbo:tau=0.5:adjust_lr=false").method == thresher.Kakurenbo(
        tau=0.5, adjust_lr=False
    )
    assert attach("winnow:score=loss").method == thresher.Winnow(score="loss")
    assert attach("selective_backprop:keep=0.5:beta=none").method == thresher.SelectiveBackprop(
        keep=0.5
    )
    with pytest.raises(
        ValueError,
        match=r"`method`: kakurenbo has no setting 'tua'; did you mean 'tau'\? It has max_fraction, ",
    ):
        attach("kakurenbo:tua=0.5")
    with pytest.raises(ValueError, match="no method 'kakurembo'"):
        attach("kakurembo:tau=0.5")
