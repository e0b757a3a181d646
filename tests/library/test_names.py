"""One word, one thing: no public name is defined twice with different meanings."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

COMMAND = "the command has the name of the function that it calls"
SHARED = {
    "Selection": "the entrance of each framework, named in the same way",
    "attach": "the entrance of TRL, of which there is one trainer; that of loops",
    "advise": COMMAND,
    "audit": COMMAND,
    "compare": COMMAND,
    "observe": COMMAND,
    "reproduce": COMMAND,
    "train": COMMAND,
}
"""Public names that several modules may define, with the reason."""


def top_level(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thresher"):
            yield from (alias.name for alias in node.names)


def test_every_public_name_is_defined_once():
    """A constant is public where another module imports it; classes, functions and types always are."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))
    }
    used = {name for tree in trees.values() for name in imported(tree)}
    homes = defaultdict(set)
    for path, tree in trees.items():
        for name in top_level(tree):
            if not name.startswith("_") and (name in used or not name.isupper()):
                homes[name].add(str(path.relative_to(SOURCE).with_suffix("")))
    shared = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    wrong = {name: modules for name, modules in shared.items() if name not in SHARED}
    assert not wrong, "\n" + "\n".join(
        f"{name}: {', '.join(modules)}" for name, modules in sorted(wrong.items())
    )
    assert set(SHARED) <= set(shared), "names that are allowed to be shared and are not"
