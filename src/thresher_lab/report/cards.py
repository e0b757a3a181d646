"""The card of a method as a page in Markdown: what it does, its settings, what is missing, and what was measured.

`python -m thresher_lab.report.cards docs/methods` writes the pages of the methods of this package.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from pathlib import Path
from string import Formatter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
import typer

from thresher import methods
from thresher.methods import Card, defines, requirements_of
from thresher.records import Records
from thresher_lab.comparison.summary import difference_text, is_share, rates_sentences
from thresher_lab.training.files import markdown_table

REPRODUCED = "reproduce"
"""Folder of the results of `thresher reproduce`, within that of the comparisons."""
NOT_MEASURED = "Not measured yet."
LEGEND = (
    "Each row gives the mean ± standard deviation over the seeds, the difference to full training (paired by seed, "
    "with its 95 % interval), and the counted cost and the CPU time as shares of full training. Batches are filled up with the "
    "rows that are kept where a method is followed by `twice`. The rows with an @ are controls at the cost of the method above "
    "them: uniform@ (a random subset each epoch), shorter@ (full data for fewer epochs), smaller@ (as many steps, with smaller "
    "batches) and placebo@ (the method with its losses or scores permuted)."
)

Row = dict[str, Any]
Compared = dict[str, Any]
"""A comparison on one task: `source` (name of its file), `task`, `epochs`, `seeds` (their number), `metric`, `device`, `share`
(whether the metric is one, shown in percent), `summary` (its rows), and `rates` as in a results.json."""


def measurements(name: str, folder: Path) -> str:
    """Returns the results of a method in the files of a folder, beside full training and the method's controls.

    Args:
        name: Name of the method.
        folder: Folder with results.json files of comparisons under any name, with files that have `pairs`, or `families` as
            `benchmarks.league` writes them, and with the results of `thresher reproduce` in a subfolder.

    Returns:
        Sections in Markdown; one sentence where there are none.
    """
    sections = []
    shown = set[tuple[Any, ...]]()
    for found in (*compared(folder), *(() if name == "full" else reproduced(folder))):
        rows = method_rows(name, found["summary"])
        key = (found["task"], found["epochs"], found["seeds"])
        if any(
            (*key, row["method"], row["control_of"]) not in shown
            for row in rows
            if name == "full" or row["method"] != "full"
        ):
            sections.append(_section(found, rows))
        shown |= {(*key, row["method"], row["control_of"]) for row in rows}
    sections = [LEGEND, *sections] if sections else []
    sections += [section for read in (_of_pairs, _of_leagues) for section in read(name, folder)]
    return "\n\n".join(sections) or NOT_MEASURED


def _read(folder: Path) -> Iterator[tuple[Path, Any]]:
    for path in sorted(folder.glob("*.json")):
        yield path, _content(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _content(path: Path, _changed: int) -> Any:
    """Returns the content of a file, which the pages of all methods read, as it was at a time."""
    return json.loads(path.read_text(encoding="utf-8"))


def compared(folder: Path) -> Iterator[Compared]:
    """Yields the comparisons of `thresher compare`."""
    for path, found in _read(folder):
        if "summary" in found:
            runs = found["runs"]
            same = {
                name: found.get(name) for name in ("task", "epochs", "device", "summary", "rates")
            }
            seeds = len({run["seed"] for run in runs})
            metric = runs[0]["metric"]["name"]
            yield same | {
                "source": path.name,
                "seeds": seeds,
                "metric": metric,
                "share": is_share(runs),
            }


def reproduced(folder: Path) -> Iterator[Compared]:
    """Yields the parts of the tables and figures of `thresher reproduce`."""
    for path, found in _read(folder / REPRODUCED):
        same = {
            "source": f"{REPRODUCED}/{path.name}",
            "seeds": len(found["seeds"]),
            "device": found["device"],
        }
        for part in found["parts"]:
            share = all(0 <= row["mean"] <= 1 for row in part["summary"] if row["method"] == "full")
            yield (
                same
                | {name: part[name] for name in ("task", "epochs", "metric", "summary")}
                | {"share": share}
            )


def method_rows(name: str, summary: Sequence[Row]) -> list[Row]:
    """Returns the rows of a method with any settings, each followed by its controls; full training comes first.

    Args:
        name: Name of the method.
        summary: Rows of the "summary" in a results.json.

    Example:
        >>> rows = [{"method": name, "control_of": None} for name in ("full", "uniform:keep=0.3", "infobatch")]
        >>> [row["method"] for row in method_rows("uniform", rows)]
        ['full', 'uniform:keep=0.3']
    """
    labels = {
        row["method"]
        for row in summary
        if row["control_of"] is None and labeled_method(row["method"]) == name
    }
    rows = [row for row in summary if (row["control_of"] or row["method"]) in labels]
    full = [row for row in summary if row["method"] == "full" and "full" not in labels]
    return [*full, *rows] if rows else []


def labeled_method(label: str) -> str:
    """Returns the method's name in a label such as `name:setting=value once`."""
    return re.split("[: ]", label)[0]


