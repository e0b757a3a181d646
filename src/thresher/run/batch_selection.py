"""How a batch method chooses the rows of a batch: what all ways share, and the choice before the loop sees the batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from thresher import rng
from thresher.attribution.attributor import MeasureLoss
from thresher.attribution.cost_meter import Meter
from thresher.attribution.rows import Attribution, RowLayout
from thresher.attribution.tracker import LossDimension
from thresher.cost import break_even
from thresher.distributed.wrappers import CallInside, SubsetModule, averages, data_parallel, inside
from thresher.losses.base import Criterion
from thresher.losses.given import GivenLosses
from thresher.losses.signals import batch_loss
from thresher.methods.contract import BatchMethod, defines, requirements_of, way_around
from thresher.passes.scoring import Scoring
from thresher.plans import BatchPlan
from thresher.records import NEVER_SEEN
from thresher.run.parts import Parts
from thresher.warning import warn


def without_ignored(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Signals to choose by: a sample all of whose labels are ignored has nothing to teach, rather than no loss yet."""
    return {**found, "loss": torch.where(found["loss"] == NEVER_SEEN, 0.0, found["loss"])}


FEW = 8
"""Number of rows for which a method is asked how many it keeps."""


def divides_by_batch(method: BatchMethod | None) -> bool:
    """Returns whether kept losses are divided by the rows of the batch, as a batch method declares it."""
    return method is not None and requirements_of(method).divide == "batch"


def by_chance(method: Any) -> bool:
    """Returns whether the number of rows that a batch method keeps is not known before it chooses."""
    return method.count(FEW) is None


def divisible_before(criterion: Criterion | None) -> bool:
    """Returns whether a weight that all rows of a batch have becomes a factor on its loss."""
    return criterion is None or not (criterion.class_weights or criterion.reduction == "sum")


