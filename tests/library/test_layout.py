"""The layout is the architecture: a package imports from the packages below it only, and never in a circle."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import thresher

SOURCE = Path(thresher.__file__).parent

FLOORS = (
    ("thresher_lab.cli",),
    ("thresher_lab.report",),
    ("thresher_lab.reproduction",),
    ("thresher_lab.comparison",),
    ("thresher_lab.advise",),
    ("thresher_lab.recipes",),
    ("thresher_lab.tasks",),
    ("thresher_lab.training",),
    ("__init__", "__main__"),
    ("testing",),
    ("lightning", "transformers", "trl"),
    ("rl",),
    ("run",),
    ("observation", "audit"),
    ("methods",),
    ("scores",),
    ("passes",),
    ("losses",),
    ("attribution",),
    ("subset",),
    ("loading",),
    ("samplers", "frozen"),
    ("distributed",),
    (
        "plans",
        "records",
        "schedules",
        "score_table",
        "selection",
        "sheet",
        "reviewing",
        "group_table",
        "permutation",
        "cost",
        "backward_ratio",
        "comparing",
        "timing",
        "torch_internals",
        "trees",
        "rng",
        "warning",
        "_version",
    ),
)
"""From the top to the ground; the names of one floor are packages and modules on the same level."""

HEIGHT = {
    package: len(FLOORS) - floor for floor, packages in enumerate(FLOORS) for package in packages
}
VOCABULARY = FLOORS[-1]


def modules() -> dict[str, Path]:
    """The modules of the library by their names in it, and those of the laboratory by their whole names."""
    found = {}
    for root, package in ((SOURCE, ()), (SOURCE.with_name("thresher_lab"), ("thresher_lab",))):
        for path in sorted(root.rglob("*.py")):
            parts = (*package, *path.relative_to(root).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = (
                path
            )
    return found


MODULES = modules()


def package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "thresher_lab" and len(parts) > 1 else parts[0]


@cache
def imported(path: Path) -> list[str]:
    """Our modules that a file imports, wherever in it the import stands; those for type checkers, too."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "thresher":
                yield "__init__"
            elif name.startswith(("thresher.", "thresher_lab.")):
                yield longest(name.removeprefix("thresher."))


def longest(name: str) -> str:
    """The module that a dotted name is or lies in."""
    while name not in MODULES:
        if "." not in name:
            return "__init__"
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize(
    "module", sorted(set(MODULES) - {"__init__", "thresher_lab", "thresher_lab.tasks.template"})
)
def test_imports_follow_the_floors(module):
    own = package_of(module)
    wrong = []
    for other in imported(MODULES[module]):
        package = package_of(other)
        # `import thresher` is what users write: above the core it is the library itself, with nothing of the upper floors.
        if package == own or (package == "__init__" and HEIGHT[own] > HEIGHT["run"]):
            continue
        beside = own in VOCABULARY and package in VOCABULARY
        if not beside and HEIGHT[package] >= HEIGHT[own]:
            wrong.append(other)
    assert not wrong, f"{module} imports {', '.join(wrong)}, which is not below {own}"


@pytest.mark.parametrize(
    "module", sorted(module for module in MODULES if module.startswith("methods."))
)
def test_a_method_imports_the_vocabulary_only(module):
    """And neither the passes, the scores and the run, nor private modules of torch."""
    others = {
        other
        for other in imported(MODULES[module])
        if package_of(other) not in {*VOCABULARY, "methods"}
    }
    assert others <= {"losses.signals"}
    assert "torch._" not in MODULES[module].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("uses", "unneeded"),
    [
        (
            "thresher.attach, thresher.observe, thresher.scores, thresher.testing",
            ("thresher.subset",),
        ),
        (
            "thresher.samplers.WeightedSampler, thresher.Shuffle",
            ("thresher.run", "thresher.loading", "thresher.distributed", "thresher.losses"),
        ),
        (
            "[thresher.methods.load(name) for name in thresher.methods.names()]",
            ("thresher.subset", "thresher.passes", "thresher.scores", "thresher.run"),
        ),
    ],
)
def test_what_is_loaded_on_first_use(uses, unneeded):
    code = f"import json, sys, thresher; {uses}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )
    assert "thresher" in loaded
    assert not [
        module
        for module in loaded
        if f"{module}.".startswith(tuple(f"{name}." for name in unneeded))
    ]


PUBLIC = {"__init__", "losses.signals", "methods"} | {
    name for name, home in thresher._HOME.items() if home == "thresher"
}
"""Modules of the library that users import names from."""


@pytest.mark.parametrize(
    "module", sorted(module for module in MODULES if module.startswith("thresher_lab."))
)
def test_the_laboratory_imports_public_names_only(module):
    inside = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "thresher"
        for alias in node.names
        if (node.module or "").partition(".")[2] not in {"", *PUBLIC} or alias.name.startswith("_")
    ]
    assert not inside


