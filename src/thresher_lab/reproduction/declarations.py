"""Reads the tables and figures of a paper from the TOML file beside the module that has its functions."""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from thresher_lab.reproduction import measures
from thresher_lab.reproduction.artefact import Artefact, RunsByPart, SeedValue

GIVEN_BY_CALLER = {"measure": 2, "tables": 2, "pictures": 1, "remark": 1}
"""Keys that name a function, with the number of arguments that the file does not give: the runs and others."""
ARTEFACT = TypeAdapter(Artefact)
Declaration = Mapping[str, Any]


@dataclass(frozen=True)
class Paper:
    """A paper and what is made of it.

    Args:
        name: Name of the paper.
        stand_ins: Trainings in place of those of its models, in one line.
        answer: Whether what it is about holds, in one sentence.
        artefacts: Its tables and figures.
        unjudged: Sentences of it that no claim judges, and why.
        settings: Rows of its table of settings: the setting, the paper, the authors' code, here, the source.
        settings_from: Which texts and code the settings are from.
    """

    name: str
    stand_ins: str
    answer: str
    artefacts: Sequence[Artefact]
    unjudged: str = ""
    settings: Sequence[Sequence[str]] = ()
    settings_from: str = ""


def read_paper(functions: ModuleType) -> Paper:
    """Returns the paper whose functions a module has, from the TOML file of the same name."""
    stem = functions.__name__.rpartition(".")[2]
    file = files("thresher_lab.reproduction") / f"{stem}.toml"
    return parse_paper(file.read_text(encoding="utf-8"), functions)


def parse_paper(text: str, functions: ModuleType) -> Paper:
    """Returns a paper from the text of its TOML file.

    Args:
        text: Content of the file.
        functions: Module with the functions that the file names; those of `measures` may be named, too.

    Raises:
        ValueError: A key or a function is unknown or missing; the message names the table or figure.
    """
    try:
        return _paper(functions, **tomllib.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the TOML file of {functions.__name__}: {error}") from error


def _paper(
    functions: ModuleType,
    *,
    paper: str,
    stand_ins: str,
    answer: str,
    artefacts: Sequence[Declaration],
    defaults: Declaration | None = None,
    shared: Declaration | None = None,
    unjudged: str = "",
    settings: Sequence[Sequence[str]] = (),
    settings_from: str = "",
) -> Paper:
    made = []
    for given in artefacts:
        try:
            made.append(_artefact(functions, paper, shared or {}, **{**(defaults or {}), **given}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{given.get('name')}: {error}") from error
    return Paper(paper, stand_ins, answer, made, unjudged, settings, settings_from)


def _artefact(
    functions: ModuleType,
    paper: str,
    shared: Declaration,
    *,
    place: str,
    parts: Sequence[Declaration],
    claims: Sequence[Declaration],
    claims_by_part: bool = False,
    **given: Any,
) -> Artefact:
    complete = [_part(shared, **part) for part in parts]
    names = [part.get("name", "") for part in complete]
    groups = [_claims(functions, names, **claim) for claim in claims]
    if claims_by_part:
        groups = zip(*groups, strict=True)
    for key in GIVEN_BY_CALLER.keys() & given:
        given[key] = _function(functions, key, **given[key])
    given["claims"] = [claim for group in groups for claim in group]
    return ARTEFACT.validate_python({"paper": f"{paper}, {place}", "parts": complete, **given})


def _part(
    shared: Declaration, /, *, rows: Declaration | None = None, **given: Any
) -> dict[str, Any]:
    complete: dict[str, Any] = {}
    methods: dict[str, str] = {}
    for name in given.pop("shared", ()):
        if name not in shared:
            raise ValueError(f"`shared`: there is no [shared.{name}]")
        complete |= shared[name]
        methods |= shared[name].get("rows", {})
    return {**complete, **given, "rows": {**methods, **(rows or {})}}


def _claims(
    functions: ModuleType,
    names: Sequence[str],
    *,
    text: str,
    measure: Declaration,
    parts: Sequence[str] = (),
    **given: Any,
) -> list[dict[str, Any]]:
    """Returns the claim, or one per part that it is about, whose name its text then begins with."""
    value = _function(functions, "measure", **measure)

    def about(part: str) -> dict[str, Any]:
        return {**given, "value": _of_part(value, part)}

    if not parts:
        return [{**about(names[0] if len(names) == 1 else ""), "text": text}]
    about_each = names if parts == "all" else parts
    unknown = set(about_each) - set(names)
    if unknown:
        raise ValueError(f"`parts`: no part {min(unknown)!r}, there are {', '.join(names)}")
    return [{**about(name), "text": f"{name}: {text}"} for name in about_each]


def _of_part(value: Callable[..., float], part: str) -> SeedValue:
    """Returns a function of the runs of one part as one of all runs; that of all parts, "", gets them all."""

    def of_all(measured: RunsByPart, seed: int) -> float:
        return value(measured[part] if part else measured, seed)

    return of_all


def _function(
    functions: ModuleType, key: str, *, function: str, **arguments: Any
) -> Callable[..., Any]:
    found = getattr(functions, function, None) or getattr(measures, function, None)
    if not inspect.isfunction(found):
        raise ValueError(f"`{key}`: no function {function!r} in {functions.__name__} or measures")
    try:
        inspect.signature(found).bind(*[None] * GIVEN_BY_CALLER[key], **arguments)
    except TypeError as error:
        raise ValueError(f"`{key}`: {function}: {error}") from error
    return partial(found, **arguments)