def _section(found: Compared, rows: Sequence[Row]) -> str:
    seeds = f"{found['seeds']} seed{'s' * (found['seeds'] > 1)}"
    share = found["share"]
    header = (
        "",
        f"{found['metric']}, %" if share else found["metric"],
        "difference to full",
        "cost",
        "CPU time",
        "verdict",
    )
    table = markdown_table(header, [result_cells(row, share=share) for row in rows])
    rates = rates_sentences({"rates": found.get("rates"), "summary": rows})
    said = " ".join([f"From `{found['source']}`.", *rates])
    return f"### `{found['task']}`, {found['epochs']} epochs, {seeds}, {found['device']}\n\n{said}\n\n{table}"


def result_cells(row: Row, *, share: bool) -> tuple[str, ...]:
    """Returns the cells of a row of a summary: name, metric, difference to full training, cost, CPU time and verdict.

    Args:
        row: Row of the "summary" in a results.json.
        share: Whether the metric is a share, which is shown in percent.
    """
    scale, digits = (100, 2) if share else (1, 4)
    spread = "" if row["std"] is None else f" ± {scale * row['std']:.{digits}f}"
    difference = difference_text(row, lambda value: f"{scale * value:+.{digits}f}")
    cpu = "" if row.get("cpu_ratio") is None else f"{row['cpu_ratio']:.2f}"
    name = f"`{row['method']}`" if row["control_of"] is None else row["method"]
    mean = f"{scale * row['mean']:.{digits}f}{spread}"
    cost = f"{row['cost_ratio']:.3f}"
    return name, mean, difference, cost, cpu, row["verdict"]


def _of_pairs(name: str, folder: Path) -> Iterator[str]:
    """Yields the tables of methods that were compared in pairs, with as many optimizer steps."""
    for path, found in _read(folder):
        pairs = [
            pair
            for pair in found.get("pairs", ())
            if name in (labeled_method(pair["method"]), labeled_method(pair["other"]))
        ]
        if pairs:
            header = (
                "task",
                "method",
                "metric",
                "beside",
                "metric",
                "difference",
                "steps",
                "seeds",
            )
            table = markdown_table(header, [_pair_cells(pair) for pair in pairs])
            yield f"### In pairs with as many optimizer steps\n\nFrom `{path.name}`; metrics in hundredths.\n\n{table}"


def _pair_cells(pair: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = pair["ci95"]
    return (
        f"`{pair['task']}`",
        f"`{pair['method']}`",
        f"{pair['mean']:.2f}",
        f"`{pair['other']}`",
        f"{pair['other_mean']:.2f}",
        f"{pair['difference']:+.2f} [{low:+.2f}, {high:+.2f}]",
        str(pair["steps"]),
        str(pair["seeds"]),
    )


def _of_leagues(name: str, folder: Path) -> Iterator[str]:
    """Yields the tables of methods that were compared one a family, each with the best learning rate of a grid."""
    for path, found in _read(folder):
        rows = [
            row for row in found.get("rows", ()) if "families" in found and row["method"] == name
        ]
        if rows:
            columns = ("to fewer epochs, same time", "to smaller batches", "to its placebo")
            header = ("task", "metric, hundredths", "full", "to full", *columns, "cost", "seeds")
            table = markdown_table(header, [_league_cells(row) for row in rows])
            title = f"### One method a family, `{found['settings'][name]}`"
            source = f"From `{path.name}`; verdicts are corrected over all methods and tasks."
            yield f"{title}\n\n{found['sentences'][name]} {source}\n\n{table}"


def _league_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    against = [
        row["to_full"] | {"finding": row["finding"]},
        *(row["against"].get(kind) for kind in ("shorter@time", "smaller", "placebo")),
    ]
    between = ["" if one is None else _with_finding(one) for one in against]
    return (
        f"`{row['task']}`",
        f"{row['metric']:.2f}",
        f"{row['full']:.2f}",
        *between,
        f"{row['cost']:.3f}",
        str(row["to_full"]["n"]),
    )


def _with_finding(one: Mapping[str, Any]) -> str:
    said = "cannot tell" if one["finding"] == "unclear" else one["finding"]
    return f"{one['mean']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}], {said}"


COMPARISONS = Path("benchmarks/results")
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
        results: Folder with results, see `measurements`; the page then ends with those of the method. Default None:
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
        *(
            f"## {title}\n\n" + "\n".join(f"- {entry}" for entry in entries)
            for title, entries in listed.items()
            if entries
        ),
        *([f"## Caveat\n\n{_as_sentence(card.caveat)}"] if card.caveat else []),
        *([] if results is None else [f"## What it reached here\n\n{measurements(name, results)}"]),
    ]
    return "\n\n".join(parts) + "\n"


