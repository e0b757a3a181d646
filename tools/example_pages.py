"""Writes the pages that list examples: each file of a folder is an example, and tests run it.

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
        link: Path of the file, from a page in docs/.
    """

    title: str
    library: str
    state: str
    refused: str
    text: str
    link: str


def read_example(path: Path) -> Example:
    """Returns the example in a file.

    Args:
        path: Python file with a docstring as described above.

    Raises:
        ValueError: The docstring does not have the form that is needed.
    """
    blocks = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
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
    return Example(
        title=blocks[0].removesuffix("."),
        library=facts["Library"],
        state=state,
        refused=facts.get("Refused", ""),
        text="\n\n".join(blocks[2:]),
        link=f"../{'/'.join(path.parts[-3:])}",
    )


def page_of(examples: Sequence[Example]) -> str:
    """Returns a table of examples, and a section for each of them that has a text, in Markdown."""
    rows = [(one.library, f"[{one.title}]({one.link})", one.state) for one in examples]
    lines = [
        f"| {' | '.join(cells)} |" for cells in (("library", "what", "state"), ("---",) * 3, *rows)
    ]
    sections = [_section(one) for one in examples if one.text or one.refused]
    return "\n\n".join(["\n".join(lines), *sections])


def _section(one: Example) -> str:
    refused = f"Refused: {one.refused}." if one.refused else ""
    return "\n\n".join(filter(None, (f"### {one.library}: {one.title}", one.text, refused)))


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
        prog="python -m tools.example_pages", description="Writes the pages that list examples."
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="folder of the repository (default: %(default)s)"
    )
    root = parser.parse_args(arguments).root
    for page, folder in PAGES.items():
        (root / page).write_text(written((root / page).read_text(), root / folder))


if __name__ == "__main__":
    main()
