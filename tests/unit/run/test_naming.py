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


def test_settings_in_the_form_of_the_command_line_say_how_they_are_written_here():
    with pytest.raises(ValueError, match=r"'kakurenbo:tau=0.5' is the form of .*; write thresher.Kakurenbo\(tau=0.5\)"):
        method_of("kakurenbo:tau=0.5")
    with pytest.raises(ValueError, match="no method 'kakurembo'"):
        method_of("kakurembo:tau=0.5")
