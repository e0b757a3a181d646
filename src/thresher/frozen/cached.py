"""A frozen module whose outputs are computed once for each row, and read from then on."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from operator import is_
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from thresher.frozen.keys import row_keys
from thresher.frozen.store import FileRows, MemoryRows, lock
from thresher.trees import own_attributes
from thresher.warning import warn

CHECKED = 200
"""One of so many rows that are read is computed again and compared."""
TIMED = 10
"""Number of calls whose times are compared."""
FEWEST_HITS = 0.01
"""Share of rows read in an epoch below which the run says why that usually is."""
SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
"""Types of arguments that are compared by value."""
ROUNDING = 1e-4
"""Largest difference between two computations of a row, as a share of the largest value."""
COARSE_ROUNDING = 0.02
"""The same if values with fewer than 32 bits take part."""

WAY_OUT = "Cache a module that computes each row from this row alone, and always the same."


class OutputLayout:
    """Where the outputs of a row lie in its bytes.

    Args:
        outputs: Tensors that the module returned, with the rows in their first dimension.
        spec: Structure of the outputs.
        dtype: Type that floating-point outputs are stored in; None for their own.
    """

    def __init__(self, outputs: list[Tensor], spec: Any, dtype: torch.dtype | None) -> None:
        self.spec = spec
        self._parts: list[tuple[torch.Size, torch.dtype, torch.dtype, torch.device]] = []
        for output in outputs:
            if dtype is not None and output.is_floating_point():
                stored = dtype
            else:
                stored = output.dtype
            self._parts.append((output.shape[1:], output.dtype, stored, output.device))
        self.size = sum(self._sizes())
        """Number of bytes of a row."""
        about = repr([str(spec), *(part[:3] for part in self._parts)])
        self.name = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
        """Checksum of the structure, the shapes and the types."""

    def _sizes(self) -> list[int]:
        return [shape.numel() * stored.itemsize for shape, _, stored, _ in self._parts]

    def fits(self, outputs: list[Tensor], spec: Any) -> bool:
        """Returns whether outputs have this layout."""
        parts = [(output.shape[1:], output.dtype) for output in outputs]
        return spec == self.spec and parts == [part[:2] for part in self._parts]

    def pack(self, outputs: list[Tensor]) -> np.ndarray:
        """Returns the bytes of each row, shape (n, size), uint8."""
        blocks = []
        for output, (_, _, stored, _) in zip(outputs, self._parts, strict=True):
            rounded = output.detach().to(stored)
            if stored != output.dtype and bool((rounded.isinf() & output.isfinite()).any()):
                raise ValueError(
                    f"cached: an output is too large for {stored}. Pass dtype=torch.bfloat16, or no `dtype`."
                )
            rows = rounded.cpu().contiguous().reshape(len(output), -1)
            blocks.append(rows.view(torch.uint8).numpy())
        return np.concatenate(blocks, axis=1)

    def round(self, outputs: list[Tensor]) -> list[Tensor]:
        """Returns outputs as they are after storing them."""
        pairs = zip(outputs, self._parts, strict=False)
        return [output.to(stored).to(own) for output, (_, own, stored, _) in pairs]

    def unpack(self, rows: np.ndarray) -> list[Tensor]:
        """Returns the outputs of rows of bytes, on the device of the module's outputs."""
        outputs = []
        begin = 0
        for size, (shape, own, stored, device) in zip(self._sizes(), self._parts, strict=True):
            content = torch.from_numpy(rows[:, begin : begin + size].copy())
            outputs.append(content.view(stored).reshape(len(rows), *shape).to(device, own))
            begin += size
        return outputs


