"""How a batch method chooses the rows of a batch: before the loop sees the batch, or in the loop's own forward pass."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn

from thresher import rng
from thresher.attribution.attributor import BATCHES_AHEAD, MeasureLoss
from thresher.attribution.cost_meter import Meter
from thresher.attribution.rows import Attribution, RowLayout
from thresher.attribution.tracker import LossDimension
from thresher.cost import break_even
from thresher.loading.row_buffer import is_per_sample, take_rows
from thresher.loading.trees import leaves, map_where
from thresher.losses.base import Criterion
from thresher.losses.given import GivenLosses
from thresher.losses.signals import batch_loss, narrow
from thresher.methods.contract import BatchMethod, requirements_of, way_around
from thresher.passes.scoring import Scoring
from thresher.plans import BatchPlan
from thresher.records import NEVER_SEEN
from thresher.run.parts import Parts
from thresher.subset import SubsetBackward, kept_rows, subset_backward
from thresher.subset.compilers import compiled_like, given
from thresher.subset.parallel import CallInside, averages, data_parallel, inside
from thresher.warning import warn


def gradient_of_nothing(outputs: Any) -> Tensor:
    """Returns 0, with a gradient of 0 for everything that outputs depend on: other processes wait for that."""
    return torch.stack([leaf.flatten()[:0].sum() for leaf in leaves(outputs) if leaf.is_floating_point()]).sum()


def take_samples(tree: Any, plan: BatchPlan, layout: RowLayout) -> Any:
    """Takes the rows of some samples of every tensor that has all of them, and their items of every list of samples."""

    def take(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return take_rows([part], plan.rows)[0] if is_per_sample(part, layout.n) else part
        per = len(part) // layout.n if part.dim() else 0
        if not per or len(part) != layout.n * per or per not in (1, layout.repeat or per):
            return part
        return kept_rows(part, plan.rows.to(part.device, non_blocking=True), layout.n, drawn=plan.drawn)

    return map_where(take, tree, lambda part: isinstance(part, Tensor) or is_per_sample(part, layout.n))


def without_ignored(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Signals to choose by: a sample all of whose labels are ignored has nothing to teach, rather than no loss yet."""
    return {**found, "loss": torch.where(found["loss"] == NEVER_SEEN, 0.0, found["loss"])}


def times(value: Tensor, factor: Tensor | float | None) -> Tensor:
    """Returns a loss times a factor, in the dtype of the loss; None for a factor of 1."""
    return value if factor is None else value * (factor.to(value.dtype) if isinstance(factor, Tensor) else factor)


def joint_weights(plan: BatchPlan, weights: Tensor | None) -> Tensor | None:
    """Weights of the chosen rows, from the epoch's plan and the batch's."""
    if weights is None:
        return plan.weights
    weights = weights.index_select(0, plan.rows)
    return weights if plan.weights is None else weights * plan.weights


def kept_losses_only(method: object, criterion: Any) -> str:
    """Returns the message for a criterion that leaves the losses unreduced, of which only the kept rows would be there."""
    return (
        f"{type(method).__name__} keeps some rows of a batch after the loop's own forward pass, and criterion {criterion!r} "
        "has reduction='none': the loop would get the losses of the kept rows alone, and tensors of the loop, such as weights "
        "or masks, have the rows of the whole batch. Use reduction='mean'; or attach(forward_passes='twice'), with which "
        "run.loader yields the kept rows alone; or compute the losses in the loop and call run.reduce(losses, outputs=...)."
    )


def not_by_rows(error: Exception, criterion: Any, kept: int, of: int) -> Exception:
    """Returns the error for a criterion that takes the whole batch and does not take the kept rows of it.

    It is the same error where that has another cause, or names the criterion and what to do already.
    """
    if isinstance(error, torch.OutOfMemoryError) or str(error).startswith(f"criterion {criterion!r}"):
        return error
    return ValueError(
        f"criterion {criterion!r} could be computed for the {of} samples of a batch, and not for {kept} of them: {error}. With "
        "forward_passes='once' it gets the kept rows of outputs and targets, of every tensor whose first dimension is the "
        "samples'. Let the first dimension of all of them be the samples', and transpose within the criterion where it needs "
        "another order, as nn.CTCLoss does; or use attach(forward_passes='twice'); or compute the losses in the loop and call "
        "run.reduce(losses, ids=run.ids)."
    )


