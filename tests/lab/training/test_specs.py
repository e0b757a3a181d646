import pytest
import torch

import thresher
from thresher_lab.comparison.controls import Job
from thresher_lab.training.specs import Composition, MethodSpec, parse_methods, parse_seeds


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
        ("", "--methods: nothing given; there are ada_boost, ada_selection, batch_importance"),
        (
            "kakurembo",
            "no method 'kakurembo'; did you mean 'kakurenbo'? There are ada_boost, ada_selection, batch_importance",
        ),
        (
            "full,kakurenbo:hide=1",
            "kakurenbo has no setting 'hide'; it has max_fraction, tau, schedule",
        ),
        ("full:x=1", "full has no setting 'x'; it has none"),
        ("kakurenbo:tau", "write settings as name:setting=value, got 'tau'"),
        ("kakurenbo:tau=0.1:tau=0.2", "the setting 'tau' is given twice"),
        ("kakurenbo:tau=2", "`tau` must be a number within [0, 1], got 2"),
        ("kakurenbo:tau=high", "kakurenbo: `tau` is a number, got 'high'"),
        ("kakurenbo:tau=True", "kakurenbo: `tau` is a number, got True"),
        ("kakurenbo:move_back=no", "kakurenbo: `move_back` is True or False, got 'no'"),
        ("kakurenbo:move_back=0", "kakurenbo: `move_back` is True or False, got 0"),
        ("kakurenbo:refresh=often", "`refresh` must be one of ('eval', 'train'), got 'often'"),
        (
            "prune",
            "prune has settings without a default; write prune:scores=... or Prune(scores=...)",
        ),
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


def test_settings_of_the_batch_stage_go_to_attach():
    text = "selective_backprop:score_every=3:keep=0.33:score_dtype=bfloat16:forward_passes=twice:score_scale=0.5"
    [spec] = parse_methods(text)
    assert spec.create() == thresher.SelectiveBackprop(keep=0.33)
    assert spec.label == "selective_backprop:keep=0.33 twice every=3 bfloat16 scale=0.5"
    scoring = thresher.Scoring(dtype=torch.bfloat16, every_epochs=3, input_scale=0.5)
    assert spec.attachment() == {"forward_passes": scoring}
    batch = {
        "forward_passes": "twice",
        "score_every": 3,
        "score_dtype": "bfloat16",
        "score_scale": 0.5,
    }
    assert spec.settings.items() >= ({"keep": 0.33} | batch).items()


@pytest.mark.parametrize(
    ("text", "label", "attachment", "setting"),
    [
        ("selective_backprop", "selective_backprop", {}, "auto"),
        (
            "selective_backprop:forward_passes=once",
            "selective_backprop once",
            {"forward_passes": "once"},
            "once",
        ),
        (
            "selective_backprop:score_every=2",
            "selective_backprop every=2",
            {"forward_passes": thresher.Scoring(every_epochs=2)},
            "auto",
        ),
    ],
)
def test_nothing_more_is_attached_than_was_given(text, label, attachment, setting):
    [spec] = parse_methods(text)
    assert (spec.label, spec.attachment(), spec.settings["forward_passes"]) == (
        label,
        attachment,
        setting,
    )


@pytest.mark.parametrize("name", ["kakurenbo", "random_backprop"])
def test_methods_that_score_no_batches_have_no_settings_of_it(name):
    [spec] = parse_methods(name)
    assert spec.attachment() == {} and "forward_passes" not in spec.settings


def test_rows_that_are_chosen_without_losses_can_fill_batches():
    [spec] = parse_methods("random_backprop:keep=0.1:forward_passes=twice")
    assert (spec.label, spec.attachment()) == (
        "random_backprop:keep=0.1 twice",
        {"forward_passes": "twice"},
    )
    assert len(parse_methods("random_backprop:forward_passes=twice,random_backprop")) == 2


