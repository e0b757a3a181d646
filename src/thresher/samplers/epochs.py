"""Common parts of the samplers: numbered epochs, division among processes, and positions to resume from."""

import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import distributed
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
        if self._order is None:
            places = slice(begin, end, step)
        else:
            places = self._order.piece(begin, end, step)
        return self._ids[places].astype(np.int64)


class BatchOrder:
    """The batches of an epoch, by their numbers.

    Args:
        ids: Ids, batch after batch, shape (k,).
        ends: Number of ids up to the end of each batch, after a leading 0.

    Example:
        >>> batches = BatchOrder(np.arange(5), np.array([0, 2, 5]))
        >>> [batches.batch(number) for number in batches.piece(0, 2)]
        [[0, 1], [2, 3, 4]]
    """

    piece = staticmethod(np.arange)

    def __init__(self, ids: NDArray[Any], ends: NDArray[np.int64]) -> None:
        self._ids = ids
        self._ends = ends

    def batch(self, number: int) -> list[int]:
        """Returns the ids of a batch.

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
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the order, 1 or more. Default: the world size of torch.distributed.
        rank: Number of this process, within [0, num_replicas); required with `num_replicas`.
        drop_last: Whether to leave out the end of the order, instead of repeating its beginning, if the processes cannot get
            equally many items. Default: False.
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
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
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
        self._current_pass: SamplerPass | None = None

    @property
    def total(self) -> int:
        """Number of items (ids or batches) of an epoch in all processes together."""
        return self.samples

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
        # A pass that has begun keeps its order, so its next item raises an error.
        if self._current_pass is not None and self._current_pass.epoch != epoch:
            self._current_pass.reset_to = epoch
        self.epoch = epoch
        self.consumed = consumed or 0
        self._current_pass = None

    def begin_pass(self) -> tuple[int, int]:
        """Begins a loop over the sampler, and returns its epoch and the items already consumed."""
        position = self.epoch, self.consumed
        self.epoch = self.epoch + 1
        self.consumed = 0
        return position

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
        grouped = divided and distributed.is_available() and distributed.is_initialized()
        # The comparison takes all processes of the default group, so it needs an order that all of them share.
        return SamplerPass(self, compares=grouped and replicas in (1, distributed.get_world_size()))

    def _check_loop(self) -> str | None:
        """Checks the dataset of the loader that loops over the sampler, and sets the epoch of the training.

        Returns:
            The class that divides the order, if any.
        """
        # A sampler is not told who loops over it: only the calls that lead here know the dataset, and whether accelerate or
        # Lightning divides the order once more. Frame 2 is the caller of `__iter__`.
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
            # A dataset that loops over the sampler itself: the loaders further up load something else.
            elif isinstance(caller, Dataset):
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
        current = self._current_pass
        if current is None or current.epoch is None or current.finished:
            return self.state_at(self.epoch, self.consumed)
        return self.state_at(current.epoch, current.consumed)

    def state_at(self, epoch: int, consumed: int) -> dict[str, Any]:
        """Returns the state at a given position.

        Args:
            epoch: Number of the epoch.
            consumed: Number of items of this epoch that all processes together have consumed.
        """
        return {**self.settings(), "epoch": epoch, "consumed": min(consumed, self.total)}

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for arrays a checksum."""
        return {"seed": self.seed, "samples": self.samples}

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


def cut(
    rows: int, size: int, *, batches: int | None = None, drop_last: bool = False, least: int = 1
) -> NDArray[np.int64]:
    """Returns the ends of the batches of an epoch, after a leading 0.

    Args:
        rows: Number of rows of the epoch.
        size: Number of rows of a full batch.
        batches: Number of batches, whose sizes differ by one at most. Default: as many full batches as there are.
        drop_last: Whether a last batch that is not full is left out. Default: False.
        least: Least number of rows of a last batch that is not left out. Default: 1.

    Example:
        >>> cut(7, 3), cut(7, 3, least=2), cut(14, 8, batches=4)
        (array([0, 3, 6, 7]), array([0, 3, 6]), array([ 0,  3,  7, 10, 14]))
    """
    if batches is not None:
        # Integer arithmetic, so every process and every resumed run gets the same sizes.
        return np.arange(batches + 1, dtype=np.int64) * rows // batches
    ends = np.arange(0, rows + 1, size, dtype=np.int64)
    rest = rows % size
    return ends if drop_last or rest < least else np.append(ends, rows)


