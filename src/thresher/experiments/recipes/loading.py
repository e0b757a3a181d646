"""Reads the recipes from their files; an error message names the file and the field."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from thresher.experiments.recipes.schema import Recipe
from thresher.methods.registry import no_such

RECIPE_SUFFIX = ".yaml"


def folder() -> Path:
    """Returns the folder of the recipes' files, which is that of this module."""
    return Path(__file__).parent


def recipe_names() -> list[str]:
    """Returns the names of all recipes in alphabetical order."""
    return sorted(path.stem for path in folder().glob(f"*{RECIPE_SUFFIX}"))


def file_of(name: str) -> Path:
    """Returns the file of a recipe.

    Args:
        name: One of `recipe_names()`, or the path of a file of your own that ends in .yaml.

    Raises:
        ValueError: There is no such recipe; the message lists all recipes.
        FileNotFoundError: There is no such file.
    """
    if name.endswith(RECIPE_SUFFIX):
        if not Path(name).is_file():
            raise FileNotFoundError(f"{name}: no such file; `thresher recipes` lists those that there are by name")
        return Path(name)
    if name not in recipe_names():
        raise ValueError(no_such("recipe", name, recipe_names(), also=", and your own as FILE.yaml"))
    return folder() / f"{name}{RECIPE_SUFFIX}"


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe from its file.

    Raises:
        ValueError: The file is not YAML, or a field is unknown, missing or wrong; the message has one line per field.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{display_path(path)}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{display_path(path)}: a recipe has fields such as {', '.join(Recipe.model_fields)}; got {content!r}")
    return validated(content, path)


def validated(content: Mapping[str, Any], path: Path, *, inside: str = "") -> Recipe:
    """Returns a recipe with the content of a file.

    Args:
        content: Fields of the recipe by name.
        path: Path of the file, used in error messages.
        inside: Text before the names of fields in error messages. Default: none.

    Raises:
        ValueError: A field is unknown, missing or wrong; the message has one line per field.
    """
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        problems = [inside + _problem(one) for one in error.errors(include_url=False)]
        raise ValueError("\n".join(f"{display_path(path)}: {problem}" for problem in problems)) from None


def display_path(path: Path) -> str:
    """Returns the path of a recipe's file in the form that messages use."""
    return str(Path("recipes") / path.name) if path.parent == folder() else str(path)


def _problem(error: Any) -> str:
    """Returns the field and a sentence for one of pydantic's errors."""
    place: tuple[int | str, ...] = error["loc"]
    field = ".".join(map(str, place))
    if error["type"] == "missing":
        return f"{field}: this field is missing"
    if error["type"] == "extra_forbidden":
        return f"{field}: no such field; there are {', '.join(_fields(place[:-1]))}"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] == "value_error" else f"; got {error['input']!r}"
    return f"{field}: {message[0].lower()}{message[1:]}{got}"


def _fields(place: tuple[int | str, ...]) -> list[str]:
    """Returns the fields of the section at a place of a recipe."""
    section: Any = Recipe
    for step in place:
        if isinstance(step, str):
            section = _section_in(section.model_fields[step].annotation)
    return [*section.model_fields]


def _section_in(annotation: Any) -> type[BaseModel]:
    """Returns the section in the type of a field, which may be a tuple of sections or None."""
    inside = [annotation, *getattr(annotation, "__args__", ())]
    return next(kind for kind in inside if isinstance(kind, type) and issubclass(kind, BaseModel))
