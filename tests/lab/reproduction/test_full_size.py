"""A table or figure at full size: what is left of it, and which settings its rows have."""

from pathlib import Path
from typing import Any

import pytest

from depth import depth
from thresher_lab.recipes.batches import rate_of
from thresher_lab.recipes.running import task_of
from thresher_lab.recipes.schema import file_of, read_recipe, recipe_names
from thresher_lab.reproduction import ARTEFACTS
from thresher_lab.reproduction.artefact import FIVE_SEEDS, Claim, specs_of
from thresher_lab.reproduction.full_size import at_full_size, on_task, plan, with_settings_of

OURS = ("adaselection-line", "adaselection-bike")
"""Recipes whose paper gives neither network nor data."""
PAIRS = [(artefact, recipe) for artefact in ARTEFACTS.values() for recipe in artefact.recipes][
    :: depth(5, 1)
]


@pytest.mark.filterwarnings("ignore:AdaSelection. `pool` is")
@pytest.mark.parametrize(
    ("artefact", "recipe"), PAIRS, ids=lambda value: getattr(value, "name", value)
)
def test_each_recipe_trains_its_part_with_at_least_one_claim(artefact, recipe):
    found, smoke = at_full_size(artefact, recipe), at_full_size(artefact, recipe, smoke=True)
    task = task_of(f"recipe:{recipe}")
    assert recipe in recipe_names() and f"`{recipe}`" in found.here
    for part in found.parts:
        assert part.task.partition("@")[0] == f"recipe:{recipe}"
        assert part.epochs == task.epochs  # pyright: ignore[reportAttributeAccessIssue]
        assert specs_of(part, Path("el2n.parquet")).keys() == part.rows.keys()
        assert len(found.parts) > 1 or not any(
            claim.text.startswith(f"{part.name}: ") for claim in found.claims
        )
    assert {part.name for part in found.parts} <= {part.name for part in artefact.parts}
    assert not any("(here: small)" in claim.says for claim in found.claims)
    assert found.claims or artefact.name == "adaselection-weights"  # its claim compares tasks
    assert [claim.text for claim in smoke.claims] == [claim.text for claim in found.claims]
    assert (
        found.command.startswith(f"thresher reproduce {artefact.name} --recipe {recipe}")
        and "--smoke" in smoke.command
    )
    assert found.command in plan(artefact, recipe)
    assert (found.name, smoke.name) == (
        f"{artefact.name}@{recipe}",
        f"{artefact.name}@{recipe}-smoke",
    )
    size = "with our recipe" if recipe in OURS else "at full size with"
    assert found.paper == f"{artefact.paper}, {size} `{recipe}`"
    assert not any("all ten" in claim.says for claim in found.claims)


def test_a_row_drops_the_largest_losses_only_where_it_says_so():
    found = at_full_size(ARTEFACTS["kakurenbo-figure-5"], "deepcam")
    dropping = {row for row, text in found.parts[0].rows.items() if "drop_top" in text}
    assert (
        dropping == {row for row in found.parts[0].rows if "DropTop" in row}
        and len(found.claims) == 5
    )


def test_a_recipe_trains_all_batches_of_the_table():
    table = ARTEFACTS["kakurenbo-table-4"]
    for smoke, given, sizes in (
        (False, {}, [(1024, 1), (2048, 1), (4096, 1), (8192, 1)]),
        (False, {"batch_size": 128, "accumulate": 8}, [(128, 8), (128, 16), (128, 32), (128, 64)]),
        (True, {}, [(16, 1), (32, 1), (64, 1), (128, 1)]),
    ):
        found = at_full_size(table, "resnet50-a", smoke=smoke, **given)
        tasks: list[Any] = [task_of(part.task) for part in found.parts]
        assert [
            (task.settings.batch.size, task.settings.batch.accumulate) for task in tasks
        ] == sizes
        rates = [rate_of(task.settings) for task in tasks]
        assert rates == pytest.approx([factor * rates[0] for factor in (1, 2, 4, 8)])
        assert len(found.claims) == 4 and found.claims[1].text.startswith("batch x2: ")


