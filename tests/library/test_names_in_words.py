"""Texts name what there is: a module, class or function that was renamed or went is not named in words any more.

Texts are the docstrings and comments of src, README.md, CONTRIBUTING.md and the pages of docs and docs/evidence. Three kinds
of names are matched:

1. `thresher.` with further parts, anywhere in a text.
2. A dotted name between backticks, with or without a call behind it. Its first part is the end of the path of a module
   (`loading.loader.EpochControl`, `methods._base`), a class of ours (`Scores.mean`), one of `OBJECTS`, or one of `FOREIGN`.
   Anything else is the name of a module that is gone.
3. A single word between backticks in the docstring of a package, which names its modules.

A module must exist, and have the next part as a name at its top level; the part after that must be a member of that class.
Parts further on are not looked at. The names are read from the source, and those of `thresher` itself from its `__all__`.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import thresher

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/evidence").glob("*.md")),
)

OURS = re.compile(r"(?<![\w./-])thresher(?:_lab)?(?:\.[A-Za-z_]\w*)+(?![\w/-])")
QUOTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`\n]*\))?`")
WORD = re.compile(r"`([a-z_]\w*)`")

OBJECTS = {
    "cost": ("Cost",),
    "records": ("Records",),
    "run": ("Run",),
    "sampler": ("WeightedSampler",),
    "selection": ("Selection",),
    "shard": ("Shard",),
    "shuffle": ("Shuffle",),
    "spec": ("MethodSpec",),
    "task": ("Task", "RecipeTask"),
}
"""Variables that stand for an object of one of these classes of ours, a member of which follows."""
PACKAGES = sys.stdlib_module_names | {
    "accelerate",
    "lightning",
    "numpy",
    "plotly",
    "pyarrow",
    "timm",
    "torch",
    "transformers",
}
FOREIGN = PACKAGES | {
    "F",
    "nn",
    "np",
    "benchmarks",
    "tools",
}  # aliases of packages, and folders of this repository
FOREIGN |= {
    "found",
    "model",
    "logits",
    "outputs",
    "tags",
    "Accelerator",
    "Trainer",
    "accelerator",
    "checkpoint",
    "optimizer",
    "scheduler",
    "self",
    "stream",
    "state",
    "trainer",
    "y",
}
"""Other first parts of names that are not ours."""
FILES = frozenset(
    {
        "csv",
        "epochs",
        "html",
        "json",
        "md",
        "parquet",
        "pt",
        "py",
        "pyi",
        "shown",
        "svg",
        "txt",
        "yaml",
    }
)
"""Endings of the names of files."""
OTHERS = frozenset(
    {"data.shape", "losses.flatten", "losses.mean", "thresher.Seta2", "wiki.train.tokens"}
)
"""Fields of recipes, tensors of examples, a class that an example makes up, and the name of a file."""


def members(tree: ast.ClassDef) -> Iterator[str]:
    """The names of a class: what its body defines, and the attributes that its functions assign."""
    yield from top_level(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def top_level(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """The names that the body of a module or class defines or imports, also below an `if` or a `try`."""
    inner = [tree]
    while inner:
        for node in ast.iter_child_nodes(inner.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            else:
                inner.append(node)


class Names:
    """The names of the modules and classes in a folder.

    Args:
        source: Folder of the packages.
    """

    def __init__(self, source: Path) -> None:
        self.modules: dict[tuple[str, ...], set[str]] = {}
        self.classes: dict[str, list[tuple[set[str], list[str]]]] = defaultdict(list)
        for path in (*sorted(source.rglob("*.py")), source / "thresher" / "__init__.pyi"):
            parts = path.relative_to(source).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.modules.setdefault(parts, set()).update(top_level(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    self.classes[node.name].append((set(members(node)), bases))
        self.modules["thresher",].update(thresher.__all__)

    def has_member(self, name: str, member: str) -> bool:
        """Whether a class of this name, or one of ours that it inherits from, has the member."""
        return any(
            member in own
            or any(base in self.classes and self.has_member(base, member) for base in bases)
            for own, bases in self.classes[name]
        )

    def resolves(self, name: str) -> bool:
        """Whether a dotted name is that of a module, of what a module defines, or of a member of a class."""
        parts = tuple(name.split("."))
        if parts[0] in self.classes and self.has_member(*parts[:2]):
            return True
        for length in range(len(parts), 0, -1):
            ends = [path for path in self.modules if path[-length:] == parts[:length]]
            rest = parts[length:]
            if ends and not rest:
                return True
            if any(
                rest[0] in self.modules[path] and (*path, rest[0]) not in self.modules
                for path in ends
            ):
                return len(rest) == 1 or rest[0] not in self.classes or self.has_member(*rest[:2])
        return False

    def gone(self, text: str) -> set[str]:
        """The names in a text that are those of nothing."""
        found = set(OURS.findall(text)) - OTHERS
        for name in set(QUOTED.findall(text)):
            first, second = name.split(".")[:2]
            is_member = any(self.has_member(one, second) for one in OBJECTS.get(first, ()))
            if not is_member and name not in OTHERS and first not in FOREIGN:
                found.add(name)
        return {
            name
            for name in found
            if name.rpartition(".")[2] not in FILES and not self.resolves(name)
        }


NAMES = Names(SOURCE)
SUBPACKAGES = {parts[1] for parts in NAMES.modules if len(parts) > 1}
"""Packages and modules of both packages; two of them have the names of the packages that they are for."""

GONE = """
thresher.feed thresher.Winow thresher.methods._ranked thresher.methods.winnow.Winow thresher.Winnow.actve `loading.loader.Feed`
`methods._on_subset` `recipes.resolve.task_of` `style.look` `data.base.training_subset` `Scores.average`
`run.lodaer` `run.feed(x)`
"""
THERE = """
thresher.loading, thresher.Winnow. thresher.Winnow.plan_epoch thresher.Kakurenbo.variant thresher.methods._base.full_plan
`loading.loader.EpochControl` `methods._base` `Scores.mean` `run.loader` `run.cost.ratio()` `run.reduce(losses, ids=x)`
`torch.nn.Linear` `nn.Linear` `results.json` thresher.pt thresher/loading.py my.thresher.feed feed.py `feed` style.look
"""


def test_a_name_that_is_gone_is_found_and_no_other():
    assert NAMES.gone(GONE) == {name.strip("`").partition("(")[0] for name in GONE.split()}
    assert not NAMES.gone(THERE)


@pytest.mark.parametrize("module", ["loading/loader.py", "methods/_base.py"])
def test_the_names_of_a_module_that_goes_are_gone(tmp_path, module):
    for path in SOURCE.rglob("*.py*"):
        if path.suffix in {".py", ".pyi"} and path != SOURCE / "thresher" / module:
            copy = tmp_path / path.relative_to(SOURCE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    name = module.removesuffix(".py").replace("/", ".")
    said = f"See `{name}`, and thresher.{name}.x."
    assert not NAMES.gone(f"See `{name}`.")
    assert Names(tmp_path).gone(said) == {name, f"thresher.{name}.x"}


def words(path: Path) -> Iterator[str]:
    """The docstrings and comments of a Python file; the whole of a page."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def test_every_name_in_words_is_one_of_something():
    found = []
    for path in (*sorted(SOURCE.rglob("*.py")), *PAGES):
        for text in words(path):
            found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(NAMES.gone(text))]
    assert not found, "\n" + "\n".join(found)


def test_the_docstring_of_a_package_names_what_it_has():
    found = []
    for path in sorted(SOURCE.rglob("__init__.py")):
        package = path.relative_to(SOURCE).parts[:-1]
        inside = {
            parts[len(package)]
            for parts in NAMES.modules
            if parts[: len(package)] == package and parts != package
        }
        known = (
            inside | NAMES.modules[package] | {parts[0] for parts in NAMES.modules} | SUBPACKAGES
        )
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found += [
            f"{'.'.join(package)}: {word}" for word in WORD.findall(text) if word not in known
        ]
    assert not found, "\n" + "\n".join(found)
