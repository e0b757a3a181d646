"""The check of methods that plan over shards: together, the plans of the shards are the plan of one process."""

from typing import Any

import torch

from thresher import rng
from thresher.distributed.kept import HeldPlan
from thresher.distributed.layout import ShardLayout
from thresher.distributed.threads import ThreadWorld, on_ranks
from thresher.methods.contract import requirements_of
from thresher.plans import EpochPlan
from thresher.records import Records
from thresher.shards import ShardColumns
from thresher.testing.promise import promise
from thresher.testing.questions import comparable_plan
from thresher.testing.subjects import EpochSubject

RANKS = (2, 3, 9)
"""Numbers of shards; of 9, some are empty by default."""


@promise("epoch")
def check_shards(subject: EpochSubject) -> None:
    """Checks that a method with `Requirements(sharded=True)` plans the same over shards, however many there are.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import dataclasses
        >>> import thresher
        >>> class OfEachShard(thresher.UniformSubset):
        ...     def plan_epoch(self, records, **settings):
        ...         shard = thresher.shards.shard_of(records)
        ...         plan = super().plan_epoch(dict(records), **settings)  # knows nothing of the other shards
        ...         return dataclasses.replace(plan, ids=plan.ids + shard.first, lots=None)
        >>> try:
        ...     check_shards(OfEachShard(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        OfEachShard: the plans of 2 shards are not the plan of one process in epoch 0
    """
    if not requirements_of(subject.method).sharded:
        return
    for kind in ("tied", "spoilt"):
        records = subject.seen(kind)
        for epoch in range(subject.epochs):
            whole = comparable_plan(subject.ask(records, epoch))
            for size in RANKS:
                with subject.asked(f"plan_epoch of epoch {epoch} over {size} shards ({kind})"):
                    parts = on_ranks(size, lambda world, e=epoch, r=records: _part(subject, r, e, world))
                same = comparable_plan(_joined(parts)) == whole and all(one.facts == parts[0].facts for one in parts)
                subject.expect(same, f"the plans of {size} shards are not the plan of one process in epoch {epoch}")


def _part(subject: EpochSubject, records: Records, epoch: int, world: ThreadWorld) -> EpochPlan:
    """Returns the plan of one shard."""
    layout = ShardLayout(subject.samples, world.size, 8)
    shard = layout.shard(world)
    columns = ShardColumns({name: values[shard.first : shard.last].clone() for name, values in records.items()}, shard)
    plan = subject.method.plan_epoch(columns, epoch=epoch, epochs=subject.epochs, generator=rng.seeded(0, epoch))
    plan.check(shard)
    HeldPlan.of(plan, layout, world)
    return plan


def _joined(parts: list[EpochPlan]) -> EpochPlan:
    """Returns the plan of all samples that the parts of the shards make up."""

    def joined(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if any(one is None for one in tensors) else torch.cat(tensors)

    found = {name: joined(name) for name in ("ids", "weights", "refresh", "keys", "scores")}
    remember = {name: torch.cat([part.remember[name] for part in parts]) for name in parts[0].remember}
    return EpochPlan(**{**vars(parts[0]), **found, "remember": remember})
