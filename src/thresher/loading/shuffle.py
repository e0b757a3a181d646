"""`Shuffle`: a sampler that computes its order piece by piece: no permutation in memory, and a pass can begin anywhere."""

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler

from thresher.permutation import PIECE, Permutation


class Shuffle(Sampler[int]):
    """Sampler that yields every sample once an epoch, in random order, without a permutation in memory.

    Use it as `DataLoader(dataset, batch_size, sampler=Shuffle(dataset))`, with a run or without. The order depends on the seed,
    the epoch and the number of samples alone (`thresher.permutation`). No global random state is used.

    Every pass has the next epoch: the first one epoch 0, and each further one the epoch after it, so that no order comes twice.
    `set_epoch(e)` gives the next pass epoch `e`. A pass begins with its first id. Call `set_epoch` after a restart.

    To go on in the middle of an epoch, load `run.state_dict()` where a run is attached. Without a run, call
    `set_epoch(epoch, consumed=steps * batch_size)`, or use torchdata's StatefulDataLoader, which saves the position by itself.

    In W processes, process r gets the ids at the places r, r + W, r + 2W, ... of the order, as from a DistributedSampler.
    Batches of B ids in each of W processes are therefore together the same samples for all W and B with the same product.

    Args:
        dataset: Dataset, or anything with a length.
        seed: Random seed. Default: 0.
        num_replicas: Number of processes that share the ids. Default: 1; in several processes it must be given, because
            something else, such as accelerate, may deal out the ids already.
        rank: Number of this process, within [0, num_replicas). Default: 0; given together with `num_replicas`.
        drop_last: Whether the last ids are left out where the processes would not all get equally many. Default: False, which
            repeats the first ids of the order instead.

    Attributes:
        epoch: Epoch of the next pass.

    Raises:
        TypeError: `dataset` has no length, or `seed` is no whole number.
        ValueError: `num_replicas` and `rank` do not fit together.

    Example:
        >>> shuffle = Shuffle(range(8), seed=1)
        >>> list(shuffle), list(shuffle)
        ([1, 2, 5, 7, 0, 6, 4, 3], [2, 6, 1, 4, 5, 3, 7, 0])
        >>> shuffle.set_epoch(0, consumed=5)
        >>> list(shuffle)
        [6, 4, 3]
    """

    def __init__(
        self,
        dataset: Sized,
        seed: int = 0,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"Shuffle: `dataset` must have a length, got {type(dataset).__name__}: a stream cannot be shuffled")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"Shuffle: `seed` must be a whole number, got {seed!r}")
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"Shuffle: give `num_replicas` and `rank` together, got {num_replicas} and {rank}")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(f"Shuffle: `rank` must be within [0, num_replicas), got {rank} and {num_replicas}")
        self.data_source, self.seed, self.drop_last = dataset, seed, drop_last
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = self.consumed = 0

    def set_epoch(self, epoch: int, consumed: int | None = None) -> None:
        """Sets the epoch of the next pass.

        Args:
            epoch: Number of the epoch, 0 or more.
            consumed: Number of ids of this epoch that all processes together have consumed before; the next pass has the rest
                of them, and `len` is still that of a whole epoch. Default: 0, or what was set for this epoch before and not
                used yet.

        Raises:
            TypeError: A number is no whole number.
            ValueError: A number is out of its range, the processes did not consume equally many ids, or the rest of another
                epoch was set before and not used yet.
        """
        epoch, consumed = operator.index(epoch), None if consumed is None else operator.index(consumed)
        if epoch < 0:
            raise ValueError(f"Shuffle.set_epoch: `epoch` must be 0 or more, got {epoch}")
        # Trainers call set_epoch(epoch) before each epoch: that must not take back the place of a resumed one.
        if consumed is None and self.consumed:
            if epoch != self.epoch:
                raise ValueError(
                    f"Shuffle.set_epoch: the next pass was to have the rest of epoch {self.epoch}, after {self.consumed} ids, "
                    f"and now it is to have epoch {epoch}. Pass consumed=0 for the whole of it."
                )
            return
        if consumed:
            replicas = self.dealing()[0]
            most, parts = len(self) * replicas, f" and a multiple of {replicas}" if replicas > 1 else ""
            if consumed % replicas or not 0 <= consumed <= most:
                raise ValueError(
                    f"Shuffle.set_epoch: `consumed` must be a number of ids of all processes, 0 to {most}{parts}, "
                    f"got {consumed}"
                )
        self.epoch, self.consumed = epoch, consumed or 0

    def begin_pass(self) -> tuple[int, int]:
        """Begins a pass: returns its epoch, and how many of its ids were consumed before. The next pass has the next epoch."""
        begun = self.epoch, self.consumed
        self.epoch, self.consumed = self.epoch + 1, 0
        return begun

    def dealing(self) -> tuple[int, int]:
        """Returns the number of processes that share the ids, and the number of this one.

        Raises:
            RuntimeError: This is one of several processes, and `num_replicas` was not given.
        """
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RuntimeError(
                f"Shuffle is used in {distributed.get_world_size()} processes, and it is not known whether it is to deal out "
                "the ids. Pass num_replicas=torch.distributed.get_world_size(), rank=torch.distributed.get_rank(); or "
                "num_replicas=1, rank=0 where something else deals them out, such as a loader that accelerate prepared."
            )
        return 1, 0

    def __len__(self) -> int:
        """Returns the number of ids that this process gets in an epoch."""
        n, replicas = len(self.data_source), self.dealing()[0]
        return n // replicas if self.drop_last else -(-n // replicas)

    def __iter__(self) -> "ShufflePass":
        return ShufflePass(self)


