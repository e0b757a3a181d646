import pytest

from thresher.experiments.specs import MethodSpec, parse_methods, parse_seeds


def test_names_and_settings():
    plain, tuned = parse_methods("infobatch, kakurenbo:max_fraction=0.4:tau=0.5")
    assert (plain.name, dict(plain.given), plain.label) == ("infobatch", {}, "infobatch")
    assert tuned.create().max_fraction == 0.4 and tuned.create().tau == 0.5
    assert tuned.label == "kakurenbo:max_fraction=0.4:tau=0.5"
    assert tuned.settings["move_back"] is True


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("kakurenbo:move_back=false", "move_back", False),
        ("kakurenbo:move_back=True", "move_back", True),
        ("kakurenbo:refresh=train", "refresh", "train"),
        ("kakurenbo:refresh='train'", "refresh", "train"),
        ("kakurenbo:warmup_epochs=2", "warmup_epochs", 2),
        ("kakurenbo:schedule=((0, 1.0), (0.5, 0.2))", "schedule", ((0.0, 1.0), (0.5, 0.2))),
        ("infobatch:threshold=0.3", "threshold", 0.3),
        ("infobatch:threshold=mean", "threshold", "mean"),
    ],
)
def test_values(text, name, value):
    [spec] = parse_methods(text)
    assert getattr(spec.create(), name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--methods: nothing given; there are full, infobatch, kakurenbo, uniform"),
        ("kakurembo", "no method 'kakurembo'; there are full, infobatch, kakurenbo, uniform"),
        ("full,kakurenbo:hide=1", "kakurenbo has no setting 'hide'; it has max_fraction, tau, schedule"),
        ("full:x=1", "full has no setting 'x'; it has none"),
        ("kakurenbo:tau", "write settings as name:setting=value, got 'tau'"),
        ("kakurenbo:tau=0.1:tau=0.2", "the setting 'tau' is given twice"),
        ("kakurenbo:tau=2", "`tau` is a probability, within [0, 1], got 2"),
        ("kakurenbo:tau=high", "kakurenbo: `tau` is a number, got 'high'"),
        ("kakurenbo:tau=True", "kakurenbo: `tau` is a number, got True"),
        ("kakurenbo:move_back=no", "kakurenbo: `move_back` is True or False, got 'no'"),
        ("kakurenbo:move_back=0", "kakurenbo: `move_back` is True or False, got 0"),
        ("kakurenbo:refresh=often", "`refresh` must be one of ('eval', 'train'), got 'often'"),
        ("kakurenbo:schedule=5", "kakurenbo:schedule=5: "),
        ("kakurenbo:schedule=((0,1)", "kakurenbo:schedule=((0,1): "),
        ("infobatch,infobatch", "infobatch is given twice"),
        ("kakurenbo,kakurenbo:tau=0.7", "kakurenbo:tau=0.7 is given twice, with the same settings"),
    ],
)
def test_mistakes_say_what_is_allowed(text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_methods(text)
    assert message in str(caught.value)


def test_empty_parts_are_passed_over():
    assert [spec.label for spec in parse_methods("full,,infobatch,")] == ["full", "infobatch"]


def test_seeds():
    assert parse_seeds("0, 1,7") == [0, 1, 7]


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1.5", "0,1,0"])
def test_seeds_mistaken(text):
    with pytest.raises(ValueError, match="--seeds"):
        parse_seeds(text)


def test_a_spec_without_settings_is_the_default():
    assert MethodSpec("kakurenbo").create().max_fraction == 0.3
