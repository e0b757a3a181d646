"""The loader of a run: the user's DataLoader rebuilt, its order filtered by the plan.

The user's sampler decides the order, the plan only who stays. RandomSampler and SequentialSampler have a fast path on
tensors that draws the same random numbers; any other sampler is filtered as it comes.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from thresher import rng
from thresher.loading.order import IdBatchSampler, Order, SamplerOrder, SequentialOrder, TensorOrder, shuffled
from thresher.loading.row_buffer import RowBuffer, rows_of, select
from thresher.loading.trees import to_device
from thresher.plans import BatchPlan, EpochPlan

KEPT_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


NONE_WAIT: tuple[Tensor, Tensor | None] = (torch.empty(0, dtype=torch.int64), None)


def check_loader(loader: Any, *, plans_epochs: bool = True) -> None:
    """Refuse a loader whose batches could not be told apart by sample.

    Args:
        loader: The user's.
        plans_epochs: Whether a method decides before each epoch, which takes samples with ids.

    Raises:
        TypeError: Not a DataLoader, or one over an IterableDataset.
        ValueError: A setting that cannot be kept.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"`loader` must be a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        if plans_epochs:
            raise TypeError(
                f"`loader` iterates over {type(loader.dataset).__name__}, an IterableDataset: its samples have no ids, so no "
                "epoch can be planned. Epoch methods need a map-style dataset (__getitem__ and __len__)."
            )
        if loader.batch_size is None:
            raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
        return
    if loader.batch_sampler is None:
        raise ValueError("`loader` has batch_size=None: batches must be made by the loader. Give it a batch_size.")
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"`loader` has a batch_sampler of its own, {type(loader.batch_sampler).__name__}: leaving samples out would break "
            "what it arranges. Use sampler= and batch_size=."
        )
    if not loader.in_order:
        raise ValueError(
            "`loader` has in_order=False: batches may come back in another order than their ids were drawn. Use in_order=True."
        )
    if isinstance(loader.batch_sampler.sampler, DistributedSampler):
        raise ValueError("`loader` has a DistributedSampler: training in several processes is not supported in this version")


