"""Common parts of the samplers: numbered epochs, division among processes, and positions to resume from."""

import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from thresher.permutation import PIECE, Permutation


class PickedOrder:
    """Ids in random order, computed when they are read.

    Args:
        ids: Ids, shape (k,), whole numbers.
        order: Permutation of the k ids. Default: none, the ids are already in order.

    Example:
        >>> PickedOrder(np.array([2, 2, 5]), Permutation(3, 0, 0)).piece(0, 3)
        array([2, 5, 2])
    """

    def __init__(self, ids: NDArray[Any], order: Permutation | None = None) -> None:
        self._ids = ids
        self._order = order

    def piece(self, begin: int, end: int, step: int = 1) -> NDArray[np.int64]:
        """Returns the ids at positions begin, begin + step, ... below `end`, int64."""
        places = (
            slice(begin, end, step) if self._order is None else self._order.piece(begin, end, step)
        )
        return self._ids[places].astype(np.int64)


class BatchOrder:
    """The batches of an epoch: an order of batch numbers, and a function `batch` from a number to ids.

    Args:
        ids: Ids, batch after batch, shape (k,).
        sizes: Number of ids of each batch; they add up to k.
        order: Permutation of the batches. Default: none, the batches are already in order.

    Example:
        >>> batches = BatchOrder(np.arange(5), np.array([2, 3]))
        >>> [batches.batch(number) for number in batches.piece(0, 2)]
        [[0, 1], [2, 3, 4]]
    """

    def __init__(
        self, ids: NDArray[Any], sizes: NDArray[np.int64], order: Permutation | None = None
    ) -> None:
        self._ids = ids
        self._ends = np.cumsum(np.append(0, sizes))
        self.piece = np.arange if order is None else order.piece

    def batch(self, number: int) -> list[int]:
        """Returns the ids of a batch, int64.

        Args:
            number: Number of the batch, 0 or more.
        """
        return self._ids[self._ends[number] : self._ends[number + 1]].tolist()


DEALERS = ("BatchSamplerShard", "_DatasetSamplerWrapper")
"""Classes of accelerate and Lightning, by name, that divide the order of a sampler among the processes."""
DISPATCHER = "DataLoaderDispatcher"
"""Class of accelerate that reads all batches in the first process, and sends them to the others (dispatch_batches=True)."""
PREPARED = ("DataLoaderShard", DISPATCHER)
"""Loaders of accelerate, by name, whose `iteration` is the number of the epoch."""


