"""A plan as a run holds and saves it: one bit per sample in place of its ids."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from thresher.distributed.marks import number, packed, unpacked
from thresher.plans import EpochPlan
from thresher.selection import Lots, ids_of
from thresher.shards import Shard


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """The plan of one shard, without the columns that it gave to the records. Ids that were drawn stay ids.

    Args:
        ids: Marks of the samples that are kept, one bit each, lowest id first, shape (ceil(len(shard) / 8),), uint8, with 0 in
            the bits beyond the shard; where `drawn` is True, the ids, shape (K,), int64, in the order of training.
        weights: Factors on the losses of the kept samples, shape (K,), float32; these and what follows are as in `EpochPlan`.
        refresh: Marks of the samples that are refreshed, packed as `ids`; None where the plan names none.
        lr_scale: Factor on the learning rate.
        drawn: Whether `ids` was drawn.
        facts: Scalars for the history by name.
        smaller_batches: Whether the epoch has as many steps as full training.
        keys: Numbers by which rows are drawn in each step.
        share: Share of the ids that the epoch trains on.
        width: Number of candidates per row that is drawn.
        scores: Scores that the rows are drawn in proportion to.
        note: Sentence that the user must know.
        lots: Random choice that the plan consists of; it is not saved.

    Example:
        >>> plan = PackedPlan.of(EpochPlan(torch.tensor([1, 3, 4]), refresh=torch.tensor([0])), Shard.whole(5))
        >>> plan.ids, plan.kept, plan.unpacked(Shard.whole(5)).ids
        (tensor([26], dtype=torch.uint8), 3, tensor([1, 3, 4]))
    """

    ids: Tensor
    weights: Tensor | None
    refresh: Tensor | None
    lr_scale: float
    drawn: bool
    facts: Mapping[str, float]
    smaller_batches: bool
    keys: Tensor | None
    share: float
    width: float
    scores: Tensor | None
    note: str
    lots: Lots | None = None

    @staticmethod
    def of(plan: EpochPlan, shard: Shard) -> "PackedPlan":
        """Returns a plan with bits in place of ids.

        Args:
            plan: The plan, which `EpochPlan.check` has let pass.
            shard: Shard that it is the plan of.
        """
        block, values = range(shard.first, shard.last), {field.name: getattr(plan, field.name) for field in fields(PackedPlan)}
        for name in ("refresh",) if plan.drawn else ("ids", "refresh"):
            if values[name] is not None:
                values[name] = torch.from_numpy(packed(values[name].numpy(), block))
        return PackedPlan(**values)

    def unpacked(self, shard: Shard) -> EpochPlan:
        """Returns the plan with its ids, which `EpochPlan` checks as those of any plan.

        Args:
            shard: Shard that it is the plan of.

        Raises:
            TypeError: A tensor has the wrong dtype.
            ValueError: There are more or fewer bits than the shard has samples, or a number is out of its range.
        """
        values: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "lots"}
        for name in ("refresh",) if self.drawn else ("ids", "refresh"):
            bits = values[name]
            if bits is None:
                continue
            if bits.dtype != torch.uint8 or bits.shape != (-(-len(shard) // 8),):
                raise ValueError(
                    f"`{name}` must be one bit for each of {len(shard)} samples, a torch.uint8 tensor of shape "
                    f"({-(-len(shard) // 8)},), got a {bits.dtype} tensor of shape {tuple(bits.shape)}"
                )
            values[name] = ids_of(unpacked(bits.numpy()), shard.first)
        return EpochPlan(**values)

    @property
    def kept(self) -> int:
        """Number of ids."""
        return len(self.ids) if self.drawn else number(self.ids.numpy())

    def state_dict(self) -> dict[str, Any]:
        """Returns what is saved, as tensors and plain values; `PackedPlan(**state)` makes the plan of it."""
        return {name: value for name, value in vars(self).items() if name != "lots"} | {"facts": dict(self.facts)}
