"""Writes the pages of the papers from the JSON files of `reproduce`: an index, and two pages per paper.

The first page of a paper has a row per sentence of the paper and at most 1,500 words; the second has all claims, tables and
figures.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from thresher_lab.comparison.statistics import SEED_COUNTS
from thresher_lab.reproduction import ANSWERS, MINOR, PAPER_SETTINGS, STAND_INS, UNJUDGED
from thresher_lab.reproduction.artefact import FIVE_SEEDS, LEAST_RATIO, Artefact, with_interval
from thresher_lab.training.files import markdown_table

INDEX_HEAD = """# Which results of the papers reproduce

`thresher reproduce NAME` makes one table or figure, and `thresher reproduce all` makes all of them and these pages. Small
networks and small data stand for those of the papers, at the scale of two CPU cores; "at full size" is a recipe with the
network, data and epochs of the paper, "our recipe" one whose paper does not give them. A claim that does not reproduce here
may still hold at the scale of the paper."""
INDEX_COLUMNS = ["paper", "does it hold?", "tables and figures", "main sentences", "side sentences"]
RULES = f"""Each claim is a number, measured with each seed, that should be above a limit; points are hundredths of the metric. It is
**reproduced** if the whole 95 % interval of the mean is above the limit, and **not reproduced** if all of it is below.
Otherwise these seeds **cannot tell**; the number of seeds that it needs would decide in four of five repetitions, if mean and
spread are as measured. A count of passes that is the same with every seed **holds by count** or **fails by count**, and decides
no table. A claim is **not tested** if a condition of our setup does not hold. Claims about time are judged by CPU time, unless they
name a count. Selection saves backward passes: where one costs less than {LEAST_RATIO} forward passes, a claim about time that fails is
not tested, and one that holds counts. A table has the worst verdict of its claims that are tested. A sentence of a paper counts
once however often it is tested, with the worst verdict of those set-ups that test it."""
TABLES_NOTE = """The tables say how many optimizer steps each row takes: not all have as many as full training. A method that
chooses in the batch trains either on batches that are **filled up** with the rows kept of several batches, in fewer steps, or
on smaller batches **as selected**, in as many steps. On small tasks, this can be worth more than the choice of the rows."""
PICTURES = "figures"
"""Folder of the pictures, beside the pages."""
CLAIM_COLUMNS = ["the paper says", "measured here", "result [95 % interval]", "limit", "verdict"]
SETTINGS_COLUMNS = ["setting", "paper", "authors' code", "here", "source"]
CONDITION = "(a condition of our setup)"
NO_CLAIM = "The claims of the paper compare several tasks. On one task, none is judged."
FROM_WORST = (
    "not reproduced",
    "fails by count",
    "cannot tell",
    "not tested",
    "holds by count",
    "reproduced",
)
Judged = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A table or figure and one of its claims."""


def reason_to_train(found: Mapping[str, Any], artefact: Artefact) -> str:
    """Returns why a result must be trained anew; "" if it is up to date.

    Args:
        found: Content of the result's file.
        artefact: The table or figure as it is declared now.
    """
    seeds = len(found["seeds"])
    texts = {claim["claim"] for claim in found["claims"]}
    changed = "@" not in found["name"] and texts != {claim.text for claim in artefact.claims}
    few = f"{seeds} of {len(FIVE_SEEDS)} seeds." if seeds < len(FIVE_SEEDS) else ""
    return " ".join(
        filter(None, (found.get("outdated"), few, "Its claims have changed." if changed else ""))
    )


def index_page(results: Sequence[Mapping[str, Any]], anew: Mapping[str, str]) -> str:
    """Returns the page that lists the papers, how claims are judged, and what is to be trained.

    Args:
        results: PartResults of `reproduce`, one per table or figure.
        anew: Reasons why tables and figures must be trained, by name, see `reason_to_train`.
    """
    papers = [
        [
            f"[{paper}]({_stem(paper)}.md)",
            ANSWERS.get(paper, ""),
            _counts(one["verdict"] for one in of),
            *map(_count_sentences, _main_and_side(of)),
        ]
        for paper, of in _by_paper(results).items()
    ]
    waiting = "\n".join(f"- `{name}`: {reason}" for name, reason in sorted(anew.items()))
    parts = [
        INDEX_HEAD,
        markdown_table(INDEX_COLUMNS, papers),
        f'## <a id="verdicts"></a>How claims are judged\n\n{RULES}',
        *(
            [
                f'## <a id="anew"></a>To be trained anew\n\nWith `thresher reproduce NAME`:\n\n{waiting}'
            ]
            if waiting
            else []
        ),
    ]
    return "\n\n".join(parts) + "\n"