class EpochSampler(Sampler[Any]):
    """Base of samplers with numbered epochs, whose order is divided among W processes.

    Subclasses implement `order(epoch)`, with the same result in all processes, and the property `samples`.

    Args:
        seed: Random seed.
        num_replicas: Number of processes that share the order, 1 or more; None for the world size of torch.distributed.
        rank: Number of this process, within [0, num_replicas); required with `num_replicas`.
        drop_last: Whether to leave out the end of the order, instead of repeating its beginning, if the processes cannot get
            equally many items.
        **counts: Further arguments, which are only checked: each must be None or a whole number, 1 or more.

    Attributes:
        epoch: Number of the next epoch, which the next loop over the sampler yields.
        consumed: Number of items (ids or batches) of this epoch that all processes together have already consumed.

    Raises:
        TypeError: `seed` or a count is not an integer.
        ValueError: `num_replicas` and `rank` do not fit together, or a count is below 1.
    """

    def __init__(
        self,
        seed: int,
        num_replicas: int | None,
        rank: int | None,
        drop_last: bool,
        **counts: int | None,
    ) -> None:
        name = type(self).__name__
        for argument, value in {"seed": seed, **counts}.items():
            if (
                not isinstance(value, int | np.integer | None)
                or isinstance(value, bool)
                or (value is None and argument == "seed")
            ):
                raise TypeError(f"{name}: `{argument}` must be a whole number, got {value!r}")
            if argument != "seed" and value is not None and value < 1:
                raise ValueError(f"{name}: `{argument}` must be 1 or more, got {value}")
        if (num_replicas is None) != (rank is None):
            raise ValueError(
                f"{name}: give `num_replicas` and `rank` together, got {num_replicas} and {rank}"
            )
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(
                f"{name}: `rank` must be within [0, num_replicas), got {rank} and {num_replicas}"
            )
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.drop_last = drop_last
        self.epoch = self.consumed = 0
        self._begun: EpochIds | None = None

    # Not `batch_size`: accelerate leaves out batches of another size than the batch_size of their sampler.
    _rows_per_item = 1

    @property
    def total(self) -> int:
        """Number of items (ids or batches) of an epoch in all processes together."""
        if self.drop_last:
            return self.samples // self._rows_per_item
        return -(-self.samples // self._rows_per_item)

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        raise NotImplementedError

    def order(self, epoch: int) -> Permutation | PickedOrder | BatchOrder:
        """Returns the order of an epoch for all processes together; every process must get the same.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        raise NotImplementedError

    def set_epoch(self, epoch: int, consumed: int | None = None) -> None:
        """Sets the epoch that the next loop over the sampler yields.

        Args:
            epoch: Number of the epoch, 0 or more.
            consumed: Number of items (ids, or batches of a batch sampler) of this epoch that all processes together have
                already consumed. The next loop yields the rest; `len` still counts a whole epoch. Default: 0, or what an
                earlier call set for this epoch, if no loop has used it yet.

        Raises:
            TypeError: A number is not an integer.
            ValueError: A number is out of its range, or an earlier call set the rest of another epoch and no loop has used it
                yet.
        """
        epoch = operator.index(epoch)
        consumed = None if consumed is None else operator.index(consumed)
        name = f"{type(self).__name__}.set_epoch"
        if epoch < 0:
            raise ValueError(f"{name}: `epoch` must be 0 or more, got {epoch}")
        # Trainers call set_epoch(epoch) before each epoch: that must not reset the position of a resumed epoch.
        if consumed is None and self.consumed:
            if epoch != self.epoch:
                raise ValueError(
                    f"{name}: an earlier call set epoch {self.epoch} to continue after {self.consumed} items, but this call "
                    f"sets epoch {epoch}. To begin epoch {epoch} from its start, pass consumed=0."
                )
            return
        # With `drop_last`, the processes leave out the end of `total`; otherwise they go on behind it.
        most = max(self.total, len(self) * self.dealing()[0]) if consumed else 0
        if consumed and not 0 <= consumed <= most:
            raise ValueError(
                f"{name}: `consumed` must be a number of items of all processes together, 0 to {most}, got {consumed}. At the end "
                "of an epoch, pass `total`."
            )
        if self._begun is not None and self._begun.epoch != epoch:
            self._begun.left_for = epoch
        self.epoch = epoch
        self.consumed = consumed or 0
        self._begun = None

    def begin_pass(self) -> tuple[int, int]:
        """Begins a loop over the sampler, and returns its epoch and the items already consumed."""
        begun = self.epoch, self.consumed
        self.epoch = self.epoch + 1
        self.consumed = 0
        return begun

    def dealing(self) -> tuple[int, int]:
        """Returns the number of processes that share the order, and the number of this process."""
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size(), distributed.get_rank()
        return 1, 0

    def __len__(self) -> int:
        """Returns the number of items that this process gets in an epoch."""
        return self.share_of(self.total)

    def share_of(self, items: int) -> int:
        """Returns the number of items per process.

        Args:
            items: Number of items, 0 or more.
        """
        replicas, _ = self.dealing()
        return items // replicas if self.drop_last else -(-items // replicas)

    def __iter__(self) -> "SamplerPass":
        replicas = self.dealing()[0]
        dealer = self._check_loop()
        if dealer and replicas > 1:
            raise RuntimeError(
                f"{type(self).__name__} divides its order among {replicas} processes, and so does the loader that accelerate "
                "or Lightning prepared: each process would get a part of a part. Pass num_replicas=1, rank=0 to the sampler; "
                "or, with Lightning, use_distributed_sampler=False to the Trainer."
            )
        divided = replicas > 1 or dealer in DEALERS
        by_world = divided and distributed.is_available() and distributed.is_initialized()
        return SamplerPass(
            self, compares=by_world and replicas in (1, distributed.get_world_size())
        )

    def _check_loop(self) -> str | None:
        """Checks the dataset of the loader that loops over the sampler, and sets the epoch of the training.

        Returns:
            The class that divides the order, if any.
        """
        # A sampler is not told who loops over it: only the calls that lead here know the dataset and other divisions.
        frame = sys._getframe(2)
        dealer: str | None = None
        dataset: Any = None
        epoch: int | None = None
        combines = False
        while frame is not None:
            caller = frame.f_locals.get("self")
            name = type(caller).__name__
            if name in PREPARED and epoch is None:
                epoch = getattr(caller, "iteration", None)
            # Lightning begins the first loop of a resumed training before it calls set_epoch.
            combines = combines or (name, frame.f_code.co_name) == ("CombinedLoader", "__iter__")
            if name == "_FitLoop" and combines and epoch is None:
                epoch = epoch_of_fit(caller)
            if name in (*DEALERS, DISPATCHER):
                dealer = name
            elif isinstance(
                caller, Dataset
            ):  # a dataset with a loop of its own; the loaders further up load something else
                break
            elif isinstance(caller, _BaseDataLoaderIter) and dataset is None:
                dataset = caller._dataset
            frame = frame.f_back
        if hasattr(dataset, "__len__"):
            self.check_size(len(dataset))
        if epoch is not None:
            self.set_epoch(epoch)
        return dealer

    def check_size(self, size: int) -> None:
        """Checks that a dataset has as many samples as the sampler.

        Args:
            size: Number of samples of the dataset.

        Raises:
            ValueError: It has more or fewer.
        """
        if size != self.samples:
            raise ValueError(
                f"{type(self).__name__} is made for {self.samples} samples, but the dataset of the loader has {size}. Give a "
                "weight, label or length for each of them, or the loader a torch.utils.data.Subset."
            )

    def check_alike(self, **position: int | None) -> None:
        """Refuses settings that differ between the processes; all of them call it together.

        Args:
            **position: Epoch and number of consumed items at which the loop begins.
        """
        facts = self.settings() | {"drop_last": self.drop_last} | position
        gathered: list[Any] = [facts] * distributed.get_world_size()
        distributed.all_gather_object(gathered, facts)
        for rank, others in enumerate(gathered):
            names = [name for name, value in gathered[0].items() if others.get(name) != value]
            if names:
                raise RuntimeError(
                    f"{type(self).__name__}: rank {rank} differs from rank 0 in {', '.join(names)}, so samples would be lost. "
                    "Use the same in all processes: compute it in one and send it with torch.distributed.broadcast_object_list."
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the current epoch, or the start of the next epoch; the same in all processes.

        The position counts items drawn from the sampler, and the workers of a DataLoader draw batches ahead. torchdata's
        StatefulDataLoader saves the right position. Without it, save `{**state, "consumed": min(steps * items, total)}`, with
        the items per step of all processes.

        Returns:
            Plain values: seed, number of samples, epoch, and the number of items that all processes together have consumed.
        """
        begun = self._begun
        if begun is None or begun.epoch is None or begun.finished:
            return self.state_at(self.epoch, self.consumed)
        return self.state_at(begun.epoch, begun.consumed)

    def state_at(self, epoch: int, consumed: int) -> dict[str, Any]:
        """Returns the state at a given position.

        Args:
            epoch: Number of the epoch.
            consumed: Number of items of this epoch that all processes together have consumed.
        """
        return {**self.settings(), "epoch": epoch, "consumed": min(consumed, self.total)}

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for arrays a checksum."""
        batch = {} if self._rows_per_item == 1 else {"batch_size": self._rows_per_item}
        return {"seed": self.seed, "samples": self.samples, **batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position, from which the next loop continues; the number of processes may differ.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: The state was saved by a sampler with other settings.
        """
        for name, value in self.settings().items():
            if state.get(name) != value:
                raise ValueError(
                    f"{type(self).__name__}: the state has {name}={state.get(name)!r}, but this sampler has {value!r}, and so "
                    "another order. Create the sampler with the same arguments as the saved one."
                )
        self.set_epoch(state["epoch"], state["consumed"])


def epoch_of_fit(loop: Any) -> int:
    """Returns the epoch that the fit loop of Lightning is about to train.

    Args:
        loop: The loop; after a resume it may not have counted an epoch whose last batch was trained on.
    """
    progress = loop.epoch_progress.current
    if loop.restarting and loop.epoch_loop.batch_progress.is_last_batch:
        return progress.started
    return progress.processed


def even_sizes(rows: int, batches: int) -> NDArray[np.int64]:
    """Returns the numbers of rows of batches that differ by one at most, shape (batches,).

    Args:
        rows: Number of rows of all batches together.
        batches: Number of batches.

    Example:
        >>> even_sizes(7, 3)
        array([2, 2, 3])
    """
    return np.diff(np.arange(batches + 1, dtype=np.int64) * rows // batches)


def permute_batches(
    rows: NDArray[Any], sizes: NDArray[np.int64], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows of batches in another order of the batches, and the ends of the batches, after a leading 0.

    Args:
        rows: Rows, batch after batch, shape (k,).
        sizes: Numbers of rows of the batches.
        order: Permutation of the batches.

    Example:
        >>> permute_batches(np.array([5, 6, 7]), np.array([2, 1]), np.array([1, 0]))
        (array([7, 5, 6]), array([0, 1, 3]))
    """
    begins = np.append(0, sizes.cumsum())
    parts = [rows[begins[number] : begins[number + 1]] for number in order.tolist()]
    # The empty array gives the dtype if there is no batch.
    taken = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    return taken.astype(np.int64), np.append(0, sizes[order].cumsum())


class BatchComposer(EpochSampler):
    """Base of batch samplers that compose the batches of any samples, such as those that a method keeps in an epoch.

    Subclasses implement `compose`, with the same result in all processes. `thresher.attach` accepts a loader whose batch
    sampler has this function, also one of another class.
    """

    once = True
    """Whether no sample comes twice in an epoch."""

    def compose(
        self, ids: NDArray[np.int64], epoch: int, batches: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the batches of an epoch for all processes together.

        Args:
            ids: Ids of the samples to train on, shape (k,), ascending.
            epoch: Number of the epoch, 0 or more.
            batches: Number of batches, each with fewer rows than usual. Default: as many as these samples fill.

        Returns:
            The ids of all rows in the order of training, shape (rows,), int64, and the number of rows up to the end of each
            batch, after a leading 0, shape (batches + 1,).

        Raises:
            ValueError: `batches` was given, and the batches cannot have fewer rows.
        """
        raise NotImplementedError

    def _batch_sizes(self, rows: int, batches: int | None = None) -> NDArray[np.int64]:
        """Returns the numbers of rows of the batches of an epoch; with `drop_last`, some rows are in none.

        Args:
            rows: Number of samples to train on.
            batches: Number of batches, as for `compose`.
        """
        size = self._rows_per_item
        if batches is not None:
            # With drop_last, the same share of the rows that full training does not drop.
            whole = min(self.samples, self.total * size)
            return even_sizes(round(rows * whole / self.samples), batches)
        # An epoch of less than one batch keeps it: with drop_last it would have no step.
        if self.drop_last and not rows < size <= self.samples:
            rows -= rows % size
        return np.diff(np.append(np.arange(0, rows, size), rows))

    def order(self, epoch: int) -> BatchOrder:
        """Returns the batches of an epoch of all samples, as `BatchOrder`.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        rows, ends = self.compose(np.arange(self.samples), epoch)
        return BatchOrder(rows, np.diff(ends))


class EpochIds:
    """The items of one loop over a sampler, read in pieces, as the loader of a run needs them.

    Args:
        sampler: The sampler.
        epoch: Number of the epoch. Default: the next epoch of the sampler, at the position that was set for it.
        consumed: Number of items that all processes together have already consumed, if `epoch` is given.
    """

    def __init__(self, sampler: EpochSampler, epoch: int | None = None, consumed: int = 0) -> None:
        self._sampler = sampler
        self._first = consumed
        self.epoch = epoch
        """Epoch of the pass; None until it begins."""
        self.left_for: int | None = None
        """Epoch that `set_epoch` has set since the pass began, if it is another one."""
        self._place = 0
        self._order: Any = None
        self._ahead = torch.empty(0, dtype=torch.int64)
        self.unused = 0
        """Number of items that were taken but not used yet."""

    @property
    def consumed(self) -> int:
        """Number of items that all processes together have used."""
        return self._first + (self._place - self.unused) * self._sampler.dealing()[0]

    @property
    def finished(self) -> bool:
        """Whether every item was used."""
        return self._place - self.unused >= self._items

    @property
    def _items(self) -> int:
        """Number of items of this process."""
        return self._sampler.share_of(max(0, self._sampler.total - self._first))

    def take(self, k: int) -> Tensor:
        """Returns the next `k` items, int64; fewer when they run out."""
        if len(self._ahead) < k:
            self._ahead = torch.cat([self._ahead, self._made(max(PIECE, k - len(self._ahead)))])
        ids = self._ahead[:k]
        self._ahead = self._ahead[k:]
        self._place += len(ids)
        return ids

    def _begin(self) -> Any:
        if self._order is None:
            if self.epoch is None:
                self.epoch, self._first = self._sampler.begin_pass()
            self._sampler._begun = self
            self._order = self._sampler.order(self.epoch)
        return self._order

    def item_of(self) -> Any:
        """Returns the function from a number in the order to its item; None if the numbers are ids."""
        return getattr(self._order, "batch", None)

    def _made(self, k: int) -> Tensor:
        """Returns up to `k` items after those that were already computed."""
        order = self._begin()
        replicas, rank = self._sampler.dealing()
        total = self._sampler.total
        first = self._place + len(self._ahead)
        places = range(self._first + rank, self._first + rank + self._items * replicas, replicas)[
            first : first + k
        ]
        end = min(places.stop, total)
        ids = torch.from_numpy(order.piece(min(places.start, end), end, replicas))
        # The processes get equally many items, so the last position may lie behind the end, where the order begins again.
        again = [
            torch.from_numpy(order.piece(p % total, p % total + 1)) for p in places[len(ids) :]
        ]
        return torch.cat([ids, *again])


class SamplerPass(Iterator[Any]):
    """Iterator over one epoch of a sampler, as Python numbers or lists. torchdata's StatefulDataLoader saves its position.

    Args:
        sampler: The sampler.
        compares: Whether to compare the settings of all processes at the first item.
    """

    def __init__(self, sampler: EpochSampler, *, compares: bool) -> None:
        self._sampler = sampler
        self._ids = EpochIds(sampler)
        self._compares = compares
        self._rest: Iterator[int] = iter(())
        self._item_of: Any = None

    def __next__(self) -> Any:
        item = next(self._rest, None)
        if item is None:
            self._rest = iter(self._ids.take(PIECE).tolist())
            if self._compares:
                self._compares = False
                self._sampler.check_alike(epoch=self._ids.epoch, consumed=self._ids._first)
            self._ids.unused = operator.length_hint(self._rest)
            self._item_of = self._ids.item_of()
            item = next(self._rest)
        if self._ids.left_for is not None:
            raise RuntimeError(
                f"{type(self._sampler).__name__}: set_epoch({self._ids.left_for}) was called after a loop over epoch "
                f"{self._ids.epoch} had begun, as if its batches were of epoch {self._ids.left_for}. Call set_epoch before "
                "the loop begins; with workers, before iter(loader)."
            )
        self._ids.unused -= 1
        return item if self._item_of is None else self._item_of(item)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, which is the same in all processes; see `EpochSampler.state_dict`."""
        if self._ids.epoch is None:
            return self._sampler.state_at(self._sampler.epoch, self._sampler.consumed)
        return self._sampler.state_at(self._ids.epoch, self._ids.consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position, from which the iterator continues; the number of processes may differ.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: The state was saved by a sampler with other settings.
        """
        self._sampler.load_state_dict(state)
        self._ids = EpochIds(self._sampler, *self._sampler.begin_pass())
        self._rest = iter(())
