"""Runs of a comparison that a Trainer of transformers trains."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from thresher.transformers import Selection
from thresher_lab.comparison.compare import compare
from thresher_lab.tasks.script import Script, takes_overrides
from thresher_lab.training.samples import read_history
from thresher_lab.training.specs import MethodSpec, parse_methods
from thresher_lab.training.trainers import OVERRIDES, build_trainer, metric_of, train_by_trainer
from transformers_cases import (
    BATCH,
    EPOCHS,
    N,
    Selected,
    Sentences,
    arguments,
    model,
    outcome,
    trainer,
)

FILE = """
import sys
sys.path.insert(0, {tests!r})
from transformers_cases import Noted, trainer

def rightness(prediction):
    return {{"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}}

def make_trainer(seed, **overrides):
    return trainer({folder!r}, of=Noted, with_compute_metrics=rightness, seed=seed, **overrides)
"""
FULL, HALF = MethodSpec("full"), MethodSpec("uniform", {"keep": 0.5})


def rightness(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def maker(folder, **settings):
    made = []

    def make(seed, **overrides):
        made.append(
            trainer(
                folder, **{"with_compute_metrics": rightness, "seed": seed, **settings, **overrides}
            )
        )
        return made[-1]

    return make, made


def trained(folder, spec=FULL, settings=None, **options):
    make, made = maker(folder, **settings or {})
    run = train_by_trainer(make, spec, **{"seed": 1, "epochs": EPOCHS, **options})
    return run, made[-1]


def test_full_training_is_the_trainer_as_it_is(tmp_path):
    run, by_compare = trained(tmp_path)
    torch.manual_seed(1)
    plain = maker(tmp_path)[0](1, **OVERRIDES, num_train_epochs=EPOCHS)
    plain.train()
    expected, got = outcome(plain), outcome(by_compare)
    assert all(
        torch.equal(got["parameters"][name], value)
        for name, value in expected["parameters"].items()
    )
    assert got["step"] == expected["step"] and torch.equal(got["random"], expected["random"])
    assert run["metric"] == {"name": "eval_accuracy", "value": plain.evaluate()["eval_accuracy"]}
    assert (
        run["cost"]["forward"]
        == run["cost"]["backward"]
        == run["cost"]["full_forward"]
        == EPOCHS * N
    )
    assert run["cost"]["ratio"] == 1 and run["cpu_s"] > 0 and len(run["history"]) == EPOCHS


def test_fewer_epochs_decay_within_them(tmp_path):
    run, by_compare = trained(tmp_path, share=0.5)
    steps = by_compare.state.global_step
    assert steps == 18 and by_compare.lr_scheduler.get_last_lr() == [0, 0]  # 1.5 epochs of 12 steps
    assert [entry["forward"] for entry in run["history"]] == [N, 6 * BATCH]
    assert run["cost"]["ratio"] == (N + 6 * BATCH) / (EPOCHS * N) and run["settings"] == {
        "epochs": 1.5
    }


@pytest.mark.parametrize(("accumulated", "drop"), [(1, True), (2, False), (2, True)])
def test_samples_of_an_epoch(accumulated, drop, tmp_path):
    settings = {
        "gradient_accumulation_steps": accumulated,
        "dataloader_drop_last": drop,
        "with_eval_dataset": Sentences(False, 16),
    }
    for spec in (FULL, MethodSpec("uniform", {"keep": 1.0})):
        run, by_compare = trained(tmp_path, spec, settings)
        seen = sum(by_compare.seen)
        cost = run["cost"]
        forward = cost["forward"] - cost.get("comparing", 0)
        assert forward == cost["full_forward"] == seen == EPOCHS * (N - drop)


def test_batches_by_length_are_those_of_the_trainer(tmp_path):
    run, by_compare = trained(tmp_path, MethodSpec("full", {}, {"batches": "by_length"}))
    assert by_compare.args.train_sampling_strategy == "group_by_length"
    assert run["cost"]["ratio"] == 1


def test_a_method_is_the_trainer_with_the_mixin(tmp_path):
    samples = tmp_path / "samples.parquet"
    run, by_compare = trained(tmp_path, HALF, samples_to=samples)
    torch.manual_seed(1)
    settings = {
        "seed": 1,
        "num_train_epochs": EPOCHS,
        **OVERRIDES,
        "with_selection_settings": {"seed": 1},
    }
    expected = trainer(
        tmp_path, HALF.create(), of=Selected, with_compute_metrics=rightness, **settings
    )
    expected.train()
    assert all(
        torch.equal(by_compare.model.state_dict()[name], value)
        for name, value in expected.model.state_dict().items()
    )
    assert run["cost"]["forward"] == expected.run.cost.forward
    assert expected.run.cost.of_loop == EPOCHS * (N // 2)
    assert 0.48 < run["cost"]["ratio"] < 0.6  # with two batches that compare losses
    assert read_history(samples).trained.sum() == EPOCHS * (N // 2)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.parquet"]


def test_rates_scale_the_rate_of_the_trainer(tmp_path):
    run, by_compare = trained(tmp_path, rate=0.5)
    assert by_compare.args.learning_rate == 0.005 and run["rate"] == 0.5

    def own(seed, **overrides):
        net = model(causal=False)
        optimizers = torch.optim.SGD(net.parameters(), lr=0.1), None
        args = arguments(tmp_path, **{"seed": seed, **overrides})
        return transformers.Trainer(
            net,
            args,
            train_dataset=Sentences(False),
            eval_dataset=Sentences(False),
            optimizers=optimizers,
        )

    with pytest.raises(ValueError, match=r"--rates: the trainer has an optimizer of its own"):
        train_by_trainer(own, FULL, seed=0, epochs=1, rate=2.0)


@pytest.mark.parametrize(
    ("args", "metrics", "expected"),
    [
        ({}, {"eval_loss": 0.5, "eval_accuracy": 0.75}, ("eval_accuracy", 0.75)),
        ({}, {"eval_loss": 0.5}, ("-eval_loss", -0.5)),
        (
            {"metric_for_best_model": "f1", "greater_is_better": True},
            {"eval_f1": 0.25},
            ("eval_f1", 0.25),
        ),
        (
            {"metric_for_best_model": "eval_wer", "greater_is_better": False},
            {"eval_wer": 0.25},
            ("-eval_wer", -0.25),
        ),
    ],
)
def test_metric(args, metrics, expected):
    assert (
        metric_of(
            SimpleNamespace(**{"metric_for_best_model": None, "greater_is_better": None} | args),
            metrics,
        )
        == expected
    )


def test_metric_that_is_not_there():
    args = SimpleNamespace(metric_for_best_model="f1", greater_is_better=True)
    with pytest.raises(ValueError, match=r"returned no eval_f1, but eval_loss: name one"):
        metric_of(args, {"eval_loss": 1.0, "epoch": 1.0})
    with pytest.raises(ValueError, match=r"finite"):
        metric_of(args, {"eval_f1": float("nan")})


def test_functions_that_are_refused(tmp_path):
    def ignores(seed, **overrides):
        return trainer(tmp_path, seed=seed, **OVERRIDES)

    def one_seed(seed, **overrides):
        return trainer(tmp_path, **overrides)

    def selects(seed, **overrides):
        return trainer(tmp_path, HALF.create(), **overrides)

    for make, says in (
        (ignores, r"ignores\(.*args.num_train_epochs=3 in place of 2"),
        (one_seed, r"args.seed=42 in place of 7"),
        (
            selects,
            r"without thresher.transformers.Selection, which compare adds itself; got Selected",
        ),
        (lambda seed, **overrides: None, r"must return a transformers.Trainer .* got NoneType"),
    ):
        with pytest.raises(ValueError, match=says):
            build_trainer(make, 7, num_train_epochs=2)


def test_options_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--track wandb: a Trainer has trackers of its own"):
        trained(tmp_path, trackers="wandb")


def test_comparison(tmp_path, request):
    file = tmp_path / "mine.py"
    file.write_text(
        FILE.format(tests=str(request.config.rootpath / "tests"), folder=str(tmp_path / "files"))
    )
    task = f"{file}:make_trainer"
    results = compare(task, parse_methods("winnow:share=0.5"), [0], 2, tmp_path / "out", jobs=1)
    rows = {row["method"].partition("@0")[0]: row for row in results["summary"]}
    assert {*rows} == {
        "full",
        "winnow:share=0.5",
        "shorter@time",
        "uniform",
        "shorter",
        "smaller",
        "placebo",
    }
    assert rows["full"]["cost_ratio"] == 1 and rows["winnow:share=0.5"][
        "cost_ratio"
    ] == pytest.approx(0.5, abs=0.05)
    assert all(row["cpu_ratio"] > 0 for row in rows.values())
    assert results["runs"][0]["metric"]["name"] == "eval_accuracy"
    script = Script.of(file, "make_trainer")
    with pytest.raises(
        ValueError,
        match=r"mine.py, line \d+: make_trainer.* makes a Trainer. Only `thresher compare` takes one",
    ):
        script.training(script.load(None), 0)


def test_which_functions_take_overrides():
    assert takes_overrides(lambda seed, **overrides: None)
    assert not takes_overrides(lambda seed: None) and not takes_overrides(object())


def test_a_selection_is_added_to_a_trainer(tmp_path):
    both = trainer(tmp_path, HALF.create()), Selection.add_to(trainer(tmp_path), HALF.create())
    for one in both:
        torch.manual_seed(0)
        one.train()
    assert outcome(both[0])["step"] == outcome(both[1])["step"] == EPOCHS * 6
    first, second = (outcome(one)["parameters"] for one in both)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert type(both[1]).__name__ == "SelectingNoted"


def test_where_no_selection_is_added(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"Selected has a selection already"):
        Selection.add_to(trainer(tmp_path, HALF.create()), 0.5)
    plain = trainer(tmp_path)
    with pytest.raises(TypeError, match=r"selection_settings: epochs: no such setting"):
        Selection.add_to(plain, 0.5, selection_settings={"epochs": 3})
    monkeypatch.setattr("thresher.transformers.selection.module_of_head", lambda kind: torch)
    with pytest.raises(ValueError, match=r"Noted sets up its fused head when it is created"):
        Selection.add_to(plain, 0.5)
    assert type(plain).__name__ == "Noted"