class Group:
    """The rows of calls with inputs of one shape, type and structure, and equal other arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layout: OutputLayout | None = None
        self.rows: MemoryRows | FileRows | None = None

    def open_files(self, folder: Path) -> FileRows:
        """Opens or creates the files of the rows; outputs of another layout have other files."""
        assert self.layout is not None
        return FileRows(folder / f"{self.name}-{self.layout.name}", self.layout.size)


class Usefulness:
    """Warns, once each, if almost no row is read, or if looking rows up takes longer than computing them.

    Args:
        name: Class of the cached module.
        epoch: Function that returns the number of the epoch of a run.
        samples: Number of samples of its dataset, 0 if unknown.
    """

    def __init__(self, name: str, epoch: Callable[[], int], samples: int) -> None:
        self._name = name
        self._epoch = epoch
        self._samples = samples
        self._first = epoch()
        self._counted = (self._first, 0, 0)
        """Number of the epoch, and of hits and misses before it."""
        self._told = False
        self.calls = 0
        self.lookup_s = 0.0
        self.compute_s = 0.0
        self.computed = 0

    def count_epoch(self, hits: int, misses: int) -> None:
        """Notes the numbers of rows that were read and computed before a call."""
        number, hits_before, misses_before = self._counted
        now = self._epoch()
        if now == number:
            return
        read = hits - hits_before
        rows = read + misses - misses_before
        # A method that leaves samples out may not have come back to any of them yet.
        again = number > self._first and misses >= 2 * self._samples
        if again and read < FEWEST_HITS * rows and not self._told:
            self._told = True
            warn(
                f"cached: {read:,} of {rows:,} rows of epoch {number} were read. Rows that differ in each epoch are computed each "
                "time. Usual reasons are random augmentation, and padding to the longest row of a batch: pad to a fixed length, "
                "or use batches by length in a fixed order."
            )
        self._counted = now, hits, misses

    def judge_time(self, rows: int) -> None:
        """Compares the times after the first calls.

        Args:
            rows: Number of rows of all calls.
        """
        self.calls += 1
        if self.calls != TIMED or not self.computed:
            return
        lookup = self.lookup_s / rows * 1e6
        compute = self.compute_s / self.computed * 1e6
        if lookup > compute:
            warn(
                f"cached: looking up a row takes {lookup:.0f} us, and computing it with {self._name} takes {compute:.0f} us. Call "
                "the module itself."
            )


class Cached(nn.Module):
    """Reads the outputs of a frozen module that were computed for the same row before; see `cached`.

    Attributes:
        module: The frozen module.
        hits: Number of rows that were read.
        misses: Number of rows that were computed.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        memory: int | None = None,
        path: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        remember: Callable[[Any, Any], None] = lambda inputs, outputs: None,
        epoch: Callable[[], int] = lambda: 0,
        samples: int = 0,
    ) -> None:
        super().__init__()
        self.module = module
        self.hits = 0
        self.misses = 0
        self._memory = memory
        self._path = None if path is None else Path(path)
        self._locked = False
        self._dtype = dtype
        self._remember = remember
        self._usefulness = Usefulness(type(module).__name__, epoch, samples)
        self._groups: dict[str, Group] = {}
        self._compared: set[Any] = set()
        self._stamp: tuple[list[Any], list[Tensor]] | None = None
        self._full = False
        self._unchecked = 0
        self._check_frozen()
        self._draws = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def extra_repr(self) -> str:
        """Returns the numbers of rows and bytes for `repr`."""
        return self.summary()

    def summary(self) -> str:
        """Returns how many rows were read and computed, and how many bytes are stored, as one line."""
        stored = "" if self._dtype is None else f" as {self._dtype}".replace("torch.", "")
        return f"{self.hits:,} rows read, {self.misses:,} computed, {self.stored_bytes / 2**20:,.1f} MB stored{stored}"

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of the stored rows."""
        stores = [group.rows for group in self._groups.values() if group.rows is not None]
        return sum(len(rows.places) * rows.size for rows in stores)

    def forget(self) -> None:
        """Removes all rows, also those in files."""
        for group in self._groups.values():
            if isinstance(group.rows, FileRows):
                group.rows.close()
        self._groups.clear()
        self._full = False
        if self._path is not None:
            for suffix in ("*.rows", "*.keys"):
                for file in self._path.glob(suffix):
                    file.unlink()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns, with the rows that were seen before read instead of computed."""
        # A compiled model calls this outside of its graphs. Importing the compiler takes seconds, so only then.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._read)(*args, **kwargs)
        return self._read(*args, **kwargs)

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        self._check_frozen()
        self._check_unchanged()
        useful = self._usefulness
        useful.count_epoch(self.hits, self.misses)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = _batched(leaves)
        n = len(leaves[places[0]])
        group = self._group(leaves, places, spec)
        keys = row_keys([leaves[place] for place in places])
        known = {} if group.rows is None else group.rows.places
        hits = [row for row, key in enumerate(keys) if key in known]
        missing = [row for row, key in enumerate(keys) if key not in known]
        checked = self._choose_checked(hits)
        useful.lookup_s += perf_counter() - began
        fresh: list[Tensor] = []
        if missing or checked:
            rows = missing + checked
            # A batch of new rows is computed as it is, so that the first epoch is that of the plain loop.
            inputs = leaves if len(missing) == n else _take(leaves, places, rows)
            fresh, structure = self._compute(inputs, spec, len(rows))
            if len(missing) == n:
                self._check_parts(leaves, places, spec, fresh)
            if group.layout is None:
                group.layout = OutputLayout(fresh, structure, self._dtype)
            if not group.layout.fits(fresh, structure):
                self._raise_varying("returned other shapes or types than before")
        began = perf_counter()
        layout = group.layout
        assert layout is not None
        result = layout.round([part[: len(missing)] for part in fresh])
        if hits:
            assert group.rows is not None
            stored = layout.unpack(group.rows.read([known[keys[row]] for row in hits]))
            self._compare_stored(hits, checked, stored, [part[len(missing) :] for part in fresh])
            result = _merge(hits, stored, missing, result)
        if missing:
            self._store(group, [keys[row] for row in missing], fresh)
        self.hits += len(hits)
        self.misses += len(missing)
        useful.lookup_s += perf_counter() - began
        useful.judge_time(self.hits + self.misses)
        tree = pytree.tree_unflatten(result, layout.spec)
        self._remember((args, kwargs), tree)
        return tree

    # What is refused

    def _check_frozen(self) -> None:
        name = type(self.module).__name__
        for parameter, value in self.module.named_parameters():
            if value.requires_grad:
                raise ValueError(
                    f"cached: parameter `{parameter}` of {name} requires gradients, and outputs that are read have none. Call "
                    "module.requires_grad_(False) if it is frozen."
                )
        if any(part.training for part in self.module.modules()):
            raise ValueError(
                f"cached: {name} is in training mode, in which dropout and batch normalization give a row other outputs each "
                "time. Call module.eval(), and again after model.train() if it is a part of your model."
            )
        # Feature distillation reads the layers of a teacher so; a hook is not called for a row that is read.
        if any(part._forward_hooks for part in self.module.modules()):
            raise ValueError(
                f"cached: {name} or a part of it has a forward hook, which is not called for rows that are read. Let the module "
                "return what the hook takes."
            )

    def _check_unchanged(self) -> None:
        """Forgets everything if a parameter or buffer was changed."""
        # The tensors are held: a new one could otherwise lie at the address of one that is gone.
        tensors = [*self.module.parameters(), *self.module.buffers()]
        addresses = [(id(tensor), tensor.data_ptr()) for tensor in tensors]
        stamp = [*zip(addresses, _versions(tensors), strict=True)]
        if self._stamp is not None and stamp == self._stamp[0]:
            return
        if self._groups:
            warn(
                f"cached: the parameters or buffers of {type(self.module).__name__} were changed or moved, so all rows are "
                "computed again. Load and move the module before its first call."
            )
            self.forget()
        self._stamp = stamp, tensors
        if self._path is not None:
            self._claim(self._path)

    def _claim(self, path: Path) -> None:
        """Makes the folder one of this module: removes the files of another module or of other weights."""
        if not self._locked:
            finalize(self, lock(path).close)
            self._locked = True
        owner_file = path / "module.json"
        owner = {"module": _checksum(self.module), "dtype": str(self._dtype)}
        try:
            previous = json.loads(owner_file.read_text())
        except (OSError, ValueError):
            previous = None
        if previous != owner:
            if any(path.glob("*.keys")):
                warn(
                    f"cached: {path} has outputs of another module than this {type(self.module).__name__}, or of other weights. "
                    "They are removed."
                )
            # In this order, because a process can be killed in between: no rows of another module are left under this name.
            self.forget()
            owner_file.write_text(json.dumps(owner))

    def _check_parts(
        self, leaves: list[Any], places: list[int], spec: Any, outputs: list[Tensor]
    ) -> None:
        """Checks, once for each structure of the inputs, that the outputs of a row do not depend on the other rows."""
        n = len(leaves[places[0]])
        kind = str(spec), *places, *(leaves[place].dtype for place in places)
        if n < 2 or kind in self._compared:
            return
        rows = [*range(1, n, 2)]
        before = [value for part in self.module.modules() for _, value in own_attributes(part)]
        part, _ = self._compute(_take(leaves, places, rows), spec, len(rows))
        for whole, alone in zip(outputs, part, strict=True):
            if alone.shape[1:] != whole.shape[1:] or not _close(
                whole[rows], alone, self._rounding(alone)
            ):
                self._raise_varying("returned other outputs for a part of the batch")
        after = [value for part in self.module.modules() for _, value in own_attributes(part)]
        if len(before) != len(after) or not all(map(is_, before, after)):
            self._raise_varying("sets attributes in its forward, which rows that are read do not")
        self._compared.add(kind)

    def _rounding(self, output: Tensor) -> float:
        tensors = [*self.module.parameters(), *self.module.buffers(), output]
        types = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        if self._dtype is not None:
            types.append(self._dtype)
        coarse = any(dtype.itemsize < 4 for dtype in types)
        if coarse or torch.is_autocast_enabled(output.device.type):
            return COARSE_ROUNDING
        return ROUNDING

    def _raise_varying(self, fault: str) -> None:
        """Raises the error for a module whose rows are not independent.

        Args:
            fault: Predicate of the sentence about the module, such as "returned other shapes or types than before".
        """
        raise ValueError(
            f"cached: {type(self.module).__name__} {fault}: its outputs depend on the other rows, on random numbers or on a state. "
            f"{WAY_OUT}"
        )

    def _choose_checked(self, hits: list[int]) -> list[int]:
        """Returns which of the rows that are read are computed again: one of 200, drawn."""
        self._unchecked += len(hits)
        due = min(self._unchecked // CHECKED, len(hits))
        self._unchecked %= CHECKED
        if due:
            return sorted(self._draws.choice(hits, due, replace=False).tolist())
        return []

    def _compare_stored(
        self, hits: list[int], checked: list[int], stored: list[Tensor], again: list[Tensor]
    ) -> None:
        name = type(self.module).__name__
        for number, row in enumerate(checked):
            for expected, read in zip(again, stored, strict=True):
                computed = expected[number].flatten()
                old = read[hits.index(row)].flatten()
                if _close(computed, old, self._rounding(computed)):
                    continue
                at = int((computed.double() - old.double()).abs().argmax())
                raise RuntimeError(
                    f"cached: {name} computes {computed[at].item():.6g} for row {row} of the batch, value {at}, but "
                    f"{old[at].item():.6g} was stored. Its outputs depend on something other than this row. {WAY_OUT} To go on "
                    "without what is stored, call forget()."
                )

    # Computing and storing

    def _compute(self, leaves: list[Any], spec: Any, n: int) -> tuple[list[Tensor], Any]:
        """Calls the module, and returns the tensors of its outputs and their structure."""
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        versions = _versions(leaves)
        began = perf_counter()
        with torch.no_grad():
            outputs, structure = pytree.tree_flatten(self.module(*args, **kwargs))
        if _versions(leaves) != versions:
            raise ValueError(
                f"cached: {type(self.module).__name__} changes its inputs in place, which does not happen for rows that are read. "
                "Cache a module that leaves its inputs as they are: its first layer may have inplace=True."
            )
        useful = self._usefulness
        if useful.calls < TIMED and outputs and isinstance(outputs[0], Tensor):
            if outputs[0].device.type != "cpu":
                torch.accelerator.synchronize()
            useful.compute_s += perf_counter() - began
            useful.computed += n
        for output in outputs:
            if not isinstance(output, Tensor) or output.shape[:1] != (n,):
                if isinstance(output, Tensor):
                    found = tuple(output.shape)
                else:
                    found = type(output).__name__
                raise ValueError(
                    f"cached: every output of {type(self.module).__name__} must be a tensor with the {n} rows in its first "
                    f"dimension, got {found}. Cache the part of the module that returns such tensors."
                )
        return [output.detach() for output in outputs], structure

    def _group(self, leaves: list[Any], places: list[int], spec: Any) -> Group:
        """Returns the rows of calls like this one."""
        parts: list[Any] = [str(spec), torch.is_autocast_enabled(leaves[places[0]].device.type)]
        if parts[-1]:
            parts.append(torch.get_autocast_dtype(leaves[places[0]].device.type))
        for place, leaf in enumerate(leaves):
            if place in places:
                parts.append((tuple(leaf.shape[1:]), leaf.dtype))
            elif isinstance(leaf, Tensor):
                content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                parts.append((tuple(leaf.shape), leaf.dtype, content.numpy().tobytes()))
            else:
                parts.append(leaf)
        name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        if name not in self._groups:
            self._groups[name] = Group(name)
            if self._path is not None:
                self._open(self._groups[name], name, leaves, places, spec)
        return self._groups[name]

    def _open(
        self, group: Group, name: str, leaves: list[Any], places: list[int], spec: Any
    ) -> None:
        """Opens the files of a group if an earlier process has written them."""
        assert self._path is not None
        if any(self._path.glob(f"{name}-*.keys")):
            # One row shows how its bytes are to be read.
            outputs, structure = self._compute(_take(leaves, places, [0]), spec, 1)
            group.layout = OutputLayout(outputs, structure, self._dtype)
            group.rows = group.open_files(self._path)
            # One of the first rows that are read is computed again: the module may have other code than the earlier process.
            self._unchecked += CHECKED

    def _store(self, group: Group, keys: list[bytes], outputs: list[Tensor]) -> None:
        layout = group.layout
        assert layout is not None
        if group.rows is None:
            if self._path is None:
                group.rows = MemoryRows(layout.size)
            else:
                group.rows = group.open_files(self._path)
        rows = layout.pack([part[: len(keys)] for part in outputs])
        # A row may come twice in a batch.
        new = {key: number for number, key in enumerate(keys)}
        if self._path is None:
            if self._memory is None:
                free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                self._memory = free // 4
                logging.getLogger("thresher").info(
                    "cached: up to %s MB of memory are used.", self._memory >> 20
                )
            room = max(0, self._memory - self.stored_bytes) // max(1, layout.size)
            if room < len(new):
                self._warn_full(len(new) - room, layout.size)
                new = dict([*new.items()][:room])
        if new:
            group.rows.add([*new], rows[[*new.values()]])

    def _warn_full(self, rows: int, size: int) -> None:
        if not self._full:
            self._full = True
            needed = (self.stored_bytes + rows * size) / 2**20
            warn(
                f"cached: the memory limit of {(self._memory or 0) / 2**20:,.1f} MB is reached. The rows seen so far need "
                f"{needed:,.1f} MB. Further rows are computed in each epoch. Raise `memory`, pass `path` to keep rows in files, or "
                "`dtype` to store fewer bytes."
            )


def _batched(leaves: list[Any]) -> list[int]:
    """Returns which arguments have the rows of the batch in their first dimension."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *SIMPLE)):
            raise TypeError(
                f"cached: arguments must be tensors or plain values, got {type(leaf).__name__}, which cannot be compared with those of "
                "other calls"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(leaf.requires_grad for leaf in tensors) and torch.is_grad_enabled():
        raise ValueError(
            "cached: an input requires gradients, and outputs that are read have none. Call the module itself, or call this one "
            "under torch.no_grad()."
        )
    sizes = [len(leaf) for leaf in tensors if leaf.dim()]
    if not sizes or not sizes[0]:
        raise ValueError(
            "cached: one argument must be a tensor with the rows in its first dimension"
        )
    return [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == sizes[0]
    ]


def _versions(values: list[Any]) -> list[int]:
    """Returns how often each tensor was changed in place; 0 where that is not known."""
    return [
        value._version if isinstance(value, Tensor) and not value.is_inference() else 0
        for value in values
    ]


def _take(leaves: list[Any], places: list[int], rows: list[int]) -> list[Any]:
    """Returns the arguments for some rows of the batch."""
    return [leaf[rows] if place in places else leaf for place, leaf in enumerate(leaves)]


def _merge(
    rows: list[int], values: list[Tensor], others: list[int], other_values: list[Tensor]
) -> list[Tensor]:
    """Returns outputs of a batch, of which some rows have `values`, and the others `other_values`."""
    order = torch.tensor([*rows, *others]).argsort()
    if not others:
        return values
    return [
        torch.cat(pair)[order.to(pair[0].device)] for pair in zip(values, other_values, strict=True)
    ]


def _close(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Returns whether two computations of the same rows differ by rounding only.

    Args:
        one: Outputs.
        other: Outputs of the same rows.
        rounding: Largest difference, as a share of the largest value.
    """
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    scale = one.abs().nan_to_num(posinf=0).max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=rounding, atol=rounding * scale, equal_nan=True)


