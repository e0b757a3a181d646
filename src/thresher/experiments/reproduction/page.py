"""The page of all that was reproduced, from the JSON files of `reproduce`."""

from collections.abc import Mapping, Sequence
from typing import Any

from thresher.experiments.reproduction.artefact import VERDICTS, with_interval

HEAD = """# What of the papers reproduces

One command makes each table and figure: `thresher reproduce NAME`, and `thresher reproduce all` this page. Everything is at
the scale of two CPU cores: small networks and small data stand for the papers', and each section says which. A claim of a
paper is a number of each seed that should be above a limit. It is **reproduced** where the whole 95 % interval of its mean
is above, **not reproduced** where all of it is below, and otherwise these seeds **cannot tell**. That a claim does not
reproduce here does not show that it is wrong at the paper's scale.

"""


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: an overview and a section each, what did not reproduce first."""
    ordered = sorted(results, key=lambda found: VERDICTS.index(found["verdict"]))
    rows = [[f"[{found['paper']}](#{found['name']})", found["shows"], found["verdict"], _counts(found)] for found in ordered]
    overview = table(["", "what it shows", "verdict", "claims"], rows)
    return HEAD + _failed(ordered) + overview + "".join(f"\n{section(found)}" for found in ordered)


def _failed(results: Sequence[Mapping[str, Any]]) -> str:
    """The claims that did not reproduce, with what was seen instead."""
    rows = [
        [f"[{found['paper']}](#{found['name']})", *_claim(claim)[:-1]]
        for found in results
        for claim in found["claims"]
        if claim["verdict"] == "not reproduced"
    ]
    return f"Not reproduced:\n\n{table(['', 'claim', 'seen [95 % interval]', 'limit'], rows)}\nAll:\n\n" if rows else ""


def section(found: Mapping[str, Any]) -> str:
    """One table or figure."""
    lines = [
        f'## <a id="{found["name"]}"></a>{found["paper"]}: {found["verdict"]}\n',
        f"{_capital(found['shows'])}. {found['here']}. Seeds: {len(found['seeds'])}. `thresher reproduce {found['name']}`\n",
        table(["claim", "seen [95 % interval]", "limit", "verdict"], [_claim(claim) for claim in found["claims"]]),
    ]
    for part in found["tables"]:
        lines += [f"{part['title']}:\n", table(part["header"], part["rows"])]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.strip() for cell in line) + " |\n" for line in lines)


def _claim(claim: Mapping[str, Any]) -> list[str]:
    scale = claim["scale"]
    seen = "-" if claim["mean"] is None else with_interval(claim["mean"], claim["ci95"], scale)
    return [claim["claim"], seen, f"{scale * claim['above']:+g}", claim["verdict"]]


def _counts(found: Mapping[str, Any]) -> str:
    said = [claim["verdict"] for claim in found["claims"]]
    return ", ".join(f"{said.count(verdict)} {verdict}" for verdict in reversed(VERDICTS) if verdict in said)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