def scale(rows: int, part: int, whole: int) -> int:
    """Returns the share `part / whole` of some rows, rounded to the nearest whole number, halves up; at most `part`.

    Args:
        rows: Number of rows.
        part: Numerator of the share.
        whole: Denominator of the share.

    Example:
        >>> scale(5, 24, 48), scale(48, 24, 48)
        (3, 24)
    """
    return min((2 * rows * part + whole) // max(1, 2 * whole), part)


def permute_batches(
    rows: NDArray[Any], ends: NDArray[np.int64], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows of batches in another order of the batches, and the ends of the batches, after a leading 0.

    Args:
        rows: Rows, batch after batch, shape (k,).
        ends: Ends of the batches, after a leading 0.
        order: Permutation of the batches.

    Example:
        >>> permute_batches(np.array([5, 6, 7]), np.array([0, 2, 3]), np.array([1, 0]))
        (array([7, 5, 6]), array([0, 1, 3]))
    """
    parts = [rows[ends[number] : ends[number + 1]] for number in order.tolist()]
    # The empty array gives the dtype if there is no batch.
    taken = np.concatenate([np.empty(0, dtype=np.int64), *parts])
    return taken.astype(np.int64), np.append(0, np.diff(ends)[order].cumsum())


class BatchComposer(EpochSampler):
    """Base of batch samplers that compose the batches of any samples, such as those that a method keeps in an epoch.

    Subclasses set `samples`, the number of samples of the dataset, and implement `compose`, with the same result in all
    processes. They then work in several processes, resume at any batch, and with every method that chooses before an epoch.
    `thresher.attach` accepts a loader whose batch sampler has a function `compose`, also one of another class.

    Args:
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the batches, as for `Shuffle`. Default: the world size.
        rank: Number of this process. Default: the rank in torch.distributed, or 0.
        drop_last: Whether to leave out the last batches, instead of repeating the first, if the processes cannot get equally
            many. Default: False.

    Example:
        Batches of neighbors in a series, at half the cost:

        >>> class Neighbors(BatchComposer):
        ...     samples = 64
        ...
        ...     def compose(self, ids, epoch, batches=None):
        ...         count = batches or -(-len(ids) // 8)
        ...         return np.roll(ids, epoch), np.arange(count + 1) * len(ids) // count
        >>> import thresher, torch
        >>> data = torch.utils.data.TensorDataset(torch.rand(64, 2), torch.arange(64) % 2)
        >>> loader = torch.utils.data.DataLoader(data, batch_sampler=Neighbors())
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> criterion = torch.nn.CrossEntropyLoss()
        >>> run = thresher.attach(0.5, loader=loader, model=model, criterion=criterion, optimizer=optimizer, epochs=4)
        >>> len(Neighbors()), len(run.loader)
        (8, 8)
    """

    once = True
    """Whether no sample comes twice in an epoch."""

    # Not `batch_size`: accelerate leaves out batches of another size than the batch_size of their sampler.
    _rows_per_item: int | None = None
    """Number of rows of a full batch, if all full batches have as many."""

    @property
    def total(self) -> int:
        """Number of batches of an epoch in all processes together."""
        # Batches without a common size have to be composed to be counted.
        if self._rows_per_item is None:
            return len(self.compose(np.arange(self.samples), self.epoch)[1]) - 1
        return len(self._cut_rows(self.samples)) - 1

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the order, as plain values; for arrays a checksum."""
        return super().settings() | {"batch_size": self._rows_per_item}

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

    def _cut_rows(self, rows: int, batches: int | None = None) -> NDArray[np.int64]:
        """Returns the ends of the batches of an epoch, after a leading 0; with `drop_last`, some rows are in none.

        Args:
            rows: Number of samples to train on.
            batches: Number of batches, as for `compose`.
        """
        size = self._rows_per_item
        assert size is not None
        if batches is not None:
            # With drop_last, the same share of the rows that full training does not drop.
            rows = scale(rows, min(self.samples, self.total * size), self.samples)
        # An epoch of less than one batch keeps it: with drop_last it would have no step.
        short = rows < size <= self.samples
        return cut(rows, size, batches=batches, drop_last=self.drop_last and not short)

    def order(self, epoch: int) -> BatchOrder:
        """Returns the batches of an epoch of all samples, as `BatchOrder`.

        Args:
            epoch: Number of the epoch, 0 or more.
        """
        return BatchOrder(*self.compose(np.arange(self.samples), epoch))


class SamplerPass(Iterator[Any]):
    """Iterator over one epoch of a sampler, as Python numbers or lists. torchdata's StatefulDataLoader saves its position.

    Args:
        sampler: The sampler.
        compares: Whether to compare the settings of all processes at the first item.
    """

    def __init__(self, sampler: EpochSampler, *, compares: bool) -> None:
        self._sampler = sampler
        self._compares = compares
        self._items: Iterator[Any] | None = None
        self._consumed_before = 0
        """Number of items of the epoch that all processes together had consumed before the pass."""
        self._yielded = 0
        self.epoch: int | None = None
        """Epoch of the pass; None until it begins."""
        self.reset_to: int | None = None
        """Other epoch that `set_epoch` has set since the pass began."""

    @property
    def consumed(self) -> int:
        """Number of items that all processes together have used."""
        return self._consumed_before + self._yielded * self._sampler.dealing()[0]

    @property
    def finished(self) -> bool:
        """Whether every item was used."""
        return self._yielded >= self._count

    @property
    def _count(self) -> int:
        """Number of items of this process."""
        return self._sampler.share_of(max(0, self._sampler.total - self._consumed_before))

    def __next__(self) -> Any:
        if self.epoch is None:
            self.epoch, self._consumed_before = self._sampler.begin_pass()
        # Also after `load_state_dict`, which has begun the pass already.
        if self._items is None:
            self._sampler._current_pass = self
            self._items = self._read(self._sampler.order(self.epoch))
        item = next(self._items)
        if self._compares:
            self._compares = False
            self._sampler.check_alike(epoch=self.epoch, consumed=self._consumed_before)
        if self.reset_to is not None:
            raise RuntimeError(
                f"{type(self._sampler).__name__}: set_epoch({self.reset_to}) was called after a loop over epoch "
                f"{self.epoch} had begun, as if its batches were of epoch {self.reset_to}. Call set_epoch before the loop "
                "begins; with workers, before iter(loader)."
            )
        self._yielded += 1
        return item

    def _read(self, order: Any) -> Iterator[Any]:
        """Yields the items of this process, in pieces that fit in the cache."""
        sampler = self._sampler
        replicas, rank = sampler.dealing()
        total = sampler.total
        begin = self._consumed_before + rank
        places = range(begin, begin + self._count * replicas, replicas)
        for first in range(0, len(places), PIECE):
            part = places[first : first + PIECE]
            end = min(part.stop, total)
            numbers = order.piece(min(part.start, end), end, replicas).tolist()
            # The processes get equally many items, so the last positions may lie behind the end, where the order begins again.
            for place in part[len(numbers) :]:
                numbers += order.piece(place % total, place % total + 1).tolist()
            # The items of a batch sampler are its batches.
            yield from map(order.batch, numbers) if hasattr(order, "batch") else numbers

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, which is the same in all processes; see `EpochSampler.state_dict`."""
        if self.epoch is None:
            return self._sampler.state_at(self._sampler.epoch, self._sampler.consumed)
        return self._sampler.state_at(self.epoch, self.consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a position, from which the iterator continues; the number of processes may differ.

        Args:
            state: State that `state_dict` returned.

        Raises:
            ValueError: The state was saved by a sampler with other settings.
        """
        self._sampler.load_state_dict(state)
        self.epoch, self._consumed_before = self._sampler.begin_pass()
        self._items = self.reset_to = None
        self._yielded = 0
