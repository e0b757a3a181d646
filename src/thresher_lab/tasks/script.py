"""A training of the user's own in a comparison: a Python file with a function that creates the objects to train with."""

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from thresher.cost import Cost
from thresher.methods import nearest_name
from thresher_lab.training.files import StoredEpoch
from thresher_lab.training.samples import class_labels
from thresher_lab.training.shown import UnshowableError, shown
from thresher_lab.training.trainable import Training

RETURN_TYPES = {
    "model": nn.Module,
    "data": DataLoader,
    "criterion": None,
    "optimizer": Optimizer,
    "evaluate": None,
}
"""Objects that the function returns, in this order, and their types; None stands for any callable."""
OPTIONAL_TYPES = {
    "schedule": None,
    "metric": str,
    "classes": (list, tuple),
    "show": None,
    "forward": None,
    "predict": None,
}
"""Objects that it may return besides; in a tuple the first of them only."""
IN_WORDS = {"metric": "a text", "classes": "a list of names"}
"""Types that messages name in words of their own."""
LONGEST_NAME = 40
"""Largest number of characters in the name of a metric or of a class."""
TAKEN_NAMES = {
    *StoredEpoch.model_fields,
    *Cost.__dataclass_fields__,
    "complete",
    "kept",
    "lr_scale",
}
"""Names of other numbers of an epoch, beside those that a method adds."""
TAKEN_BEGINNINGS = ("weight_", "batch_")
"""Beginnings of names that methods give to their numbers."""
RESERVED_NAMES = sys.stdlib_module_names | {"accelerate", "numpy", "thresher", "torch"}
"""Names of modules that a file of the same name would replace."""