MOSTLY = 0.9
"""Share of the backward passes, and of the rows of one, from which on they are nearly all."""

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


def part_of_divisor(
    criterion: Criterion, targets: Any, layout: RowLayout, rows: Tensor, weights: Tensor | None, of_batch: Tensor | None
) -> Tensor | float:
    """Returns the part of some samples in what the scalar of their batch is divided by.

    The scalar of these samples times this part is their sum over the divisor of the batch.

    Args:
        criterion: The user's criterion per sample.
        targets: Targets of the batch.
        layout: Layout of the rows of the batch as samples.
        rows: Numbers of the samples, shape (k,), int64.
        weights: Weights of these samples, shape (k,), float; None where all are 1.
        of_batch: Weights of all samples of the batch, shape (n,), float; None where all are 1.
    """
    if criterion.reduction == "sum":
        return 1.0
    shares = criterion.shares(torch.empty(layout.n, 1, device=rows.device), targets)
    kept = shares.index_select(0, rows)
    if criterion.class_weights:  # then weights are part of the divisor, too
        kept = kept if weights is None else kept * weights
        shares = shares if of_batch is None else shares * of_batch
    return kept.sum() / shares.sum()


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
        return self.requires.active and not self.method.active(self._progress(), self.step)  # pyright: ignore[reportAttributeAccessIssue]

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
        if self.requires.report:
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
        self._parts = [] if model is None else [part for part in model.modules() if isinstance(part, SubsetBackward)]
        self._whole = _innermost(model)
        if self._parts and model is not as_given and given(as_given).options is not None:
            warn(COMPILED_AROUND)
        if model is None or self._parts or not subset:
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
    while model is not None and not isinstance(model, SubsetBackward):
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
    scores = False
    """Whether own passes of the trained model compute the losses that rows are chosen by."""
    tracing_s = 0.0
    """Seconds of the loop's steps that tracing the model has taken."""
    gives_up: Callable[[], bool] | None = None
    """Whether another selection, which makes own passes, may take its place; None where there is no other."""

    def __init__(self, parts: Parts, stage: BatchStage | None = None) -> None:
        self._parts, self.stage, self._world = parts, stage, parts.records.shard.world
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