class SelectedLoader:
    """`run.loader`: iterate it like the loader it was made from. Other attributes are those of that loader.

    Args:
        loader: The user's.
        begin: Called when an epoch begins; returns its plan and, for an interrupted one, how many ids of its order were
            consumed, and the checksum of those that were yielded.
        yielded: Called with each batch on the device, its ids, how many ids of the order are consumed by then, the checksum
            of those that were drawn, and weights of its rows where a batch method gave some.
        finish: Called when the epoch is exhausted.
        upcoming: The plan of the epoch in progress, else of the next.
        device: Where batches are moved; None leaves them where they are.
        choose: For selection before the loop sees a batch: maps a candidate batch and its ids to the rows that stay, once
            `gatherer` is set.
        count: How many rows of a batch of n stay; None where that is not known.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        begin: Callable[[], tuple[EpochPlan | None, int, int]],
        yielded: Callable[[Any, Tensor, int, int, Tensor | None], None],
        finish: Callable[[], None],
        upcoming: Callable[[], EpochPlan],
        device: torch.device | None,
        choose: Callable[[Any, Tensor], BatchPlan] | None = None,
        count: Callable[[int], int | None] = lambda n: n,
    ) -> None:
        self._user = loader
        self._choose, self._count = choose, count
        self.gatherer: RowBuffer | None = None
        """Rows that were selected and not yielded yet; None where batches go to the loop as they are."""
        self.waiting: tuple[Tensor, Tensor | None] = NONE_WAIT
        """Ids and weights of such rows in a saved epoch that is to be gone on with."""
        self.seen = 0
        """Samples of the last epoch that was exhausted."""
        self.streams = isinstance(loader.dataset, IterableDataset)
        self._begin, self._yielded, self._finish, self._upcoming = begin, yielded, finish, upcoming
        self._device = device
        self.n = 0 if self.streams else len(loader.dataset)  # pyright: ignore[reportArgumentType]
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        self._sampler: Any = batches.sampler
        self._ids = IdBatchSampler(batches.batch_size, batches.drop_last)
        self._loader = loader if self.streams else self._rebuilt(loader)
        # A run is collected as part of a cycle, in which workers could not be told to stop: held from outside it, they
        # are let go in good order after the cycle is gone.
        self._held = weakref.finalize(self, lambda _: None, self._loader)
        self._held.atexit = False
        # Weak, so that breaking out of the loop lets the workers go at once.
        self._current: Callable[[], EpochIterator | None] = lambda: None
        self._workers_ran = False
        self.epoch_start: rng.RandomStates | None = None
        """Random states when the epoch in progress began; what an interrupted epoch is replayed from."""

    def _rebuilt(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        settings = {name: getattr(loader, name) for name in KEPT_SETTINGS}
        return DataLoader(loader.dataset, batch_sampler=self._ids, **settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._user, name)

    @property
    def order_is_free(self) -> bool:
        """Whether the user's order is a plain shuffle, which a plan that draws may replace."""
        return self._fast_path() and isinstance(self._sampler, RandomSampler)

    @property
    def yields_once(self) -> bool:
        """Whether no sample can come twice in an epoch."""
        return self._fast_path()

    def _fast_path(self) -> bool:
        if self.streams:
            return False
        kind = type(self._sampler)
        if kind not in (RandomSampler, SequentialSampler) or len(self._sampler.data_source) != self.n:
            return False
        return kind is SequentialSampler or (not self._sampler.replacement and self._sampler.num_samples == self.n)

    def generators(self) -> list[torch.Generator]:
        """The generators that the user's loader draws from."""
        found = [None if self.streams else getattr(self._sampler, "generator", None), self._user.generator]
        own = [generator for generator in found if isinstance(generator, torch.Generator)]
        return own[:1] if len(own) == 2 and own[0] is own[1] else own

    @property
    def device(self) -> torch.device:
        """Where random numbers of the loop are drawn."""
        return self._device or torch.device("cpu")

    @property
    def candidates(self) -> int:
        """Ids that the user's sampler yields an epoch, as many of them as full batches take where the last is dropped.

        0 for a stream that does not tell its length, until an epoch of it is over.
        """
        if self.streams:
            dataset: Any = self._user.dataset
            if self.seen or not hasattr(dataset, "__len__"):
                return self.seen
            total = len(dataset)
        else:
            total = len(self._sampler) if hasattr(self._sampler, "__len__") else self.n
        return total - total % self._ids.batch_size if self._ids.drop_last else total

    def __len__(self) -> int:
        """Batches of the epoch in progress, else of the next one.

        Raises:
            TypeError: It is not known: a sampler of unknown order, a batch method that keeps rows by chance and gathers them
                to full batches, or a stream.
        """
        if self.gatherer is not None and self.gatherer.size is not None:
            return self._gathered_batches()
        full, rest = self._candidate_batches()
        return full + bool(rest)

    def _gathered_batches(self) -> int:
        full, rest = self._candidate_batches()
        size = self._ids.batch_size
        of_full, of_rest = self._count(size), self._count(rest) if rest else 0
        if of_full is None or of_rest is None:
            raise TypeError(
                "the length of this epoch is not known before it is over: how many rows of a batch are kept depends on the "
                "losses. A method with a fixed `keep` has one."
            )
        batches, left = divmod(full * of_full + of_rest, size)
        return batches + bool(left and not self._ids.drop_last)

    def _candidate_batches(self) -> tuple[int, int]:
        """Full batches of the plan's samples, and how many samples the last has beyond them."""
        full, rest = divmod(self._total(), self._ids.batch_size)
        return full, 0 if self._ids.drop_last else rest

    def _total(self) -> int:
        """Samples of the epoch before the last is dropped."""
        if self.streams:
            return len(self._user.dataset)  # pyright: ignore[reportArgumentType]
        plan = self._upcoming()
        if len(plan.ids) == self.n and not plan.drawn:
            return len(self._sampler)
        if plan.drawn or self._fast_path():
            return len(plan.ids)
        raise TypeError(
            f"the length of this epoch is not known before it is over: the plan leaves samples out of the order of "
            f"{type(self._sampler).__name__}, which may repeat or skip ids"
        )

    def _order(self, plan: EpochPlan) -> Order:
        if plan.drawn:
            return TensorOrder(lambda: plan.ids)
        if not self._fast_path():
            return SamplerOrder(self._sampler, self.n)
        if isinstance(self._sampler, SequentialSampler):
            return SequentialOrder(self.n)
        return shuffled(self.n, self._sampler.generator)

    def __iter__(self) -> "EpochIterator":
        self._ids.serve(SequentialOrder(0), None)  # the last epoch's order goes before the plan is made
        plan, consumed, checksum = self._begin()
        if consumed == 0:
            self.go_on()
        resumed = self.epoch_start if consumed else None
        now = rng.capture(self.device, self.generators())
        if resumed is None:
            self.epoch_start = {**now, "workers_ran": self._workers_ran}
        else:
            if resumed["workers_ran"]:
                self._start_workers()
            rng.restore(resumed, self.device, self.generators())
        if plan is None:
            candidates: Any = StreamBatches(iter(self._loader))
        else:
            everything = plan.drawn or len(plan.ids) == self.n
            kept = None if everything else torch.zeros(self.n, dtype=torch.bool).index_fill_(0, plan.ids, True)
            self._ids.serve(self._order(plan), kept, consumed=consumed)
            candidates = MapStyleBatches(iter(self._loader), self._ids, ahead=self.num_workers > 0)
        self._workers_ran = self.persistent_workers
        if resumed is not None:
            waiting = self._let_go()
            replayed = candidates.skip(consumed, self._keep_waiting(waiting)) if plan is None else self._ids.replay()
            # The loader's generators stay as replayed: the loop's own random numbers go on where they were.
            rng.restore({**now, "generators": []}, self.device)
            if zlib.crc32(replayed.numpy().tobytes()) != checksum:
                raise RuntimeError(
                    f"{type(self._sampler).__name__} did not repeat the order of the interrupted epoch: it must depend only on "
                    "the global random states and its `generator`. Resume between epochs, or give it a generator."
                )
            if plan is not None and len(waiting[0]):
                self._fetch(*waiting)
        iterator = EpochIterator(self, candidates, consumed, checksum)
        self._current = weakref.ref(iterator)
        return iterator

    def gather(self, *, fills: bool) -> None:
        """From now on select before the loop sees a batch; `fills`: and gather the rows to full batches."""
        self.gatherer = RowBuffer(self._ids.batch_size if fills else None)

    def waits(self) -> tuple[Tensor, Tensor | None]:
        """Ids and weights of the rows that were selected and not yielded yet."""
        return self.waiting if self.gatherer is None or len(self.waiting[0]) else self.gatherer.waiting

    def go_on(self, waiting: tuple[Tensor, Tensor | None] = NONE_WAIT) -> None:
        """Begin the next pass with these rows, which waited when the epoch was interrupted."""
        self.waiting = waiting
        if self.gatherer is not None:
            self.gatherer.clear()

    def _let_go(self) -> tuple[Tensor, Tensor | None]:
        """Ids and weights of the rows that waited when the epoch was interrupted."""
        waiting = self.waiting
        self.go_on()
        return waiting

    def _keep_waiting(self, waiting: tuple[Tensor, Tensor | None]) -> Callable[[Any, Tensor], None]:
        """Takes from each batch the rows that waited."""
        wanted, weights = waiting

        def look(batch: Any, ids: Tensor) -> None:
            here = torch.isin(wanted, ids)
            if self.gatherer is None or not bool(here.any()):
                return
            rows = wanted[here] - ids[0]
            part = select(self.moved(batch), rows, len(ids))
            self.gatherer.put(part, wanted[here], None if weights is None else weights[here])

        return look

    def _fetch(self, ids: Tensor, weights: Tensor | None) -> None:
        """Read rows again that were selected and not trained on when the epoch was interrupted."""
        assert self.gatherer is not None
        dataset: Any = self._user.dataset
        with rng.undisturbed(self.device, self.generators()):
            batch = self._user.collate_fn([dataset[i] for i in ids.tolist()])
        self.gatherer.put(self.moved(batch), ids, weights)

    def _start_workers(self) -> None:
        """Persistent workers draw their seed when they start; an epoch that found them running did not."""
        if not self._workers_ran:
            with rng.undisturbed(self.device, self.generators()):
                self._ids.serve(SequentialOrder(0), None)
                iter(self._loader)

    def passes(self, ids: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """The batches of some samples for the run's own forward passes, in order, and their ids."""
        self._ids.serve(TensorOrder(lambda: ids), None, drop_last=False)
        for batch in iter(self._loader):
            self._workers_ran = self.persistent_workers
            batch_ids, _ = self._ids.on_the_way.popleft()
            yield self.moved(batch), batch_ids

    def moved(self, batch: Any) -> Any:
        """The batch on the device of the model."""
        return batch if self._device is None else to_device(batch, self._device)

    def stop(self) -> None:
        """Take the epoch away from the iterator that has it."""
        self._current = lambda: None

    def close(self) -> None:
        """Let go of the data and of persistent workers."""
        self.stop()
        self._held()
        self._loader = DataLoader((), batch_sampler=self._ids)  # pyright: ignore[reportArgumentType]


class MapStyleBatches:
    """Candidate batches of a map-style dataset: the ids were drawn here, the samples come from the loader."""

    def __init__(self, batches: Iterator[Any], ids: IdBatchSampler, *, ahead: bool) -> None:
        self._batches, self._ids, self._ahead = batches, ids, ahead

    def take(self) -> tuple[Any, Tensor, int]:
        """The next batch, its ids, and how many ids are drawn by then.

        Raises:
            StopIteration: There is none.
        """
        if not self._ahead:
            self._ids.on_the_way.clear()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception:
            # The failed batch was drawn; the ids of the next one must not be taken for its own.
            if self._ids.on_the_way:
                self._ids.on_the_way.popleft()
            raise
        return batch, *self._ids.on_the_way.popleft()


class StreamBatches:
    """Batches of an iterable dataset; a sample's id is its place in this epoch's stream."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._place = batches, 0

    def take(self) -> tuple[Any, Tensor, int]:
        """The next batch, the places of its rows, and where the stream is after it.

        Raises:
            StopIteration: The stream is over.
        """
        batch = next(self._batches)
        begin, self._place = self._place, self._place + rows_of(batch)
        return batch, torch.arange(begin, self._place), self._place

    def skip(self, consumed: int, look: Callable[[Any, Tensor], None]) -> Tensor:
        """Read again what an interrupted epoch consumed; `look` is shown every batch of it. Returns its ids."""
        while self._place < consumed:
            batch, ids, _ = self.take()
            look(batch, ids)
        return torch.arange(self._place)


class EpochIterator:
    """One pass over a Feed."""

    def __init__(self, feed: SelectedLoader, candidates: MapStyleBatches | StreamBatches, drawn: int, checksum: int) -> None:
        self._feed, self._candidates, self._drawn, self._checksum = feed, candidates, drawn, checksum
        self._exhausted = self._done = False

    def __iter__(self) -> "EpochIterator":
        return self

    def __len__(self) -> int:
        return len(self._feed)

    def __next__(self) -> Any:
        if self._done:
            raise StopIteration
        if self._feed._current() is not self:
            raise RuntimeError("this pass over run.loader was ended by a newer one; iterate the newer one")
        gatherer = self._feed.gatherer
        if gatherer is None:
            try:
                batch, ids = self._next_candidate()
            except StopIteration:
                self._end()
                raise
            self._feed._yielded(batch, ids, self._drawn, self._checksum, None)
            return batch
        self._gather(gatherer)
        if not gatherer.rows or (not gatherer.full and self._feed._ids.drop_last):
            self._end()
            raise StopIteration
        batch, ids, weights = gatherer.take()
        self._feed._yielded(batch, ids, self._drawn, self._checksum, weights)
        return batch

    def _next_candidate(self) -> tuple[Any, Tensor]:
        batch, ids, self._drawn = self._candidates.take()
        self._checksum = zlib.crc32(ids.numpy().tobytes(), self._checksum)
        return self._feed.moved(batch), ids

    def _gather(self, gatherer: RowBuffer) -> None:
        """Select from candidate batches until there is a full batch, or no candidate is left."""
        choose = self._feed._choose
        assert choose is not None
        while not gatherer.full and not self._exhausted:
            try:
                batch, ids = self._next_candidate()
            except StopIteration:
                self._exhausted = True
            else:
                gatherer.add(batch, ids, choose(batch, ids))

    def _end(self) -> None:
        self._done = True
        self._feed.seen = self._drawn
        self._candidates = StreamBatches(iter(()))
        if self._feed.gatherer is not None:
            self._feed.gatherer.clear()
        self._feed._finish()