def test_every_package_has_its_floor():
    assert {package_of(module) for module in MODULES} - {"thresher_lab"} == set(HEIGHT)


def test_contributing_lists_every_package_from_the_top_to_the_ground():
    text = (
        (SOURCE.parents[1] / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## Packages")[2]
        .partition("### Where")[0]
    )
    names = [
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w.]+)/?`", line.split("|")[1])
    ]
    listed = [name.removesuffix(".pyi").removesuffix(".py") for name in names]
    heights = [HEIGHT.get(name, HEIGHT.get(f"thresher_lab.{name}")) for name in listed]
    assert {name for name in listed if name in HEIGHT} >= {
        name for name in HEIGHT if not name.startswith(("thresher_lab", "_version"))
    }
    assert {f"thresher_lab.{name}" for name in listed} >= {
        name for name in HEIGHT if name.startswith("thresher_lab.")
    }
    assert heights == sorted(heights, reverse=True)


def test_no_circle():
    """Modules that are reached from themselves, imports inside functions included."""
    graph = {module: set(imported(path)) - {module, "__init__"} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, (
            f"circle: {' -> '.join((*above[above.index(module) :], module))}"
        )
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def functions_and_classes() -> Iterator[tuple[str, ast.AST]]:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{module}.{node.name}", node


def lines_of_body(node: ast.AST) -> int:
    """Lines of a function without its signature and its docstring."""
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return node.end_lineno - (first.end_lineno if is_docstring else first.lineno - 1)


def test_functions_are_read_at_one_look():
    long_functions = {
        name: lines
        for name, node in functions_and_classes()
        if not isinstance(node, ast.ClassDef) and (lines := lines_of_body(node)) > 70
    }
    assert not long_functions, (
        "functions of at most 70 lines of 100 columns, beside their signature and docstring"
    )


def test_what_a_constructor_made_is_not_changed_afterwards():
    """In the package of the run: an object is complete when its constructor returns, and changes itself by its methods."""
    poked = [
        f"{module}.{function.name}: {ast.unparse(target)}"
        for module, path in MODULES.items()
        if module.startswith("run.")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for made in [set(_made_in(function))]
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for part in ast.walk(target)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and ast.unparse(part.value) in made
    ]
    assert not poked


def _made_in(function: ast.FunctionDef) -> Iterator[str]:
    """Names, `self.x` among them, that a function gives to what a class of ours, or a builder, has just made."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).rpartition(".")[2].lstrip("_")
            if called[:1].isupper() or called in {
                "data",
                "attribution",
                "selection",
                "epochs",
                "build_run",
            }:
                for target in node.targets:
                    yield from (
                        ast.unparse(one)
                        for one in (target.elts if isinstance(target, ast.Tuple) else [target])
                    )


MOST_ATTRIBUTES = 16
OF_TRAINER = {"lr_scheduler", "compute_loss_func"}
"""Attributes of transformers' Trainer that our mixin sets for a while."""


def test_a_class_has_few_attributes():
    """Those that its methods set; a class with more has more than one concern."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found = {
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
                    if isinstance(one.value, ast.Name) and one.value.id == "self"
                }
                assert len(found - OF_TRAINER) <= MOST_ATTRIBUTES, (node.name, sorted(found))


def decisions_in_one_statement(tree: ast.AST):
    """Yields statements of the three kinds that are split: each makes several decisions at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            parts = (node.body, node.orelse, node.test)
            if any(isinstance(part, ast.IfExp) for part in parts):
                yield node.lineno, "a conditional expression inside of another"
        named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if named and isinstance(node.value, ast.Lambda):
            yield node.lineno, "a lambda with a name"
        tuples = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        if tuples and isinstance(node.targets[0], ast.Tuple):
            read = {ast.unparse(one) for one in ast.walk(node.value) if isinstance(one, ast.expr)}
            written = {ast.unparse(one) for one in node.targets[0].elts}
            # A swap needs a tuple: a value reads what another part of the statement writes.
            if not read & written:
                yield node.lineno, "values that are assigned as a tuple"


def test_a_statement_makes_one_decision():
    found = [
        f"{module}:{line}: {what}"
        for module, path in MODULES.items()
        for line, what in decisions_in_one_statement(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


FACTORIES = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}


def without_dtype(tree):
    """Yields the line of each factory of torch whose dtype would be the default dtype, which the user's script sets."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if not of_torch or any(keyword.arg == "dtype" for keyword in node.keywords):
            continue
        holds_floats = node.func.attr == "tensor" and any(
            isinstance(one, ast.Constant) and isinstance(one.value, float) for one in ast.walk(node)
        )
        if node.func.attr in FACTORIES or holds_floats:
            yield node.lineno


def test_no_tensor_takes_its_dtype_from_the_default():
    lines = [
        f"{module}:{line}"
        for module, path in MODULES.items()
        if not module.startswith("thresher_lab")
        for line in without_dtype(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not lines
