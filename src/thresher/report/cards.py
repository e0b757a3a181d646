"""A method's card as Markdown: what it does, what can be set, what of its paper is not there, and what it reached here.

`python -m thresher.report.cards docs/methods` writes those of this package, with an index.
"""

import argparse
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from string import Formatter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch

from thresher import methods
from thresher.methods.card import Card
from thresher.methods.contract import requirements_of
from thresher.records import Records

RESULTS = Path("benchmarks/results")
INDEX = "README.md"
BY_HAND = "not-implemented.md"
STAGES = {"before": "before training", "epoch": "before each epoch", "batch": "in each batch"}
MADE_UP = 20
"""Epochs of the training that a method is asked about."""

Row = dict[str, Any]


def text(name: str, results: Path | None = None) -> str:
    """The card of a registered method.

    Args:
        name: Of the method.
        results: Folder with results.json files of comparisons, under any name; what the method reached in them is shown.

    Raises:
        ValueError: No such method, or its class has no card, or does not say what a setting means.
    """
    kind, info = methods.load(name), methods.infos()[name]
    card = _card(name, kind)
    listed = {"Differences to the official code": card.differences, "What is missing": card.missing}
    parts = [
        f"# {name}",
        f"`{_home(kind)}`: {info.summary}.",
        "\n".join(f"- **{title}:** {fact}" for title, fact in _facts(kind, info, card).items()),
        f"## Settings\n\n{_settings(kind)}",
        *(f"## {title}\n\n" + "\n".join(f"- {entry}" for entry in entries) for title, entries in listed.items() if entries),
        *([f"## Caveat\n\n{_sentence(card.caveat)}"] if card.caveat else []),
        *([] if results is None else [f"## What it reached here\n\n{_measured(name, results)}"]),
    ]
    return "\n\n".join(parts) + "\n"


def pages(results: Path) -> dict[str, str]:
    """The cards of this package's methods and their index, by the names of their files."""
    cards = {f"{name}.md": text(name, results) for name in sorted(methods.BUILT_IN)}
    return {INDEX: index(), **cards}


def index() -> str:
    """The methods of this package, a table a stage."""
    parts = [
        "# The methods",
        "One page each: settings, differences to the official code, what is missing, and what was measured here beside random "
        "samples and fewer epochs of the same cost. `thresher methods NAME` prints the same without the measurements. "
        f"What the papers describe and this package does not have: [{BY_HAND}]({BY_HAND}).",
    ]
    for stage, title in STAGES.items():
        rows = [_entry(name, info) for name, info in sorted(methods.BUILT_IN.items()) if info.stage == stage]
        header = ("method", "what it does", "paper", "signals", "bytes a sample")
        parts.append(f"## {title.capitalize()}\n\n{table(header, rows)}")
    return "\n\n".join(parts) + "\n"


def _entry(name: str, info: methods.MethodInfo) -> tuple[str, ...]:
    kind = methods.load(name)
    size = f"{_card(name, kind).bytes_per_sample:g}"
    return f"[{name}]({name}.md)", info.summary, _paper(info.paper), _code(signals(kind)), size


def _card(name: str, kind: type) -> Card:
    card = getattr(kind, "card", None)
    if not isinstance(card, Card):
        raise ValueError(f"{name} has no card: give {kind.__qualname__} a class attribute `card`, a thresher.methods.card.Card")
    return card


def _home(kind: type) -> str:
    own = kind.__module__.startswith("thresher.methods.")
    return f"{'thresher' if own else kind.__module__}.{kind.__qualname__}"


def _facts(kind: Any, info: methods.MethodInfo, card: Card) -> dict[str, str]:
    found = {
        "Paper": _paper(info.paper),
        "Decides": STAGES[kind.stage],
        "Signals": _code(signals(kind)) or "none",
        "Remembers of each sample": f"{card.bytes_per_sample:g} bytes" if card.bytes_per_sample else "nothing",
        "Extra forward passes": card.forwards,
        "Biased": card.biased,
        "Published": card.claim,
        "Skips a sample": "".join(said + (f"`{field}`" if field else "") for said, field, _, _ in Formatter().parse(info.rule)),
    }
    return {title: _sentence(fact) for title, fact in found.items() if fact}


def _sentence(said: str) -> str:
    """With a capital letter and a full stop."""
    return said[:1].upper() + said[1:] + "." * (not said.endswith("."))


