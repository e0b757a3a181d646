"""Writes the table of docs/loops.md: `PYTHONPATH=src:tests python -m scripts.page docs/loops.md`."""

import sys
from pathlib import Path

from benchmarks.marks import between_marks

from scripts import generative, images, language, tables  # noqa: F401  # they add their loops
from scripts.kit import SCRIPTS
from thresher_lab.training.files import markdown_table

MARKS = "<!-- table of tests/scripts -->", "<!-- end of the table -->"
REASONS = {
    "confidence": "KAKURENBO: the loss gives no confidence",
    "criterion": "KAKURENBO: it refreshes losses with a criterion",
    "sorts or mixes": "KAKURENBO: the batches of a refresh would be sorted, too",
    "": "KAKURENBO: an epoch repeats samples",
    "sets another order": "a share: its batches need `shuffle=True`",
}
"""Why a method is refused, by the part of the message that the tests look for."""


def table() -> str:
    """Returns the table: each script, what its loop needs, and what is refused."""
    rows = [
        (one.source, one.note, ", ".join(REASONS[message] for message in one.refused.values()))
        for one in SCRIPTS
    ]
    return markdown_table(
        (
            "script",
            "changes besides `run.loader`, `run.model` and `run.criterion`",
            "not supported",
        ),
        rows,
    )


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(between_marks(page.read_text(), *MARKS, table()))