def _checksum(module: nn.Module) -> str:
    """Returns a checksum of the class of a module, its parameters and its buffers."""
    digest = hashlib.blake2b(repr(module).encode(), digest_size=16)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(content.numpy().data)
    return digest.hexdigest()


def cached(
    module: nn.Module,
    *,
    memory: int | None = None,
    path: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Cached:
    """Returns a module that computes the outputs of a frozen module once for each row, and reads them from then on.

    A row is recognized by its content: a checksum of 128 bits of the row of each input. So a row that is augmented, cropped or
    padded differently is computed, and only the rows of a batch that were not seen before are. Outputs are those that the
    module returned when it saw the row first; in batches of another size, they can differ from new ones by rounding.

    The module must compute each row from this row alone, and always the same. This is checked: at the first call, a part of the
    batch is computed again; later, one of 200 rows that are read is. Parameters and buffers that change are noticed, with a
    warning, and everything is computed again.

    Args:
        module: Module in evaluation mode, none of whose parameters requires gradients, such as a teacher, a reference model or a
            backbone. It takes tensors with the rows in their first dimension, and returns such tensors, in any nesting.
        memory: Largest number of bytes of the stored outputs; further rows are computed. Default: a quarter of the memory that
            is free when the first row is stored.
        path: Folder for files that hold the outputs, instead of memory. A later process with an equal module reads them, also
            after this one was killed. Each process needs a folder of its own.
        dtype: Type that floating-point outputs are rounded to and stored in, such as torch.float16. Default: their own.

    Raises:
        TypeError: An argument of a call is neither a tensor nor a plain value.
        ValueError: A parameter requires gradients, the module or a part of it is in training mode, it changes its inputs in
            place, or outputs do not have the rows in their first dimension, depend on the other rows or are too large for `dtype`.
        RuntimeError: A row that was computed again has other outputs than those that are stored, or `path` is in use.

    Example:
        >>> teacher = cached(nn.Linear(2, 3).requires_grad_(False).eval())
        >>> rows = torch.rand(4, 2)
        >>> torch.equal(teacher(rows), teacher(rows))
        True
        >>> teacher.hits, teacher.misses
        (4, 4)
    """
    return Cached(module, memory=memory, path=path, dtype=dtype)