def _paper(paper: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def signals(kind: Any) -> tuple[str, ...]:
    """What a method must be told of each sample, by its default settings."""
    method = kind if any(map(_required, fields(kind))) else kind()
    if method is kind or kind.stage != "epoch":
        return tuple(requirements_of(method).signals)
    recorded = sorted(Records(method.columns(), 0, torch.device("cpu")).signals)
    passes = range(MADE_UP) if requirements_of(method).full_pass else ()
    return *recorded, *dict.fromkeys(name for epoch in passes for name in method.full_pass(epoch, MADE_UP))


def _required(field: Field[Any]) -> bool:
    return field.init and field.default is MISSING and field.default_factory is MISSING


def _settings(kind: Any) -> str:
    meanings = described(kind)
    settings = [field for field in fields(kind) if field.init]
    unknown = [field.name for field in settings if field.name not in meanings]
    if unknown:
        raise ValueError(f"{kind.__qualname__}: the Args of its docstring do not say what {', '.join(unknown)} means")
    if not settings:
        return "None."
    rows = [(f"`{field.name}`", _type(field.type), _default(field), meanings[field.name]) for field in settings]
    return table(("setting", "type", "default", "meaning"), rows)


def _type(annotation: Any) -> str:
    of = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in of)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_type, of))
    if of or isinstance(annotation, str):
        return str(annotation).replace("collections.abc.", "")
    return "None" if annotation is NoneType else annotation.__name__


def _default(field: Field[Any]) -> str:
    if _required(field):
        return "none, must be given"
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def described(kind: type) -> dict[str, str]:
    """The meaning of each setting, from the Args of a class's docstring and of those that it inherits from."""
    found: dict[str, str] = {}
    for of in reversed(kind.__mro__):
        found |= _arguments(of.__dict__.get("__doc__") or "")
    return found


def _arguments(docstring: str) -> dict[str, str]:
    """Names and descriptions in the Args section of a Google docstring."""
    _, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _measured(name: str, folder: Path) -> str:
    """Tables of the comparisons in a folder that have a method, with full training and the method's controls."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    held = [(path, results, of_method(name, results["summary"])) for path, results in found if "summary" in results]
    tables = [_comparison(path, results, rows) for path, results, rows in held if rows]
    if not tables:
        return "Not measured yet."
    return "\n\n".join(
        [
            "Mean ± standard deviation over the seeds; difference to full training, paired by seed, with its 95 % interval; "
            "cost as counted and CPU time as shares of full training. At the cost of the method above them: uniform@, a random "
            "subset each epoch; shorter@, full data for fewer epochs.",
            *tables,
        ]
    )


def of_method(name: str, summary: Sequence[Row]) -> list[Row]:
    """The rows of a method, whatever its settings, each with its controls after it; full training before all others."""
    labels = {row["method"] for row in summary if row["control_of"] is None and _name(row["method"]) == name}
    rows = [row for row in summary if (row["control_of"] or row["method"]) in labels]
    full = [row for row in summary if row["method"] == "full" and "full" not in labels]
    return [*full, *rows] if rows else []


def _name(label: str) -> str:
    """The name in `name:setting=value once`."""
    return re.split("[: ]", label)[0]


def _comparison(path: Path, results: dict[str, Any], rows: Sequence[Row]) -> str:
    metric = results["runs"][0]["metric"]["name"]
    seeds = len({run["seed"] for run in results["runs"]})
    share = all(0 <= run["metric"]["value"] <= 1 for run in results["runs"] if run["method"] == "full")
    title = f"`{results['task']}`, {results['epochs']} epochs, {seeds} seed{'s' * (seeds > 1)}, {results['device']}"
    header = ("", f"{metric}, %" if share else metric, "difference to full", "cost", "CPU time", "verdict")
    return f"### {title}\n\nFrom `{path.name}`.\n\n{table(header, [_cells(row, share=share) for row in rows])}"


def _cells(row: Row, *, share: bool) -> tuple[str, ...]:
    scale, digits = (100, 2) if share else (1, 4)
    spread = "" if row["std"] is None else f" ± {scale * row['std']:.{digits}f}"
    difference = "" if row["difference"] is None else f"{scale * row['difference']:+.{digits}f}"
    between = "" if row["ci95"] is None else " [{}, {}]".format(*(f"{scale * bound:+.{digits}f}" for bound in row["ci95"]))
    cpu = "" if row.get("cpu_ratio") is None else f"{row['cpu_ratio']:.2f}"
    name = f"`{row['method']}`" if row["control_of"] is None else row["method"]
    mean, cost = f"{scale * row['mean']:.{digits}f}{spread}", f"{row['cost_ratio']:.3f}"
    return name, mean, f"{difference}{between}", cost, cpu, row["verdict"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the cards of this package and their index into a folder."""
    parser = argparse.ArgumentParser(prog="python -m thresher.report.cards", description="Write the cards of all methods.")
    parser.add_argument("folder", type=Path, help="where they go, such as docs/methods")
    parser.add_argument("--results", type=Path, default=RESULTS, help="comparisons to quote (default: %(default)s)")
    given = parser.parse_args(arguments)
    if not given.results.is_dir():
        parser.error(f"--results {given.results}: no such folder")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, page in pages(given.results).items():
        (given.folder / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
