import pytest

from thresher_lab.comparison.controls import Rates, parse_rates
from thresher_lab.comparison.summary import rates_sentences


def test_a_placebo_has_the_rate_of_its_method():
    rates = Rates({("m", None): 0.5, ("m", "smaller"): 2.0}, (0.5, 1.0, 2.0), (7, 8))
    assert [rates.of("m", kind) for kind in (None, "placebo", "smaller", "uniform")] == [
        0.5,
        0.5,
        2.0,
        0.5,
    ]
    assert (
        rates.of("full") == 1.0
        and Rates().of("m", "smaller") == 1.0
        and Rates(everywhere=3.0).of("m", "placebo") == 3.0
    )


@pytest.mark.parametrize("text", ["1", "1,1", "0.5,half", "", "0,1", "-1,1", "1,inf", "1,nan"])
def test_factors_are_checked(text):
    with pytest.raises(
        ValueError, match=r"--rates: two or more different factors above 0 .*, as in 0.5,1,2; got"
    ):
        parse_rates(text)


def row(method, rate, control_of=None):
    return {"method": method, "control_of": control_of, "rate": rate}


def test_the_rates_are_said_with_those_at_an_end():
    summary = [
        row("full", 1.0),
        row("m", 0.5),
        row("smaller@0.500", 1.0, "m"),
        row("placebo@0.500", 0.5, "m"),
    ]
    results = {"rates": {"factors": [0.5, 1.0, 2.0], "seeds": [7, 8]}, "summary": summary}
    chosen, ends = rates_sentences(results)
    assert (
        "at 0.5, 1 and 2 times the learning rate of the training, on seeds that do not count (7 and 8)"
        in chosen
    )
    assert chosen.endswith("uses the best: full 1; m 0.5; smaller@0.500 1.")
    assert (
        ends
        == "The best rate is the smallest or largest tried for m; a wider range may change the verdicts."
    )
    assert rates_sentences(results | {"rates": None}) == [] == rates_sentences({"summary": []})
    assert len(rates_sentences(results | {"rates": {"factors": [0.1, 9.0], "seeds": [7, 8]}})) == 1
