"""`Run`: a method attached to one training loop, as the loop sees it. Its parts do the work."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thresher.attribution.tracked_model import TrackedModel
from thresher.audit import Audit, audit_counts, may_repeat
from thresher.cost import Cost
from thresher.frozen import Cached
from thresher.loading.uncopied import Uncopied
from thresher.losses.given import GivenLosses
from thresher.methods.contract import OBSERVE, as_written, defines, share_given
from thresher.methods.full import FullData
from thresher.observation import DataMap, map_of
from thresher.plans import EpochPlan
from thresher.records import Records
from thresher.run.checkpoint import SavedState
from thresher.run.criterion import CreditedCriterion, uncompiled
from thresher.run.learning_rate import PacedLR, follow_clock, pace
from thresher.run.parts import Parts
from thresher.run.timeline import Timeline
from thresher.timing import time_by_part
from thresher.warning import warn

Facts = list[tuple[str, str]]
"""Names and values that a summary shows."""


def facts(
    method: Any,
    epochs: str,
    samples: int | None,
    history: Sequence[Mapping[str, Any]],
    times: Sequence[Mapping[str, Any]],
    cost: Cost,
    why_plain: str = "",
    *,
    nothing_saved: str = "",
    cached: Sequence[str] = (),
    scored: bool = False,
    on_device: bool = False,
) -> Facts:
    """Returns the facts that a summary of a run shows.

    Args:
        method: The method of the run.
        epochs: Number of finished epochs.
        samples: Number of samples of the dataset; None for an IterableDataset.
        history: Entries of `run.history`.
        times: Entries of `run.times`.
        cost: Cost of the run by now.
        why_plain: Why the model could not be traced, if rows are chosen in the batch. Default: it was.
        nothing_saved: Why nothing was saved. Default: something was, or epochs are to come.
        cached: Line of each cached module, with its rows read and computed. Default: none.
        scored: Whether the method got scores, which took time before the run. Default: False.
        on_device: Whether the model is on an accelerator, whose work the measured times do not wait for. Default: False.
    """
    rows = [("method", as_written(method)), ("epochs", epochs)]
    rows.append(("samples", "a stream" if samples is None else f"{samples:,}"))
    if history:
        rows.append(("last epoch", _epoch(history, samples, counted=cost.unknown is None)))
    if times:
        notes = (
            "; since the state was loaded" * (len(times) < len(history))
            + "; time of the host" * on_device
            + "; what the scores took before it is not in it" * scored
        )
        rows.append(("time", time_by_part(times) + notes))
    # Full training saves nothing that could be measured.
    if times and not isinstance(method, FullData):
        measures = "thresher compare measures it: it trains with this method and in full"
        rows.append(("saving", nothing_saved or measures))
    rows += (
        [("not traced", f"a backward pass costs all rows that are put forward: {why_plain}")]
        if why_plain
        else []
    )
    rows += [("cached", line) for line in cached]
    return [*rows, *_costs(cost)]


SAME_SHARE = 0.005
"""Two shares of the samples that differ by less than this are not both reported."""


def as_text(found: Facts) -> str:
    """Returns one line per fact, the values below each other."""
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found)


def as_html(found: Facts) -> str:
    """Returns a table with one row per fact."""
    rows = "".join(
        f"<tr><th scope='row' style='text-align:left'>{escape(n)}</th>{_cell(v)}</tr>"
        for n, v in found
    )
    return f"<table>{rows}</table>"


def _cell(value: str) -> str:
    return f"<td style='text-align:left'>{escape(value)}</td>"


def _epoch(history: Sequence[Mapping[str, Any]], samples: int | None, *, counted: bool) -> str:
    entry = history[-1]
    parts = []
    if samples:
        # The share of the last epoch can be far from the others', as for a method that trains the end in full.
        mean_share = sum(epoch["kept"] for epoch in history) / len(history) / samples
        if abs(mean_share - entry["kept"] / samples) < SAME_SHARE:
            also = ""
        else:
            also = f" ({mean_share:.1%} in all epochs)"
        parts.append(f"planned {entry['kept']:,} samples, {entry['kept'] / samples:.1%}{also}")
    if entry.get("moved_back"):
        parts.append(f"{entry['moved_back']:,} moved back")
    if "steps" in entry:
        went = f"{entry['backward']:,} went backward in " if counted else ""
        parts.append(f"{went}{entry['steps']:,} steps")
    if "padded_tokens" in entry:
        parts.append(
            f"{1 - entry['tokens'] / entry['padded_tokens']:.1%} of the tokens were padding"
        )
    if entry.get("lr_scale", 1.0) != 1.0:
        parts.append(f"learning rate times {entry['lr_scale']:.3g}")
    if entry.get("nonfinite"):
        parts.append(f"{entry['nonfinite']:,} losses not finite")
    return "; ".join(parts) or "nothing was counted"


def _costs(cost: Cost) -> Facts:
    known = cost.to_dict()
    # Unknown, or nothing was trained yet: the text of the cost gives the reason.
    if known["ratio"] is None:
        return [("cost", str(cost))]
    passes = (
        f"{abs(1 - known['ratio']):.1%} {'fewer' if known['ratio'] <= 1 else 'more'}, if a backward pass counts as 2 forward "
        f"passes: forward {cost.forward:,} of {cost.full_forward:,} samples, backward {cost.backward:,} of "
        f"{cost.full_backward:,}, {cost.steps:,} steps"
    )
    return [("sample passes", passes)]


def numbers_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the numbers in some dicts by name; later dicts win. None, texts and lists are left out."""
    latest = {name: value for entry in entries for name, value in entry.items()}
    # True is an int in Python, and no number to plot.
    return {
        name: value
        for name, value in latest.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


Log = Callable[[Mapping[str, float], int], object]


def log_of(tracker: Any) -> Log:
    """Returns a function `(numbers, step)` that logs numbers by name to an experiment tracker.

    Args:
        tracker: Object with `add_scalar(name, value, step)`, such as TensorBoard's SummaryWriter; with
            `log_metrics(numbers, step=)`, such as the module mlflow or a logger of Lightning; with `log(numbers, step=)`, such
            as a run of W&B or a tracker of accelerate; or a function `(numbers, step)`.

    Raises:
        TypeError: The tracker has none of these.
    """
    # Functions come last: an object with such a method may be callable, too.
    if callable(add_scalar := getattr(tracker, "add_scalar", None)):

        def log_each(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                add_scalar(name, value, step)

        return log_each
    for name in ("log_metrics", "log"):
        if callable(taking := getattr(tracker, name, None)):
            return lambda numbers, step: taking(dict(numbers), step=step)
    if callable(tracker):
        return lambda numbers, step: tracker(dict(numbers), step)
    raise TypeError(
        f"run.log: `tracker` must have add_scalar, log_metrics or log, or be a function (numbers, step), got "
        f"{type(tracker).__name__}; for another tracker pass `lambda numbers, step: ...`"
    )


class Run(Uncopied):
    """A method attached to one training loop. Returned by `attach`.

    Args:
        parts: Parts of the run.
        timeline: Events of the loop, choice of samples, progress and history.

    Attributes:
        method: The method, the last one if there are several.
        loader: Loader to iterate over instead of the DataLoader.
        criterion: Module to call in the loop instead of the criterion; it records the loss of each sample.
        epochs: Number of epochs of the whole training run.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import thresher
        >>> data = TensorDataset(torch.arange(8.0).unsqueeze(1), torch.arange(8) % 2)
        >>> run = thresher.attach(
        ...     thresher.UniformSubset(keep=0.5), loader=DataLoader(data, 2), criterion=nn.CrossEntropyLoss(), epochs=3
        ... )
        >>> run.epoch, run.progress, len(run.plan.ids), len(run.loader)
        (0, 0.0, 4, 2)
    """

    def __init__(self, parts: Parts, timeline: Timeline) -> None:
        self._parts = parts
        self._cached: list[Cached] = []
        self._timeline = timeline
        self.method = parts.config.methods[-1]
        self.loader = parts.loader
        self.epochs = parts.given.epochs
        self._credit = parts.attributor.credit
        # The loader saves the run, for scripts that save the state of their loader, as they do with a StatefulDataLoader.
        self.loader.saved = SavedState(parts, timeline)
        self.criterion = CreditedCriterion(
            parts.given.criterion, parts.config.adapter, timeline, self._credit, parts.stopwatch
        )

    # What the loop calls

    @property
    def model(self) -> TrackedModel:
        """Module to call in the loop instead of the model; it remembers which samples the outputs belong to."""
        if self._parts.model is None:
            raise ValueError("run.model: the run was created without a model; pass model=model")
        return self._parts.model

    def reduce(
        self,
        per_sample_losses: Tensor,
        ids: Tensor | None = None,
        outputs: Any = None,
        targets: Any = None,
        repeat: int | None = None,
        *,
        valid: Tensor | None = None,
        total: float | Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Averages losses that the loop computed itself, and records and weights them as `run.criterion` does.

        With `valid`, the result is the mean over all positions that count, as in `F.cross_entropy(..., ignore_index=-100)`, not
        the mean of the means of the rows. The loss of a sample is the mean over its positions that count.

        Args:
            per_sample_losses: Losses, shape (rows, ...), with gradient; the loss of a sample is the mean of its entries.
            ids: Positions of the rows in the loader's dataset, as in `criterion`. Default: found from the tensors.
            outputs: Outputs of `run.model`, or a part of them, by which the samples of the losses are found. Default: found
                from `per_sample_losses`.
            targets: Tensors of the batch, by which the samples of the losses are found. Default: none.
            repeat: Number of consecutive rows per id, as in `criterion`. Default: one row per id. With `repeat`, the first
                dimension of the losses is taken for the rows, even if the second is as long.
            valid: Mask of the positions that count, such as `labels != -100`, or their weights, >= 0, such as
                `class_weights[labels]`, in a shape that fits by broadcasting. A sample without such a position records no
                loss. Default: all count.
            total: Number > 0, or tensor of shape (), by which the sum of the losses is divided. If it is the number of valid
                positions in all micro-batches of a step, the results of these add up to one mean. Default: the number in this
                call, or the sum of its weights.
            keep: Mask of the positions to train on, such as the tokens that `thresher.TokenSelection` chose, in the same form
                as `valid`. The recorded loss of a sample is still the mean over all its positions that count. Default: all that
                count.

        Returns:
            Mean loss, shape (), weighted if the method weights samples. If the method keeps only some rows of the loop's
            forward pass, the mean over these rows; with `total`, this mean times the number of valid positions in the batch,
            divided by `total`.

        Raises:
            AttributionError: Thresher cannot tell which samples the rows belong to. Nothing was recorded.
            TypeError: Losses, `valid` or `keep` are not tensors, or `total` is not a number.
            ValueError: Losses have no sample dimension, a mask does not fit them or has numbers below 0, `total` is not above 0
                (on a device these values are not read, and the result is NaN), or the method needs signals that are computed
                from `outputs` and `targets`.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> labels = torch.tensor([[1, 0, 1], [1, -100, -100]])
            >>> model, loader = torch.nn.Embedding(2, 2), DataLoader(TensorDataset(labels.clamp(min=0), labels), 2)
            >>> run = thresher.attach(thresher.FullData(), loader=loader, criterion=None, model=model, epochs=1)
            >>> tokens, labels = next(iter(run.loader))
            >>> losses = torch.nn.functional.cross_entropy(run.model(tokens).mT, labels, reduction="none")
            >>> torch.allclose(run.reduce(losses, targets=labels, valid=labels != -100), losses.sum() / 4)
            True
        """
        # In a compiled step, attribution would see only the compiler's placeholders for the tensors.
        if torch.compiler.is_compiling():
            tensors = (per_sample_losses, ids, outputs, targets, repeat)
            return uncompiled(self.reduce, *tensors, valid=valid, total=total, keep=keep)
        losses = GivenLosses(per_sample_losses, valid, total, keep, by_row=repeat is not None)
        # An evaluation: nothing is trained on, so nothing is recorded.
        if not torch.is_grad_enabled():
            return losses.plain()
        # The losses were computed from the outputs, so they show the rows as well.
        evidence = (per_sample_losses, outputs)
        measure = partial(self._timeline.selection.reduced, losses)
        value = self._credit(evidence, targets, ids, measure, repeat)
        if value is None:
            return losses.plain()
        return self.criterion.watch(value, evidence)

    @property
    def ids(self) -> Tensor:
        """Positions in the dataset of the samples in the last batch, shape (B,), int64, to pass as `ids` to the criterion."""
        ids = self._parts.attributor.ids
        if ids is None:
            raise ValueError("run.ids: no batch was yielded yet; iterate run.loader")
        return ids

    def ids_of(self, tensor: Tensor) -> Tensor:
        """Returns the positions in the dataset of the samples in a tensor, shape (n,), int64, for the argument `ids`.

        Use it instead of `run.ids` if the loader runs ahead of the loop, as with a prefetcher, or if batches are skipped.

        Args:
            tensor: A tensor of a batch that `run.loader` yielded, or a slice or view of it.

        Raises:
            AttributionError: The tensor is not part of a batch of this run, or has only parts of rows, such as some columns.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])), batch_size=2)
            >>> run = thresher.attach(thresher.FullData(), loader=loader, criterion=torch.nn.CrossEntropyLoss(), epochs=1)
            >>> (x, _), _ = run.loader
            >>> run.ids_of(x), run.ids
            (tensor([0, 1]), tensor([2, 3]))
        """
        return self._parts.attributor.ids_of(tensor)

    def cached(
        self,
        module: nn.Module,
        *,
        memory: int | None = None,
        path: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Cached:
        """Returns a frozen module that computes each row once; see `thresher.cached`, which has the same arguments.

        Its outputs belong to the samples of its inputs, so that `run.model` may take them, as a head on a backbone does.
        `run.summary()` shows how many rows were read. After an epoch in which almost none were, a warning says why that
        usually is.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> loader = DataLoader(TensorDataset(torch.rand(4, 2), torch.tensor([0, 1, 0, 1])), batch_size=2)
            >>> head, criterion = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
            >>> run = thresher.attach("full", loader=loader, criterion=criterion, model=head, epochs=2)
            >>> backbone = run.cached(torch.nn.Linear(2, 3).requires_grad_(False).eval())
            >>> for _ in range(2):
            ...     for x, y in run.loader:
            ...         run.criterion(run.model(backbone(x)), y).backward()
            >>> backbone.hits, backbone.misses
            (4, 4)
        """
        module = Cached(
            module,
            memory=memory,
            path=path,
            dtype=dtype,
            remember=self._parts.attributor.pass_on,
            epoch=lambda: self.epoch,
            samples=self.loader.n,
        )
        self._cached.append(module)
        return module

    def pace(self, scheduler: LRScheduler, total: int | None = None) -> PacedLR:
        """Returns a scheduler that steps yours in proportion to the samples consumed, so that it ends as in full training.

        A method makes epochs shorter, so a scheduler that counts steps would not reach its end. Call `step()` of the returned
        scheduler wherever your loop steps your scheduler, save and load its state instead of the state of yours, and pass it to
        code that takes a scheduler. With `thresher.FullData()` every learning rate is the same as in the plain loop, bit for
        bit.

        Args:
            scheduler: Scheduler that counts steps, such as OneCycleLR, CosineAnnealingLR, LambdaLR or SequentialLR. It must not
                have stepped yet. It may be the one that `accelerator.prepare` returned.
            total: Number of steps, 1 or more, that the scheduler makes in full training: the number of batches, of optimizer
                steps (if gradients are accumulated) or of epochs, depending on where your loop steps it. Default: the
                scheduler's own number if it has `total_steps`, else one step per batch of full training.

        Raises:
            TypeError: `scheduler` does not count steps, such as ReduceLROnPlateau.
            ValueError: `total` is out of range or contradicts the scheduler, the scheduler has stepped already, or the loader
                streams samples without a length.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> model, loader = torch.nn.Linear(1, 2), DataLoader(TensorDataset(torch.randn(8, 1), torch.arange(8) % 2), 2)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> method, criterion = thresher.UniformSubset(keep=0.5), torch.nn.CrossEntropyLoss()
            >>> run = thresher.attach(method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=3)
            >>> schedule = run.pace(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader)))
            >>> for epoch in range(3):
            ...     for x, y in run.loader:
            ...         run.criterion(run.model(x), y).backward()
            ...         optimizer.step()
            ...         schedule.step()
            >>> schedule.get_last_lr()
            [0.0]
        """
        exact = self._parts.config.trains_in_full
        return pace(scheduler, follow_clock(self._timeline), total, exact=exact)

    # What it remembers and reports

    @property
    def epoch(self) -> int:
        """Number of the epoch in progress or, between epochs, of the next one, from 0."""
        # An epoch that is over counts, even if nothing has ended it yet.
        return self._timeline.epoch + self._timeline.end.due

    @property
    def progress(self) -> float:
        """Share of the whole training run that is done, in samples of full training, [0, 1]."""
        # A loop that reads this may schedule by it: it gets no warning that its epochs have fewer steps.
        self._timeline.steps.by_progress = True
        return self._timeline.progress.share

    @property
    def plan(self) -> EpochPlan:
        """The plan (chosen samples and weights) of the epoch in progress or, between epochs, of the next epoch.

        The run stores a bit per sample, so each access builds a new `EpochPlan`. It is the same in all processes.

        Raises:
            ValueError: The loader has an IterableDataset, for which no samples are chosen in advance.
        """
        return self._timeline.plan.unpacked()

    @property
    def records(self) -> Records:
        """Values stored for each sample, such as the last loss: a mapping from names to tensors of shape (N,).

        A loss is included once the optimizer has stepped or, without `optimizer=`, at once. With several processes, only process 0
        has the values, up to the end of the last epoch or to `detach`.

        Raises:
            RuntimeError: This is not process 0.
        """
        self._check_keeper("run.records")
        self._warn_if_open()
        # An epoch that is over ends first: its refresh is part of the records.
        self._timeline.end.read()
        self._parts.accumulator.flush()
        return self._parts.records

    def data_map(self, labels: Any = None) -> DataMap:
        """Returns the data map, a table with one row per sample: loss, confidence, suspicion of a wrong label, and more.

        The run must be attached with `observe=True`. With several processes, call it in process 0.

        Args:
            labels: Classes of the samples, shape (N,): list, array or tensor. Default: the classes in the dataset or, if the
                criterion got other classes, those, with -1 for a sample that the criterion never got; none for a criterion
                without classes, such as MSELoss.

        Raises:
            RuntimeError: This is not process 0.
            ValueError: The run was attached without `observe=True`.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> data = TensorDataset(torch.zeros(4, 2), torch.rand(4, 1))
            >>> run = thresher.observe(loader=DataLoader(data, 2), criterion=torch.nn.MSELoss(), epochs=1)
            >>> list(run.data_map())
            ['id', 'times_seen', 'loss', 'loss_mean', 'loss_spread', 'suspicion']
        """
        if not self._parts.given.observe:
            raise ValueError(
                "run.data_map: the run does not observe: use thresher.observe(...), or attach(..., observe=True)"
            )
        self._check_keeper("run.data_map()")
        config = self._parts.config
        observe = config.given.observe
        return map_of(
            self.records,
            config.given.loader.dataset,
            labels,
            config.on_mismatch,
            has_classes=config.adapter is None or config.adapter.kind != "values",
            loss=observe if isinstance(observe, str) else "loss",
        )

    @property
    def trained(self) -> Tensor:
        """Number of times each sample was trained on, shape (N,), int32; empty for an IterableDataset.

        With several processes, only process 0 has the numbers.

        Raises:
            RuntimeError: This is not process 0.
        """
        self._check_keeper("run.trained")
        self._warn_if_open()
        self._parts.accumulator.flush()
        return self._parts.accumulator.trained(in_step=self._parts.config.world.size == 1)

    def audit(self) -> Audit:
        """Says how often the samples were trained on, for loops that skip batches, break or resume.

        Returns:
            An audit like that of `thresher.testing.audit`. Without selection, it has a problem if a sample was trained on less
            often than once a complete epoch, or more often than once an epoch; it notes the samples that were never trained on.

        Raises:
            RuntimeError: This is not process 0.
        """
        parts = self._parts
        full = all(isinstance(one, FullData) for one in parts.config.methods)
        history = self.history
        complete = sum(entry["complete"] for entry in history)
        partial = len(history) - complete + self._timeline.progress.active
        loader = parts.loader
        dropped = (loader.order.candidates - loader.candidates) * parts.config.world.size
        every = full and not may_repeat(parts.given.loader)
        return audit_counts(self.trained.cpu(), complete, partial, every=every, dropped=dropped)

    @property
    def cost(self) -> Cost:
        """Number of samples in forward and backward passes, and the same for full training."""
        cost = self._parts.cost
        # An epoch that is over ends first: the cost includes its refresh.
        self._timeline.end.read()
        self._parts.accumulator.settle()
        self._parts.stopwatch.update(cost)
        return cost

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per finished epoch: facts about the chosen samples, numbers of samples and steps, non-finite losses.

        `kept` is the number of samples that the plan keeps, also if the sampler, `drop_last`, or a batch of one row that batch
        normalization cannot use, leaves some of them out.
        """
        self._warn_if_open()
        return self._timeline.history

    @property
    def times(self) -> list[dict[str, Any]]:
        """One dict per epoch that this process has finished, with its time in seconds; not part of a saved state.

        `seconds` is the wall time of the loop over `run.loader`. It has these parts: `loading_s` (waiting for batches) and
        `steps_s` (training), and the work of Thresher: `planning_s` (choosing samples), `refresh_s` and `scoring_s` (extra
        forward passes), `tracing_s` (compiling the model) and `attribution_s` (finding the samples of losses). On an
        accelerator, parts are times of the CPU, which does not wait for the work that it queues.
        """
        self._timeline.history  # noqa: B018 - ends an epoch that is over
        return self._timeline.timing.entries

    def _check_keeper(self, call: str) -> None:
        """Raises an error in processes that do not have the records; `call` is what the user called."""
        world = self._parts.config.world
        if not world.is_first:
            raise RuntimeError(
                f"{call}: only process 0 stores the values of all samples, and this is process {world.rank} of {world.size}. "
                "Call it there, as in `if torch.distributed.get_rank() == 0`."
            )

    def _warn_if_open(self) -> None:
        """Warns if an epoch is over and several processes have not ended it together."""
        # One process may not end an epoch by reading: ending takes all of them.
        if self._parts.config.world.size > 1 and self._timeline.end.due:
            warn(
                "The last epoch is over, but the processes have not ended it together: no optimizer step followed the last "
                "gradients, or the loop left run.loader before its end. Its records and its entry in run.history are missing. "
                "Call run.detach() in all processes, then read both."
            )

    def summary(self) -> str:
        """Returns a few lines about the run: method, last finished epoch, time, and cost in samples.

        The time is the wall time of the loop over `run.loader`, with its parts. To measure the time of full training, train in
        full, as `thresher compare` does.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])), batch_size=2)
            >>> run = thresher.attach("infobatch", loader=loader, criterion=torch.nn.CrossEntropyLoss(), epochs=9)
            >>> print(run.summary())
            method   InfoBatch(prune_fraction=0.5)
            epochs   0 of 9 are over
            samples  4
            cost     no steps yet, so there is no cost yet
        """
        return as_text(self._facts())

    def _repr_html_(self) -> str:
        return as_html(self._facts())

    def _facts(self) -> Facts:
        cost = self.cost
        history = self.history
        samples = None if self.loader.streams else self.loader.n
        return facts(
            self.method,
            f"{self.epoch} of {self.epochs} are over",
            samples,
            history,
            self.times,
            cost,
            self._parts.why_plain(),
            nothing_saved=self._timeline.nothing_saved,
            cached=[f"{type(one.module).__name__}: {one.summary()}" for one in self._cached],
            scored=any(
                defines(one, "cost") and any(one.cost or ()) for one in self._parts.config.methods
            ),
            on_device=self._parts.device.type != "cpu",
        )

    def log(self, tracker: Any, *, step: int | None = None, prefix: str = "thresher/") -> None:
        """Logs the numbers of the last finished epoch to an experiment tracker; call it once after each epoch.

        Logs the numbers in the last entries of `run.history` and `run.times`, and those of `run.cost.to_dict()` with "run/"
        before their names. Unknown numbers are left out.

        Args:
            tracker: TensorBoard's SummaryWriter, a run of W&B, the module mlflow, a tracker of accelerate, a logger of
                Lightning, or a function `(numbers, step)`.
            step: Step to log at, for trackers that take steps in ascending order only. Default: the number of the epoch,
                0-based.
            prefix: Text before each name. Default: "thresher/".

        Raises:
            TypeError: The tracker is none of these.
            ValueError: No epoch has finished yet.

        Example:
            >>> import torch, thresher
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])), batch_size=2)
            >>> model, criterion = torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss()
            >>> run = thresher.attach("full", loader=loader, criterion=criterion, model=model, epochs=1)
            >>> for x, y in run.loader:
            ...     run.criterion(run.model(x), y).backward()
            >>> run.log(lambda numbers, step: print(step, numbers["thresher/kept"], numbers["thresher/run/ratio"]))
            0 4 1.0
        """
        log = log_of(tracker)
        cost = self.cost
        history = self.history
        if not history:
            raise ValueError(
                "run.log: no epoch is over yet; call it after the loop over run.loader has ended"
            )
        # Times are not saved, so that a resumed run may have none of its last epoch.
        entry = history[-1]
        times = [one for one in self.times if one["epoch"] == history[-1]["epoch"]]
        numbers = numbers_of(
            [entry, *times, {f"run/{name}": value for name, value in cost.to_dict().items()}]
        )
        log(
            {prefix + name: value for name, value in numbers.items()},
            entry["epoch"] if step is None else step,
        )

    # Saving and leaving

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run as tensors and plain values, which load with `weights_only=True`.

        With several processes, all of them must call it. The state of process 0 has the values stored for each sample; every
        state has the random states of all processes. Save all states with `torch.distributed.checkpoint`, or save the state of
        process 0 with `torch.save` and load it in all processes.

        Warns if the loop has not yet computed the loss of some batches that it got: after resuming they do not come again.

        A state saved at the last batch of an epoch, inside `for batch in run.loader`, belongs to this epoch: after loading, the
        next loop over `run.loader` has no batch, and the code after the loop runs, such as `scheduler.step()`. A state saved
        after the loop continues with the next epoch. If the loop got the last batch and did not ask for a further one (`break`,
        `return`, `zip` or `islice`, after which the iterator is gone), the run cannot tell whether that code has run: the epoch
        ends with the step of its last batch, and `load_state_dict` warns.

        A state saved before the last batch of an epoch continues within that epoch, even if the loop was left by `break`. If
        the saving run then begins the next epoch instead, it warns.

        Raises:
            RuntimeError: Not all processes called it within a minute.
        """
        return self.loader.saved.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, restore_rng: bool = True) -> None:
        """Loads a saved state: the next loop over `run.loader` continues after the last batch of the saved run.

        Args:
            state: State that `run.state_dict()` returned, for the same method and number of samples; any number of processes.
            restore_rng: Whether to restore the random states that the run and its loader draw from, too.

        Raises:
            TypeError: `state` is not a mapping.
            ValueError: The state is damaged, or belongs to another method, loader, number of samples or version; nothing was
                changed.
        """
        self.loader.saved.load_state_dict(state, restore_rng=restore_rng)

    def detach(self, *, together: bool = True) -> None:
        """Ends the run: finishes the epoch in progress, removes hooks from the optimizer, and releases the data.

        Loader, model and optimizer are then as before `attach`. The epoch is in `run.history` even if the loop was left early.

        Args:
            together: Whether all processes call it, so that `records` has everything since the end of the last epoch. Pass
                False after an error, so that no process waits for a failed one; the epoch in progress then stays unfinished,
                and a saved state continues within it. Default: True.
        """
        # The epoch ends while the loader is still open, because a refresh reads samples.
        if together:
            self._timeline.end.finish(leaves=True)
        # Records are sent by all processes together, and after an error some of them may never come.
        if together or self._parts.config.world.size == 1:
            self._parts.accumulator.sync()
        self._timeline.detach()
        self.loader.close()

    def __repr__(self) -> str:
        shown = OBSERVE if share_given(self.method) == OBSERVE else repr(self.method)
        return f"Run({shown}, epoch {self.epoch} of {self.epochs}, {self.loader.n} samples)"
