"""A table or figure of a paper at full size: its rows, trained with a recipe on the data of the paper."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.methods import no_such
from thresher_lab.comparison.statistics import LEAST_SEEDS
from thresher_lab.recipes.running import SMOKE, task_of, with_batch_of
from thresher_lab.recipes.task import PREFIX, RecipeTask
from thresher_lab.reproduction.artefact import FIVE_SEEDS, Artefact, ArtefactPart
from thresher_lab.tasks import built_in
from thresher_lab.training.specs import Composition, parse_methods

SEEDS_OF_TASK = {"line": 10}
"""Least number of seeds at full size of a task that takes minutes; of the others `FIVE_SEEDS`."""
EL2N_MODELS = ("el2n", 10, 10)
"""Scores at full size: EL2N of ten models that train for ten epochs, as in arXiv:2107.07075."""
OF_SMOKE = "**A smoke test, on made-up data: it shows that the command runs. Its numbers and verdicts say nothing about the paper.**"


def at_full_size(
    artefact: Artefact,
    recipe: str,
    *,
    smoke: bool = False,
    batch_size: int | None = None,
    accumulate: int | None = None,
) -> Artefact:
    """Returns a table or figure with the parts that a recipe stands for, at the size of the recipe.

    The rows of these parts are trained with the network, the data, the epochs and the schedules of the recipe. A row of the
    recipe's own method takes those settings from the recipe that it does not give itself, see `with_settings_of`. Claims about
    other parts are left out.

    Args:
        artefact: The table or figure.
        recipe: Name of one of the recipes of the table or figure.
        smoke: Whether a small network is trained on made-up data instead, in seconds. Default False.
        batch_size: Number of samples of one forward and backward pass. Default: that of the recipe.
        accumulate: Number of batches whose gradients are added up before each step. Default: that of the recipe.

    Raises:
        ValueError: The table or figure has no such recipe; the message names those that it has.
    """
    if not artefact.recipes:
        raise ValueError(f"--recipe: {artefact.name} has no form at full size; leave --recipe out")
    if recipe not in artefact.recipes:
        raise ValueError(
            f"--recipe: {artefact.name}: {no_such('recipe', recipe, artefact.recipes)}"
        )
    target = artefact.recipes[recipe]
    names = (target,) if isinstance(target, str) else target
    named = f"{SMOKE if smoke else PREFIX}{recipe}"
    parts = [
        _at_its_size(part, with_batch_of(named, batch_size, accumulate, part.batch))
        for part in artefact.parts
        if part.name in names
    ]
    settings = RecipeTask.of(recipe).settings
    here = f"{settings.title}, the recipe `{recipe}`" + (
        " with a small network on made-up data" if smoke else ""
    )
    options = {"recipe": recipe, "batch-size": batch_size, "accumulate": accumulate}
    least = SEEDS_OF_TASK.get(settings.data.task or "", len(FIVE_SEEDS))
    seeds = range(LEAST_SEEDS if smoke else max(least, len(artefact.seeds)))
    command = ["thresher", "reproduce", artefact.name]
    command += [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    if smoke:
        command.append("--smoke")
    elif settings.data.task not in OWN_DATA:
        command += ["--data", "DIR"]
    size = f"at full size with `{recipe}`"
    if settings.data.task in OWN_DATA:
        size = f"with our recipe `{recipe}`"  # the paper names neither network nor data
    if smoke:
        size = f"a smoke test of `{recipe}`"
    texts = {
        "name": f"{artefact.name}@{recipe}{'-smoke' * smoke}",
        "paper": f"{artefact.paper}, {size}",
    }
    texts |= {"here": here, "beside": OF_SMOKE if smoke else "", "command": shlex.join(command)}
    return _with_parts(artefact, parts, seeds=seeds, **texts)


def on_task(
    artefact: Artefact,
    task: str,
    *,
    epochs: int | None = None,
    seeds: Sequence[int] | None = None,
    data: Path | None = None,
) -> Artefact:
    """Returns a table or figure with its first part alone, trained on another task; claims about other parts are left out.

    Args:
        artefact: The table or figure.
        task: Name of a task of this package, see `tasks.built_in`.
        epochs: Number of epochs. Default: `epochs_on_task` of the table or figure.
        seeds: Random seeds. Default: `FIVE_SEEDS`.
        data: Folder with the data, which the command on the page then takes, too.

    Raises:
        ValueError: There is no such task, or the table or figure needs its own.
    """
    if not artefact.recipes:
        raise ValueError(f"--task: {artefact.name} needs the tasks it has; leave --task out")
    built_in(task)
    part = replace(artefact.parts[0], task=task, epochs=epochs or artefact.epochs_on_task)
    options = {
        "--task": task,
        "--epochs": epochs,
        "--seeds": seeds and ",".join(map(str, seeds)),
        "--data": data and "DIR",
    }
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    return _with_parts(
        artefact,
        [part],
        name=f"{artefact.name}@{task}",
        paper=f"{artefact.paper}, on `{task}`",
        here=f"The task `{task}`, {part.epochs} epochs",
        command=shlex.join(["thresher", "reproduce", artefact.name, *words]),
        seeds=seeds or FIVE_SEEDS,
    )


def _with_parts(artefact: Artefact, parts: Sequence[ArtefactPart], **changes: Any) -> Artefact:
    """Returns a table or figure with some of its parts, as they are trained elsewhere, and the claims about these."""
    every = [part.name for part in artefact.parts]
    names = [part.name for part in parts]
    claims = [
        replace(claim, text=claim.text.removeprefix(f"{names[0]}: ")) if len(parts) == 1 else claim
        for claim in artefact.claims
        if (of := claim.part_of(every)) in names or (not of and len(parts) == len(every))
    ]
    return replace(artefact, parts=parts, claims=claims, **changes)


OWN_DATA = ("line", "bike")
"""Tasks of recipes that take no folder with data."""


def _at_its_size(part: ArtefactPart, name: str) -> ArtefactPart:
    """Returns a part with the epochs of a recipe, the settings of its method and, but for smoke tests, its scores."""
    task: Any = task_of(name)
    method = task.scaled(task.given_method(None)).text
    rows = {row: with_settings_of(method, text) for row, text in part.rows.items()}
    scores = part.scores if name.startswith(SMOKE) or not part.scores else EL2N_MODELS
    return replace(part, task=name, epochs=task.epochs, rows=rows, scores=scores)


def plan(artefact: Artefact, recipe: str) -> str:
    """Returns the command that trains a table or figure at full size, and a line on what it takes.

    The hours assume that each run takes as long as full training does on the hardware of the recipe's source.

    Args:
        artefact: The table or figure.
        recipe: Name of one of its recipes.
    """
    full = at_full_size(artefact, recipe)
    settings = RecipeTask.of(recipe).settings
    runs = len(full.seeds) * sum(
        1 + len(part.rows) * (1 + len(part.controls)) for part in full.parts
    )
    models = sum(
        part.scores[1] * (len(full.seeds) if part.score_sets else 1)
        for part in full.parts
        if part.scores
    )
    scores = f", {models} models of {EL2N_MODELS[2]} epochs for scores" if models else ""
    hours = (settings.hours or 0) * (runs + models * EL2N_MODELS[2] / settings.epochs)
    time = f"about {hours:.2g} h" if hours else "hours not given"
    if hours >= 10:
        time = f"about {hours:,.0f} h"
    taken = f"{settings.data.name}: {runs} runs of {settings.epochs} epochs{scores}; {time}, {settings.hardware}"
    return f"{full.command}\n    {taken}"


def with_settings_of(recipe_method: str, text: str) -> str:
    """Completes the method of a row with settings of the recipe, if both are the same method.

    Settings that the row gives are kept. `COMPARED_SETTINGS` are not completed.

    Args:
        recipe_method: Method of the recipe, in the form of the command line.
        text: Method of the row, in the same form.

    Returns:
        The completed method; `text` itself if it is another method, or if one of the two is a composition.

    Example:
        >>> with_settings_of("kakurenbo:max_fraction=0.3:warmup_epochs=5", "kakurenbo:max_fraction=0.4:adjust_lr=false")
        'kakurenbo:max_fraction=0.4:adjust_lr=false:warmup_epochs=5'
    """
    name, *row_settings = text.split(":")
    recipe_spec: Any = parse_methods(recipe_method)[0]
    if isinstance(recipe_spec, Composition) or "+" in text or recipe_spec.name != name:
        return text
    _, *recipe_settings = recipe_method.split(":")
    kept = COMPARED_SETTINGS | {setting.partition("=")[0] for setting in row_settings}
    added = [setting for setting in recipe_settings if setting.partition("=")[0] not in kept]
    return ":".join([text, *added])


COMPARED_SETTINGS = {"keep", "beta", "forward_passes", "drop_top"}
"""Settings in which the rows of a table differ. A row without one means the default of the method, not that of the recipe."""