@dataclass(frozen=True)
class Script:
    """A function `build(seed)` in a file that returns what a run trains with, or `make_trainer(seed, **overrides)`.

    `build` returns model, data, criterion, optimizer, evaluate and, if wanted, schedule: as a tuple in this order, or as a dict
    with these names, which may also have metric (a name), classes (a list of names), show, forward and predict, see `Training`.
    `make_trainer` returns a Trainer of transformers, see `training.trainers`.

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
            raise FileNotFoundError(
                f"{path}: no such file; `thresher init {path}` writes one to begin with"
            )
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError) as error:
            raise ValueError(
                f"{path}, line {getattr(error, 'lineno', None) or 1}: {error}"
            ) from error
        names = {name for node in tree.body for name in _bound_names(node)}
        if function not in names and "*" not in names:
            kinds = ast.FunctionDef, ast.ClassDef
            defined = sorted(node.name for node in tree.body if isinstance(node, kinds))
            near = nearest_name(function, defined)
            if near is not None:
                has = f"did you mean {near!r}?"
            else:
                has = f"it defines {', '.join(defined) or 'nothing'}"
            raise ValueError(f"{path} has no {function!r}; {has}")
        if path.stem in RESERVED_NAMES:
            raise ValueError(
                f"{path}: there is a module {path.stem!r} already; give the file another name"
            )
        return cls(path, function)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.path}:{self.function}"

    @property
    def recipe(self) -> dict[str, Any]:
        """A digest of the file and of the modules in its folder that it imports: other code is another training."""
        code = "".join(ast.dump(tree) for _, tree in sorted(_local_imports(self.path, {}).items()))
        return {"script": hashlib.sha256(code.encode()).hexdigest()[:12]}

    def find(self, folder: Path | None) -> None:
        """Returns None, as a script finds its data itself.

        Raises:
            ValueError: A folder was given.
        """
        if folder is not None:
            raise ValueError(
                f"--data {folder}: {self.name} reads its data itself; leave --data out"
            )

    def load(self, _: Path | None) -> Callable[[int], Any]:
        """Runs the file and returns its function; the file can import modules of its folder."""
        folder = str(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = (
            module  # Unpickling, such as in workers of a DataLoader, looks the module up by this name.
        )
        spec.loader.exec_module(module)
        return getattr(module, self.function)

    def training(self, data: Callable[[int], Any], seed: int) -> Training:
        """Calls the function.

        Raises:
            ValueError: The function returned wrong objects; the message names its line.
        """
        if takes_overrides(data):
            raise ValueError(
                f"{self._line_of(data)}: {self.function}(seed, **overrides) makes a Trainer. Only `thresher compare` takes "
                "one, in one process per run; the others take a function "
                "(seed), as `thresher init` writes it"
            )
        # Messages begin with the call, such as "train.py, line 3: build(seed)".
        call = f"{self._line_of(data)}: {self.function}(seed)"
        _check_takes_seed(data, call)
        parts = _by_name(data(seed), call)
        for name, value in parts.items():
            kind = (RETURN_TYPES | OPTIONAL_TYPES)[name]
            if not (callable(value) if kind is None else isinstance(value, kind)):
                wanted = IN_WORDS.get(name) or (
                    "something that can be called" if kind is None else f"a torch {kind.__name__}"
                )
                raise ValueError(
                    f"{call} must return {wanted} as {name}; got {type(value).__name__}"
                )
        loader = parts.pop("data")
        if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
            raise ValueError(
                f"{call} must return data over a dataset with a length: what a run costs is counted in shares of it"
            )
        _check_new(parts["model"], call)
        _warn_of_order(loader, call)
        _check_metric(parts.get("metric", "metric"), call)
        if "classes" in parts:
            _check_classes(parts["classes"], class_labels(loader.dataset), call)
        if "show" in parts and len(loader.dataset):
            self._check_show(parts["show"])
        return Training(loader=loader, **parts)

    def _check_show(self, show: Callable[[int], Any]) -> None:
        """Raises ValueError unless the function can show the first sample: it is needed when a run has been trained."""
        try:
            shown(show(0))
        except UnshowableError as error:
            raise ValueError(f"{self._line_of(show)}: show(0) {error}") from error

    def _line_of(self, function: Callable[..., Any]) -> str:
        """Returns the file with the line of a function; its first line for what has none."""
        return (
            f"{self.path}, line {getattr(getattr(function, '__code__', None), 'co_firstlineno', 1)}"
        )

    @contextmanager
    def errors_placed(self) -> Iterator[None]:
        """Turns an error that the code of the file raises within it into a ValueError whose message names file and line."""
        try:
            yield
        except Exception as error:
            if not (place := self.place_of(error)):
                raise
            raise ValueError(f"{place}{type(error).__name__}: {error}") from error

    def place_of(self, error: BaseException) -> str:
        """Returns file and line, with a colon, of the last frame of a traceback in the file; empty if there is none."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [
            frame.lineno
            for frame in frames
            if Path(frame.filename).resolve() == self.path.resolve()
        ]
        return f"{self.path}, line {lines[-1]}: " if lines else ""


def takes_overrides(data: Any) -> bool:
    """Returns whether what `load` returned is a function `(seed, **overrides)`: it makes a Trainer of transformers.

    Args:
        data: Data of a task.
    """
    if inspect.isfunction(data):
        parameters = inspect.signature(data).parameters.values()
    else:
        parameters = ()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def errors_placed(task: Any) -> AbstractContextManager[None]:
    """Returns a context in which errors of the user's own file are named with their line; see `Script.errors_placed`.

    Args:
        task: A task, which may be a `Script`.
    """
    return task.errors_placed() if isinstance(task, Script) else nullcontext()


def _by_name(returned: Any, call: str) -> dict[str, Any]:
    """Names the objects that a function returned: those of a tuple by their order, of which only the schedule is optional."""
    needed = [*RETURN_TYPES]
    in_order = [*RETURN_TYPES, "schedule"]
    if isinstance(returned, tuple) and len(cast(tuple[Any, ...], returned)) in (
        len(needed),
        len(in_order),
    ):
        return dict(zip(in_order, cast(tuple[Any, ...], returned), strict=False))
    if not isinstance(returned, dict):
        if isinstance(returned, tuple):
            got = f"{len(cast(tuple[Any, ...], returned))} of them"
        else:
            got = type(returned).__name__
        raise ValueError(
            f"{call} must return a tuple of {', '.join(needed)} and, if wanted, schedule, or a dict with these names; got {got}"
        )
    named = cast(dict[Any, Any], returned)
    also = f"{', '.join(needed)} and, if wanted, {', '.join(OPTIONAL_TYPES)}"
    if missing := [name for name in needed if name not in named]:
        raise ValueError(
            f"{call} must return a dict with {also}; got one without {' and '.join(missing)}"
        )
    if unknown := [name for name in named if name not in RETURN_TYPES | OPTIONAL_TYPES]:
        raise ValueError(f"{call} must return a dict with {also}; got {unknown[0]!r}, too")
    return dict(named)


