"""One word, one thing: no identifier has a former name, and no public name is defined twice with different meanings."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")

FORMER = {
    "Feed": "SelectedLoader",
    "IdBatches": "IdBatchSampler",
    "Drawn": "MapStyleBatches",
    "Streamed": "StreamBatches",
    "Gatherer": "RowBuffer",
    "gatherer": "row_buffer",
    "taken": "take_rows",
    "holds_samples": "is_per_sample",
    "Witnesses": "RowTracker",
    "witnesses": "tracker",
    "Sight": "Lookup",
    "sight": "lookup",
    "sights": "lookups",
    "Credit": "Attribution",
    "Group": "RowLayout",
    "Ledger": "StepAccumulator",
    "ledger": "accumulator",
    "WatchedModel": "TrackedModel",
    "Unread": "DeferredSignals",
    "Within": "OnSubset",
    "rests": "is_inactive",
    "survey": "full_pass",
    "surveys": "full_pass",
}
"""Former names that no identifier may have, with or without leading underscores, and the names that replaced them."""

FORMER_FUNCTIONS = {"stages": "split_by_stage"}
"""Former names of functions that mean something else as a parameter, such as the stages of a residual network."""

COMMAND = "the command has the name of the function that it calls"
SHARED = {
    "Selection": "the entrance of each framework, named in the same way",
    "attach": "the entrance of TRL, of which there is one trainer; that of loops",
    "advise": COMMAND,
    "compare": COMMAND,
    "observe": COMMAND,
    "reproduce": COMMAND,
    "train": COMMAND,
}
"""Public names that several modules may define, with the reason."""


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that is named: variables, attributes, parameters, keywords, functions, classes, imports."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield line, node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.alias):
            yield from ((line, name) for name in (*node.name.split("."), node.asname or ""))


def former_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name in sorted(set(identifiers(tree))):
        if name.lstrip("_") in FORMER:
            yield line, f"{name}, now {FORMER[name.lstrip('_')]}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_") in FORMER_FUNCTIONS:
            yield node.lineno, f"{node.name}, now {FORMER_FUNCTIONS[node.name.lstrip('_')]}"


def test_former_names_are_found_wherever_they_stand():
    source = """
import a.taken as x, b as Feed
from c import Credit as y
class Group(Sight):
    sights: int
    def stages(self, stages, *rests, **ledger): return self._survey(witnesses=stages).surveys
[Drawn for Within in taken_rows]
"""
    found = [wrong.partition(",")[0] for _, wrong in former_names(ast.parse(source))]
    names = "taken Feed Credit Group Sight sights rests ledger _survey witnesses surveys Drawn Within stages"
    assert sorted(found) == sorted(names.split())


def test_no_identifier_has_a_former_name():
    found = []
    mentioned = re.compile(rf"\b_*({'|'.join([*FORMER, *FORMER_FUNCTIONS])})\b")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if mentioned.search(source):
                found += [f"{path.relative_to(ROOT)}:{line}: {wrong}" for line, wrong in former_names(ast.parse(source))]
    assert not found, "\n" + "\n".join(found)


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
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    used = {name for tree in trees.values() for name in imported(tree)}
    homes = defaultdict(set)
    for path, tree in trees.items():
        for name in top_level(tree):
            if not name.startswith("_") and (name in used or not name.isupper()):
                homes[name].add(str(path.relative_to(SOURCE).with_suffix("")))
    shared = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    wrong = {name: modules for name, modules in shared.items() if name not in SHARED}
    assert not wrong, "\n" + "\n".join(f"{name}: {', '.join(modules)}" for name, modules in sorted(wrong.items()))
    assert set(SHARED) <= set(shared), "names that are allowed to be shared and are not"
