"""A table or figure of a paper at full size: its rows, trained with a recipe on the data of the paper."""

from dataclasses import replace
from typing import Any

from thresher.methods import no_such
from thresher_lab.recipes.running import SMOKE, task_of
from thresher_lab.recipes.task import PREFIX, RecipeTask
from thresher_lab.reproduction.artefact import Artefact
from thresher_lab.training.specs import Composition, parse_methods


def at_full_size(artefact: Artefact, recipe: str, *, smoke: bool = False) -> Artefact:
    """Returns a table or figure with the part that a recipe stands for, at the size of the recipe.

    The rows of that part are trained with the network, the data, the epochs and the schedules of the recipe. A row of the
    recipe's own method has the settings of the recipe, where the row gives none. Claims about other parts are left out.

    Args:
        artefact: The table or figure.
        recipe: Name of one of the recipes of the table or figure.
        smoke: Whether a small network is trained on made-up data instead, in seconds. Default False.

    Raises:
        ValueError: The table or figure has no such recipe; the message names those that it has.
    """
    if not artefact.recipes:
        raise ValueError(f"--recipe: {artefact.name} has no form at full size; leave --recipe out")
    if recipe not in artefact.recipes:
        raise ValueError(f"--recipe: {artefact.name}: {no_such('recipe', recipe, artefact.recipes)}")
    named = f"{SMOKE if smoke else PREFIX}{recipe}"
    task = task_of(named)
    assert isinstance(task, RecipeTask)
    name = artefact.recipes[recipe]
    [part] = [part for part in artefact.parts if part.name == name]
    rows = {row: with_settings_of(task.settings.method, text) for row, text in part.rows.items()}
    own = replace(part, task=named, epochs=task.epochs, rows=rows)
    several = len(artefact.parts) > 1
    claims = [
        replace(claim, text=claim.text.removeprefix(f"{name}: "))
        for claim in artefact.claims
        if claim.part == name or not (several or claim.part)
    ]
    here = f"{task.settings.title}, the recipe `{recipe}`" + (" with a small network on made-up data" if smoke else "")
    return replace(artefact, parts=[own], claims=claims, here=here, beside="")


def with_settings_of(recipe_method: str, text: str) -> str:
    """Returns a method with the settings of a recipe that it does not give, if it is the recipe's method.

    Args:
        recipe_method: Method of the recipe, in the form of the command line.
        text: Method of a row.

    Example:
        >>> with_settings_of("kakurenbo:max_fraction=0.3:warmup_epochs=5", "kakurenbo:max_fraction=0.4:adjust_lr=false")
        'kakurenbo:max_fraction=0.4:adjust_lr=false:warmup_epochs=5'
    """
    name, *given = text.split(":")
    own: Any = parse_methods(recipe_method)[0]
    if isinstance(own, Composition) or "+" in text or own.name != name:
        return text
    _, *others = recipe_method.split(":")
    named = {setting.partition("=")[0] for setting in given}
    return ":".join([text, *(setting for setting in others if setting.partition("=")[0] not in named | CHOICES)])


CHOICES = {"keep", "beta", "forward_passes"}
"""Settings in which the rows of a table differ, so that a row without one has the method's default."""
