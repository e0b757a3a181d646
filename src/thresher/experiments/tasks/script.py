"""A training of the user's own in a comparison: a Python file with a function that creates the objects to train with."""

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from thresher.experiments.training.trainable import Training

RETURN_TYPES = {"model": nn.Module, "data": DataLoader, "criterion": None, "optimizer": Optimizer, "evaluate": None}
"""Objects that the function returns, in this order, and their types; None stands for any callable."""
RESERVED_NAMES = sys.stdlib_module_names | {"accelerate", "numpy", "thresher", "torch"}
"""Names of modules that a file of the same name would replace."""


@dataclass(frozen=True)
class Script:
    """A function `build(seed)` in a file; it returns model, data, criterion, optimizer, evaluate and, if wanted, a schedule.

    Args:
        path: Path of the file, which is run once per process.
        function: Name of the function.
    """

    path: Path
    function: str

    @classmethod
    def of(cls, path: Path, function: str) -> "Script":
        """Checks a file without running it.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not Python, has no such function, or has the name of another module.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; `thresher init {path}` writes one to begin with")
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{path}, line {getattr(error, 'lineno', None) or 1}: {error}") from error
        names = {name for node in tree.body for name in _bound_names(node)}
        if function not in names and "*" not in names:
            raise ValueError(f"{path} has no {function!r}; it has {', '.join(sorted(names)) or 'nothing'}")
        if path.stem in RESERVED_NAMES:
            raise ValueError(f"{path}: there is a module {path.stem!r} already; give the file another name")
        return cls(path, function)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.path}:{self.function}"

    @property
    def recipe(self) -> dict[str, Any]:
        """A digest of the file and of the modules in its folder that it imports: another version is another training."""
        files = sorted(_local_imports(self.path, {}).items())
        return {"script": hashlib.sha256(b"".join(content for _, content in files)).hexdigest()[:12]}

    def find(self, folder: Path | None) -> None:
        """Returns None, as a script finds its data itself.

        Raises:
            ValueError: A folder was given.
        """
        if folder is not None:
            raise ValueError(f"--data {folder}: {self.name} reads its data itself; leave --data out")

    def load(self, _: Path | None) -> Callable[[int], Any]:
        """Runs the file and returns its function; the file can import modules of its folder."""
        folder = str(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # Unpickling, such as in workers of a DataLoader, looks the module up by this name.
        spec.loader.exec_module(module)
        return getattr(module, self.function)

    def training(self, data: Callable[[int], Any], seed: int) -> Training:
        """Calls the function.

        Raises:
            ValueError: The function returned wrong objects; the message names its line.
        """
        made = data(seed)
        line = getattr(getattr(data, "__code__", None), "co_firstlineno", 1)
        where = f"{self.path}, line {line}: {self.function}(seed) must return"
        if not isinstance(made, tuple) or len(made) not in (len(RETURN_TYPES), len(RETURN_TYPES) + 1):
            got = f"{len(made)} of them" if isinstance(made, tuple) else type(made).__name__
            raise ValueError(f"{where} a tuple of {', '.join(RETURN_TYPES)} and, if wanted, schedule; got {got}")
        for (name, kind), value in zip((RETURN_TYPES | {"schedule": None}).items(), made, strict=False):
            if not (callable(value) if kind is None else isinstance(value, kind)):
                wanted = "something that can be called" if kind is None else f"a torch {kind.__name__}"
                raise ValueError(f"{where} {wanted} as {name}; got {type(value).__name__}")
        loader = made[1]
        if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
            raise ValueError(f"{where} data over a dataset with a length: what a run costs is counted in shares of it")
        return Training(*made)

    def place_of(self, error: BaseException) -> str:
        """Returns file and line, with a colon, of the last frame of a traceback in the file; empty if there is none."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == self.path.resolve()]
        return f"{self.path}, line {lines[-1]}: " if lines else ""


def _bound_names(node: ast.stmt) -> list[str]:
    """Returns the names that a statement binds; "*" if that is only known when it runs."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return [] if isinstance(node, ast.Expr) else ["*"]


def _local_imports(path: Path, found: dict[Path, bytes]) -> dict[Path, bytes]:
    """Returns the content, by path, of a file and of the modules in its folder that it imports, directly or not."""
    found[path] = path.read_bytes()
    for node in ast.walk(ast.parse(found[path])):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for module in modules:
            beside = path.parent / f"{module.replace('.', '/')}.py"
            if beside.is_file() and beside not in found:
                _local_imports(beside, found)
    return found