def test_how_a_batch_is_scored_tells_methods_apart():
    assert (
        len(
            parse_methods(
                "selective_backprop:forward_passes=once,selective_backprop:forward_passes=twice"
            )
        )
        == 2
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kakurenbo:forward_passes=once", "kakurenbo has no setting 'forward_passes': `forward_passes` is for methods that "
         "select in the batch, and score_every, score_dtype, score_scale for those that do so by its losses"),
        ("random_backprop:score_every=2", "random_backprop has no setting 'score_every': "),
        ("full:score_every=2", "full has no setting 'score_every': "),
        ("selective_backprop:forward_passes=thrice", "`forward_passes` is one of auto, once, twice, got 'thrice'"),
        ("selective_backprop:forward_passes=2", "`forward_passes` is one of auto, once, twice, got 2"),
        ("selective_backprop:passes=once", "selective_backprop has no setting 'passes'; did you mean 'forward_passes'? "
         "It has keep, beta, history, min_probability, warmup_steps, start, end, interrupt, draw, forward_passes, score_every, "
         "score_dtype, score_scale"),
        ("selective_backprop:forward_passes=twice:score_every=0", "a whole number of 1 or more, got 0"),
        ("selective_backprop:forward_passes=twice:score_every=1.5", "a whole number of 1 or more, got 1.5"),
        ("selective_backprop:forward_passes=twice:score_every=true", "a whole number of 1 or more, got True"),
        ("selective_backprop:forward_passes=twice:score_dtype=int8", "one of bfloat16, float16, float32, got 'int8'"),
        ("selective_backprop:forward_passes=twice:score_scale=0", "within (0, 1], got 0"),
        ("selective_backprop:forward_passes=twice:score_scale=2", "within (0, 1], got 2"),
        ("selective_backprop:forward_passes=twice:score_scale=half", "within (0, 1], got 'half'"),
        ("selective_backprop:forward_passes=once:score_scale=0.5", "`score_scale` is about passes that only score: it needs "
         "forward_passes=twice, got 'once'"),
        ("selective_backprop:keep=0.3:keep=0.4", "the setting 'keep' is given twice"),
        ("selective_backprop:keep=2:forward_passes=once", "selective_backprop:keep=2 once: SelectiveBackprop: `keep` is"),
    ],
)  # fmt: skip
def test_mistakes_of_the_batch_stage(text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_methods(text)
    assert message in str(caught.value)


def test_empty_parts_are_passed_over():
    assert [spec.label for spec in parse_methods("full,,infobatch,")] == ["full", "infobatch"]


def test_seeds():
    assert parse_seeds("0, 1,7") == [0, 1, 7]
    assert parse_seeds("9, 0-2,4-4") == [9, 0, 1, 2, 4]
    assert len(parse_seeds("0-999")) == 1000


@pytest.mark.parametrize("text", ["0-1000000000", "0-999,1000"])
def test_too_many_seeds_are_refused(text):
    with pytest.raises(ValueError, match=f"at most 1,000 seeds, got more in '{text}'"):
        parse_seeds(text)


@pytest.mark.parametrize(
    "text", ["", "a", "1,,2", "-1", "1.5", "0,1,0", "3-1", "0-", "0-2-4", "0-2,1"]
)
def test_seeds_mistaken(text):
    with pytest.raises(ValueError, match="--seeds"):
        parse_seeds(text)


def test_a_spec_without_settings_is_the_default():
    assert MethodSpec("kakurenbo").create().max_fraction == 0.3


# Methods of several stages


def test_a_composition():
    (spec,) = parse_methods(
        "uniform:keep=0.5+selective_backprop:keep=0.25:forward_passes=twice:score_every=2"
    )
    assert isinstance(spec, Composition)
    assert spec.name == "uniform+selective_backprop"
    assert spec.label == "uniform:keep=0.5+selective_backprop:keep=0.25 twice every=2"
    assert [type(method).__name__ for method in spec.create()] == [
        "UniformSubset",
        "SelectiveBackprop",
    ]
    assert spec.settings["uniform"] == {"keep": 0.5, "fixed": False}
    assert spec.settings["selective_backprop"]["score_every"] == 2
    assert spec.attachment() == {"forward_passes": thresher.Scoring(every_epochs=2)}
    assert spec.batch == {"forward_passes": "twice", "score_every": 2}


def test_two_methods_of_one_stage():
    with pytest.raises(
        ValueError, match="uniform is not the only method of the stage 'epoch'; one a stage"
    ):
        parse_methods("uniform:keep=0.5+full")


def test_a_composition_given_twice():
    with pytest.raises(ValueError, match=r"uniform\+random_backprop is given twice"):
        parse_methods("uniform+random_backprop,uniform+random_backprop")


def test_files_of_the_same_name():
    with pytest.raises(
        ValueError,
        match="two methods would be called prune:scores=el2n:keep=0.5 in the results; rename a file",
    ):
        parse_methods("prune:scores=a/el2n.parquet:keep=0.5,prune:scores=b/el2n.parquet:keep=0.5")


def test_a_run_is_another_one_with_other_scores(tmp_path):
    path = tmp_path / "el2n.parquet"
    (spec,) = parse_methods(f"prune:scores={path}:keep=0.5+uniform:keep=0.5")
    assert spec.files == []
    path.write_bytes(b"some scores")
    assert spec.files == [path]
    before = Job.of(spec, 0).key
    assert Job.of(spec, 0).key == before
    path.write_bytes(b"other scores")
    assert Job.of(spec, 0).key != before
    assert Job.of(MethodSpec("full"), 0).spec.files == []


def test_any_method_can_spend_in_batches_and_be_a_placebo():
    smaller, permuted, both = parse_methods(
        "uniform:keep=0.5:spend=batches,kakurenbo:placebo=true,selective_backprop:keep=0.5:placebo=true:forward_passes=once"
    )
    assert (
        smaller.attachment() == {"spend": "batches"}
        and smaller.label == "uniform:keep=0.5 in batches"
    )
    assert type(permuted.create()).__name__ == "KakurenboPlacebo" and permuted.attachment() == {}
    assert permuted.label == "kakurenbo placebo" and permuted.settings["placebo"] is True
    assert type(both.create()).__name__ == "SelectiveBackpropPlacebo" and both.attachment() == {
        "forward_passes": "once"
    }
    assert (
        not parse_methods("kakurenbo:placebo=false")[0]
        .create()
        .__class__.__name__.endswith("Placebo")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kakurenbo:spend=rows", "kakurenbo: `spend` is 'steps' or 'batches', got 'rows'"),
        ("full:batches=short", "full: `batches` is 'by_length', got 'short'"),
        ("kakurenbo:placebo=1", "kakurenbo: `placebo` is True or False, got 1"),
        ("prune:scores=x.parquet:placebo=true", "Prune decides before training"),
    ],
)
def test_wrong_ways_to_spend_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_methods(text)
