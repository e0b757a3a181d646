"""Another batch than that of a recipe: smaller batches, gradients that are added up, and the learning rate for them."""

import math
from collections.abc import Callable

from thresher_lab.recipes.schema import OptimizerSection, Recipe

SCALED: dict[str, tuple[Callable[[float], float], str]] = {
    "sgd": (float, "in proportion to the samples of a step"),
    "rmsprop": (float, "in proportion to the samples of a step"),
    "adamw": (math.sqrt, "by the square root of the samples of a step"),
    "lamb": (math.sqrt, "by the square root of the samples of a step"),
}
"""Factor on the learning rate, a function of the ratio of the samples of a step, and its name; by optimizer."""


def with_batch(
    recipe: Recipe, batch_size: int | None = None, accumulate: int | None = None
) -> Recipe:
    """Returns a recipe with another batch, and with the learning rate that goes with it.

    Args:
        recipe: Recipe to change.
        batch_size: Number of samples of one forward and backward pass. Default: that of the recipe.
        accumulate: Number of batches whose gradients are added up before each step. Default: that of the recipe.

    Returns:
        The recipe itself, where nothing is different. With as many samples per step as before, the learning rate is the same.

    Example:
        >>> from thresher_lab.recipes.schema import file_of, read_recipe
        >>> deepcam = read_recipe(file_of("deepcam"))
        >>> with_batch(deepcam, 8, 32).batch.step, rate_of(deepcam), rate_of(with_batch(deepcam, 8, 32))
        (256, 0.0055, 0.00275)
    """
    before = recipe.batch
    asked = (
        before.size if batch_size is None else batch_size,
        before.accumulate if accumulate is None else accumulate,
    )
    if asked == (before.size, before.accumulate):
        return recipe
    batch = before.model_copy(update={"workers": 1, "per_worker": asked[0], "accumulate": asked[1]})
    factor, _ = SCALED[recipe.optimizer.name]
    if batch.step == before.step:
        rate = rate_of(recipe)
    else:
        rate = rate_of(recipe) * factor(batch.step / before.step)
    optimizer = OptimizerSection.model_validate(
        recipe.optimizer.model_dump() | {"lr": rate, "lr_per": "batch"}
    )
    return recipe.model_copy(update={"batch": batch, "optimizer": optimizer})


def rate_of(recipe: Recipe) -> float:
    """Returns the largest learning rate of a recipe, that of all its workers together."""
    return recipe.optimizer.lr * (
        recipe.batch.workers if recipe.optimizer.lr_per == "worker" else 1
    )


def rate_note(before: Recipe, recipe: Recipe) -> str | None:
    """Returns a line about the learning rate that changed with the batch; None where it did not.

    Args:
        before: Recipe with its own batch.
        recipe: Recipe that `with_batch` returned for it.
    """
    if before.batch.step == recipe.batch.step:
        return None
    name = recipe.optimizer.name
    samples = f"{recipe.batch.step:,} samples per step in place of {before.batch.step:,}"
    rates = f"{rate_of(before):.6g} -> {rate_of(recipe):.6g}"
    return f"{samples}: learning rate {rates} ({name}: {SCALED[name][1]})"