def paper_pages(
    results: Sequence[Mapping[str, Any]],
    anew: Mapping[str, str],
    charts: Collection[str],
    index: str,
) -> dict[str, str]:
    """Returns the pages of the papers by the names of their files, which stand beside the index: two of each.

    Args:
        results: PartResults of `reproduce`, one per table or figure.
        anew: Reasons why tables and figures must be trained, by name.
        charts: Names of those with a chart of their tables in the folder `PICTURES`, see `chart_file`.
        index: Name of the file of the index.
    """
    pages: dict[str, str] = {}
    for paper, of in _by_paper(results).items():
        stem = _stem(paper)
        head = f"# {paper}: all tables and figures\n\nIn short: [{stem}.md]({stem}.md). Verdicts: [{index}]({index}#verdicts)."
        sections = [section(one, with_chart=one["name"] in charts) for one in of]
        pages |= {
            f"{stem}.md": _answers(paper, of, anew, index),
            f"{stem}-tables.md": "\n".join(
                [head, "", TABLES_NOTE, "", _settings(paper), *sections]
            ),
        }
    return pages


def _settings(paper: str) -> str:
    """Returns the section with the settings of a paper, of its authors' code, and here; "" if none are declared."""
    if paper not in PAPER_SETTINGS:
        return ""
    sources, rows = PAPER_SETTINGS[paper]
    return f'## <a id="settings"></a>Settings\n\n{sources}\n\n{markdown_table(SETTINGS_COLUMNS, rows)}\n'


def _answers(
    paper: str, results: Sequence[Mapping[str, Any]], anew: Mapping[str, str], index: str
) -> str:
    """Returns the short page of a paper: whether it holds, and a row per sentence."""
    main, side = _main_and_side(results)
    waiting = ", ".join(f"`{one['name']}`" for one in results if one["name"] in anew)
    parts = [
        f"# {paper}: does it hold?",
        ANSWERS.get(paper, ""),
        f"Main sentences: {_count_sentences(main)}. Side sentences: {_count_sentences(side)}.",
        *(f"**{one['remark']}**" for one in results if one.get("remark")),
        f"Trained here: {STAND_INS.get(paper, '')}. [How claims are judged]({index}#verdicts). "
        "Seeds: 5 unless given."
        + (f" To be trained anew ([why]({index}#anew)): {waiting}." if waiting else ""),
    ]
    for title, groups in (("main", main), ("side", side)):
        rows = [
            [_said(group), _cell(group, _measured), _cell(group, _with_reasons)] for group in groups
        ]
        if rows:
            parts.append(
                markdown_table([f"{title} sentence of the paper", "measured here", "verdict"], rows)
            )
    if unjudged := UNJUDGED.get(paper):
        parts.append(f"Not judged: {unjudged}")
    return "\n\n".join(parts) + "\n"


Sentence = Sequence[Judged]
"""The claims about one sentence of a paper, from the worst verdict."""


def _main_and_side(results: Sequence[Mapping[str, Any]]) -> tuple[list[Sentence], list[Sentence]]:
    """Returns the main sentences of a paper and the others."""
    sentences: dict[str, list[Judged]] = {}
    for found in results:
        for claim in found["claims"]:
            if claim["says"]:
                sentences.setdefault(claim["says"], []).append((found, claim))
    groups: list[Sentence] = [sorted(group, key=_from_worst) for group in sentences.values()]
    main = [group for group in groups if not group[0][0]["name"].startswith(MINOR)]
    return main, [group for group in groups if group not in main]


def _count_sentences(groups: Sequence[Sentence]) -> str:
    """Returns how many sentences there are, and how many of each verdict, the worst of a set-up that tests them."""
    worst = (min((claim["verdict"] for _, claim in one), key=_severity) for one in groups)
    return f"{len(groups)} ({_counts(worst)})" if groups else "none"


def _severity(verdict: str) -> tuple[bool, int]:
    """Returns the key of a verdict within a sentence: setups that do not test a claim are ignored if another does."""
    return verdict == "not tested", FROM_WORST.index(verdict)


def _from_worst(judged: Judged) -> tuple[bool, tuple[bool, int], float]:
    found, claim = judged
    distance = claim["scale"] * ((claim["mean"] or 0) - claim["above"])
    return "@" in found["name"], _severity(claim["verdict"]), distance


def _said(group: Sentence) -> str:
    """Returns what the paper says, with a link from the place to the table."""
    place, _, said = group[0][1]["says"].partition(": ")
    return f"[{place}]({_place(group[0][0])}): {said}"


def _cell(group: Sentence, words: Callable[[Sentence], str]) -> str:
    """Returns the words on the results of the stand-in, and on those with a recipe or on another task."""
    places: dict[str, list[Judged]] = {}
    for judged in group:
        places.setdefault(_trained_on(judged[0]), []).append(judged)
    claims = {claim["claim"].rpartition(": ")[2] for _, claim in group}
    limit = _limit(group[0][1])
    pieces: list[str] = []
    for place, some in places.items():
        said = words(some)
        # If the sentence has one claim, its words and its limit are those of the first piece.
        if pieces and len(claims) == 1:
            said = said.removeprefix(f"{min(claims)}: ").replace(f", limit {limit}", "")
        pieces.append(f"{place}{said}")
    return "; ".join(pieces)