class UnevenLabels:
    """Notices where a share of the rows stood for a share of the labels, and the samples had different numbers of labels.

    Args:
        device: Device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._uneven = torch.zeros((), dtype=torch.bool, device=device)
        self._warned = False

    def note(self, counts: Tensor) -> None:
        """Notes how many labels count in each sample of a batch, shape (n,); nothing waits for the device."""
        # A flag on the device, read once an epoch: the step waits for nothing.
        if len(counts):
            self._uneven |= counts.min() != counts.max()

    def warn(self) -> None:
        """Warns once where samples had different numbers of labels; it waits for the device."""
        if self._warned or not self._uneven:
            return
        self._warned = True
        warn(
            "The method divides kept losses by the rows of the batch, and samples of one batch had different numbers of labels "
            "that count. Where rows are chosen before the forward pass without the labels of their whole batch, the mean over "
            "the kept labels is multiplied by the share of the rows that were kept, which is not the share of the labels. Use "
            "forward_passes='once'. This is said once."
        )


def part_of_batch(plan: BatchPlan, n: int) -> BatchPlan:
    """Returns a plan whose mean over the kept rows is their sum over the rows of the batch.

    Args:
        plan: Plan of a batch.
        n: Number of rows of the batch.

    Example:
        >>> part_of_batch(BatchPlan(torch.tensor([0, 3])), 8).weights
        tensor([0.2500, 0.2500])
    """
    k = len(plan.rows)
    if k in (0, n):
        return plan
    ones = torch.ones(k, dtype=torch.float32, device=plan.rows.device) if plan.weights is None else plan.weights
    return replace(plan, weights=ones * (k / n))


OF_BATCHES = 1
"""Key that sets the random numbers of steps apart from those of epochs."""
SEEDS = 256
"""Number of steps whose seeds are made together; one by one they would take longer than the choice itself."""


class BatchStage:
    """A batch method at work: its state, its own random numbers, and what it did.

    Args:
        method: The method.
        seed: Random seed of its draws.
        rank: Number of this process among those that train together, whose batches have draws of their own. Default: 0.
        progress: Function that returns the share of the training that is done, in [0, 1]. Default: it is not known.
    """

    def __init__(
        self,
        method: BatchMethod,
        *,
        seed: int,
        rank: int = 0,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.method, self.seed, self._rank, self._progress = method, seed, rank, progress
        self.requires = requirements_of(method)
        self.state = method.init_state()
        self.step = 0
        self.candidates = self.kept = 0
        self._facts: dict[str, float] = {}
        self._batches = self._offered = self._chosen = self._asked = 0
        self._seeds: tuple[tuple[int, int] | None, list[int]] = None, []

    def plan(self, ids: Tensor, signals: Mapping[str, Tensor]) -> BatchPlan:
        """Returns the plan of the method for one batch.

        Args:
            ids: Ids of the rows, shape (n,), int64.
            signals: Signals by name, each of shape (n,).

        Raises:
            TypeError: The method did not return a BatchPlan.
        """
        signals = {"id": ids, **signals}
        plan, state = self.method.plan_batch(signals, self.state, step=self.step, generator=self._generator())
        if not isinstance(plan, BatchPlan):
            name = type(self.method).__name__
            raise TypeError(f"{name}.plan_batch must return (thresher.BatchPlan, state), got {type(plan).__name__}")
        self.state = state
        self._asked += 1
        self._offered += len(ids)
        self._chosen += len(plan.rows)
        return self._counted(plan, len(ids))

    def _generator(self) -> torch.Generator:
        """Returns the generator of this step, whatever was drawn before."""
        # The draw of a step depends on the seed and the number of the step alone: a resumed run draws the same.
        block, place = divmod(self.step, SEEDS)
        if self._seeds[0] != (self.seed, block):
            keys = (self.seed, block, OF_BATCHES, *([self._rank] if self._rank else []))
            self._seeds = (self.seed, block), rng.seeds(SEEDS, *keys)
        return torch.Generator().manual_seed(self._seeds[1][place])

    @property
    def keeps_all(self) -> bool:
        """Whether the next batch is trained whole, because the method does not choose at this point of the training."""
        return defines(self.method, "active") and not self.method.active(self._progress(), self.step)  # pyright: ignore[reportAttributeAccessIssue]

    def whole(self, n: int, device: torch.device) -> BatchPlan:
        """Returns a plan with every row of a batch."""
        return self._counted(BatchPlan(torch.arange(n, device=device)), n)

    def _counted(self, plan: BatchPlan, n: int) -> BatchPlan:
        self.step += 1
        self.candidates += n
        self.kept += len(plan.rows)
        self._batches += 1
        for name, value in plan.facts.items():
            self._facts[name] = self._facts.get(name, 0.0) + value
        return plan

    def facts(self) -> dict[str, float]:
        """Returns the numbers of rows seen and kept since the last call, and the means of the facts of the plans."""
        found: dict[str, float] = {"candidates": self.candidates, "selected": self.kept}
        found |= {name: total / self._batches for name, total in self._facts.items()}
        if self.candidates:
            found["actual_fraction"] = 1 - self.kept / self.candidates
        if defines(self.method, "report"):
            found |= self.method.report(self.state)  # pyright: ignore[reportAttributeAccessIssue]
        self.candidates = self.kept = self._batches = 0
        self._facts = {}
        return found

    def chosen(self) -> tuple[float, int]:
        """Returns the share of rows that the method chose since the last call, and in how many batches; others were left whole.

        The share is 1 where it was not asked.
        """
        found = self._chosen / self._offered if self._offered else 1.0, self._asked
        self._offered = self._chosen = self._asked = 0
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the method and its position in the random numbers."""
        return {
            "state": {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.state.items()},
            "step": self.step,
            "seed": self.seed,
            "candidates": self.candidates,
            "kept": self.kept,
            "facts": dict(self._facts),
            "batches": self._batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another stage stopped."""
        self.state, self.step, self.seed = dict(state["state"]), state["step"], state["seed"]
        self.candidates, self.kept = state["candidates"], state["kept"]
        self._facts, self._batches = dict(state["facts"]), state["batches"]


COMPILED_AROUND = (
    "`model` is torch.compile around subset_backward, and torch.compile would compute the backward pass of all rows. The model "
    "is trained without that wrapper, with right gradients and more slowly. Write subset_backward(torch.compile(model)), or "
    "leave subset_backward out and give attach the model that torch.compile returned."
)


class Trained:
    """The model of a run, whose backward pass may cost only the chosen rows.

    Args:
        model: Argument of `attach`.
        subset: Whether the backward pass is to cost only the chosen rows. A model that was made for this is left as it is.

    Attributes:
        module: Module that `run.model` stands for; None where `attach` was given no model.
        call: Function that runs a forward pass of the training; None where this is a call of `module`.
    """

    def __init__(self, model: nn.Module | None, *, subset: bool) -> None:
        as_given: Any = model
        if subset:
            model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would compile the backward pass of all rows
        self.module, self.call = model, None
        self._parallel, self._averages = data_parallel(model), averages(model)
        self._parts = [] if model is None else [part for part in model.modules() if isinstance(part, SubsetModule)]
        self._whole = _innermost(model)
        if model is None or not subset:
            return
        # Loaded here, as it loads torch's compiler: other runs need neither.
        from thresher.subset import subset_backward
        from thresher.subset.compilers import compiled_like, given

        if self._parts:
            if model is not as_given and given(as_given).options is not None:
                warn(COMPILED_AROUND)
            return
        # A model that torch.compile returned is compiled inside of the wrapper; one in DistributedDataParallel is wrapped
        # inside of it, so that gradients are still reduced.
        self._whole = made = subset_backward(as_given if self._parallel is None else compiled_like(as_given, inside(model)))
        self._parts = [made]
        if self._parallel is None:
            self.module = made
        else:
            self.call = CallInside(self._parallel, made)

    @property
    def tracing_s(self) -> float:
        """Seconds that tracing and compiling have taken."""
        return sum(part.tracing_s for part in self._parts)

    @property
    def is_plain(self) -> bool:
        """Whether the model turned out not to be traceable, so that its backward pass costs all rows."""
        return bool(self.why_plain())

    def why_plain(self) -> str:
        """Returns why the model could not be traced; "" where it was, or has not been tried."""
        return next((part.fallback for part in self._parts if part.fallback is not None), "")

    def is_plain_anywhere(self, can_score: bool) -> bool:
        """Returns whether the model turned out not to be traceable in any process that trains it; all get the same answer.

        Args:
            can_score: Whether this process can choose in another way; where one cannot, the answer is False.
        """
        if self._averages is None:
            return self.is_plain and can_score
        # All processes choose in the same way, or one would wait for a scoring pass that the others do not make.
        found = torch.tensor([self.is_plain, not can_score], dtype=torch.int32, device=self._averages.device)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self._averages.process_group)
        plain, unable = found.tolist()
        return bool(plain) and not unable

    def report_to(self, meter: Meter) -> None:
        """Has the model report the samples that go backward, where its backward pass costs the chosen rows only.

        Args:
            meter: Meter that counts them.
        """
        if not self._parts:
            return
        self._parts[0].meter = meter
        # The backward pass of what lies around the wrapped part costs all rows, or fewer, as its operations decide.
        if self._parts[0] is not self._whole:
            meter.make_unknown(
                "only a part of the model has the backward pass of subset_backward, and the cost of the rest depends on its "
                "operations; wrap the whole model in subset_backward, unless its blocks are sharded one by one"
            )


def _innermost(model: nn.Module | None) -> nn.Module | None:
    """Returns what is inside of wrappers around a whole model, down to that of `subset_backward`."""
    while model is not None and not isinstance(model, SubsetModule):
        model = getattr(model, "_orig_mod", getattr(model, "module", None))
    return model


class BatchSelection:
    """How the rows of batches are chosen, as the run, its epochs and its loader see it; by itself, all rows are trained on.

    Args:
        parts: Parts of the run.
        stage: The batch method at work. Default: none.
    """

    fills: bool | None = None
    """Whether the loader fills chosen rows up to full batches; None where it yields the batches as they are."""
    forward_passes: str | None = None
    """How it turned out, for the saved state: "once", "twice", or None without a batch method."""
    by_loop = False
    """Whether the losses of the loop's own forward pass choose the rows."""
    instead: "BatchSelection | None" = None
    """Selection that takes over if the model turns out not to be traceable; None if there is no other."""
    scores = False
    """Whether own passes of the trained model compute the losses that rows are chosen by."""
    tracing_s = 0.0
    """Seconds of the loop's steps that tracing the model has taken."""
    gives_up: Callable[[], bool] | None = None
    """Whether another selection, which makes own passes, may take its place; None where there is no other."""

    def __init__(self, parts: Parts, stage: BatchStage | None = None) -> None:
        self._parts, self.stage, self._world = parts, stage, parts.config.world
        self.by_chance = stage is not None and by_chance(stage.method)
        """Whether processes keep different numbers of rows of equal batches."""
        self.loss: MeasureLoss = parts.reader.measuring()  # the criterion's own function: this is called in every step
        """Computes the criterion of the rows that are trained on, and the signals of all."""
        self._dimension = LossDimension()

    def reduced(
        self,
        given: GivenLosses,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        _weights_over_n: Tensor | None,
    ) -> tuple[Any, ...]:
        """Averages losses that the loop computed itself over the rows that are trained on, and reads the signals of all."""
        found = self._beside(given, attribution.layout, outputs[1], targets, self._parts.reader.recorded)
        return given.value(attribution.layout, weights), found

    def _beside(self, given: GivenLosses, layout: RowLayout, outputs: Any, targets: Any, wanted: set[str]) -> dict[str, Tensor]:
        """Signals of samples whose losses by position the loop computed itself."""
        self._dimension.check(given.losses, layout.n, by_sample=given.of_samples)
        found = {"loss": given.means(layout)}
        if "batch_loss" in wanted:
            found["batch_loss"] = batch_loss(found["loss"])
        return found | self._parts.reader.beside(
            outputs, targets, layout.n, wanted - {"batch_loss"}, self._missing, found["loss"]
        )

    def _missing(self, wanted: set[str]) -> str:
        method = self._parts.config.methods[-1]
        return (
            f"run.reduce: {type(method).__name__} needs {', '.join(sorted(wanted))}: pass outputs= and targets=, or "
            f"attach(signals=...){way_around(method, *sorted(wanted))}"
        )

    def watch(self, value: Tensor) -> None:
        """Times the backward pass of a loss of the loop."""
        self._parts.stopwatch.watch(value)

    def at_epoch_start(self, *, can_score: bool) -> "BatchSelection":
        """Returns the selection of the epoch that begins: this one, or the one that takes its place.

        Args:
            can_score: Whether own passes give the losses of the loop, as far as it is known.
        """
        return self

    def step_over(self) -> None:
        """Forgets the choices of the optimizer step that is over."""

    def batch_yielded(self, number: int) -> None:
        """Forgets the choices of batches long before this one."""

    def warn_if_in_vain(self, keep: float, batches: int) -> None:
        """Warns once where choosing saves nothing.

        Args:
            keep: Share of the rows that the method chose in the last epoch, in the batches in which it chose.
            batches: Number of these batches.
        """


class BeforeForward(BatchSelection):
    """A batch method chooses before the loop sees a batch, by a scoring pass or, where it needs no losses, without one.

    Args:
        parts: Parts of the run.
        stage: The batch method at work.
        scoring: How losses are computed.
        fills: Whether chosen rows are filled up to full batches.
    """

    def __init__(self, parts: Parts, stage: BatchStage, scoring: Scoring, *, fills: bool) -> None:
        super().__init__(parts, stage)
        self._stage, self._scoring, self.fills = stage, scoring, fills
        self.forward_passes = "twice" if fills else "once"
        self._known_losses = None if scoring.losses is None else scoring.losses.to(parts.device)
        self.scores = bool(stage.requires.signals) and scoring.losses is None and scoring.model is None
        self._warned, self._loss_of_rows = False, self.loss
        self._uneven = UnevenLabels(parts.device) if parts.config.by_batch else None
        if self._uneven is not None and parts.reader.criterion is not None:
            self.loss = self._loss_by_rows

    def choose(self, batch: Any, ids: Tensor, epoch: int) -> BatchPlan:
        """Returns the rows of a candidate batch that the loop sees.

        Args:
            batch: The batch, on the device.
            ids: Ids of its rows, shape (n,), int64, on the host.
            epoch: Number of the epoch, 0-based.
        """
        if self._stage.keeps_all:
            return self._stage.whole(len(ids), ids.device)
        # A method without signals chooses on the host, where the loader needs the rows: nothing waits for the device then.
        here = ids.to(self._parts.device, non_blocking=True) if self._stage.requires.signals else ids
        plan = self._stage.plan(here, self._signals(batch, here, epoch) if self._stage.requires.signals else {})
        return part_of_batch(plan, len(ids)) if self._parts.config.by_batch else plan

    def _signals(self, batch: Any, ids: Tensor, epoch: int) -> dict[str, Tensor]:
        """Signals to choose by: given ones, those of an earlier epoch, or those of a scoring pass."""
        if self._known_losses is not None:
            return {"loss": self._known_losses.index_select(0, ids)}
        # Losses of this step may still wait in the accumulator, and stale ones are read from the records.
        if epoch % self._scoring.every_epochs:
            self._parts.attributor.write()
            return {name: self._parts.records[name].index_select(0, ids) for name in self._stage.requires.signals}
        return without_ignored(self._parts.passes.score(batch, ids, self._scoring))

    def warn_of_labels(self) -> None:
        """Warns once where the losses were divided by a share of rows, and labels should have counted."""
        if self._uneven is not None:
            self._uneven.warn()

    def reduced(
        self,
        given: GivenLosses,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        _weights_over_n: Tensor | None,
    ) -> tuple[Any, ...]:
        """Averages losses that the loop computed itself over all rows of its batch, and reads their signals."""
        if self._uneven is not None and (counts := given.counts(attribution.layout)) is not None:
            self._uneven.note(counts)
        return super().reduced(given, outputs, targets, attribution, weights, _weights_over_n)

    def _loss_by_rows(self, outputs: Any, targets: Any, attribution: Attribution, *weights: Any) -> tuple[Any, ...]:
        criterion, device = self._parts.reader.criterion, self._parts.device
        assert self._uneven is not None
        assert criterion is not None
        self._uneven.note(criterion.shares(torch.empty(attribution.layout.n, 1, device=device), targets))
        return self._loss_of_rows(outputs, targets, attribution, *weights)

    def warn_if_in_vain(self, keep: float, batches: int) -> None:
        """Warns once where a scoring pass costs more than it saves on this model, as measured."""
        self.warn_of_labels()
        scoring, ratio = self._scoring, self._parts.stopwatch.ratio()
        cheaper = scoring.losses is not None or scoring.model is not None or scoring.dtype or scoring.input_scale != 1
        if not self._stage.requires.signals or cheaper or self._warned or not (ratio and batches):
            return
        most = 1 - (1 - break_even(1.0, ratio)) / scoring.every_epochs
        if keep <= most:
            return
        self._warned = True
        warn(
            f"{type(self._stage.method).__name__} kept {keep:.2f} of the samples, but with two forward passes it saves time on "
            f"this model only below {most:.2f} (a backward pass takes {ratio:.2f} forward passes, measured). Keep less than "
            f"{most:.2f}, use forward_passes='once', or a cheaper forward_passes=Scoring(...). This is said once."
        )
