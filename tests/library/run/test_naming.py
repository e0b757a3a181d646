"""Methods by share and by name."""

import pytest

import thresher
from thresher.run.attach import method_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.5, thresher.Winnow(0.5)),
        (1, thresher.Winnow(1.0)),
        ("35%", thresher.Winnow(0.35)),
        ("50 %", thresher.Winnow(0.5)),
        ("kakurenbo", thresher.Kakurenbo()),
        ("full", thresher.FullData()),
        (thresher.InfoBatch(), thresher.InfoBatch()),
        (["infobatch", thresher.SelectiveBackprop(keep=0.5)], [thresher.InfoBatch(), thresher.SelectiveBackprop(keep=0.5)]),
    ],
)
def test_what_stands_for_a_method(given, expected):
    assert method_of(given) == expected


def test_a_share_of_a_stream_is_uniform():
    assert method_of([0.5, "full"], streams=True) == [thresher.UniformRows(0.5), thresher.FullData()]


def test_what_is_no_method_passes_to_the_checks_of_attach():
    thing = object()
    assert method_of(thing) is thing and method_of(True) is True


@pytest.mark.parametrize("given", [0, -0.5, 1.01, float("nan"), "0%", "half%", "50", "", "%"])
def test_a_share_outside_is_refused(given):
    with pytest.raises(ValueError, match=r"`method`: the share .* must be within \(0, 1\], such as 0.5 or '50%', got "):
        method_of(given)


def test_a_name_that_is_none_says_which_is_near():
    for given in ("kakurembo", "Kakurenb", "kakuren-bo"):
        with pytest.raises(ValueError, match=f"`method`: no method '{given}'; did you mean 'kakurenbo'\\? There are"):
            method_of(given)
    with pytest.raises(ValueError, match=r"`method`: no method 'zzzz'; there are .*winnow"):
        method_of("zzzz")


def test_a_method_with_settings_that_are_needed_is_not_guessed():
    with pytest.raises(ValueError, match=r"`method`: 'prune' has settings without a default; write thresher.Prune\(scores=..."):
        method_of("prune")


def test_settings_are_written_as_on_the_command_line():
    assert method_of("kakurenbo:tau=0.5:adjust_lr=false") == thresher.Kakurenbo(tau=0.5, adjust_lr=False)
    assert method_of("winnow:score=loss") == thresher.Winnow(score="loss")
    assert method_of("selective_backprop:keep=0.5:beta=none") == thresher.SelectiveBackprop(keep=0.5)
    with pytest.raises(ValueError, match="`method`: thresher.Kakurenbo has no setting 'tua'; it has max_fraction, "):
        method_of("kakurenbo:tua=0.5")
    with pytest.raises(ValueError, match="no method 'kakurembo'"):
        method_of("kakurembo:tau=0.5")
