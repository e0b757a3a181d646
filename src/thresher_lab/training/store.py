"""The folder of a comparison, one file per finished run, and the checkpoints of runs."""

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, Protocol

import torch
from torch.utils._pytree import tree_map_only

import thresher
from thresher_lab.training.files import Manifest, StoredRun, read_checked
from thresher_lab.training.folders import check_folder, sole_use
from thresher_lab.training.processes import number_of_processes, of_each_process, of_first, own_rank

MANIFEST = "comparison.json"
RESULTS = "results.json"
RUNS = "runs"
LOOKS = "rates"
"""Folder of the runs that learning rates are chosen by, within that of the comparison."""
BESIDE = {"samples": ".parquet", "shown": ".shown"}
"""Endings of the files beside a run: the history of its samples, and what some of them look like."""
DEFAULTS = {"processes": 1}
"""Values of an identity that files do not have which were written before there were others."""


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the block ends; if the block fails, `path` stays as it was."""
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
    """Writes strict JSON, whole or not at all; a value that JSON cannot represent is written as its `repr`."""
    text = json.dumps(content, indent=1, allow_nan=False, default=repr) + "\n"
    with whole(path) as file:
        file.write(text.encode())


def versions() -> dict[str, str]:
    """Returns the versions of the software that results depend on, by name."""
    others = {name: version(name) for name in ("torch", "numpy", "accelerate")}
    return {"thresher": thresher.__version__, "python": platform.python_version(), **others}


class Store:
    """The files of one comparison; methods and seeds can be added later.

    Args:
        folder: Folder of the files; it is created if it does not exist.
        identity: Values by name that all runs in the folder share; a folder with another identity is refused.

    Raises:
        ValueError: The folder holds finished runs of another comparison, or is not a folder but a file.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self._path = folder / MANIFEST
        check_folder(folder)
        self._manifest: dict[str, Any] = {"backward_to_forward": None, **identity}
        if self._path.exists():
            self._manifest = read_checked(
                self._path, Manifest, f"Give another --out, or delete the folder {folder}"
            )
        elif any(self.runs.glob("*.json")):
            raise ValueError(f"--out {folder} contains runs but no {MANIFEST}; give another folder")
        for name, value in identity.items():
            held = self._manifest.get(name, DEFAULTS.get(name))
            if not _is_same(name, held, value):
                if any(self.runs.glob("*.json")):
                    raise ValueError(
                        f"--out {folder} holds {_difference(name, held, value, identity)}"
                    )
                self._manifest = {"backward_to_forward": None}
                break
        self._manifest |= identity
        self._save_manifest()

    @property
    def backward_to_forward(self) -> float | None:
        """The ratio of backward to forward time for all costs in this folder; None before it was measured."""
        return self._manifest["backward_to_forward"]

    @property
    def lengths(self) -> dict[str, dict[str, Any]]:
        """For each method the length of its control in the same time: `share` of the epochs, `clock`, and number of `seeds`."""
        return self._manifest.get("lengths", {})

    def remember(self, **values: Any) -> None:
        """Writes values into comparison.json.

        Args:
            **values: `backward_to_forward` and `lengths`, see the properties of these names.
        """
        self._manifest |= values
        self._save_manifest()

    def looks_with(self, sizes: Iterable[int]) -> int:
        """Returns how often the verdicts of this folder are looked at, with other numbers of seeds each time, and remembers it.

        Args:
            sizes: Numbers of seeds at which they are looked at.
        """
        all_sizes = sorted({*sizes, *self._manifest.get("looked_at", [])})
        self.remember(looked_at=all_sizes)
        return len(all_sizes)

    def run(self, key: str) -> dict[str, Any] | None:
        """Returns a finished run; None if there is none."""
        path = self._file(key)
        if path.exists():
            return read_checked(
                path, StoredRun, "Delete the file; the same command trains the run again"
            )
        return None

    def save_run(self, key: str, run: dict[str, Any]) -> None:
        """Writes the file of a finished run."""
        write_json(self._file(key), run)

    @property
    def runs(self) -> Path:
        """The folder of the finished runs."""
        return self.folder / RUNS

    def beside(self, key: str) -> dict[str, str]:
        """Returns the paths of a run's other files, "samples" and "shown", relative to the folder, as far as they exist."""
        paths = {name: self.runs / f"{key}{suffix}" for name, suffix in BESIDE.items()}
        return {
            name: path.relative_to(self.folder).as_posix()
            for name, path in paths.items()
            if path.exists()
        }

    def save_results(self, results: dict[str, Any]) -> None:
        """Writes results.json."""
        write_json(self.folder / RESULTS, results)

    def _save_manifest(self) -> None:
        write_json(self._path, self._manifest)

    def _file(self, key: str) -> Path:
        return self.runs / f"{key}.json"


class ReadOnlyStore(Store):
    """The files of one comparison, which are read and never written.

    Args:
        folder: Folder of the files; it need not exist, and is not created.
        identity: Values by name that all runs in the folder share, see `Store`.

    Raises:
        ValueError: The folder holds finished runs of another comparison, or is not a folder but a file.
    """

    def _save_manifest(self) -> None:
        """Writes nothing."""


