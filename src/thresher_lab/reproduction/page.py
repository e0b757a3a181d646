"""Writes the page of all reproduced tables and figures, from the JSON files of `reproduce`."""

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from thresher_lab.reproduction.artefact import VERDICTS, with_interval
from thresher_lab.training.files import markdown_table

SMALL_HEAD = """\
The command `thresher reproduce NAME` makes one table or figure, and `thresher reproduce all` makes all of them and this page.
Small networks and small data stand for those of the papers, at the scale of two CPU cores, and each section names them; a
section "at full size" trains a recipe, with the network, data and epochs that it gives."""
SMALL_END = " A\nclaim that does not reproduce here may still hold at the scale of the paper."
PAGE_HEAD = """# Which results of the papers reproduce

{} Each row of a section has what the paper says, in our words with the place, and a number, measured with each seed,
that should be above a limit. The claim is **reproduced** where the whole 95 % interval of the mean is above the limit, and
**not reproduced** where the whole interval is below it. Otherwise, these seeds **cannot tell**: more of them are needed. A
number of counted passes that is the same with every seed has no interval: such a claim **holds by count** or **fails by
count**, and decides no table. Some rows are conditions of our setup; where one does not hold, the table is **not tested**.{}

The tables say how many optimizer steps each row takes: not all have as many as full training. A method that chooses in the
batch trains either on batches that are **filled up** with the rows kept of several batches, which takes fewer steps, or on
smaller batches **as selected**, which takes as many steps as full training. On small tasks, this alone can be worth more than
the choice of the rows.

"""


PICTURES = "figures"
"""Folder of the pictures, beside the page."""
CLAIM_COLUMNS = ["the paper says", "measured here", "result [95 % interval]", "limit", "verdict"]
CONDITION = "(a condition of our setup)"


def reproduction_page(results: Sequence[Mapping[str, Any]], missing: Sequence[str] = (), charts: Collection[str] = ()) -> str:
    """Returns the page in Markdown: a summary, and one section per table or figure; those not reproduced come first.

    Args:
        results: Results of `reproduce`, one per table or figure; those that are outdated come last and are not counted.
        missing: Names of the tables and figures without a result.
        charts: Names of those with a chart of their tables in the folder `PICTURES`, see `chart_file`.
    """
    waiting, outdated = _waiting(results, missing), [found for found in results if found.get("outdated")]
    results = [found for found in results if not found.get("outdated")]
    ordered = sorted(results, key=lambda found: VERDICTS.index(found["verdict"]))
    rows = [
        [f"[{found['paper']}](#{found['name']})", found["shows"], found["verdict"], _claim_counts(found)] for found in ordered
    ]
    overview = markdown_table(["", "subject", "verdict", "claims"], rows) + "\n"
    own = results[0].get("head") if len(results) == 1 else None
    head = f"{PAGE_HEAD.format(*((own, '') if own else (SMALL_HEAD, SMALL_END)))}{summary_sentence(results)}\n\n{waiting}"
    return f"{head}{_failed_claims(ordered)}{overview}" + "".join(
        f"\n{section(found, with_chart=found['name'] in charts)}" for found in (*ordered, *outdated)
    )


def _waiting(results: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> str:
    """Returns a list of the tables and figures that must be trained, with the reasons; "" where there are none."""
    reasons = [f"- [`{found['name']}`](#{found['name']}): {found['outdated']}" for found in results if found.get("outdated")]
    reasons += [f"- `{name}`: not trained yet." for name in missing]
    listed = "\n".join(sorted(reasons))
    return f"To be trained, or trained anew, with `thresher reproduce NAME`:\n\n{listed}\n\n" if reasons else ""


def summary_sentence(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many tables and figures have which verdict, in one sentence."""
    verdicts = [found["verdict"] for found in results]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    n, yes, no, open_ = len(verdicts), counts["reproduced"], counts["not reproduced"], counts["cannot tell"]
    untested = counts["not tested"]
    text = (
        f"Of {n} tables and figures, {yes} {_verb(yes, 'reproduce')}, {no} {_verb(no, 'do')} not, and {open_} "
        f"{_verb(open_, 'need')} more seeds to decide at least one claim."
    )
    return text if not untested else f"{text} {untested} of the {n} {_verb(untested, 'are')} not tested by our setup."


def _verb(count: int, plural: str) -> str:
    """Returns a verb in the form for a count."""
    return plural if count != 1 else {"do": "does", "are": "is"}.get(plural, f"{plural}s")


def _failed_claims(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of the claims that did not reproduce, with the values that were measured; "" where there are none."""
    rows = [
        [f"[{found['paper']}](#{found['name']})", *_claim_cells(claim)[:-1]]
        for found in results
        for claim in found["claims"]
        if claim["verdict"] == "not reproduced"
    ]
    header = ["", *CLAIM_COLUMNS[:-1]]
    return f"Claims that did not reproduce:\n\n{markdown_table(header, rows)}\n\nAll tables and figures:\n\n" if rows else ""


def section(found: Mapping[str, Any], *, with_chart: bool = False) -> str:
    """Returns the section of one table or figure, above whose tables their chart may be shown."""
    outdated, command = found.get("outdated"), found.get("command") or f"thresher reproduce {found['name']}"
    lines = [
        f'## <a id="{found["name"]}"></a>{found["paper"]}: {"to be trained anew" if outdated else found["verdict"]}\n',
        *([f"Numbers of an earlier version. {outdated}\n"] if outdated else []),
        f"{_capital(found['shows'])}. {found['here']}. Seeds: {len(found['seeds'])}. `{command}`\n",
        markdown_table(CLAIM_COLUMNS, [_claim_cells(claim) for claim in found["claims"]]) + "\n",
        *([f"{found['beside']}\n"] if found.get("beside") else []),
    ]
    if with_chart:
        lines += [f"![{found['shows']}]({PICTURES}/{chart_file(found['name'])})\n"]
    for table in found["tables"]:
        lines += [f"{table['title']}:\n", markdown_table(table["header"], table["rows"]) + "\n"]
    for file, picture in zip(_picture_names(found), found.get("pictures", ()), strict=True):
        lines += [f"{picture['title']}:\n", f"![{picture['title']}]({PICTURES}/{file})\n"]
    return "\n".join(lines)


def chart_file(name: str) -> str:
    """Returns the name of the file with the chart of a table or figure, in the folder `PICTURES`."""
    return f"{name}.svg"


def pictures_of(found: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the PNG files of a table or figure by their names in the folder `PICTURES`.

    Args:
        found: Result of `reproduce`.
    """
    contents = (base64.b64decode(picture["png"]) for picture in found.get("pictures", ()))
    return dict(zip(_picture_names(found), contents, strict=True))


def _picture_names(found: Mapping[str, Any]) -> list[str]:
    return [f"{found['name']}-{number}.png" for number in range(1, 1 + len(found.get("pictures", ())))]


def _claim_cells(claim: Mapping[str, Any]) -> list[str]:
    scale = claim["scale"]
    measured = "-" if claim["mean"] is None else with_interval(claim["mean"], claim["ci95"], scale)
    return [claim.get("says") or CONDITION, claim["claim"], measured, f"{scale * claim['above']:+g}", claim["verdict"]]


def _claim_counts(found: Mapping[str, Any]) -> str:
    verdicts = [claim["verdict"] for claim in found["claims"]]
    ordered = (*reversed(VERDICTS), "holds by count", "fails by count")
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ordered if verdict in verdicts)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
