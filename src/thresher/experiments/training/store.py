"""The folder of a comparison: one file a finished run, written whole or not at all."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import thresher

MANIFEST = "comparison.json"
RESULTS = "results.json"


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end, all of it on the disk; where the block fails, none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write the file so that at no time it is there in part; strict JSON, and `repr` for what it has no form for."""
    text = json.dumps(content, indent=1, allow_nan=False, default=repr) + "\n"
    with whole(path) as file:
        file.write(text.encode())


def read_json(path: Path) -> Any:
    """Read a file that `write_json` wrote.

    Raises:
        ValueError: It is damaged; the message says what to do.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the same command makes it again") from error


def versions() -> dict[str, str]:
    """What the figures depend on, beside the machine."""
    others = {name: version(name) for name in ("torch", "numpy", "accelerate")}
    return {"thresher": thresher.__version__, "python": platform.python_version(), **others}


class Store:
    """The files of one comparison, which may be added to: more methods, more seeds.

    Args:
        folder: Made where it is not there.
        identity: What all runs in it share; a folder with another identity is refused.

    Raises:
        ValueError: The folder holds another comparison, or is a file.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self._path = folder / MANIFEST
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is a file; give a folder")
        self._manifest = read_json(self._path) if self._path.exists() else {"backward_to_forward": None, **identity}
        for name, value in identity.items():
            held = self._manifest.get(name)
            if held != value:
                raise ValueError(
                    f"--out {folder} holds another comparison: its {name} is {_plain(held)}, here it is {_plain(value)}; "
                    "give another folder, or delete this one"
                )
        write_json(self._path, self._manifest)

    @property
    def backward_to_forward(self) -> float | None:
        """The ratio that all costs in this folder are held to; None before it was measured."""
        return self._manifest["backward_to_forward"]

    @backward_to_forward.setter
    def backward_to_forward(self, ratio: float) -> None:
        self._manifest["backward_to_forward"] = ratio
        write_json(self._path, self._manifest)

    def run(self, key: str) -> dict[str, Any] | None:
        """A finished run, or None."""
        path = self._file(key)
        return read_json(path) if path.exists() else None

    def save_run(self, key: str, run: dict[str, Any]) -> None:
        """Keep a finished run."""
        write_json(self._file(key), run)

    @property
    def runs(self) -> Path:
        """Folder of the finished runs."""
        return self.folder / "runs"

    def samples(self, key: str) -> str | None:
        """The history of a run's samples, a path from the folder; None where none was kept."""
        path = self._file(key).with_suffix(".parquet")
        return path.relative_to(self.folder).as_posix() if path.exists() else None

    def save_results(self, results: dict[str, Any]) -> Path:
        """Write results.json and say where it is."""
        write_json(self.folder / RESULTS, results)
        return self.folder / RESULTS

    def _file(self, key: str) -> Path:
        return self.runs / f"{key}.json"


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
