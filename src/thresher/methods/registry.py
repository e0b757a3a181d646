"""Methods by name: those of this package from `built_in.py`, those of other packages from entry points.

The facts about a method are in its class. For the methods of this package they are read from the source files, so methods can
be listed without importing them or torch.
"""

import ast
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from thresher.methods.contract import RULE

GROUP = "thresher.methods"
"""Entry-point group for methods of other packages: name -> "package.module:Class"."""

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method that are known without importing it.

    Args:
        target: Import path of the class, as "package.module:Class".
        stage: When the method decides: "before" training, before each "epoch" or in each "batch"; "?" for a method of another
            package.
        summary: Short description of the method.
        paper: Publication, such as "arXiv:2310.10102"; "" for none.
        rule: Text that says why a sample is skipped; "{setting}" stands for the value of that setting.

    Example:
        >>> infos()["kakurenbo"].paper
        'arXiv:2310.10102'
    """

    target: str
    stage: str
    summary: str
    paper: str = ""
    rule: str = RULE


def reexports(path: Path) -> dict[str, str]:
    """Returns the names that a file of imports defines, without running the file.

    Args:
        path: Python file or stub with lines of the form `from module import name as name`; other lines are ignored.

    Returns:
        Mapping from each name to the module that it comes from, in the order of the file.

    Example:
        >>> reexports(FOLDER / "built_in.py")["Kakurenbo"]
        'thresher.methods.kakurenbo'
    """
    lines = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
    ]
    return {
        alias.asname: str(line.module) for line in lines for alias in line.names if alias.asname
    }


BUILT_IN = {
    module.rpartition(".")[2]: f"{module}:{kind}"
    for kind, module in reexports(FOLDER / "built_in.py").items()
}
"""Methods of this package: name -> "package.module:Class"."""

FOR_POSITIONS = {"token_selection": "thresher.methods.token_selection:TokenSelection"}
"""Methods of this package that choose among the positions (tokens) of a loss; `attach` does not take them."""


@cache
def _classes(module: str) -> tuple[dict[str, ast.ClassDef], dict[str, str]]:
    """Returns the classes of a module in this folder by name, and the modules of the names that it imports."""
    path = FOLDER / f"{module.rpartition('.')[2]}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    lines = [node for node in body if isinstance(node, ast.ImportFrom)]
    imports = {alias.name: str(line.module) for line in lines for alias in line.names}
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}, imports


def _attribute(target: str, name: str) -> ast.expr | None:
    """Returns the expression that a class, or the first of its bases, assigns to one of its attributes."""
    module, _, kind = target.partition(":")
    classes, imports = _classes(module)
    for node in classes[kind].body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
        ):
            return node.value
    bases = [base.id for base in classes[kind].bases if isinstance(base, ast.Name)]
    if bases:
        return _attribute(f"{imports.get(bases[0], module)}:{bases[0]}", name)
    return None


@cache
def _read_info(name: str) -> MethodInfo:
    """Returns the facts of a method of this package, from the literals in its class."""
    target = BUILT_IN[name]
    stage = _attribute(target, "stage")
    card = _attribute(target, "card")
    if isinstance(card, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in card.keywords}
    else:
        keywords = {}
    known = {
        field.name: ast.literal_eval(keywords[field.name])
        for field in fields(MethodInfo)
        if field.name in keywords
    }
    return MethodInfo(target, ast.literal_eval(stage) if stage else "?", **{"summary": "", **known})


def _targets() -> dict[str, str]:
    """Returns the import path of every registered class by name; another package cannot replace a name of this package."""
    return {**{point.name: point.value for point in entry_points(group=GROUP)}, **BUILT_IN}


def infos() -> dict[str, MethodInfo]:
    """Returns a `MethodInfo` for every registered method, by name, without importing the methods.

    Example:
        >>> infos()["full"].summary
        'every sample, every epoch'
    """
    others = {
        point.name: MethodInfo(
            point.value, "?", f"from {point.dist.name if point.dist else point.module}"
        )
        for point in entry_points(group=GROUP)
    }
    return {**others, **{name: _read_info(name) for name in BUILT_IN}}


def names() -> list[str]:
    """Returns the sorted names of all methods, as `create` takes them.

    Example:
        >>> names()[:3]
        ['ada_boost', 'ada_selection', 'batch_importance']
    """
    return sorted(_targets())


def load(name: str) -> type:
    """Imports a method, and returns its class.

    Args:
        name: Name of the method, one of `names()` or of `FOR_POSITIONS`; hyphens count as underscores.

    Raises:
        ValueError: No method has this name.

    Example:
        >>> load("kakurenbo").__name__
        'Kakurenbo'
    """
    # Other packages come last: finding them reads the metadata of everything that is installed.
    spelled = name.replace("-", "_")
    target = FOR_POSITIONS.get(spelled) or BUILT_IN.get(spelled) or _targets().get(name)
    if target is None:
        raise ValueError(no_such("method", name, names(), also_near=FOR_POSITIONS))
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def no_such(
    kind: str, name: str, known: Iterable[str], *, also_near: Iterable[str] = (), also: str = ""
) -> str:
    """Returns the error message for an unknown name: the name that was probably meant, if any, and all known names.

    Args:
        kind: Noun for what is named, such as "method".
        name: The name that was given.
        known: The names that exist.
        also_near: Further names that may have been meant. Default: none.
        also: End of the list, for what else may be given. Default: nothing.

    Example:
        >>> no_such("method", "Winow", ["full", "winnow"])
        "no method 'Winow'; did you mean 'winnow'? There are full, winnow"
        >>> no_such("task", "?", ["digits", "bike"], also=", and your own")
        "no task '?'; there are digits, bike, and your own"
    """
    known = list(known)
    near = nearest_name(name, (*also_near, *known))
    question = f"did you mean {near!r}? There are" if near else "there are"
    return f"no {kind} {name!r}; {question} {', '.join(known)}{also}"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that was probably meant; None if no name is similar.

    Args:
        name: The name that was given.
        known: The names that exist.

    Example:
        >>> nearest_name("SelectiveBackProp", ["full", "selective_backprop"])
        'selective_backprop'
    """

    def joined(one: str) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\s_-]+", "-", one).lower()

    by_form = {joined(one): one for one in known}
    near = difflib.get_close_matches(joined(name), sorted(by_form), n=1)
    return by_form[near[0]] if near else None


def create(name: str, **settings: Any) -> Any:
    """Creates a method by name with the given settings.

    Args:
        name: Name of the method, one of `names()`.
        **settings: Settings of the method: the fields of its class.

    Raises:
        ValueError: No method has this name, or a setting is out of its range.
        TypeError: The method has no such setting.

    Example:
        >>> create("uniform", keep=0.3)
        UniformSubset(keep=0.3, fixed=False)
    """
    return load(name)(**settings)


def name_of(method: Any) -> str:
    """Returns the registered name of a method, or the name of its class if it is not registered.

    Args:
        method: Instance of a method.

    Example:
        >>> from thresher import UniformSubset
        >>> name_of(UniformSubset(keep=0.3))
        'uniform'
    """
    target = f"{type(method).__module__}:{type(method).__qualname__}"
    return next(
        (name for name, place in _targets().items() if place == target), type(method).__qualname__
    )
