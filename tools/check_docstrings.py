"""Checks the docstrings below src; prints `file:line: name: what is wrong` for each finding.

It refuses

- an entry of an `Args:` section, or a `help=` text, that opens with a word that cannot say what it is, such as "Of" or "As",
- an entry for a parameter that does not exist, and a parameter of a public function that its `Args:` section leaves out,
- words that a reader does not understand without knowing the code.

Use: `python tools/check_docstrings.py [FOLDER ...]`; the default is src. The exit code is 1 where something is found.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

OPENINGS = frozenset({"Of", "As", "That", "Likewise", "Whose", "What"})
"""Words that the text of an argument must not open with."""

UNCLEAR = {
    "so-manieth": 'write "every n-th"',
    "heard out": "say what is computed or decided",
    "stand for themselves": "say what does not depend on what",
    "the kept": 'name what is kept: "the kept samples"',
    "the told": "name what is told",
    "the hidden": 'name what is hidden: "the hidden samples"',
    "the dropped": 'name what is dropped: "the dropped samples"',
}
"""Words that no docstring may have, with what to write instead; those that open with "the" only where no noun follows."""

ENTRY = re.compile(r"(?P<name>\*{0,2}\w+)(?: \([^)]*\))?:(?: (?P<text>.*))?$")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Finding = tuple[int, str, str]
"""Line number, dotted name of the function or class, and what is wrong."""

Entry = tuple[int, str, str]
"""Line number, name and first line of the text of an argument."""


def check_source(source: str) -> list[Finding]:
    """Returns what is wrong with the docstrings of a module.

    Args:
        source: Source code of the module.

    Returns:
        Line number, dotted name and description of each finding, in the order of the lines.
    """
    module = ast.parse(source)
    found = [*_unclear_words(module, "module"), *_openings(_help_texts(module), "module")]
    for name, node in _definitions(module):
        entries = list(_entries(node))
        found += _unclear_words(node, name)
        found += _openings(entries, name)
        found += _mismatches(name, node, [argument for _, argument, _ in entries])
    return sorted(found)


def _openings(entries: Iterable[Entry], name: str) -> Iterator[Finding]:
    for line, argument, text in entries:
        words = text.split()
        if words and (opening := words[0].strip(".,:;")) in OPENINGS:
            yield (
                line,
                name,
                f"the text of `{argument}` opens with {opening!r}; open with a noun that says what it is",
            )


def _help_texts(module: ast.Module) -> Iterator[Entry]:
    """Yields the texts of all arguments `help="..."`."""
    for node in ast.walk(module):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "help"
            and isinstance(node.value, ast.Constant)
        ):
            yield node.value.lineno, "help", str(node.value.value)


def _definitions(module: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yields all functions and classes of a module with their dotted names."""
    todo: list[tuple[str, ast.AST]] = [("", module)]
    while todo:
        prefix, parent = todo.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition):
                yield prefix + node.name, node
                todo.append((f"{prefix}{node.name}.", node))
            else:
                todo.append((prefix, node))


def _docstring(node: Definition | ast.Module) -> tuple[int, list[str]]:
    """Returns the line of a docstring and its lines without indentation; no lines where there is no docstring."""
    text = ast.get_docstring(node)
    return (node.body[0].lineno, text.split("\n")) if text else (0, [])


def _entries(node: Definition) -> Iterator[Entry]:
    """Yields line, name and first line of text of each entry of the `Args:` section."""
    start, lines = _docstring(node)
    inside, indent = False, 0
    for number, line in enumerate(lines):
        stripped = line.strip()
        if line and not line[0].isspace():
            inside, indent = stripped == "Args:", 0
        elif inside and stripped:
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            match = ENTRY.match(stripped)
            if depth == indent and match:
                following = lines[number + 1].strip() if number + 1 < len(lines) else ""
                yield start + number, match["name"].lstrip("*"), match["text"] or following


def _mismatches(name: str, node: Definition, documented: Sequence[str]) -> Iterator[Finding]:
    """Yields entries without a parameter, and parameters of public functions without an entry."""
    if not documented:
        return
    parameters = _parameters(node)
    if parameters is None:
        return
    for argument in documented:
        if argument not in parameters:
            yield node.lineno, name, f"`{argument}` is documented, but is no parameter"
    if isinstance(node, ast.ClassDef) or any(part.startswith("_") for part in name.split(".")):
        return
    for parameter in parameters:
        if parameter not in documented and not parameter.startswith("_"):
            yield node.lineno, name, f"`{parameter}` is a parameter, but is not documented"


def _parameters(node: Definition) -> list[str] | None:
    """Returns the parameters of a function or of a class's constructor; None where they are inherited or not visible.

    The parameters of a dataclass are its fields.
    """
    if not isinstance(node, ast.ClassDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
        return [one.arg for one in every if one.arg not in {"self", "cls"}]
    constructors = [
        one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    if constructors:
        return _parameters(constructors[0])
    if node.bases:
        return None
    return [
        one.target.id
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]


def _unclear_words(node: Definition | ast.Module, name: str) -> Iterator[Finding]:
    start, lines = _docstring(node)
    for number, line in enumerate(lines):
        for words, instead in UNCLEAR.items():
            ending = (
                r"(?=[.,:;)]| (?:and|are|is|of|or|stay|were)\b|$)"
                if words.startswith("the ")
                else r"\b"
            )
            if re.search(rf"\b{re.escape(words)}{ending}", line, re.IGNORECASE):
                yield start + number, name, f"{words!r} is not clear; {instead}"


def main(folders: Sequence[str]) -> int:
    """Checks all modules of some folders.

    Args:
        folders: Folders or files to check.

    Returns:
        Exit code: 1 where something is wrong, else 0.
    """
    found = False
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            for line, name, wrong in check_source(path.read_text(encoding="utf-8")):
                print(f"{path}:{line}: {name}: {wrong}")
                found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["src"]))
