"""A method of the user's: a class in a file, or a registered method."""

import hashlib
import inspect
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from thresher.methods import parse as parse_settings
from thresher.methods import split_outside_brackets
from thresher_lab.tasks.script import Script
from thresher_lab.training.specs import FORMATS, MethodSpec, parse_methods
from thresher_lab.training.store import versions


@dataclass(frozen=True)
class FileSpec(MethodSpec):
    """A class in a file, with settings; `name` is that of the class.

    Args:
        file: Path of the file.
    """

    file: str = ""

    def load(self) -> type:
        """Returns the class of the method."""
        return class_in(self.file, self.name)


@cache
def class_in(file: str, name: str) -> Any:
    """Returns a class that a file defines.

    Args:
        file: Path of the file.
        name: Name of the class.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file has no such name, or it is not the class of a method.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file}: there is no such file")
    kind = Script.of(Path(file), name).load(None)
    if not isinstance(kind, type) or not hasattr(kind, "stage"):
        raise ValueError(f"{file}: {name} is not the class of a method, which has a `stage`")
    return kind


def parse(text: str) -> MethodSpec:
    """Returns the method that a text names, created once so that a mistake is found before anything is trained.

    Args:
        text: FILE.py:Class or the name of a registered method, either with settings, as in `thresher compare --methods`.

    Raises:
        ValueError: There is no such class, method or setting, or the text names several methods.
    """
    if text.endswith(".py"):
        raise ValueError(f"league: name the class of the file, as in {text}:MyMethod")
    if ".py:" not in text:
        try:
            specs = parse_methods(text)
        except ValueError as error:
            raise ValueError(f"league: {str(error).removeprefix('--methods: ')}") from error
        if len(specs) > 1 or not isinstance(specs[0], MethodSpec) or specs[0].name == "full":
            raise ValueError(f"league: give one method, and not full training; got {text!r}")
        return specs[0]
    file, _, rest = text.partition(".py:")
    if len(list(split_outside_brackets(rest, ","))) != 1:
        raise ValueError(f"league: give one class after {file}.py, got {rest!r}")
    spec = FileSpec(*parse_settings(rest, FORMATS), str(Path(f"{file}.py").resolve()))
    spec.create()
    return spec


def source_of(spec: MethodSpec) -> Path:
    """Returns the path of the file that defines a method.

    Args:
        spec: The method.
    """
    return Path(str(inspect.getsourcefile(type(spec.create()))))


def identity_of(spec: MethodSpec) -> dict[str, Any]:
    """Returns what the runs of a method depend on: its settings, the digest of its file, and the versions.

    Args:
        spec: The method.
    """
    return {
        "method": spec.label,
        "name": spec.name,
        "settings": spec.settings,
        "file": Script(source_of(spec), spec.name).recipe,
        "versions": versions(),
    }


def folder_of(spec: MethodSpec, runs: Path) -> Path:
    """Returns the folder of the runs of a method: another one for each change of its file, settings or versions.

    Args:
        spec: The method.
        runs: Folder of all methods.
    """
    text = json.dumps(identity_of(spec), sort_keys=True, default=repr)
    return runs / f"{spec.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
