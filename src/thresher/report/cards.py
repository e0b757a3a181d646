"""The card of a method as a page in Markdown: what it does, its settings, what is missing, and what was measured here.

`python -m thresher.report.cards docs/methods` writes the pages of the methods of this package and their index.
"""

import argparse
import inspect
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from string import Formatter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch

from thresher import methods
from thresher.experiments.training.tables import markdown_table
from thresher.methods.card import Card
from thresher.methods.contract import requirements_of
from thresher.records import Records
from thresher.report.measured import measurements

COMPARISONS = Path("benchmarks/results")
INDEX = "README.md"
BY_HAND = "not-implemented.md"
STAGE_TITLES = {
    "before": "before training",
    "epoch": "before each epoch",
    "batch": "in each batch",
    "position": "in each batch, by position",
}
EXAMPLE_EPOCHS = 20
"""Length of the example training for which a method is asked which signals it needs, in epochs."""


def card_page(name: str, results: Path | None = None, *, as_lists: bool = False) -> str:
    """Returns the card of a registered method as Markdown.

    Args:
        name: Name of the method, one of `thresher.methods.names()`.
        results: Folder with results, see `measured.measurements`; the page then ends with those of the method. Default None:
            without results.
        as_lists: Whether the settings are a list, which a narrow terminal shows whole, in place of a table. Default: False.

    Raises:
        ValueError: No method has this name, its class has no card, or its docstring does not explain a setting.

    Example:
        >>> print(card_page("uniform").splitlines()[2])
        `thresher.UniformSubset`: a fresh random subset each epoch.
    """
    kind = methods.load(name)
    card = _card_of(name, kind)
    listed = {"Differences to the official code": card.differences, "What is missing": card.missing}
    parts = [
        f"# {name}",
        f"`{_import_path(kind)}`: {card.summary or methods.infos()[name].summary}.",
        "\n".join(f"- **{title}:** {fact}" for title, fact in _fact_lines(kind, card).items()),
        f"## Settings\n\n{_settings(kind, as_lists=as_lists)}",
        *(f"## {title}\n\n" + "\n".join(f"- {entry}" for entry in entries) for title, entries in listed.items() if entries),
        *([f"## Caveat\n\n{_as_sentence(card.caveat)}"] if card.caveat else []),
        *([] if results is None else [f"## What it reached here\n\n{measurements(name, results)}"]),
    ]
    return "\n\n".join(parts) + "\n"


def all_pages(results: Path) -> dict[str, str]:
    """Returns the pages of the methods of this package and their index, by the names of their files.

    Args:
        results: Folder with results.json files of comparisons, see `card_page`.

    Example:
        >>> sorted(all_pages(Path("no-such-folder")))[:3]
        ['README.md', 'ada_boost.md', 'ada_selection.md']
    """
    cards = {f"{name}.md": card_page(name, results) for name in _names()}
    return {INDEX: index_page(), **cards}


