"""`thresher score` and `thresher prune` on a small part of the digits."""

import os
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import typer
from typer.testing import CliRunner

from subset_cases import optional
from thresher import scores
from thresher.scores import Scores
from thresher_lab import tasks
from thresher_lab.cli._console import use_device
from thresher_lab.cli.observe import observe
from thresher_lab.cli.prune import prune
from thresher_lab.cli.score import score
from thresher_lab.comparison import scoring
from thresher_lab.comparison.scoring import SCORES, export, in_epochs, make_scores, part_of
from thresher_lab.recipes.running import SmokeTask, task_of
from thresher_lab.training.loop import train
from thresher_lab.training.specs import parse_methods

TASK = "digits@128"
N = 128

app = typer.Typer()
for command in (observe, score, prune):
    app.command()(command)


NAMED = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    return {"model": model, "data": DataLoader(data, 8, shuffle=True), "criterion": torch.nn.CrossEntropyLoss(),
            "optimizer": torch.optim.SGD(model.parameters(), 0.1), "evaluate": lambda model: 0.0, "classes": ["no", "yes"]}
"""


def called(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_score_then_prune(tmp_path):
    out, kept = tmp_path / "s.parquet", tmp_path / "kept.txt"
    done = called("score", "--task", TASK, "--models", 1, "--epochs", 1, "--out", out)
    assert done.exit_code == 0, done.output
    assert (
        f"{out}: el2n of 128 samples; cost as much as 1.33 epochs of full training (256 forward, 128 backward)"
        in done.output
    )
    table = Scores.load(out)
    assert table == make_scores(TASK, "el2n", models=1, epochs=1)
    assert (
        table.provenance["task"] == TASK
        and table.provenance["seeds"] == [0]
        and table.provenance["epochs"] == 1
    )
    assert set(table.provenance["versions"]) >= {"thresher", "torch", "python"}
    done = called("prune", out, "--keep", 0.5, "--per-class-floor", 0.3, "--out", kept)
    assert done.exit_code == 0, done.output
    assert (
        f"{kept}: 64 of 128 samples kept: the hardest by el2n, wrong labels among them"
        in done.output
    )
    shares = re.search(
        r"share kept per class: from (\d+)% \(class \d\) to (\d+)% \(class \d\)", done.output
    )
    assert shares and 30 <= int(shares[1]) <= 50 <= int(shares[2])
    ids = [int(line) for line in kept.read_text().splitlines()]
    assert len(ids) == 64 and ids == sorted(ids)
    done = called(
        "prune", out, "--keep", 0.5, "--per-class-floor", 0.3, "--out", tmp_path / "kept.parquet"
    )
    assert pq.read_table(tmp_path / "kept.parquet").to_pydict() == {"id": ids}
    window = ("prune", out, "--keep", 0.25, "--which", "window", "--offset", 0.5, "--out", kept)
    refused = called(*window)
    assert refused.exit_code == 1 and "is there already: give another file, or --force" in str(
        refused.exception
    )
    assert len(kept.read_text().splitlines()) == 64
    done = called(*window, "--force")
    middle = set(map(int, kept.read_text().split()))
    assert middle == set(table.values.argsort(stable=True)[32:64].tolist())


def test_a_share_that_floats_round_is_not_above_keep(tmp_path):
    values = torch.arange(100, dtype=torch.float64)
    Scores(torch.arange(100), values, name="mine").save(tmp_path / "s.parquet")
    done = called("prune", tmp_path / "s.parquet", "--keep", 0.29, "--out", tmp_path / "kept.txt")
    assert "29 of 100 samples kept" in done.output and "per-class-floor" not in done.output


def test_classes_that_nearly_vanish_are_named(tmp_path):
    values = torch.arange(100, dtype=torch.float64)
    Scores(torch.arange(100), values, labels=torch.arange(100) // 50, name="mine").save(
        tmp_path / "s.parquet"
    )
    done = called("prune", tmp_path / "s.parquet", "--keep", 0.52, "--out", tmp_path / "kept.txt")
    assert done.exit_code == 0 and done.output.splitlines()[-1] == (
        "These classes nearly vanish: class 0 (4%). `--per-class-floor 0.26` keeps 26% of each class at least."
    )
    done = called(
        "prune",
        tmp_path / "s.parquet",
        "--keep",
        0.52,
        "--per-class-floor",
        0.26,
        "--out",
        tmp_path / "k.txt",
    )
    assert (
        "vanish" not in done.output
        and "52 of 100 samples kept: the hardest by mine, wrong labels among them\n" in done.output
    )
    done = called(
        "prune",
        tmp_path / "s.parquet",
        "--keep",
        0.3,
        "--per-class-floor",
        0.5,
        "--out",
        tmp_path / "more.txt",
    )
    assert (
        "50 of 100 samples kept: the hardest by mine, wrong labels among them, 20 of them for --per-class-floor, beyond --keep"
        in done.output
    )


def test_classes_are_told_by_name(tmp_path):
    names = {"classes": ["crops", "roads"]}
    scores = Scores(
        torch.arange(100), torch.arange(100.0), labels=torch.arange(100) // 50, provenance=names
    )
    scores.save(tmp_path / "s.parquet")
    said = called(
        "prune", tmp_path / "s.parquet", "--keep", 0.52, "--out", tmp_path / "kept.txt"
    ).output
    assert (
        "share kept per class: from 4% (crops) to 100% (roads)" in said
        and "nearly vanish: crops (4%)." in said
    )


def test_a_training_with_names_gives_them_to_its_scores(tmp_path):
    (tmp_path / "named.py").write_text(textwrap.dedent(NAMED))
    script, scored, observed = (
        f"{tmp_path / 'named.py'}:build",
        tmp_path / "s.parquet",
        tmp_path / "map",
    )
    assert (
        called(
            "score", script, "--score", "forgetting", "--models", 2, "--epochs", 1, "--out", scored
        ).exit_code
        == 0
    )
    assert called("observe", script, "--epochs", 1, "--out", observed, "-q").exit_code == 0
    for number, path in enumerate((scored, observed / "map.parquet")):
        done = called(
            "prune",
            path,
            "--keep",
            0.5,
            "--per-class-floor",
            0.5,
            "--out",
            tmp_path / f"{number}.txt",
        )
        assert re.search(r"from \d+% \((no|yes)\) to \d+% \((no|yes)\)", done.output), done.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--device", "gpu"),
            r"--device gpu: Expected one of cpu, cuda.*; `--device cpu` always works",
        ),
        (("--device", "cuda:77"), r"--device cuda:77: .*; `--device cpu` always works"),
        (
            ("--out", "/proc/none/s.parquet"),
            "--out /proc/none/s.parquet cannot be written: No such file or directory",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_trained(given, said, monkeypatch):
    monkeypatch.setattr("thresher_lab.comparison.scoring.make_scores", None)
    done = called("score", "--task", TASK, *given)
    assert done.exit_code == 1 and re.match(said, str(done.exception))


def test_a_device_is_used_by_the_training_and_its_processes(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "none")
    use_device("cpu")
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"
    use_device(None)
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"


@pytest.mark.parametrize(
    ("name", "models", "passes"),
    [
        ("el2n", 2, (2 * 128 * 2, 2 * 128)),
        ("grand", 1, (128 * 2, 128)),
        ("grand_all", 1, (128 * 2, 128 * 2)),
        ("forgetting", 2, (2 * 128 * 2, 2 * 128 * 2)),
        ("prototypes", 1, (128 * 2, 128)),
        ("memorisation", 2, (2 * 89 + 2 * 128, 2 * 89)),
        ("entropy", 1, (128 * 2, 128)),
        ("mutual_information", 2, (2 * 128 * 2, 2 * 128)),
        ("variation_ratio", 2, (2 * 128 * 2, 2 * 128)),
        ("irreducible", 1, (128 + 2 * 128, 128)),
        ("aum", 2, (2 * 128 * 2, 2 * 128)),
        ("dyn_unc", 1, (2 * 128 * 2, 2 * 128)),
        ("dual", 1, (2 * 128 * 2, 2 * 128)),
        ("tdds", 1, (3 * 128 * 2, 3 * 128)),
        ("d2", 2, (2 * 128 * 2 + 128, 2 * 128 * 2)),
    ],
)
def test_every_score(name, models, passes):
    state, said = torch.get_rng_state(), []
    epochs = {"forgetting": 2, "d2": 2, "dyn_unc": 2, "dual": 2, "tdds": 3}.get(name, 1)
    given = {"models": models, "epochs": epochs, "seed": 4, "window": 2}
    table = make_scores(TASK, name, progress=lambda *told: said.append(told), **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert (
        len(table) == N
        and len(table.labels.unique()) == 10
        and (table.forward, table.backward) == passes
    )
    trained = 2 if name == "irreducible" else models
    assert said == [
        (model, trained, epoch) for model in range(1, trained + 1) for epoch in range(1, epochs + 1)
    ]
    assert name == "memorisation" or table.values.isfinite().all()
    assert table == make_scores(TASK, name, **given)


@pytest.mark.parametrize(
    ("name", "epochs", "window"), [("dyn_unc", 9, 10), ("tdds", 10, 10), ("dual", 5, 1)]
)
def test_windows_that_do_not_fit_are_refused_before_anything_is_trained(name, epochs, window):
    with pytest.raises(
        ValueError,
        match=f"{name} needs windows of 2 epochs or more, .* got `window`={window} and .* --window",
    ):
        make_scores("no task", name, epochs=epochs, window=window)


def test_dynamics_are_those_of_plain_training():
    """AUM of one epoch is the negative margin of the trained model, made here from its logits."""
    [table] = [make_scores(TASK, "aum", models=1, epochs=1, seed=4)]
    made = []
    task = task_of(TASK)
    data = task.load(task.find(None))
    first = task.training(data, 4)
    ensemble = scoring.train_ensemble(
        task, data, first, [4], 1, scoring.all_samples, lambda *_: made.append(1) or torch.zeros(N)
    )
    [model] = ensemble.models
    inputs, labels = (
        torch.stack([torch.as_tensor(first.loader.dataset[i][part]) for i in range(N)])
        for part in (0, 1)
    )
    logits = model.eval()(inputs).detach().numpy()
    others = np.where(np.eye(10, dtype=bool)[labels], -np.inf, logits).max(1)
    assert np.allclose(
        table.values.numpy(), others - logits[np.arange(N), labels], atol=1e-4
    ) and made == [1]


def test_d2_is_one_order_by_mean_forgetting_and_the_features_of_the_first_model():
    task = task_of(TASK)
    data = task.load(task.find(None))
    first = task.training(data, 4)
    ensemble = scoring.train_ensemble(
        task, data, first, [4, 5], 3, scoring.all_samples, scoring.was_right
    )
    hard = Scores.mean([scores.forgetting(seen) for seen in ensemble.watched])
    expected = scores.d2(hard, scores.sample_features(ensemble.models[0], first.loader)[0])
    assert torch.equal(make_scores(TASK, "d2", models=2, epochs=3, seed=4).values, expected.values)
    assert expected.values.sort().values.tolist() == list(range(1, N + 1))


@pytest.mark.parametrize("name", ["d2", "prototypes"])
def test_a_model_without_features_is_refused_before_it_is_trained(monkeypatch, name):
    task = task_of(TASK)
    training = replace(task.training(task.load(task.find(None)), 0), model=torch.nn.Flatten())
    monkeypatch.setattr(type(task), "training", lambda *_: training)
    monkeypatch.setattr(scoring, "train_ensemble", None)
    with pytest.raises(
        ValueError,
        match=f"score: {name} needs features; .*Flatten has no nn.Linear. Use another score, such",
    ):
        make_scores(TASK, name)


def test_every_score_is_tried():
    [mark] = [mark for mark in test_every_score.pytestmark if mark.name == "parametrize"]
    assert sorted(name for name, *_ in mark.args[1]) == sorted(SCORES)


def test_halves_score_each_other(monkeypatch):
    seen = {}

    def keep(models, loader, criterion, *, trained_on, **given):
        seen["ids"] = trained_on
        return Scores(torch.arange(N), torch.zeros(N))

    monkeypatch.setattr(scoring.scores, "irreducible", keep)
    make_scores(TASK, "irreducible", models=2, epochs=1)
    first, second, third, fourth = (set(ids.tolist()) for ids in seen["ids"])
    assert (
        first | second == third | fourth == set(range(N))
        and not first & second
        and len(first) == 64
        and first != third
    )


def test_ones_own_training(tmp_path):
    path, template = tmp_path / "my_digits.py", Path(tasks.__file__).with_name("template.py")
    path.write_text(template.read_text().replace("x[:1400], y[:1400]", "x[:100], y[:100]"))
    out = tmp_path / "s.parquet"
    done = called(
        "score",
        f"{path}:build",
        "--score",
        "forgetting",
        "--models",
        1,
        "--epochs",
        2,
        "--out",
        out,
    )
    assert done.exit_code == 0, done.output
    assert (
        f"{out}: forgetting of 100 samples; cost as much as 2.00 epochs of full training"
        in done.output
    )
    assert set(Scores.load(out).values.tolist()) <= {0.0, 1.0, 2.0}


def test_a_finished_run_is_exported(tmp_path):
    task = task_of("digits@128")
    [spec] = parse_methods("kakurenbo:max_fraction=0.4:tau=0.0")
    run = tmp_path / "run.parquet"
    train(task, task.load(task.find(None)), spec, seed=0, epochs=4, samples_to=run)
    done = called(
        "prune", "--from-run", tmp_path / "ru", "--keep", 0.5, "--out", tmp_path / "kept.txt"
    )
    assert done.exit_code == 0, done.output
    assert "64 of 128 samples kept: the hardest by trained, wrong labels among them" in done.output
    trained = pq.read_table(run).column("trained").to_pylist()
    kept = {int(line) for line in (tmp_path / "kept.txt").read_text().split()}
    order = sorted(range(N), key=lambda i: (trained[i], i))
    assert kept == set(order[64:]) and len(set(trained)) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score"], "give the name of a task, or your own training"),
        (["score", "x.py:build", "--task", TASK], "give the name of a task, or your own training"),
        (["score", "x.py"], "write your own training as FILE.py:FUNCTION"),
        (["score", "x"], "no task 'x'; there are digits"),
        (["score", "--task", TASK, "--score", "loss"], "--score: no score 'loss'; there are el2n"),
        (
            ["score", "--task", TASK, "--score", "memorisation", "--models", "1"],
            "`models` must be 2 or more, got 1",
        ),
        (["score", "--task", "nothing"], "no task 'nothing'"),
        (["prune"], "give either a file of scores or --from-run"),
        (
            ["prune", "a.parquet", "--from-run", "b.parquet"],
            "give either a file of scores or --from-run",
        ),
        (["prune", "not-there.parquet"], "not-there.parquet"),
        (
            ["prune", "not-there.parquet", "--out", "kept.csv"],
            "--out kept.csv: ids go to a file that ends in .parquet or .txt",
        ),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = called(*arguments)
    assert done.exit_code and message in " ".join(
        f"{done.output} {done.exception}".replace("│", " ").split()
    )
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_trained():
    with pytest.raises(
        ValueError, match="score: `models` and `epochs` must be 1 or more, got 0 and 1"
    ):
        make_scores(TASK, "el2n", models=0, epochs=1)
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="take a loader with a batch_size"):
        part_of(loader, torch.arange(2), 0)


def test_costs_in_epochs():
    assert in_epochs(
        Scores(torch.arange(10), torch.zeros(10), forward=60, backward=60)
    ) == pytest.approx(6)
    assert in_epochs(
        Scores(torch.arange(10), torch.zeros(10), forward=60, backward=60), 1.0
    ) == pytest.approx(6)
    assert in_epochs(Scores(torch.arange(10), torch.zeros(10), forward=30)) == pytest.approx(1)


def test_export_refuses_other_endings(tmp_path):
    with pytest.raises(
        ValueError, match=r"ids\.csv: ids go to a file that ends in \.parquet or \.txt"
    ):
        export(torch.arange(3), tmp_path / "ids.csv")


RECIPE = """
title: digits
paper: {title: a paper, where: a table}
data: {name: digits, kind: task, task: digits@128, samples: 128, shape: [1, 8, 8], classes: 10}
model: {source: task, name: perceptron}
method: "prune:scores=el2n.parquet:keep=0.5+selective_backprop:keep=0.5"
epochs: 2
batch: {per_worker: 32}
optimizer: {name: sgd, lr: 0.1}
published: []
"""


def test_the_scores_that_a_recipe_begins_with(tmp_path, monkeypatch):
    """Its models are scored, and the recipe then takes the scores."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE)
    task = task_of("recipe:mine.yaml")
    with pytest.raises(
        FileNotFoundError,
        match="no file of scores el2n.parquet; `thresher score --task recipe:mine.yaml --data",
    ):
        task.spec()
    done = called(
        "score", "--task", "recipe:mine.yaml", "--models", 1, "--epochs", 1, "--out", "el2n.parquet"
    )
    assert done.exit_code == 0 and "el2n of 128 samples" in done.output, done.output
    assert Scores.load("el2n.parquet").provenance["recipe"]["model"] == task.recipe["model"]
    run = train(task, task.load(task.find(None)), task.spec(), seed=0, epochs=1)
    assert run["history"][0]["kept"] == 64


def test_a_recipe_with_transforms_is_scored(tmp_path, monkeypatch):
    """With its own network, on synthetic images."""
    optional("torchvision")
    small = SmokeTask.at("diet-sb-resnet20-cifar10", tmp_path)
    monkeypatch.setattr(
        scoring, "task_of", lambda name: {"recipe:diet-sb-resnet20-cifar10": small}[name]
    )
    table = make_scores("recipe:diet-sb-resnet20-cifar10", "el2n", models=1, epochs=1)
    assert table.samples == small.settings.data.samples and table.values.isfinite().all()
    assert table.provenance["recipe"]["model"]["name"] == "resnet20"
