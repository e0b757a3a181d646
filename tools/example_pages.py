"""Writes the pages that show examples: each file of a folder is an example, and tests run the very same lines.

`python -m tools.example_pages` writes all pages anew; a test compares them. The docstring of an example has its title, the
library, its state and further text:

    Title of the example.

    Library: timm
    State: works

    Further text.

A state begins with "works" or "refused". Where something is refused, a further line says so:

    Refused: what is refused: "words of the message"
"""

import argparse
import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.marks import between_marks

ROOT = Path(__file__).resolve().parents[1]
MARKS = "<!-- examples of tools.example_pages -->", "<!-- end of the examples -->"

PAGES = {"docs/loaders.md": "examples/loaders", "docs/frameworks.md": "examples/frameworks"}
"""Pages, each with the folder of its examples."""


@dataclass(frozen=True)
class Example:
    """One example of a page.

    Attributes:
        title: What is combined with Thresher.
        library: Library that it is of.
        state: Whether it works, or is refused, and what to do.
        refused: What is refused, and words of the message; empty where nothing is.
        text: Further text in Markdown.
        code: The lines to write.
    """

    title: str
    library: str
    state: str
    refused: str
    text: str
    code: str

    @property
    def heading(self) -> str:
        """Heading of its section."""
        return f"{self.library}: {self.title}"


def read_example(path: Path) -> Example:
    """Returns the example in a file.

    Args:
        path: Python file with a docstring as described above.

    Raises:
        ValueError: The docstring does not have the form that is needed.
    """
    source = path.read_text()
    tree = ast.parse(source)
    blocks = (ast.get_docstring(tree) or "").split("\n\n")
    lines = blocks[1].splitlines() if len(blocks) > 1 else []
    facts = {name: fact for name, _, fact in (line.partition(": ") for line in lines)}
    state = facts.get("State", "")
    if not {"Library", "State"} <= facts.keys() <= {
        "Library",
        "State",
        "Refused",
    } or not state.startswith(("works", "refused")):
        raise ValueError(
            f"{path.name}: the docstring must have a title, an empty line, and the lines 'Library: ...' and 'State: works...' "
            "or 'State: refused...', and may have 'Refused: ...' after them"
        )
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    text = "\n\n".join(blocks[2:])
    return Example(
        blocks[0].removesuffix("."), facts["Library"], state, facts.get("Refused", ""), text, code
    )


def page_of(examples: Sequence[Example]) -> str:
    """Returns a table of examples and a section for each of them, in Markdown."""
    rows = [(one.library, f"[{one.title}](#{_anchor(one.heading)})", one.state) for one in examples]
    lines = [
        f"| {' | '.join(cells)} |" for cells in (("library", "what", "state"), ("---",) * 3, *rows)
    ]
    return "\n\n".join(["\n".join(lines), *map(_section, examples)])


def _section(one: Example) -> str:
    state = f"State: {one.state}."
    refused = f"Refused: {one.refused}." if one.refused else ""
    return "\n\n".join(
        filter(None, (f"### {one.heading}", state, one.text, refused, f"```py\n{one.code}\n```"))
    )


def _anchor(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def written(page: str, folder: Path) -> str:
    """Returns a page with its examples written anew.

    Args:
        page: Content of the page, with the two marks.
        folder: Folder of the examples; they come in the order of their names.
    """
    return between_marks(
        page, *MARKS, page_of([read_example(path) for path in sorted(folder.glob("*.py"))])
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.example_pages", description="Writes the pages that show examples."
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="folder of the repository (default: %(default)s)"
    )
    root = parser.parse_args(arguments).root
    for page, folder in PAGES.items():
        (root / page).write_text(written((root / page).read_text(), root / folder))


if __name__ == "__main__":
    main()
