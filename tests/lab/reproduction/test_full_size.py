"""A table or figure at full size: what is left of it, and which settings its rows have."""

import pytest

from depth import depth
from thresher_lab.recipes.running import task_of
from thresher_lab.recipes.schema import recipe_names
from thresher_lab.reproduction import ARTEFACTS
from thresher_lab.reproduction.full_size import at_full_size, with_settings_of
from thresher_lab.training.specs import parse_methods

PAIRS = [(artefact, recipe) for artefact in ARTEFACTS.values() for recipe in artefact.recipes][:: depth(5, 1)]


@pytest.mark.filterwarnings("ignore:AdaSelection. `pool` is")
@pytest.mark.parametrize(("artefact", "recipe"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_each_recipe_trains_its_part_with_at_least_one_claim(artefact, recipe):
    found = at_full_size(artefact, recipe)
    [part] = found.parts
    task = task_of(f"recipe:{recipe}")
    assert (part.task, part.epochs) == (f"recipe:{recipe}", task.epochs)  # pyright: ignore[reportAttributeAccessIssue]
    assert part.name == artefact.recipes[recipe] and recipe in recipe_names() and f"`{recipe}`" in found.here
    for text in part.rows.values():
        parse_methods(text.replace("{scores}", "el2n.parquet"))
    several = len(artefact.parts) > 1
    assert found.claims or (several and not any(claim.part for claim in artefact.claims))
    assert not any(claim.text.startswith(f"{part.name}: ") for claim in found.claims)


def test_claims_about_other_parts_are_left_out():
    table = ARTEFACTS["kakurenbo-table-3"]
    found = at_full_size(table, "resnet50-b")
    assert len(found.claims) == 4 < len(table.claims) and {claim.part for claim in found.claims} == {"recipe B"}
    assert (
        "warmup_epochs=5" in found.parts[0].rows["KAKURENBO-0.2"] and "max_fraction=0.2" in found.parts[0].rows["KAKURENBO-0.2"]
    )


def test_a_claim_of_several_parts_names_the_one_that_it_is_about():
    for artefact in ARTEFACTS.values():
        names = {part.name for part in artefact.parts}
        assert all(not claim.part or claim.part in names for claim in artefact.claims), artefact.name


@pytest.mark.parametrize(
    ("recipe", "row", "expected"),
    [
        ("kakurenbo:max_fraction=0.3:tau=0.7", "kakurenbo:max_fraction=0.2:tau=0.5", "kakurenbo:max_fraction=0.2:tau=0.5"),
        ("kakurenbo:max_fraction=0.3:tau=0.7", "infobatch", "infobatch"),
        ("selective_backprop:beta=3:history=1024", "selective_backprop:keep=0.5", "selective_backprop:keep=0.5:history=1024"),
        ("prune:scores=a:keep=0.75+selective_backprop:keep=0.5", "prune:scores=b:keep=0.5", "prune:scores=b:keep=0.5"),
    ],
)
def test_a_row_of_the_recipes_method_has_its_settings(recipe, row, expected):
    assert with_settings_of(recipe, row) == expected


def test_what_has_no_form_at_full_size_says_so():
    with pytest.raises(ValueError, match="kakurenbo-table-2-deit has no form at full size; leave --recipe out"):
        at_full_size(ARTEFACTS["kakurenbo-table-2-deit"], "wrn-28-10")
    with pytest.raises(ValueError, match=r"--recipe: kakurenbo-table-4: no recipe 'wrn-28-10'.*resnet50-a"):
        at_full_size(ARTEFACTS["kakurenbo-table-4"], "wrn-28-10")
