"""The examples in docstrings run, and every public class and function has one."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lightning_cases  # noqa: F401  # prepares the import of lightning
import thresher
from thresher import rng

SOURCE = Path(thresher.__file__).parent
ENTRIES = {"thresher_lab.cli.__main__"}
"""Modules that run a command when they are imported."""

VOCABULARY = ("plans", "records", "schedules", "selection", "cost", "permutation", "rng")
PUBLIC = (
    *VOCABULARY,
    "methods.contract",
    "methods.registry",
    "rl",
    "losses.signals",
    "testing.check",
    "testing.toys",
)
PUBLIC_PACKAGES = ("scores",)


def modules_with_examples() -> Iterator[str]:
    for path in sorted(
        path
        for package in (SOURCE, SOURCE.with_name("thresher_lab"))
        for path in package.rglob("*.py")
    ):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture
def undisturbed(tmp_path, monkeypatch):
    """Random states and the working directory are as before when an example has run."""
    monkeypatch.chdir(tmp_path)
    with rng.undisturbed(torch.device("cpu")):
        yield


@pytest.mark.parametrize("name", sorted(set(modules_with_examples()) - ENTRIES))
def test_examples_run(name, undisturbed):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted, f"no example of {name} is found"
    assert not result.failed, "the failures are printed above"


def public_modules() -> Iterator[ModuleType]:
    for name in PUBLIC:
        yield importlib.import_module(f"thresher.{name}")
    for name in PUBLIC_PACKAGES:
        package = importlib.import_module(f"thresher.{name}")
        yield package
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                yield importlib.import_module(f"thresher.{name}.{module.name}")


def public_names() -> dict[str, object]:
    """Public classes and functions by dotted name: of `thresher` and the public modules, and the functions of `subset`."""
    found = {f"thresher.{name}": getattr(thresher, name) for name in thresher.__all__}
    for module in public_modules():
        own = {
            name: value
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        }
        found |= {
            f"{module.__name__}.{name}": value
            for name, value in own.items()
            if not name.startswith("_")
        }
    functions = inspect.getmembers(importlib.import_module("thresher.subset"), inspect.isfunction)
    found |= {
        f"thresher.subset.{name}": value for name, value in functions if not name.startswith("_")
    }
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value) or inspect.isfunction(value)
    }


def test_every_public_name_has_an_example():
    found = public_names()
    assert {
        "thresher.attach",
        "thresher.Kakurenbo",
        "thresher.selection.largest",
        "thresher.subset.subset_backward",
    } <= set(found)
    homes = {
        f"{value.__module__}.{value.__qualname__}"
        for value in found.values()
        if ">>> " not in (value.__doc__ or "")
    }
    assert not homes, (
        f"{len(homes)} public classes and functions without an example: {', '.join(sorted(homes))}"
    )