OF_RUNS = (".json", ".parquet", ".shown", ".epochs")
"""Suffixes of the files of runs."""


def restart(folder: Path) -> None:
    """Deletes the runs, the results and the report of a comparison; what else is in its folder stays.

    Args:
        folder: Folder of the comparison; it need not exist.

    Raises:
        ValueError: The folder of the runs is a link, or another comparison uses the folder.
        OSError: A file cannot be deleted; then the folder still holds the comparison.
    """
    if folder.is_dir():
        with sole_use(folder):
            _delete_runs(folder)


def _delete_runs(folder: Path) -> None:
    if (folder / LOOKS).is_dir():
        restart(folder / LOOKS)
    if not (folder / MANIFEST).is_file():
        return
    if (folder / RUNS).is_symlink():
        raise ValueError(
            f"--restart: {folder / RUNS} is a link; delete what it leads to yourself, or give another --out"
        )
    runs = [path for path in (folder / RUNS).glob("*") if path.suffix in OF_RUNS]
    for path in (*runs, folder / RESULTS, folder / "report.html", folder / MANIFEST):
        path.unlink(missing_ok=True)
    if (folder / RUNS).is_dir() and not any((folder / RUNS).iterdir()):
        (folder / RUNS).rmdir()


def _is_same(name: str, held: Any, value: Any) -> bool:
    """Returns whether two values of an identity are the same; the same script may be named by several paths."""
    if name == "task" and isinstance(held, str) and _script(held) and _script(value):
        return _script(held) == _script(value)
    return held == value


def _script(task: str) -> tuple[str, str] | None:
    """Returns the name of a script and its function; None for a task of this package."""
    path, _, function = task.rpartition(":")
    if path.endswith(".py"):
        return (re.split(r"[\\/]", path)[-1], function)
    return None


def _difference(name: str, held: Any, value: Any, identity: dict[str, Any]) -> str:
    """Returns what is wrong with a folder, and the ways out."""
    if name == "recipe" and "script" in (value or ()):
        file = identity["task"].rpartition(":")[0]
        return (
            f"runs of another version of {file}: it, or a file beside it that it imports, was changed since. Give --restart "
            "to delete them and begin anew, or another --out"
        )
    return (
        f"another comparison: its {name} is {_as_text(held)}, here it is {_as_text(value)}; give another folder, or --restart "
        "to delete its runs"
    )


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


class Stateful(Protocol):
    """The interface of an object that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restores a state."""
        ...


class Checkpoint:
    """The state of one training in a file, which is written whole or not at all.

    Several processes save and load it together; the first one writes and reads the file.

    Args:
        path: Path of the file, which need not exist yet.
        identity: Values by name that distinguish this training from others; the file of another training is refused, and so is
            that of another number of processes.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        described = {**identity, "number of processes": number_of_processes()}
        self.identity: dict[str, Any] = json.loads(json.dumps(described, default=repr))

    def save(
        self,
        parts: Mapping[str, Stateful],
        own: Mapping[str, Stateful] | None = None,
        **values: Any,
    ) -> None:
        """Writes the states of the parts and some plain values, and replaces the file that was there before.

        Args:
            parts: Parts by name that are the same in all processes.
            own: Parts by name of which each process has another state. Default: none.
            **values: Plain values.
        """
        states = {name: part.state_dict() for name, part in (own or {}).items()}
        of_each = of_each_process(tree_map_only(torch.Tensor, torch.Tensor.cpu, states))
        if own_rank() == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            with whole(self.path) as file:
                torch.save(
                    {"identity": self.identity, "parts": states, "own": of_each, "values": values},
                    file,
                )

    def load(
        self, parts: Mapping[str, Stateful], own: Mapping[str, Stateful] | None = None
    ) -> dict[str, Any]:
        """Restores the states of the parts from the file.

        Args:
            parts: Parts by name that are the same in all processes.
            own: Parts by name of which each process has another state. Default: none.

        Returns:
            The plain values; empty if there is no file.

        Raises:
            ValueError: The file is damaged or belongs to another training; no part was changed.
        """
        found = of_first(self._read() if own_rank() == 0 and self.path.is_file() else None)
        if found is None:
            return {}
        for name, part in parts.items():
            part.load_state_dict(found["parts"][name])
        for name, part in (own or {}).items():
            part.load_state_dict(found["own"][own_rank()][name])
        return found["values"]

    @property
    def epochs_in(self) -> Path:
        """Path of the file for the finished epochs of every sample, which belong to the checkpoint, see `Recording`."""
        return self.path.with_name(f"{self.path.name}.epochs")

    def delete(self) -> None:
        """Deletes the file and that of the finished epochs, if there are any."""
        if own_rank():
            return
        self.path.unlink(missing_ok=True)
        self.epochs_in.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            held = content["identity"]
        except (EOFError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
            # The message of torch would advise to load the file with weights_only=False.
            what = type(error).__name__
            raise ValueError(
                f"{self.path} is damaged ({what}); delete it, and the training starts anew"
            ) from error
        for name, value in self.identity.items():
            if held.get(name) != value:
                raise ValueError(
                    f"{self.path} is of another training: its {name} is {held.get(name)}, here it is {value}; give another "
                    "folder, or delete this file"
                )
        return content