def _trained_on(found: Mapping[str, Any]) -> str:
    """Returns where a result was trained, as the beginning of a sentence; "" for the stand-in."""
    _, at, name = found["name"].partition("@")
    if not at:
        return ""
    if found["parts"][0]["task"] == name:
        return f"on `{name}` "
    if "at full size" in found["paper"]:
        return "at full size "
    return "with our recipe "


def _counted(group: Sentence) -> str:
    return _counts(claim["verdict"] for _, claim in group)


def _measured(group: Sentence) -> str:
    """Returns the worst result with its limit, the best, and the number of seeds if it is not five.

    If set-ups test the sentence, only those are shown.
    """
    group = [one for one in group if one[1]["verdict"] != "not tested"] or group
    found, worst = group[0]
    if len(group) > 1:
        best = f"; best of {len(group)}: {_figure({**group[-1][1], 'ci95': None, 'unit': ''})}"
    else:
        best = ""
    number = len(found["seeds"])
    seeds = f"; {number} seed{'s' * (number > 1)}" if number != len(FIVE_SEEDS) else ""
    return f"{worst['claim']}: {_figure(worst)}, limit {_limit(worst)}{best}{seeds}"


def _with_reasons(group: Sentence) -> str:
    """Returns the verdicts, the conditions of the claims, and how many seeds would decide those that are open."""
    notes = "; ".join(filter(None, (claim.get("note") for _, claim in group)))
    reasons = filter(None, dict.fromkeys(notes.split("; ")))
    still_open = [
        claim for _, claim in group if claim["verdict"] == "cannot tell" and claim["ci95"]
    ]
    needed = max((one.get("seeds_needed") or math.inf for one in still_open), default=0)
    most = f"{needed}" if needed in SEED_COUNTS else f"over {SEED_COUNTS[-1]:,}"
    parts = [_counted(group), *reasons, *([f"needs {most} seeds"] if needed else [])]
    return "; ".join(parts).replace(" forward passes; backward pass: ", ", ")


def single_page(found: Mapping[str, Any], *, with_chart: bool = False) -> str:
    """Returns a page about one table or figure alone, above whose tables their chart may be shown."""
    own = section(found, with_chart=with_chart)
    return f"# {found['paper']}\n\n{RULES}\n\n{TABLES_NOTE}\n\n{own}"


def section(found: Mapping[str, Any], *, with_chart: bool = False) -> str:
    """Returns the section of one table or figure, above whose tables their chart may be shown."""
    command = found.get("command") or f"thresher reproduce {found['name']}"
    cells = [_claim_cells(claim) for claim in found["claims"]]
    lines = [
        f'## <a id="{found["name"]}"></a>{found["paper"]}: {found["verdict"]}\n',
        f"{found['shows'][0].upper()}{found['shows'][1:]}. {found['here']}. Seeds: {len(found['seeds'])}. `{command}`\n",
        (markdown_table(CLAIM_COLUMNS, cells) if cells else NO_CLAIM) + "\n",
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
    return [
        f"{found['name']}-{number}.png" for number in range(1, 1 + len(found.get("pictures", ())))
    ]


def _by_paper(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the results by the paper that they are of: the words before the place in it."""
    papers: dict[str, list[Mapping[str, Any]]] = {}
    for one in results:
        papers.setdefault(one["paper"].partition(", ")[0], []).append(one)
    return papers


def _stem(paper: str) -> str:
    """Returns the name of the file of a paper without its suffix, such as selective-backprop."""
    return paper.partition(", ")[0].partition(" (")[0].lower().replace(" ", "-")


def _place(found: Mapping[str, Any]) -> str:
    """Returns where the section of a table or figure is."""
    return f"{_stem(found['paper'])}-tables.md#{found['name']}"


def _claim_cells(claim: Mapping[str, Any]) -> list[str]:
    verdict = "; ".join(filter(None, (claim["verdict"], claim.get("note"))))
    return [
        claim.get("says") or CONDITION,
        claim["claim"],
        _figure(claim),
        _limit(claim),
        verdict,
    ]


def _figure(claim: Mapping[str, Any]) -> str:
    if claim["mean"] is None:
        return "-"
    figure = with_interval(claim["mean"], claim["ci95"], claim["scale"])
    return f"{figure} {claim.get('unit', '')}".rstrip()


def _limit(claim: Mapping[str, Any]) -> str:
    return f"{claim['scale'] * claim['above']:+g}"


def _counts(verdicts: Iterable[str]) -> str:
    """Returns how often each verdict comes, the best first; the verdict alone if there is one."""
    counts = Counter(verdicts)
    if counts.total() == 1:
        return next(iter(counts))
    return ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in reversed(FROM_WORST) if counts[verdict]
    )