def index_page() -> str:
    """Returns the index page: the methods of this package, one table per stage.

    Example:
        >>> print(index_page().splitlines()[0])
        # The methods
    """
    parts = [
        "# The methods",
        "Each method has a page with its settings, its differences to the official code, what is missing, and what was "
        "measured here beside controls of the same cost. `thresher methods NAME` prints the same page "
        f"without the measurements. [{BY_HAND}]({BY_HAND}) lists what the papers describe and this package does not have.",
    ]
    kinds: dict[str, Any] = {name: methods.load(name) for name in _names()}
    for stage, title in STAGE_TITLES.items():
        rows = [_index_row(name, kind) for name, kind in kinds.items() if kind.stage == stage]
        header = ("method", "what it does", "paper", "signals", "bytes per sample")
        parts.append(f"## {title.capitalize()}\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts) + "\n"


def _names() -> list[str]:
    return sorted(methods.BUILT_IN | methods.FOR_POSITIONS)


def _index_row(name: str, kind: Any) -> tuple[str, ...]:
    card = _card_of(name, kind)
    signals = _as_code(signals_of(kind))
    return f"[{name}]({name}.md)", card.summary, _paper_link(card.paper), signals, f"{card.bytes_per_sample:g}"


def _card_of(name: str, kind: type) -> Card:
    card = getattr(kind, "card", None)
    if not isinstance(card, Card):
        raise ValueError(f"{name} has no card: give {kind.__qualname__} a class attribute `card`, a thresher.methods.card.Card")
    return card


def _import_path(kind: type) -> str:
    own = kind.__module__.startswith("thresher.methods.")
    return f"{'thresher' if own else kind.__module__}.{kind.__qualname__}"


def _fact_lines(kind: Any, card: Card) -> dict[str, str]:
    found = {
        "Paper": _paper_link(card.paper),
        "Decides": STAGE_TITLES[kind.stage],
        "Signals": _as_code(signals_of(kind)) or "none",
        "Remembers of each sample": f"{card.bytes_per_sample:g} bytes" if card.bytes_per_sample else "nothing",
        "Extra forward passes": card.forwards,
        "Biased": card.biased,
        "Published": card.claim,
        "Skips a sample": "".join(said + (f"`{field}`" if field else "") for said, field, _, _ in Formatter().parse(card.rule)),
    }
    return {title: _as_sentence(fact) for title, fact in found.items() if fact}


def _as_sentence(said: str) -> str:
    """Returns a text with a capital letter and a full stop."""
    return said[:1].upper() + said[1:] + "." * (not said.endswith("."))


def _paper_link(paper: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def _as_code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def signals_of(kind: Any) -> tuple[str, ...]:
    """Returns the names of the signals that a method needs with its default settings.

    Args:
        kind: Class of the method.

    Example:
        >>> signals_of(methods.load("kakurenbo"))
        ('confidence', 'correct', 'loss')
    """
    method = kind if any(map(_has_no_default, fields(kind))) else kind()
    if method is kind or kind.stage != "epoch":
        return tuple(requirements_of(method).signals)
    recorded = sorted(Records(method.columns(), 0, torch.device("cpu")).signals)
    passes = range(EXAMPLE_EPOCHS) if requirements_of(method).full_pass else ()
    return *recorded, *dict.fromkeys(name for epoch in passes for name in method.full_pass(epoch, EXAMPLE_EPOCHS))


def _has_no_default(field: Field[Any]) -> bool:
    return field.init and field.default is MISSING and field.default_factory is MISSING


def _settings(kind: Any, *, as_lists: bool) -> str:
    meanings = setting_meanings(kind)
    settings = [field for field in fields(kind) if field.init]
    unknown = [field.name for field in settings if field.name not in meanings]
    if unknown:
        raise ValueError(f"{kind.__qualname__}: the Args section of its docstring does not explain {', '.join(unknown)}")
    if not settings:
        return "None."
    rows = [(f"`{field.name}`", _type_of(field.type), _default_of(field), meanings[field.name]) for field in settings]
    if as_lists:
        return "\n".join(f"- {name} ({of}; default: {default}): {meaning}" for name, of, default, meaning in rows)
    return markdown_table(("setting", "type", "default", "meaning"), rows)


def _type_of(annotation: Any) -> str:
    of = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in of)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_type_of, of))
    if of or isinstance(annotation, str):
        return str(annotation).replace("collections.abc.", "")
    return "None" if annotation is NoneType else annotation.__name__


def _default_of(field: Field[Any]) -> str:
    if _has_no_default(field):
        return "none, must be given"
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def setting_meanings(kind: type) -> dict[str, str]:
    """Returns the description of each setting, from the `Args` of the class's docstring and of those of its bases.

    Args:
        kind: Class of the method.

    Example:
        >>> list(setting_meanings(methods.load("uniform")))
        ['keep']
    """
    found: dict[str, str] = {}
    for of in reversed(kind.__mro__):
        found |= _args_section(of.__dict__.get("__doc__") or "")
    return found


def _args_section(docstring: str) -> dict[str, str]:
    """Returns the names and descriptions in the `Args` section of a Google-style docstring."""
    _, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def write_pages(arguments: Sequence[str] | None = None) -> None:
    """Writes the pages of the methods of this package and their index into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m thresher.report.cards", description="Write the pages of all methods and their index."
    )
    parser.add_argument("folder", type=Path, help="folder for the pages, such as docs/methods")
    parser.add_argument(
        "--results", type=Path, default=COMPARISONS, help="folder with results.json files to quote (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    if not given.results.is_dir():
        parser.error(
            f"--results {given.results}: no such folder; give the folder that has the results.json files of the comparisons"
        )
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, page in all_pages(given.results).items():
        (given.folder / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_pages()