def all_pages(results: Path) -> dict[str, str]:
    """Returns the pages of the methods of this package, by the names of their files.

    Args:
        results: Folder with results.json files of comparisons, see `card_page`.

    Example:
        >>> sorted(all_pages(Path("no-such-folder")))[:2]
        ['ada_boost.md', 'ada_selection.md']
    """
    return {f"{name}.md": card_page(name, results) for name in documented_methods()}


def documented_methods() -> list[str]:
    """Returns the names of the methods of this package."""
    return sorted(methods.BUILT_IN | methods.FOR_POSITIONS)


def _card_of(name: str, kind: type) -> Card:
    card = getattr(kind, "card", None)
    if not isinstance(card, Card):
        raise ValueError(
            f"{name} has no card: give {kind.__qualname__} a class attribute `card`, a thresher.methods.contract.Card"
        )
    return card


def _import_path(kind: type) -> str:
    ours = kind.__module__.startswith("thresher.methods.")
    return f"{'thresher' if ours else kind.__module__}.{kind.__qualname__}"


def _fact_lines(kind: Any, card: Card) -> dict[str, str]:
    facts = {
        "Paper": paper_link(card.paper),
        "Decides": STAGE_TITLES[kind.stage],
        "Signals": _as_code(signals_of(kind)) or "none",
        "Remembers of each sample": f"{card.bytes_per_sample:g} bytes"
        if card.bytes_per_sample
        else "nothing",
        "Extra forward passes": card.forwards,
        "Biased": card.biased,
        "Published": card.claim,
        "Skips a sample": "".join(
            said + (f"`{field}`" if field else "")
            for said, field, _, _ in Formatter().parse(card.rule)
        ),
    }
    return {title: _as_sentence(fact) for title, fact in facts.items() if fact}


def _as_sentence(said: str) -> str:
    """Returns a text with a capital letter and a full stop."""
    return said[:1].upper() + said[1:] + "." * (not said.endswith("."))


def paper_link(paper: str) -> str:
    """Returns the text about a publication, with a link for its number at arXiv."""
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
    passes = range(EXAMPLE_EPOCHS) if defines(method, "full_pass") else ()
    return *recorded, *dict.fromkeys(
        name for epoch in passes for name in method.full_pass(epoch, EXAMPLE_EPOCHS)
    )


def _has_no_default(field: Field[Any]) -> bool:
    return field.init and field.default is MISSING and field.default_factory is MISSING


def _settings(kind: Any, *, as_lists: bool) -> str:
    meanings = setting_meanings(kind)
    settings = [field for field in fields(kind) if field.init]
    unknown = [field.name for field in settings if field.name not in meanings]
    if unknown:
        raise ValueError(
            f"{kind.__qualname__}: the Args section of its docstring does not explain {', '.join(unknown)}"
        )
    if not settings:
        return "None."
    rows = [
        (f"`{field.name}`", _type_of(field.type), _default_of(field), meanings[field.name])
        for field in settings
    ]
    if as_lists:
        return "\n".join(
            f"- {name} ({of}; default: {default}): {meaning}" for name, of, default, meaning in rows
        )
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
        ['keep', 'fixed']
    """
    meanings: dict[str, str] = {}
    for of in reversed(kind.__mro__):
        meanings |= _args_section(of.__dict__.get("__doc__") or "")
    return meanings


def _args_section(docstring: str) -> dict[str, str]:
    """Returns the names and descriptions in the `Args` section of a Google-style docstring."""
    _, _, section = inspect.cleandoc(docstring).partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def write_pages(
    folder: Annotated[Path, typer.Argument(help="Folder for the pages, such as docs/methods.")],
    results: Annotated[
        Path,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with results.json files of comparisons to quote.",
        ),
    ] = COMPARISONS,
) -> None:
    """Writes the pages of the methods of this package into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in all_pages(results).items():
        (folder / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(write_pages)
