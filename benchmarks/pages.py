"""Writes what docs/evidence/results.md quotes from the committed comparisons, so that they never disagree.

`python -m benchmarks.pages` writes the page anew, from the results of `make fashion` and `make mnist-5k`, and
those of nine further methods. In the overview, those that fell short come first.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.marks import between_marks
from thresher_lab.advise.budget import in_fewer_steps
from thresher_lab.comparison.summary import is_share, left_out_sentence, listed, rates_sentences
from thresher_lab.report.cards import result_cells
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "evidence" / "results.md"

COMPARED = {
    "demo-mnist-5k": "small CNN on MNIST",
    "fashion-cnn": "small CNN on Fashion-MNIST",
    "fashion-resnet8": "ResNet-8 on Fashion-MNIST",
}
"""Comparisons that are quoted, by the name of their file, each with what it is measured on."""

NAMES = {
    "kakurenbo": "KAKURENBO",
    "infobatch": "InfoBatch",
    "selective_backprop:keep=0.33 once": "Selective-Backprop, one forward pass",
    "selective_backprop:keep=0.33 twice": "Selective-Backprop, two forward passes",
}
"""Published methods of the overview. Random rows of each batch, which are compared too, are no method of a paper."""

FURTHER = "further-methods"
"""Comparison of methods that have a table of their own and are not in the overview."""

OVERVIEW = "<!-- overview of benchmarks.pages -->", "<!-- end of the overview -->"
"""Marks of the overview."""

FINDINGS = ("loses", "unclear", "no loss")
"""Findings against full training, the worst first."""

Results = Mapping[str, Any]
"""Content of a results.json."""


@dataclass(frozen=True)
class Entry:
    """One published method in one comparison.

    Args:
        on: Network and dataset that the method was measured on.
        row: Row of the method in the summary.
    """

    on: str
    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the method in words."""
        return NAMES[self.row["method"]]


def entries(found: Mapping[str, Results]) -> list[Entry]:
    """Returns the published methods of all comparisons, those that fell short first.

    Args:
        found: Contents of the results by the name of the file, as in `COMPARED`.
    """
    made = [
        Entry(on, row)
        for file, on in COMPARED.items()
        for row in found[file]["summary"]
        if row["method"] in NAMES
    ]
    return sorted(made, key=lambda one: (FINDINGS.index(one.row["finding"]), one.row["difference"]))


def overview_table(found: Mapping[str, Results]) -> str:
    """Returns the table of the published methods, those that fell short first."""
    header = ("method", "measured on", "difference to full", "at the cost of", "verdict")
    rows = []
    for one in entries(found):
        _, _, difference, cost, _, verdict = result_cells(dict(one.row), share=True)
        rows.append((one.name, one.on, difference, cost, verdict))
    return markdown_table(header, rows)


def comparison_part(results: Results) -> str:
    """Returns the settings of a comparison in a sentence, its whole table, and what was left out.

    Args:
        results: Content of a results.json.
    """
    seeds = sorted({run["seed"] for run in results["runs"]})
    ratio = results["runs"][0]["cost"]["backward_to_forward"]
    metric, share = results["runs"][0]["metric"]["name"], is_share(results["runs"])
    sentence = (
        f"`{results['task']}`, {results['epochs']} epochs, seeds {listed([str(seed) for seed in seeds])}, {results['device']}; "
        f"a backward pass takes {ratio:.2f} times as long as a forward pass."
    )
    header = (
        "method",
        f"{metric}, %" if share else metric,
        "difference to full [95 % interval]",
        "cost",
        "CPU time",
        "verdict",
    )
    cells = [result_cells(dict(row), share=share) for row in results["summary"]]
    without = [left_out_sentence(one) for one in results.get("left_out", ())]
    below = " ".join([*without, *rates_sentences(results), *time_beside_cost(results)])
    return "\n\n".join(filter(None, (sentence, markdown_table(header, cells), below)))


APART = 0.1
"""Difference between counted cost and CPU time, as shares of full training, from which it is said."""
LEAST_SCORES = 0.005
"""Cost of scores, as a share of full training, from which it is named."""
NOT_COUNTED = (
    "Not counted are, for example, steps of the optimizer, loading, and the choice of rows."
)
NO_TIME_SAVED = 0.97
"""Share of full training's CPU time from which on no time is saved, but for noise."""


def time_beside_cost(results: Mapping[str, Any]) -> list[str]:
    """Returns sentences on each method whose CPU time is not what its counted cost says, and what is known about why.

    Args:
        results: Content of results.json.
    """
    said = []
    for row in results["summary"]:
        if row["control_of"] is not None or row.get("cpu_ratio") is None:
            continue
        runs = [
            run
            for run in results["runs"]
            if run["method"] == row["method"] and run["control_of"] is None
        ]
        known = [run["cost"].get("scores_ratio") for run in runs]
        scores = None if None in known else fmean(known)
        apart = abs(row["cpu_ratio"] - row["cost_ratio"] + (scores or 0.0)) > APART
        if apart or (scores or 0.0) >= LEAST_SCORES:
            tried = any(
                one["method"].startswith("winnow") and "in steps" in one["method"]
                for one in results["summary"]
            )
            said.append(
                f"{row['method']}: {_cost_in_words(row, runs, scores, apart=apart, tried=tried)}"
            )
    return said


def _cost_in_words(
    row: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    scores: float | None,
    *,
    apart: bool,
    tried: bool,
) -> str:
    traced = [run["tracing_s"] for run in runs if run.get("tracing_s")]
    tracing = (
        f", of which tracing the model took {max(traced):.1f} s of each run"
        if traced and apart
        else ""
    )
    said = f"the counted cost is {row['cost_ratio']:.2f} of full training"
    if scores is not None and scores >= LEAST_SCORES:
        itself = row["cost_ratio"] - scores
        said += f": {scores:.2f} for scores that were made before the run, and {itself:.2f} for the run itself. Its CPU time is "
    else:
        said += ", and the CPU time "
    said += f"{row['cpu_ratio']:.2f}{tracing}."
    fewer = "" if tried else in_fewer_steps(row["method"], row["cost_ratio"], 1 - row["cpu_ratio"])
    if row["cost_ratio"] < NO_TIME_SAVED <= row["cpu_ratio"]:
        busy = " as measured on a busy machine" if any(run.get("busy") for run in runs) else ""
        said += f" So it saved no time here{busy}."
    return " ".join([said, *[NOT_COUNTED] * (apart and scores is not None), *[fewer] * bool(fewer)])


def marks_of(file: str) -> tuple[str, str]:
    """Returns the marks of the whole table of a comparison."""
    return f"<!-- table of {file}.json -->", f"<!-- end of {file}.json -->"


def with_results(page: str, found: Mapping[str, Results]) -> str:
    """Returns docs/evidence/results.md with what it quotes written anew.

    Args:
        page: Content of docs/evidence/results.md.
        found: Contents of the results by the name of the file, those of `COMPARED` and `FURTHER`.
    """
    page = between_marks(page, *OVERVIEW, overview_table(found))
    for file in (*COMPARED, FURTHER):
        page = between_marks(page, *marks_of(file), comparison_part(found[file]))
    return page


def load(folder: Path = RESULTS) -> dict[str, Results]:
    """Returns the contents of the results in a folder, by the name of the file."""
    return {
        file: json.loads((folder / f"{file}.json").read_text()) for file in (*COMPARED, FURTHER)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="page that is written (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    given.page.write_text(with_results(given.page.read_text(), load()))


if __name__ == "__main__":
    main()