def test_figure_3_hides_as_much_as_the_paper():
    [part] = at_full_size(ARTEFACTS["kakurenbo-figure-3"], "efficientnet-b3").parts
    assert [text.split(":")[1] for text in part.rows.values()] == ["max_fraction=0.3"]


@pytest.mark.parametrize(
    ("recipe", "full"), [("selective-backprop-svhn", 573), ("selective-backprop-cifar10", 391)]
)
def test_steps_of_the_warmup_fit_the_training(recipe, full):
    table = ARTEFACTS["selective-backprop-time-to-target"]
    for given, steps in (({}, full), ({"batch_size": 64}, 2 * full), ({"smoke": True}, 8)):
        [part] = at_full_size(table, recipe, **given).parts
        specs = [
            spec
            for row, spec in specs_of(part, None).items()
            if row.startswith("Selective-Backprop")
        ]
        assert len(specs) == 5 and {spec.settings["warmup_steps"] for spec in specs} == {steps}


def test_scores_are_those_of_the_recipe():
    table = ARTEFACTS["diet-sb-d"]
    recipe = "diet-sb-resnet20-cifar10"
    assert [part.scores for part in at_full_size(table, recipe).parts] == [("el2n", 10, 10)]
    assert [part.scores for part in at_full_size(table, recipe, smoke=True).parts] == [
        ("el2n", 3, 2)
    ]
    assert "--models 10 --epochs 10" in read_recipe(file_of(recipe)).not_given["method"]
    assert (
        "CIFAR-10: 15 runs of 200 epochs, 50 models of 10 epochs for scores; hours not given"
        in plan(table, recipe)
    )


def test_a_plan_has_the_hours_of_the_recipe():
    text = plan(ARTEFACTS["kakurenbo-table-3"], "resnet50-a")
    command, taken = text.splitlines()
    assert command == "thresher reproduce kakurenbo-table-3 --recipe resnet50-a --data DIR"
    assert (
        taken.strip() == "ImageNet-1K: 35 runs of 100 epochs; about 157 h, 32 GPUs (V100)"
    )  # 35 times 4.48 h
    assert "460 runs of 20 epochs; about 1 h" in plan(
        ARTEFACTS["adaselection-table-4"], "adaselection-line"
    )


def test_no_claim_is_judged_at_full_size_with_fewer_than_five_seeds():
    for artefact, recipe in PAIRS:
        found, smoke = at_full_size(artefact, recipe), at_full_size(artefact, recipe, smoke=True)
        least = 10 if recipe == "adaselection-line" else 5
        assert (
            list(found.seeds) == list(range(max(least, len(artefact.seeds))))
            and len(smoke.seeds) == 3
        )


def test_the_batch_is_in_the_command_and_in_the_task():
    found = at_full_size(ARTEFACTS["kakurenbo-table-2"], "wrn-28-10", batch_size=64, accumulate=16)
    assert found.command.endswith("--recipe wrn-28-10 --batch-size 64 --accumulate 16 --data DIR")
    task: Any = task_of(found.parts[0].task)
    assert (task.settings.batch.size, task.settings.batch.step) == (64, 1024)


def test_every_recipe_of_adaselection_trains_the_figures_by_rate():
    recipes = {name for name in recipe_names() if name.startswith("adaselection-")}
    assert recipes == ARTEFACTS["adaselection-rates"].recipes.keys() and len(recipes) == 6


def test_the_page_of_the_recipes_counts_tables_and_figures():
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    assert f"makes all {len(ARTEFACTS)} artifacts" in page


def test_hours_and_hardware_are_on_the_page_of_the_recipes():
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text().splitlines()
    for name in recipe_names():
        [row] = [line for line in page if line.startswith(f"| `{name}` |")]
        recipe = read_recipe(file_of(name))
        assert (
            recipe.hardware in row
            or "not given" in recipe.hardware
            or recipe.hardware == "one core, measured here"
        )
        assert recipe.hours is None or "not given |" not in row[-14:]


