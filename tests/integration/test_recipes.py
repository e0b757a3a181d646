"""Recipes with --smoke, through the function of the command.

`make test` has one recipe per family of networks and method, with the epochs that its assertions need; `make verify` has all of
them, with all epochs of a smoke test. Tests of the other folders read, check and reduce every recipe.
"""

import json

import pytest
import torch

from depth import DEEP, depth
from subset_cases import optional
from thresher_lab.cli.train import train
from thresher_lab.recipes import running
from thresher_lab.recipes import schema as loading
from thresher_lab.recipes.task import RecipeTask


@pytest.fixture(scope="module", autouse=True)
def vision():
    optional("timm")


EPOCHS = {
    "wrn-28-10": 5,
    "deepcam": 5,
    "deit-tiny-fractal3k": 8,
    "deit-tiny-cifar10": 1,
    "diet-sb-resnet20-cifar10": 2,
    "selective-backprop-cifar10": 4,
    "adaselection-cifar10": 1,
    "adaselection-line": 2,
    "adaselection-wikitext2": 1,
}
"""Recipes of `make test`, and their epochs there. The network of diet-sb-googlenet-cifar100 is trained by a unit test."""


def trained(name, out, **options):
    train(name, out=out, **options)
    return json.loads((out / "results.json").read_text())


def test_every_method_is_among_the_quick_ones():
    methods = {
        name: RecipeTask.of(name).settings.method.partition(":")[0]
        for name in loading.recipe_names()
    }
    assert {methods[name] for name in EPOCHS} == set(methods.values())


@pytest.mark.parametrize("name", loading.recipe_names() if DEEP else EPOCHS)
def test_smoke(name, tmp_path):
    results = trained(name, tmp_path, smoke=True, epochs=None if DEEP else EPOCHS[name])
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(value.isfinite().all() for value in weights.values())
    [run] = results["runs"]
    history = run["history"]
    assert len(history) == results["epochs"] and all(entry["complete"] for entry in history)
    kind = RecipeTask.of(name).settings.method.partition(":")[0]
    if kind == "kakurenbo":
        crosses(history)
    elif kind != "full":
        assert run["cost"]["backward"] < 0.8 * run["cost"]["full_backward"]
    else:
        assert run["cost"]["backward"] == run["cost"]["full_backward"]


def crosses(history):
    """Samples are hidden, refreshed and moved back, the fraction decays, and the learning rate follows what is hidden."""
    assert history[0]["kept"] == len_of(history) and not history[0]["refreshed"]
    assert any(entry["moved_back"] for entry in history)
    hiding = [entry for entry in history if entry["refreshed"]]
    assert hiding and all(entry["kept"] + entry["refreshed"] == len_of(history) for entry in hiding)
    assert all(entry["refresh"] == entry["refreshed"] for entry in history)
    assert max(entry["actual_fraction"] for entry in hiding) > 0.05
    assert history[1]["scheduled_fraction"] == 0.3 > history[-1]["scheduled_fraction"]
    n, learned = (
        len_of(history),
        [entry["kept"] + entry.get("dropped_fraction", 0) * len_of(history) for entry in history],
    )
    assert [entry["lr_scale"] for entry in history] == pytest.approx([n / one for one in learned])


def len_of(history):
    return history[0]["backward"]


def test_another_method_in_fewer_epochs(tmp_path):
    results = trained(
        "wrn-28-10", tmp_path, smoke=True, method="uniform:keep=0.5", epochs=2, seed=3
    )
    [run] = results["runs"]
    assert (run["method"], run["seed"], len(run["history"])) == ("uniform:keep=0.5", 3, 2)
    assert [entry["kept"] for entry in run["history"]] == [64, 64]


def test_the_same_seed_is_the_same_training(tmp_path):
    """Augmentation, hiding, refreshing and averaging included."""
    epochs = depth(2, 3)
    first, again, *others = (
        trained("resnet50", tmp_path / out, smoke=True, epochs=epochs, seed=seed)
        for out, seed in RUNS
    )
    assert all(results["runs"][0]["history"][1]["refreshed"] for results in (first, again, *others))
    assert told(first) == told(again) and all(told(first) != told(other) for other in others)


RUNS = depth([("first", 1), ("again", 1)], [("first", 1), ("again", 1), ("other", 2)])