_MODELS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Models that functions of scripts have returned in this process, by their address."""


def _check_takes_seed(function: Callable[..., Any], call: str) -> None:
    """Raises ValueError unless the function can be called with a seed."""
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        raise ValueError(
            f"{call.removesuffix('(seed)')} must take one argument, the seed"
        ) from None


def _check_new(model: nn.Module, call: str) -> None:
    """Raises ValueError if an earlier call returned the same model, which may be trained by now; remembers the model."""
    if _MODELS.get(id(model)) is model:
        raise ValueError(
            f"{call} must return a new model from each call; got the one of an earlier call, which may be trained already: make it "
            "inside the function"
        )
    _MODELS[id(model)] = model


def _warn_of_order(loader: DataLoader[Any], call: str) -> None:
    """Warns of a loader that yields the samples in the order of the dataset."""
    if loader.batch_size and isinstance(loader.sampler, SequentialSampler):
        warnings.warn(
            f"the loader of {call} does not shuffle: every epoch has the order of the dataset, in which "
            "neighbours are often alike. Give it shuffle=True, or its results say little about a usual training.",
            stacklevel=3,
        )


def _check_metric(metric: str, call: str) -> None:
    """Raises ValueError unless the name is a short line that no other value of an epoch has."""
    if not metric.strip() or len(metric) > LONGEST_NAME or not metric.isprintable():
        raise ValueError(
            f"{call} must return a line of 1 to {LONGEST_NAME} characters as metric; got {metric!r:.80}"
        )
    if metric in TAKEN_NAMES or metric.startswith(TAKEN_BEGINNINGS):
        raise ValueError(
            f"{call} must return a metric with a name of its own; {metric!r} is another number of each epoch"
        )


def _check_classes(classes: Sequence[Any], labels: NDArray[np.int64] | None, call: str) -> None:
    """Raises ValueError unless every class of the data has a name of its own; warns if the data has no class of each sample."""
    seen: set[str] = set()
    for number, name in enumerate(classes):
        if (
            not isinstance(name, str)
            or not name.strip()
            or len(name) > LONGEST_NAME
            or not name.isprintable()
        ):
            raise ValueError(
                f"{call} must return names of 1 to {LONGEST_NAME} characters as classes; class {number} has {name!r:.80}"
            )
        if name in seen:
            raise ValueError(
                f"{call} must return another name for each class as classes; {name!r} comes twice"
            )
        seen.add(name)
    if labels is None:
        warnings.warn(
            f"the names in `classes` cannot be shown, and batches not stratified: the dataset of {call} "
            "holds no class of each sample. Give its class the attribute `targets`, a list or tensor of whole numbers from 0.",
            stacklevel=3,
        )
    elif labels.max() >= len(classes):
        raise ValueError(
            f"{call} must return the names of all classes as classes; got {len(classes)}, and the data has labels up to {labels.max()}"
        )


def _bound_names(node: ast.stmt) -> list[str]:
    """Returns the names that a statement binds; "*" if that is only known when it runs."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [
            part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
        ]
    return [] if isinstance(node, ast.Expr) else ["*"]


def _local_imports(path: Path, found: dict[Path, ast.Module]) -> dict[Path, ast.Module]:
    """Returns the code, by path, of a file and of the modules in its folder that it imports, directly or not."""
    found[path] = ast.parse(path.read_bytes())
    for node in ast.walk(found[path]):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for module in modules:
            beside = path.parent / f"{module.replace('.', '/')}.py"
            if beside.is_file() and beside not in found:
                _local_imports(beside, found)
    return found
