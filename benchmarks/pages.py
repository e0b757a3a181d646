"""Writes what docs/evidence/results.md quotes from the committed comparisons, so that they never disagree.

`python -m benchmarks.pages` writes the page anew, from the results of `make fashion`, `make mnist-5k` and `make
further-methods`. In the overview, those that fell short come first.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.marks import between_marks
from thresher_lab.comparison.summary import is_share, left_out_sentence, listed, rates_sentences, time_beside_cost
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
    made = [Entry(on, row) for file, on in COMPARED.items() for row in found[file]["summary"] if row["method"] in NAMES]
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
    return {file: json.loads((folder / f"{file}.json").read_text()) for file in (*COMPARED, FURTHER)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written (default: %(default)s)")
    given = parser.parse_args(arguments)
    given.page.write_text(with_results(given.page.read_text(), load()))


if __name__ == "__main__":
    main()