def told(results):
    return [
        (entry["accuracy"], entry["kept"], entry["loss_histogram"])
        for entry in results["runs"][0]["history"]
    ]


INTERRUPTED = [
    ("resnet50", None, depth(3, 4)),
    ("wrn-28-10", "selective_backprop:beta=1:forward_passes=once", depth(2, 4)),
    ("deepcam", None, 4),
]


@pytest.mark.parametrize(("name", "method", "epochs"), INTERRUPTED[: depth(1, 3)])
def test_an_interrupted_training_goes_on_to_the_same_numbers(
    name, method, epochs, tmp_path, monkeypatch
):
    """Weights, their average, optimizer, what is hidden, augmentation and order."""
    whole = trained(name, tmp_path / "whole", smoke=True, method=method, epochs=epochs)
    out, real = tmp_path / "interrupted", running.train

    def interrupted(*args, progress, **kwargs):
        def stop(done, metric):
            progress(done, metric)
            raise KeyboardInterrupt

        return real(*args, progress=stop, **kwargs)

    monkeypatch.setattr(running, "train", interrupted)
    for _ in range(epochs - 1):
        with pytest.raises(KeyboardInterrupt):
            trained(name, out, smoke=True, method=method, epochs=epochs)
    assert {path.name for path in out.iterdir()} >= {"checkpoint.pt"} and not (
        out / "results.json"
    ).exists()
    with pytest.raises(
        ValueError,
        match=r"checkpoint.pt is of another training: its seed is 0, here it is 1; give another",
    ):
        trained(name, out, smoke=True, method=method, epochs=epochs, seed=1)
    monkeypatch.setattr(running, "train", real)
    resumed = trained(name, out, smoke=True, method=method, epochs=epochs)
    assert untimed(resumed) == untimed(whole)
    assert not (out / "checkpoint.pt").exists()
    models = [
        torch.load(tmp_path / folder / "model.pt", weights_only=True)
        for folder in ("whole", "interrupted")
    ]
    assert all(torch.equal(value, models[1][key]) for key, value in models[0].items())


def untimed(results):
    """Without times and what is made of them."""
    [run] = results["runs"]
    timed = {"wall_s", "cpu_s", "step_s", "step_memory", "cost", "backward_to_forward"}
    entries = [
        {name: value for name, value in entry.items() if name not in timed}
        for entry in run["history"]
    ]
    return (
        run["metric"],
        entries,
        {
            name: run["cost"][name]
            for name in ("forward", "backward", "refresh", "scoring", "steps")
        },
    )


def test_fine_tuning_from_the_weights_of_a_pretraining(tmp_path):
    trained("deit-tiny-fractal3k", tmp_path / "before", smoke=True, epochs=1)
    given = trained(
        "deit-tiny-cifar100",
        tmp_path,
        smoke=True,
        epochs=1,
        weights=tmp_path / "before" / "model.pt",
    )
    begun = trained("deit-tiny-cifar100", tmp_path, smoke=True, epochs=1)
    assert told(given) != told(begun), (
        "those that it is given, and not those that pretraining begins with"
    )
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(
        ValueError, match="deit-tiny-cifar100.yaml: --weights .*other.pt: of another network: "
    ):
        trained("deit-tiny-cifar100", tmp_path, smoke=True, weights=tmp_path / "other.pt")


def test_gradients_of_small_batches_add_up_to_those_of_a_large_one(tmp_path):
    """The network normalizes within each sample; the loss has class weights, and the last step has batches of 7, 7 and 2."""
    small, large = ({"batch_size": 7, "accumulate": 4}, {"batch_size": 28})
    runs = [
        trained("deepcam", tmp_path / str(number), smoke=True, method="full", epochs=2, **batch)[
            "runs"
        ][0]
        for number, batch in enumerate((small, large))
    ]
    models = [torch.load(tmp_path / folder / "model.pt", weights_only=True) for folder in "01"]
    for key, value in models[0].items():
        torch.testing.assert_close(value, models[1][key], rtol=1e-4, atol=1e-4)
    assert runs[0]["metric"]["value"] == pytest.approx(runs[1]["metric"]["value"], abs=1e-3)
    assert (
        [entry["steps"] for entry in runs[0]["history"]]
        == [5, 5]
        == [entry["steps"] for entry in runs[1]["history"]]
    )