class InForward(BatchSelection):
    """A batch method chooses by the losses of the loop's own forward pass; the criterion keeps the chosen rows.

    Args:
        parts: Parts of the run.
        stage: The batch method at work.
        trained: The model, whose backward pass costs the chosen rows only where it was traced.
        instead: Takes over where the model turned out not to be traceable; None: nothing does.
    """

    forward_passes = "once"

    def __init__(self, parts: Parts, stage: BatchStage, trained: Trained, instead: BatchSelection | None) -> None:
        super().__init__(parts, stage)
        self._stage, self._trained, self.instead = stage, trained, instead
        self.loss = self._loss_of_chosen
        self.gives_up = None if instead is None else lambda: trained.is_plain
        self._chosen_in_step: list[tuple[Any, BatchPlan, Tensor | None]] = []
        self._before_step: dict[str, Any] = {}
        self._may_be_foreign = False
        self._passed_back = 0, 0
        self._share = 1.0
        self._warned = self._compared = False

    @property
    def tracing_s(self) -> float:
        """Seconds that tracing has taken in the loop's forward passes."""
        return self._trained.tracing_s

    def watch(self, value: Tensor) -> None:
        """Times the backward pass, which runs on the chosen rows only where the model was traced."""
        self._parts.stopwatch.watch(value, 1.0 if self._trained.is_plain else self._share)

    def _loss_of_chosen(
        self, outputs: Any, targets: Any, attribution: Attribution, weights: Tensor | None, weights_over_n: Any
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        reader, layout = self._parts.reader, attribution.layout
        criterion = reader.criterion
        assert criterion is not None
        # The loop would multiply the losses of the kept rows with weights of all rows.
        if criterion.keeps_positions:
            raise ValueError(kept_losses_only(self._stage.method, criterion.own))
        # Choosing takes time that full training does not take; the criterion itself does.
        begin = perf_counter()
        all_count = attribution.all_count and criterion.ignores_negatives_of(targets)
        found = reader.signals(outputs, targets, layout, reader.chosen_by, all_count=all_count)
        # A sample all of whose labels are ignored has a loss of NEVER_SEEN, which a method takes for "not seen yet".
        plan, factor = self._choose_rows(attribution, found if all_count else without_ignored(found))
        # Before the rows are taken: the divisor is that of the targets of the whole batch.
        if self._parts.config.by_batch:
            factor = part_of_divisor(criterion, targets, layout, plan.rows, joint_weights(plan, weights), weights)
        weights, k = joint_weights(plan, weights), len(plan.rows)
        outputs, targets = (take_samples(tree, plan, layout) for tree in (outputs, targets))
        self._parts.timing.attribution_s += perf_counter() - begin
        small, alone = RowLayout(k, layout.repeat), None
        # A loss whose value for a row depends on the other rows (contrastive, in-batch negatives) would be another one for the
        # kept rows; the first step shows it.
        to_compare = not self._compared and 0 < k < layout.n
        try:
            if to_compare:
                alone = criterion.signals_alone(outputs, targets, small)
            # Other processes wait in the backward pass for gradients of every parameter.
            if not k:
                value = gradient_of_nothing(outputs)
            elif weights is None:
                value = criterion.value(outputs, targets)
            else:
                value = criterion.measure(outputs, targets, small, weights=weights, wanted=set()).value
        except (RuntimeError, ValueError, IndexError) as error:
            raise not_by_rows(error, criterion.own, k, layout.n) from error
        if to_compare:
            self._compare(alone, found["loss"].index_select(0, plan.rows))
        return times(value, factor), narrow(found), plan.rows

    def _factor(self, k: int) -> Tensor | None:
        """Returns the factor of a mean over k rows, so that the mean over the processes is that over the rows of all of them.

        None where processes keep equally many rows.
        """
        several = self._world.size > 1 and self.by_chance
        return self._world.share_of_mean(k, self._parts.device) if several else None

    def reduced(
        self,
        given: GivenLosses,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        _weights_over_n: Tensor | None,
    ) -> tuple[Any, ...]:
        """Averages losses that the loop computed itself over the chosen rows, and reads the signals of all."""
        layout = attribution.layout
        found = self._beside(given, layout, outputs[1], targets, self._parts.reader.chosen_by)
        plan, factor = self._choose_rows(attribution, found if given.all_count else without_ignored(found))
        value = given.value(layout, joint_weights(plan, weights), plan.rows)
        if self._parts.config.by_batch:
            factor = given.part(layout, plan.rows)
        elif given.has_total:
            factor = None
        return times(value, factor), narrow(found), plan.rows

    def _compare(self, alone: Tensor | None, losses: Tensor) -> None:
        """Compares once the losses of the chosen rows by themselves with those that they had in the whole batch.

        Raises:
            ValueError: They differ, so that the loss of a sample depends on the rest of its batch.
        """
        criterion = self._parts.reader.criterion
        assert criterion is not None
        if alone is not None:
            exact = losses.dtype in (torch.float32, torch.float64)
            if not torch.allclose(alone.to(losses.dtype), losses, rtol=1e-3 if exact else 0.05, atol=1e-4, equal_nan=True):
                raise ValueError(
                    f"criterion {criterion.own!r} gives samples other losses when it is called with {len(losses)} samples of "
                    "the batch than with the whole batch: the loss of a sample depends on the other samples, as in a "
                    "contrastive loss. forward_passes='once' trains on the kept rows and would compute another loss. Use "
                    "forward_passes='twice', or compute the losses of the whole batch yourself and call "
                    "run.reduce(losses, outputs=...)."
                )
        self._compared = True

    def _choose_rows(self, attribution: Attribution, found: Mapping[str, Tensor]) -> tuple[BatchPlan, Tensor | None]:
        """Asks the method about some rows; the same answer for a second loss of the same rows in a step.

        Returns:
            The plan, and the factor of `_factor`.
        """
        trains_own = self._parts.attributor.trains_model
        if trains_own:
            self._discard_foreign()
        # A second criterion for the same rows, as of an auxiliary head, keeps the same rows; the key of given ids is None, and
        # asks anew.
        chosen = next((one for one in self._chosen_in_step if one[0] is not None and one[0] == attribution.key), None)
        if chosen is None:
            ids, device = attribution.ids, self._parts.device
            if not (trains_own or self._chosen_in_step):
                self._before_step = self._stage.state_dict()
            self._may_be_foreign = not trains_own
            plan = self._stage.whole(len(ids), device) if self._stage.keeps_all else self._stage.plan(ids, found)
            chosen = attribution.key, plan, self._factor(len(plan.rows))
            self._chosen_in_step.append(chosen)
        _, plan, factor = chosen
        self._share = len(plan.rows) / attribution.layout.n
        return plan, factor

    def at_epoch_start(self, *, can_score: bool) -> BatchSelection:
        """Returns the selection that takes over where the model turned out not to be traceable, else itself."""
        return self.instead if self.instead is not None and self._trained.is_plain_anywhere(can_score) else self

    def warn_if_in_vain(self, keep: float, batches: int) -> None:
        """Warns once where the backward pass costs the whole batch for a reason that lies in the loop."""
        meter, before = self._parts.attributor.meter, self._passed_back
        self._passed_back = now = meter.subset_backwards, meter.whole_backwards
        passes, whole = now[0] - before[0], now[1] - before[1]
        if self._warned or self._trained.module is None or meter.cost.unknown is not None:
            return
        if meter.elsewhere:
            why = (
                f"the outputs of {meter.elsewhere:,} samples did not come from run.model, so that their backward pass costs "
                "the whole batch. Call run.model(inputs) in the loop instead of the model itself."
            )
        # A penalty on the outputs, or a loss of another head, of all rows. Batches that the method left whole do so rightly.
        elif passes and batches and 0 < keep < MOSTLY and whole >= passes - (1 - MOSTLY) * batches:
            why = (
                f"the model was called as it is, whose backward pass costs the whole batch: {self._trained.why_plain()}."
                if self._trained.is_plain
                else f"gradient came to all rows of {whole:,} of {passes:,} backward passes, which thus cost the whole batch. "
                "Another loss of the outputs has all rows of the batch: compute it by run.criterion or run.reduce, too, or add "
                "it to the losses that run.reduce gets."
            )
        else:
            return
        self._warned = True
        warn(
            f"{type(self._stage.method).__name__} kept {keep:.2f} of the samples in the loop's own forward pass, and {why} "
            "This is said once."
        )

    def step_over(self) -> None:
        """Forgets the choices of the optimizer step that is over."""
        self._chosen_in_step.clear()
        self._may_be_foreign = False

    def _discard_foreign(self) -> None:
        """Takes back choices of this step by the losses of another model, and what the method learned by them.

        That they are another model's shows when the first loss of the run's own model is credited: until then, a loop may well
        compute the outputs without `run.model`.
        """
        if self._may_be_foreign and self._chosen_in_step:
            self._stage.load_state_dict(self._before_step)
            self._chosen_in_step.clear()
        self._may_be_foreign = False

    def batch_yielded(self, number: int) -> None:
        """Forgets the choices of batches that are not in use any more."""
        # A prefetcher asks for batches before the loss of an earlier one is computed.
        first = number - BATCHES_AHEAD
        self._chosen_in_step = [one for one in self._chosen_in_step if one[0] is not None and one[0][0] > first]


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
        # The ids are on the host for the loader, and on the device for the records.
        here = ids.to(self._parts.device, non_blocking=True)
        if self._stage.keeps_all:
            return self._stage.whole(len(ids), self._parts.device)
        found = self._signals(batch, here, epoch) if self._stage.requires.signals else {}
        plan = self._stage.plan(here, found)
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
            f"{most:.2f}, use forward_passes='once', or a cheaper scoring=Scoring(...). This is said once."
        )