class ShuffledIds:
    """The ids of one pass over a `Shuffle`, in pieces; it is an `Order` of the loader.

    Args:
        shuffle: The sampler.
        epoch: Epoch of the pass. Default: that of the sampler's next pass, which begins with the first id.
        place: Number of ids of this process that were taken before, where an epoch is given.
    """

    def __init__(self, shuffle: Shuffle, epoch: int | None = None, place: int = 0) -> None:
        self._shuffle = shuffle
        self.epoch = epoch
        """Epoch of the pass; None until it begins."""
        self.place = place
        """Number of ids of this process that were taken."""
        self._order: Permutation | None = None
        self._ahead = torch.empty(0, dtype=torch.int64)

    def take(self, k: int) -> Tensor:
        """Returns the next `k` ids, int64; fewer when they run out."""
        if len(self._ahead) < k:
            self._ahead = torch.cat([self._ahead, self._made(max(PIECE, k - len(self._ahead)))])
        ids, self._ahead = self._ahead[:k], self._ahead[k:]
        self.place += len(ids)
        return ids

    def skip(self, k: int) -> None:
        """Leaves out the next `k` ids."""
        self._begin()
        self.place, self._ahead = min(self.place + k, len(self._shuffle)), self._ahead[k:]

    def _begin(self) -> Permutation:
        if self._order is None:
            if self.epoch is None:
                self.epoch, consumed = self._shuffle.begin_pass()
                self.place = consumed // self._shuffle.dealing()[0]
            self._order = Permutation(len(self._shuffle.data_source), self._shuffle.seed, self.epoch)
        return self._order

    def _made(self, k: int) -> Tensor:
        """Returns up to `k` ids after those that are made already."""
        order, (replicas, rank) = self._begin(), self._shuffle.dealing()
        first = self.place + len(self._ahead)
        places = range(rank, rank + len(self._shuffle) * replicas, replicas)[first : first + k]
        end = min(places.stop, order.n)
        ids = torch.from_numpy(order.piece(min(places.start, end), end, replicas))
        # The processes get equally many ids: the last place may lie behind the end, where the order begins again.
        again = [torch.from_numpy(order.piece(p % order.n, p % order.n + 1)) for p in places[len(ids) :]]
        return torch.cat([ids, *again])


