"""What a run is made of: the options of `attach` with what the checks found, and the parts that share the work."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from thresher.attribution.accumulator import StepAccumulator
from thresher.attribution.attributor import Attributor
from thresher.attribution.tracked_model import TrackedModel
from thresher.backward_ratio import Stopwatch
from thresher.cost import Cost
from thresher.distributed.world import ALONE, World
from thresher.loading.loader import SelectedLoader
from thresher.losses.base import Criterion, SignalReader, Signals
from thresher.methods.contract import BatchMethod, EpochMethod
from thresher.methods.full import FullData
from thresher.observation import OPTIONAL
from thresher.passes.engine import Forward
from thresher.passes.extra_passes import ExtraPasses
from thresher.passes.scoring_settings import Scoring
from thresher.records import Records
from thresher.run.strata import Strata
from thresher.timing import Timing


class SelectionMode(enum.Enum):
    """Where and by what the rows of a batch are chosen. `selection_mode` decides it once, in `attach`."""

    NONE = enum.auto()
    """Every row that the loader yields is trained on."""
    IN_FORWARD = enum.auto()
    """Rows are chosen by the losses of the loop's own forward pass."""
    IN_FORWARD_AT_FIRST = enum.auto()
    """As IN_FORWARD; as BEFORE_FORWARD from the second epoch on, if the model turns out not to be traceable."""
    BEFORE_FORWARD = enum.auto()
    """Rows are chosen by the losses of a scoring pass before the loop gets them; they are gathered into full batches."""
    WITHOUT_LOSSES = enum.auto()
    """Rows are chosen without losses before the loop gets them; the batches become smaller."""
    WITHOUT_LOSSES_FILLED = enum.auto()
    """As WITHOUT_LOSSES, but chosen rows are gathered into full batches."""

    @property
    def is_in_forward(self) -> bool:
        """Whether rows are chosen in the loop's own forward pass."""
        return self in (SelectionMode.IN_FORWARD, SelectionMode.IN_FORWARD_AT_FIRST)

    @property
    def fills(self) -> bool:
        """Whether chosen rows of several batches are gathered into full batches."""
        return self in (SelectionMode.BEFORE_FORWARD, SelectionMode.WITHOUT_LOSSES_FILLED)


# `attach` takes these as **options, with their types, and their defaults stand in `Arguments` alone.
class Options(TypedDict, total=False):
    """Arguments of `attach` that are seldom needed. See `attach` for their meaning."""

    on_nonfinite: Literal["keep", "raise"]
    observe: bool | str  # the name of a token loss, from Selection of Transformers
    collate_keeps_rows: bool


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `attach`, which describes them, as the user gave them."""

    method: Any
    loader: DataLoader[Any]
    criterion: Any
    epochs: int
    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    forward: Forward | None = None
    forward_passes: str = "auto"
    scoring: Scoring | None = None
    signals: Signals | None = None
    seed: int = 0
    device: torch.device | str | None = None
    on_nonfinite: Literal["keep", "raise"] = "keep"
    spend: Literal["steps", "batches"] | None = None
    stratify: str | None = None
    labels: Any = None
    collate_keeps_rows: bool = False
    observe: bool | str = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the checks of `attach` found out, with the arguments. The defaults are one process that trains on everything.

    Attributes:
        given: The arguments of `attach`.
        world: Processes that train together.
        before: Method that decides before training; None if there is none.
        epoch_method: Method that decides before each epoch; all data if there is none.
        batch_method: Method that decides inside each batch; None if there is none.
        adapter: The user's criterion per sample; None if there is none.
        samples: Number of samples of the dataset; None for a stream.
        mode: Where and by what the rows of a batch are chosen.
        by_batch: Whether the losses that a batch method kept are divided by the rows of the batch.
        spend: Quantity that shrinks with fewer samples; see `attach`. "batches" if the loader composes its batches.
        free: Whether the loader's order is a plain shuffle, which a method may replace by another order.
        composes: Whether the loader's batch sampler composes the batches of each epoch.
        kept: Ids that pruning left, shape (K,), int64; None if there was no pruning.
        strata: Puts plans into stratified order; None if plans have the order of the loader.
        on_mismatch: Function that warns, once, that the labels of the criterion are not those stored in the dataset.
    """

    given: Arguments
    world: World = ALONE
    before: Any = None
    epoch_method: EpochMethod = field(default_factory=FullData)
    batch_method: BatchMethod | None = None
    adapter: Criterion | None = None
    samples: int | None = None
    mode: SelectionMode = SelectionMode.NONE
    by_batch: bool = False
    spend: Literal["steps", "batches"] | None = None
    free: bool = False
    composes: bool = False
    kept: Tensor | None = None
    strata: Strata | None = None
    on_mismatch: Callable[[], None] | None = None

    @property
    def optional(self) -> Mapping[str, str]:
        """Signals used only if the loss defines them, each with a note on what is done without it ("" for no note)."""
        needed = {
            column.signal or name: column.optional
            for name, column in self.epoch_method.columns().items()
        }
        # A map of a regression has fewer columns, which needs no warning. That of a classification has no others.
        may_lack = self.given.observe and not (
            self.adapter is not None and self.adapter.kind in ("classes", "labels")
        )
        observed = dict.fromkeys(OPTIONAL - needed.keys(), "") if may_lack else {}
        return observed | {signal: note for signal, note in needed.items() if note is not None}

    @property
    def methods(self) -> list[Any]:
        """The methods in the order of their stages, without `FullData` unless it is the only one."""
        stages = (self.before, self.epoch_method, self.batch_method)
        methods = [method for method in stages if method is not None]
        if len(methods) == 1:
            return methods
        return [method for method in methods if not isinstance(method, FullData)]

    @property
    def trains_in_full(self) -> bool:
        """Whether no method leaves anything out, so that epochs have the steps of full training."""
        return all(isinstance(method, FullData) for method in self.methods)


# Compared by identity: tensors and loaders have no useful equality.
@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The parts that the objects of a run share; each owns one concern.

    Args:
        given: The arguments of `attach`.
        config: Findings of the checks.
        device: Device of the records, where the loop draws random numbers.
        loader: Loader of the run, which yields the chosen samples.
        model: Wrapper of the user's model; None if `attach` got no model.
        attributor: Assigns losses to samples.
        accumulator: Collects the signals of a step.
        reader: Reads signals.
        passes: Makes extra forward passes.
        records: Records of all samples.
        cost: Counters of samples and steps.
        stopwatch: Times forward and backward passes.
        timing: Records how the time of the run is spent.
        why_plain: Function that returns why the backward pass costs all rows although rows are chosen; "" if it does not.
    """

    given: Arguments
    config: RunConfig
    device: torch.device
    loader: SelectedLoader
    model: TrackedModel | None
    attributor: Attributor
    accumulator: StepAccumulator
    reader: SignalReader
    passes: ExtraPasses
    records: Records
    cost: Cost
    stopwatch: Stopwatch
    timing: Timing
    why_plain: Callable[[], str]