def test_claims_about_other_parts_are_left_out():
    table = ARTEFACTS["kakurenbo-table-3"]
    found = at_full_size(table, "resnet50-b")
    assert len(found.claims) == 4 < len(table.claims) and all(
        claim.text.startswith("at 0.") for claim in found.claims
    )
    assert (
        "warmup_epochs=5" in found.parts[0].rows["KAKURENBO-0.2"]
        and "max_fraction=0.2" in found.parts[0].rows["KAKURENBO-0.2"]
    )


def test_a_claim_of_several_parts_names_the_one_that_it_is_about():
    several = [artefact for artefact in ARTEFACTS.values() if len(artefact.parts) > 1]
    of_all = {
        claim.text
        for one in several
        for claim in one.claims
        if not claim.part_of([part.name for part in one.parts])
    }
    assert {text[:30] for text in of_all} == {
        "of the quarter pruned with one",
        "the spread over beta of the mo",
        "the last weights of the two mo",
    }
    assert Claim("b: it is", lambda *_: 1.0).part_of(["a", "b"]) == "b"
    assert (
        Claim("c: it is", lambda *_: 1.0).part_of(["a"]) == "a"
        and Claim("c: it is", lambda *_: 1.0).part_of(["a", "b"]) == ""
    )


@pytest.mark.parametrize(
    ("recipe", "row", "expected"),
    [
        (
            "kakurenbo:max_fraction=0.3:tau=0.7",
            "kakurenbo:max_fraction=0.2:tau=0.5",
            "kakurenbo:max_fraction=0.2:tau=0.5",
        ),
        ("kakurenbo:max_fraction=0.3:tau=0.7", "infobatch", "infobatch"),
        (
            "selective_backprop:beta=3:history=1024",
            "selective_backprop:keep=0.5",
            "selective_backprop:keep=0.5:history=1024",
        ),
        (
            "prune:scores=a:keep=0.75+selective_backprop:keep=0.5",
            "prune:scores=b:keep=0.5",
            "prune:scores=b:keep=0.5",
        ),
    ],
)
def test_a_row_of_the_recipes_method_has_its_settings(recipe, row, expected):
    assert with_settings_of(recipe, row) == expected


def test_what_has_no_form_at_full_size_says_so():
    with pytest.raises(
        ValueError, match="kakurenbo-table-2-deit has no form at full size; leave --recipe out"
    ):
        at_full_size(ARTEFACTS["kakurenbo-table-2-deit"], "wrn-28-10")
    with pytest.raises(
        ValueError, match=r"--recipe: kakurenbo-table-4: no recipe 'wrn-28-10'.*resnet50-a"
    ):
        at_full_size(ARTEFACTS["kakurenbo-table-4"], "wrn-28-10")


def test_a_task_replaces_the_stand_in():
    table = on_task(
        ARTEFACTS["selective-backprop-time-to-target"], "cifar10-resnet8@10000", data=Path("/data")
    )
    [part] = table.parts
    specs = specs_of(part, None)
    assert (part.task, part.epochs, table.seeds) == ("cifar10-resnet8@10000", 40, FIVE_SEEDS)
    assert table.name == "selective-backprop-time-to-target@cifar10-resnet8@10000"
    assert table.command == (
        "thresher reproduce selective-backprop-time-to-target --task cifar10-resnet8@10000 --data DIR"
    )
    assert specs["Selective-Backprop"].label == "selective_backprop:beta=1:start=0.025 twice"
    assert len(table.claims) == 3 and "Fashion-MNIST" not in table.here


def test_a_task_trains_the_first_part_and_keeps_its_claims():
    table = on_task(ARTEFACTS["kakurenbo-table-3"], "digits@300", epochs=2, seeds=[0, 1])
    assert [part.name for part in table.parts] == ["recipe A"] and table.parts[0].epochs == 2
    assert len(table.claims) == 2 and table.claims[0].text.startswith("at 0.")
    assert table.command.endswith("--task digits@300 --epochs 2 --seeds 0,1")


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("diet-sb-c", "digits", "--task: diet-sb-c needs the tasks it has; leave --task out"),
        ("diet-sb-a", "cifar10-resnet9", "no task 'cifar10-resnet9'; did you mean"),
    ],
)
def test_tasks_that_cannot_replace_a_stand_in(name, task, message):
    with pytest.raises(ValueError, match=message):
        on_task(ARTEFACTS[name], task)