class ShufflePass(Iterator[int]):
    """One pass over a `Shuffle`, as Python numbers. torchdata's StatefulDataLoader saves and loads its position.

    Args:
        shuffle: The sampler.
    """

    def __init__(self, shuffle: Shuffle) -> None:
        self._shuffle, self._ids = shuffle, ShuffledIds(shuffle)
        self._rest: Iterator[int] = iter(())

    def __next__(self) -> int:
        found = next(self._rest, None)
        if found is None:
            self._rest = iter(self._ids.take(PIECE).tolist())
            return next(self._rest)
        return found

    def state_dict(self) -> dict[str, int]:
        """Returns the position, which is the same in all processes, as plain values."""
        replicas, _ = self._shuffle.dealing()
        consumed = (self._ids.place - operator.length_hint(self._rest)) * replicas
        epoch = self._ids.epoch
        if epoch is None:
            epoch, consumed = self._shuffle.epoch, self._shuffle.consumed
        return {"seed": self._shuffle.seed, "samples": len(self._shuffle.data_source), "epoch": epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at a position, also with another number of processes; the pass after this one has the next epoch.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: The state is of another order, or these processes cannot go on at its position.
        """
        own = self.state_dict()
        if any(state[name] != own[name] for name in ("seed", "samples")):
            raise ValueError(
                f"Shuffle: the state is of seed {state['seed']} and {state['samples']} samples, this sampler has seed "
                f"{own['seed']} and {own['samples']}: its order is another one. Use the same seed and dataset."
            )
        self._shuffle.set_epoch(state["epoch"], state["consumed"])
        epoch, consumed = self._shuffle.begin_pass()
        self._ids = ShuffledIds(self._shuffle, epoch, consumed // self._shuffle.dealing()[0])
        self._rest = iter(())


class ShufflePasses:
    """The passes of a run over a `Shuffle`: which epoch each of them has, and where an interrupted one goes on.

    Args:
        shuffle: The sampler of the user's loader.
    """

    def __init__(self, shuffle: Shuffle) -> None:
        self._shuffle, self._ids, self._next = shuffle, ShuffledIds(shuffle), 0

    def order(self, consumed: int) -> ShuffledIds:
        """Returns the ids of the next pass.

        Args:
            consumed: Number of ids of the order that an interrupted epoch has consumed already; 0 for a new epoch.

        Raises:
            RuntimeError: `set_epoch` was called with another epoch than the interrupted one.
            ValueError: `set_epoch` was called with `consumed`.
        """
        if self._shuffle.consumed:
            raise ValueError(
                f"Shuffle.set_epoch was called with consumed={self._shuffle.consumed}, which is for loaders without a run: the "
                "run would take the rest of the epoch for all of it. Load run.state_dict() of the interrupted run instead."
            )
        if not consumed:
            self._ids = ShuffledIds(self._shuffle)
            return self._ids
        if self._shuffle.epoch not in (self._ids.epoch, self._next):
            raise RuntimeError(
                f"The run goes on in the middle of an epoch whose order is that of epoch {self._ids.epoch} of its Shuffle, but "
                f"set_epoch({self._shuffle.epoch}) was called. Load the state again, and call set_epoch({self._ids.epoch}) "
                "(on the loader, where accelerate prepared it), or do not call it before this epoch is over."
            )
        self._shuffle.set_epoch(self._next, consumed=0)
        self._ids = ShuffledIds(self._shuffle, self._ids.epoch, consumed)
        return self._ids

    def state_dict(self) -> dict[str, int | None]:
        """Returns what the order of the pass in progress and those of later ones depend on, as plain values."""
        shuffle = self._shuffle
        return {
            "seed": shuffle.seed,
            "samples": len(shuffle.data_source),
            "epoch": shuffle.epoch,
            "begun": self._ids.epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, active: bool, consumed: int) -> None:
        """Goes on with the orders of a run that was saved.

        Args:
            state: Result of `state_dict`.
            active: Whether an epoch was in progress.
            consumed: Number of ids of its order that were consumed.
        """
        begun, self._next = state["begun"], state["epoch"]
        self._ids = ShuffledIds(self._shuffle, begun)
        # Workers may have begun an epoch of which the loop has had no batch: it begins again.
        if begun is None or consumed or not active:
            begun = self._next
        self._shuffle.set_epoch(begun, consumed=0)
