"""Runs that a Trainer of transformers trains: the trainer of the user, with other arguments or with a selection."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from thresher.transformers import Selection
from thresher_lab.training import loop
from thresher_lab.training.samples import Recording
from thresher_lab.training.specs import Spec

OVERRIDES: dict[str, Any] = {
    "eval_strategy": "epoch",
    "eval_delay": 0,
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "max_steps": -1,
    "report_to": [],
    "disable_tqdm": True,
}
"""Training arguments of every run; the number of epochs is added, and the learning rate if --rates scales it."""


class EpochMeter(TrainerCallback):
    """Measures time, samples and metric of each epoch of a trainer; the time of evaluations does not count.

    Args:
        trainer: The trainer.
        progress: Function that is called after each epoch.
        epochs_in: File for the history of every sample of a trainer with a selection, see `Recording`. None for none.

    Attributes:
        entries: The history so far, with the counts of a trainer without a selection.
        samples: Number of samples in an epoch of full training.
        name: Name of the metric, after the first epoch.
    """

    def __init__(
        self, trainer: Any, progress: loop.EpochCallback | None, epochs_in: Path | None
    ) -> None:
        self._trainer = trainer
        self._progress = progress
        self._epochs_in = epochs_in
        self._clock = loop.Clock()
        self.entries: list[dict[str, Any]] = []
        self.recording: Recording | None = None
        self._metrics: dict[str, float] = {}
        self.samples = 0
        self.name = ""
        self._steps = 0
        self.was_busy = loop.is_busy()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the samples of an epoch, and begins to record the run of a selection."""
        trainer = self._trainer
        dataset = kwargs["train_dataloader"].dataset
        self.samples = (
            len(dataset) - len(dataset) % args.train_batch_size * args.dataloader_drop_last
        )
        if isinstance(trainer, Selection):
            self.recording = Recording(trainer.run, dataset, epochs_in=self._epochs_in)

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._finish_epoch()
        self._running = self._clock.running()
        self._running.__enter__()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock, before the evaluation."""
        self._running.__exit__(None, None, None)
        steps = state.global_step - self._steps
        self._steps = state.global_step
        trained = min(
            self.samples, steps * args.train_batch_size * args.gradient_accumulation_steps
        )
        entry = {
            "epoch": len(self.entries),
            "complete": trained == self.samples,
            "kept": trained,
            "steps": steps,
            "forward": trained,
            "backward": trained,
            "refresh": 0,
            "scoring": 0,
            **self._clock.state_dict(),
        }
        if self.recording is not None:
            entry |= self.recording.epoch()
        self.entries.append(entry)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the metrics, of all datasets if there are several."""
        self._metrics |= kwargs["metrics"]

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Adds the metric of the last epoch."""
        self._finish_epoch()

    def _finish_epoch(self) -> None:
        """Adds the metric to the epoch that has ended."""
        if self.entries and self.name not in self.entries[-1]:
            self.name, value = metric_of(self._trainer.args, self._metrics, len(self.entries))
            # The loss tells two seeds apart that are equally accurate.
            self.entries[-1] |= {self.name: value, "eval_loss": self._metrics.get("eval_loss")}
            self._metrics = {}
            if self._progress is not None:
                self._progress(len(self.entries), value)


def metric_of(args: Any, metrics: Mapping[str, float], epoch: int = 0) -> tuple[str, float]:
    """Returns name and value of the metric of an evaluation, negated if smaller is better.

    Args:
        args: Arguments of the trainer: `metric_for_best_model`, if set, names it, with `greater_is_better`.
        metrics: Result of `Trainer.evaluate`. Default metric: `eval_accuracy`, else `eval_loss`.
        epoch: Number of the epoch, for messages.

    Raises:
        ValueError: There is no such metric, or it is not finite.
    """
    bare = args.metric_for_best_model or ("accuracy" if "eval_accuracy" in metrics else "loss")
    name = f"eval_{bare.removeprefix('eval_')}"
    if name not in metrics:
        there = ", ".join(one for one in metrics if one.startswith("eval_"))
        raise ValueError(
            f"evaluate() returned no {name}, but {there}: name one of them by metric_for_best_model"
        )
    value = loop.finite(metrics[name], epoch)
    if args.greater_is_better is None:
        larger = not name.endswith("loss")
    else:
        larger = args.greater_is_better
    return (name, value) if larger else (f"-{name}", -value)


def build_trainer(make: Callable[..., Any], seed: int, **arguments: Any) -> Any:
    """Returns a new trainer from the user's function.

    Args:
        make: Function `(seed, **overrides)`.
        seed: Random seed.
        arguments: Training arguments besides `OVERRIDES`.

    Raises:
        ValueError: The function returned something else, or did not pass on the seed or the overrides.
    """
    torch.manual_seed(seed)
    trainer = make(seed, **OVERRIDES, **arguments)
    if not isinstance(trainer, Trainer) or isinstance(trainer, Selection):
        raise ValueError(
            f"{make.__name__}(seed, **overrides) must return a transformers.Trainer without thresher.transformers.Selection, "
            f"which compare adds itself; got {type(trainer).__name__}"
        )
    for name, value in ({"seed": seed} | OVERRIDES | arguments).items():
        if (got := getattr(trainer.args, name)) != value:
            raise ValueError(
                f"{make.__name__}(seed, **overrides) returned a trainer with args.{name}={got!r} in place of {value!r}: write "
                "TrainingArguments(**{..., 'seed': seed, **overrides})"
            )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_by_trainer(
    make: Callable[..., Any],
    spec: Spec,
    *,
    seed: int,
    epochs: int,
    share: float = 1.0,
    rate: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Trains once by `Trainer.train`, as `loop.train` does by a loop.

    Args:
        make: Function `(seed, **overrides)`, which returns a trainer.
        spec: Method; full training is the trainer as it is, and any other method is added by `Selection.add_to`.
        seed: Random seed.
        epochs: Number of epochs of full training.
        share: Share of the epochs to train, (0, 1]. Default: 1.
        rate: Factor on the learning rate. Default: 1.
        options: `label`, `progress`, `samples_to` and `trackers` of `loop.train`; others are not read.

    Returns:
        Plain values, see `loop.train`; without the memory of a step, confusions, and the history of samples in full training.

    Raises:
        ValueError: The trainer or an option is refused.
    """
    samples_to = options.get("samples_to")
    trackers = options.get("trackers")
    if trackers is not None:
        raise ValueError(
            f"--track {trackers}: a Trainer has trackers of its own, which a comparison leaves out"
        )
    arguments: dict[str, Any] = {"num_train_epochs": share * epochs}
    if spec.batch.get("batches") == "by_length":
        arguments["train_sampling_strategy"] = "group_by_length"
    trainer = build_trainer(make, seed, **arguments)
    if rate != 1:
        if trainer.optimizer is not None:
            raise ValueError(
                "--rates: the trainer has an optimizer of its own; leave out Trainer(optimizers=), or --rates"
            )
        trainer = build_trainer(
            make, seed, learning_rate=rate * trainer.args.learning_rate, **arguments
        )
    if spec.name != "full":
        per_position = getattr(trainer, "per_position", None)
        Selection.add_to(trainer, spec.create(), per_position, {"seed": seed, **spec.attachment()})
    measured = EpochMeter(
        trainer, options.get("progress"), loop.epochs_file(samples_to, checkpoint=None)
    )
    trainer.add_callback(measured)
    try:
        trainer.train()
        if measured.recording is not None and samples_to is not None:
            measured.recording.save(samples_to)
    finally:
        if measured.recording is not None:
            measured.recording.discard()
    history = measured.entries
    full = epochs * measured.samples
    if isinstance(trainer, Selection):
        counts = loop.counts_by_epoch(trainer.run, measured.samples)
        history = [entry | counted for entry, counted in zip(history, counts, strict=True)]
        cost = asdict(trainer.run.cost)
    else:
        cost = {name: sum(entry[name] for entry in history) for name in loop.COST_COUNTERS}
        cost |= {"backward_to_forward": None}
    last = history[-1]
    return loop.outcome_of(
        spec,
        label=options.get("label") or spec.label,
        seed=seed,
        epochs=epochs,
        share=share,
        rate=rate,
        metric={"name": measured.name, "value": last[measured.name]},
        cost=cost | {"full_forward": full, "full_backward": full},
        device=str(trainer.args.device),
        wall_s=last["wall_s"],
        cpu_s=last["cpu_s"],
        history=loop.with_step_time(history),
        busy=measured.was_busy or loop.is_busy(),
    )
