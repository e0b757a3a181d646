"""The recipes by name, read from their files; what is wrong with one is told by file and field."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from thresher.experiments.recipes.schema import Recipe

ENDING = ".yaml"


def folder() -> Path:
    """The folder of the recipes' files, which is that of this module."""
    return Path(__file__).parent


def names() -> list[str]:
    """Of all recipes, in the order of the alphabet."""
    return sorted(path.stem for path in folder().glob(f"*{ENDING}"))


def file_of(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: One of `names`, or the path of a file of your own that ends in .yaml.

    Raises:
        ValueError: There is no such recipe; the message lists them.
        FileNotFoundError: There is no such file.
    """
    if name.endswith(ENDING):
        if not Path(name).is_file():
            raise FileNotFoundError(f"{name}: no such file; `thresher recipes` lists those that there are by name")
        return Path(name)
    if name not in names():
        raise ValueError(f"no recipe {name!r}; there are {', '.join(names())}, and your own as FILE.yaml")
    return folder() / f"{name}{ENDING}"


def read(path: Path) -> Recipe:
    """A recipe from its file.

    Raises:
        ValueError: It is not YAML, or a field is unknown, missing or wrong; a line for each.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{told(path)}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{told(path)}: a recipe has fields such as {', '.join(Recipe.model_fields)}; got {content!r}")
    return checked(content, path)


def checked(content: Mapping[str, Any], path: Path, *, inside: str = "") -> Recipe:
    """A recipe of the content of a file.

    Args:
        content: It.
        path: Of the file.
        inside: Written before the names of fields.

    Raises:
        ValueError: A field is unknown, missing or wrong; a line for each.
    """
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        problems = [inside + _problem(one) for one in error.errors(include_url=False)]
        raise ValueError("\n".join(f"{told(path)}: {problem}" for problem in problems)) from None


def told(path: Path) -> str:
    """A recipe's file, as messages name it."""
    return str(Path("recipes") / path.name) if path.parent == folder() else str(path)


def _problem(error: Any) -> str:
    """One of pydantic's errors: the field, and a sentence."""
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
    """Those of the part of a recipe at a place."""
    part: Any = Recipe
    for step in place:
        if isinstance(step, str):
            part = _part_in(part.model_fields[step].annotation)
    return [*part.model_fields]


def _part_in(annotation: Any) -> type[BaseModel]:
    """The part that a field holds, be it in a tuple or possibly None."""
    inside = [annotation, *getattr(annotation, "__args__", ())]
    return next(kind for kind in inside if isinstance(kind, type) and issubclass(kind, BaseModel))
