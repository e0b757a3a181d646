"""`Selection`: a mixin with which a Trainer trains on selected samples."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, get_last_checkpoint

from thresher.attribution.rows import AttributionError
from thresher.comparing import is_compared
from thresher.losses.given import GivenLosses
from thresher.methods.full import FullData
from thresher.methods.token_selection import TokenSelection
from thresher.passes.engine import isolated_pass
from thresher.passes.saved_attributes import Attributes
from thresher.run.attach import GIVEN_BY_TRAINER, attach, check_further_settings
from thresher.run.learning_rate import PacedLR
from thresher.run.run import Run
from thresher.run.trainers import TrainerRun, trl_class
from thresher.transformers.checks import (
    PAIR_TRAINERS,
    TRANSFORMERS_TRAINER,
    check_chooses_before,
    check_has_ids,
    check_labels_of_rows,
    check_settings_of,
    keeps_own_batches,
    passes_beside_head,
)
from thresher.transformers.fused_head import (
    ROWS,
    HeadLosses,
    NotingLengths,
    aux_loss,
    module_of_head,
    squares_in_head,
)
from thresher.transformers.losses import (
    GIVE_LOSSES,
    PerPosition,
    check_same,
    divides_by_total,
    joint_signals,
    losses_of,
    naming_collator,
    warn_if_other,
    without_loss,
)
from thresher.transformers.pairs import Margins, as_two_classes, losses_of_pairs
from thresher.trees import leaves
from thresher.warning import warn


class Tokens:
    """Chooses the token positions to train on, by a `TokenSelection` and its reference model.

    Args:
        method: The token selection.
    """

    def __init__(self, method: TokenSelection) -> None:
        if method.reference is None:
            raise ValueError(
                "thresher.transformers.Selection: TokenSelection needs a reference model to choose by. Give it a model of "
                "transformers with the same tokenizer: thresher.TokenSelection(keep, reference=model)."
            )
        self._method = method
        self._reference = method.reference

    def begin(self, model: Any, device: torch.device) -> None:
        """Prepares the reference model.

        Args:
            model: Model to train.
            device: Device of the batches.

        Raises:
            ValueError: The reference model is the model that is trained.
        """
        if set(map(id, self._reference.parameters())) & set(map(id, model.parameters())):
            raise ValueError(
                "thresher.transformers.Selection: the reference model of TokenSelection shares parameters with the model that "
                "you train, so it would change during training. Pass a separate model, such as copy.deepcopy(model)."
            )
        self._reference.to(device).eval()

    def chosen(
        self, inputs: Any, of_reference: Callable[[Any], Tensor], by_position: Tensor, valid: Tensor
    ) -> Tensor:
        """Runs the reference model on a batch, and returns the mask of the token positions to train on.

        Args:
            inputs: Batch of the trainer, a dict with or without labels.
            of_reference: Function from outputs of the reference model to its loss at each position, shape (rows, ...).
            by_position: Losses of the trained model at each position, shape (rows, ...).
            valid: Mask of the positions that count in the loss, same shape.

        Returns:
            Mask of the chosen positions, shape (rows, ...), bool.
        """
        with torch.no_grad():
            plain = {name: value for name, value in inputs.items() if name != "labels"}
            reference = of_reference(self._reference(**plain))
        return self._method.chosen(by_position, valid.bool(), reference)


def split_tokens(selection: Any) -> tuple[Any, Tokens | None]:
    """Splits `selection` into methods that choose samples, as `thresher.attach` takes them, and a token selection or None.

    Args:
        selection: Argument of `Selection`.

    Raises:
        ValueError: There are two token selections, or a token selection has no reference model.
    """
    methods = list(selection) if isinstance(selection, list | tuple) else [selection]
    token_methods = [one for one in methods if isinstance(one, TokenSelection)]
    if not token_methods:
        return selection, None
    if len(token_methods) > 1:
        raise ValueError(
            "thresher.transformers.Selection: `selection` has two TokenSelection; give only one"
        )
    others = [one for one in methods if not isinstance(one, TokenSelection)]
    if not others:
        others = [FullData()]
    return others[0] if len(others) == 1 else others, Tokens(token_methods[0])


Base: Any = object
"""Base class of the mixin. It needs none, because the class of a trainer, whose methods it calls by `super`, comes after it."""

LOSS_SETTINGS = ("label_smoothing_factor", "loss_type", "beta", "center_rewards_coefficient")
"""Arguments of trainers that change the loss of a sample."""
FILE = "thresher.pt"
"""Name of the file with the state of the run in a checkpoint."""


def _checked(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings of a selection; raises TypeError for one that is not an argument of `attach` for users."""
    check_further_settings(
        settings or {}, "selection_settings: ", given=GIVEN_BY_TRAINER | {"forward"}
    )
    return dict(settings or {})


class Selection(Base):
    """Trains with Trainer, or a subclass of it, on the samples that a method chooses.

    Put it before the trainer in the list of base classes. In each epoch, Trainer trains only on the samples that the method
    chose, and updates weights, evaluates and saves as if the dataset had only these samples. The scheduler is paced as by
    `Run.pace`, and each checkpoint also has the state of the run. See docs/frameworks.md for what is supported.

    The loss of a position (token) is the cross-entropy of the logits, or what `per_position` returns. Positions with the label
    -100 do not count. In the first epoch, at batches 1, 2, 4, 8, ..., the loss is compared with that of Trainer itself in
    evaluation mode; if the two differ, training ends with an error.

    Args:
        args: Arguments of the trainer, as without a selection.
        selection: Method, list of methods or share of the cost, as `thresher.attach` takes it. In the list, or alone, there may
            be a `thresher.TokenSelection`, whose reference model is called with each training batch.
        per_position: Function `(outputs, labels) -> (losses, valid)`, for a loss that is not a cross-entropy. It returns the
            loss of each position, shape (rows, ...), and a mask or weights of the positions that count, same shape. Class
            weights belong into the second, class_weights[labels], and the losses have none: the mean is over the sum of the
            weights, as in CrossEntropyLoss(weight=). The trainer must compute the same loss, or training ends with an error.
            If the batch has no key "labels", `labels` is a dict with the keys in `TrainingArguments(label_names=...)`. Default:
            cross-entropy.
        selection_settings: Other arguments of `thresher.attach`: `forward_passes`, `signals`, `seed`, `spend`, `stratify`,
            `on_nonfinite`, `observe` and `collate_keeps_rows`. Default: none.
        kwargs: Arguments of the trainer by name, as without a selection.

    Raises:
        TypeError: `selection_settings` has a key that is not an argument of `thresher.attach`, or that Trainer sets itself; or
            the class of the trainer comes before `Selection` in the list of base classes.
        ValueError: An argument of the trainer or of `train` is not supported. Raised before any training.

    Example:
        >>> import torch, transformers, thresher.transformers
        >>> class MyTrainer(thresher.transformers.Selection, transformers.Trainer):
        ...     pass
        >>> MyTrainer.__mro__[1].__module__
        'thresher.transformers.selection'
    """

    def __init__(
        self,
        *args: Any,
        selection: Any,
        per_position: PerPosition | None = None,
        selection_settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = _checked(selection_settings)
        self.selection, self._tokens = split_tokens(selection)
        with squares_in_head(type(self)):
            super().__init__(*args, **kwargs)
        self._prepare(per_position, settings)
        check_settings_of(self)

    def _prepare(self, per_position: PerPosition | None, settings: dict[str, Any]) -> None:
        """Sets the state before training."""
        self.per_position = per_position
        self.selection_settings = settings
        self._run: Run | None = None
        self._saved: dict[str, Any] | None = None
        self._scheduler_state: dict[str, Any] = {}
        self._trains = False
        self._compared = ComparedLoss()
        self._batches: Iterator[Any] = iter(())
        self._rows: tuple[Tensor | None, Any] | None = (
            None  # ids of the batch in training, lengths of joined examples
        )
        self._done = self._length = 0
        self.add_callback(StepEnd(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(Selection):
            raise TypeError(
                f"class {cls.__name__}: Trainer comes before thresher.transformers.Selection, so that nothing would be "
                f"selected. Write class {cls.__name__}(thresher.transformers.Selection, Trainer)."
            )

    @classmethod
    def add_to(
        cls,
        trainer: Any,
        selection: Any,
        per_position: PerPosition | None = None,
        selection_settings: Any = None,
    ) -> Any:
        """Adds a selection to a trainer that exists already, and returns the trainer.

        The class of the trainer becomes a subclass of `Selection` and of its former class.

        Args:
            trainer: Trainer, before it trains.
            selection: Method, list of methods or share of the cost, as `Selection` takes it.
            per_position: Function `(outputs, labels) -> (losses, valid)`. Default: cross-entropy.
            selection_settings: Other arguments of `thresher.attach` by name. Default: none.

        Returns:
            The same trainer.

        Raises:
            TypeError: `selection_settings` has a key that is not an argument of `thresher.attach`, or that Trainer sets itself.
            ValueError: The trainer has a selection already, or is an SFTTrainer, whose loss is set up when it is created.
        """
        kind = type(trainer)
        if isinstance(trainer, cls):
            raise ValueError(
                f"thresher.transformers.Selection.add_to: call it once; {kind.__name__} has a selection already"
            )
        if module_of_head(kind) is not None:
            raise ValueError(
                f"thresher.transformers.Selection.add_to: {kind.__name__} sets up its fused head when it is created, "
                f"before a selection can be added. Write class MyTrainer(thresher.transformers.Selection, {kind.__name__})."
            )
        settings = _checked(selection_settings)
        parts = split_tokens(selection)
        trainer.__class__ = type(f"Selecting{kind.__name__}", (cls, kind), {})
        trainer.selection, trainer._tokens = parts
        trainer._prepare(per_position, settings)
        return trainer

    @property
    def run(self) -> Run:
        """The `thresher.Run` of the current or last call of `train`, with its cost, history and stored losses.

        Raises:
            AttributeError: `train` was not called yet, or the trainer makes its own batches and trains without a run.
        """
        if self._run is None:
            raise AttributeError(
                "thresher.transformers.Selection.run: no training has begun; call train() first. A trainer that makes its own "
                "batches has no run."
            )
        return self._run

    # What Trainer calls, in the order in which it does

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as `Trainer.train` does, on the samples that the method chooses.

        Args:
            resume_from_checkpoint: Folder of a checkpoint, or True for the last one, as `Trainer.train` takes it.
            args: Further arguments of `Trainer.train`.
            kwargs: Further arguments of `Trainer.train` by name.

        Raises:
            ValueError: A setting is not supported, or the checkpoint has no state of the run.
        """
        check_settings_of(self)
        self._saved = self._state_of(resume_from_checkpoint)
        saved = self._saved or {}
        self._compared = ComparedLoss(*saved.get("compared", ()))
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            self._leave(together=False)
            raise
        self._leave()
        return output

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Begins with the epoch of the run, because with shorter epochs it does not follow from the number of steps."""
        position = super()._init_training_state(*args, **kwargs)
        return position if self._saved is None else (self._saved["epoch"], 0)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Keeps the loaded state of the scheduler until the scheduler is paced."""
        own = self.lr_scheduler
        held = HeldState()
        self.lr_scheduler: Any = held
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.lr_scheduler = own
            self._scheduler_state = held.state

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        """Attaches the run, and continues from the position of the checkpoint."""
        check_has_ids(train_dataloader)
        if keeps_own_batches(self, train_dataloader):
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        smoothing = self.args.label_smoothing_factor
        self._losses = losses = self._fused_head() or losses_of(
            self._users_model(), self.per_position, smoothing=smoothing
        )
        if self._head is not None and self.padding_free:
            check_chooses_before(
                self,
                "SFTConfig(packing=True) or SFTConfig(padding_free=True)",
                "These settings join examples into one row; padding_free=False does not.",
            )
            train_dataloader.collate_fn = NotingLengths(train_dataloader.collate_fn)
        further: dict[str, Any] = {}
        if self._of_pairs:
            further = {"collate_keeps_rows": True}  # the check knows no batch with two rows a pair
        if self._head is not None:
            further = {"signals": self._head.signals, **passes_beside_head(self)}
        if losses.token_loss and not self._of_pairs and self.selection_settings.get("observe"):
            signals = joint_signals(losses.signals, self.selection_settings.get("signals"))
            further |= {"observe": losses.token_loss, "signals": signals}
        model, loader = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        self._run = run = attach(
            self.selection,
            loader=loader,
            criterion=losses.criterion,
            model=model,
            optimizer=self.optimizer,
            epochs=self._epochs_of(loader),
            forward=self._forward,
            device=self.args.device,
            **self.selection_settings | further,
        )
        self._inside = TrainerRun(run)
        self._inside.samples_come_first()
        self._trains = True
        if self._tokens is not None:
            self._tokens.begin(self.model, self.args.device)
        TRANSFORMERS_TRAINER.check_length(run)
        self._pace(run, max_steps)
        self._done = 0
        if self._saved is not None:
            run.load_state_dict(self._saved["run"])
            self._done = self._saved["batches"]
        self.callback_handler.lr_scheduler = self.lr_scheduler
        self.callback_handler.train_dataloader = run.loader
        return model, run.loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Runs an epoch with as many batches as its plan has, or the rest of the batches of an interrupted epoch."""
        if self._trains:
            self._length = TRANSFORMERS_TRAINER.batches_in_epoch(self.run.loader)
            steps = self._length - self._done
            kwargs["steps_in_epoch"] = steps
            kwargs["num_update_steps_per_epoch"] = math.ceil(
                steps / self.args.gradient_accumulation_steps
            )
        super()._run_epoch(*args, **kwargs)
        self._done = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Returns the batches of the next step, and the number of positions in them that count."""
        batches, total = super().get_batch_samples(
            self._with_ids(epoch_iterator), num_batches, device
        )
        self._batches = epoch_iterator
        if self._trains and len(batches) < num_batches:
            raise RuntimeError(self._wrong_length("fewer"))
        return batches, total

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Trains on one batch, and returns its loss."""
        if not self._trains:
            return super().training_step(model, inputs, num_items_in_batch)
        rows = inputs.pop(ROWS, None)
        try:
            self._rows = rows or (ids_of_batch(self.run, inputs), None)
            self._done = self._done + 1
        except AttributionError as error:
            raise AttributionError(
                "thresher.transformers.Selection: the rows of the batch are not samples of the dataset. Use a data_collator "
                "that pads: DataCollatorWithFlattening and SFTConfig(padding_free=True) join samples in one row. For two rows "
                "of a pair, use RewardTrainer or DPOTrainer of TRL, or write your own loop with run.reduce(losses, ids=run.ids)."
            ) from error
        try:
            return super().training_step(self.run.model, inputs, num_items_in_batch)
        finally:
            self._rows = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of the selected samples in training, and the trainer's own loss otherwise."""
        if self._rows is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._of_pairs:
            return self._loss_of_pairs(model, inputs, return_outputs, num_items_in_batch)
        if self._head is not None:
            return self._loss_of_head(model, inputs, return_outputs, num_items_in_batch)
        # The trainer's own loss is that of full training, but `per_position` has to agree with it.
        uses_losses = not self._only_counts or self.per_position is not None
        if uses_losses and (self._compared.divides is None or self._has_new_classes(inputs)):
            self._compare(inputs, num_items_in_batch)
        if self._only_counts:
            return self._loss_of_trainer(model, inputs, return_outputs, num_items_in_batch)
        if self._compared.direct:
            outputs, labels = self._forward(model, inputs)
            loss = self._reduced(inputs, outputs, labels, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss
        own = self.compute_loss_func
        self.compute_loss_func = partial(self._reduced, inputs)
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.compute_loss_func = own

    @property
    def _only_counts(self) -> bool:
        """Whether every sample is trained on and no loss is recorded, so that the loss is the trainer's own."""
        return self._inside.only_counts and self._tokens is None

    def _is_compared(self) -> bool:
        """Whether this batch is compared with what the selection assumes of the trainer."""
        return self.run.epoch == 0 and is_compared(self._done)

    def _has_new_classes(self, inputs: Any) -> bool:
        """Whether a batch to compare has a class that no compared batch had: a loss with class weights may show only there."""
        labels = inputs.get("labels")
        if not self._is_compared() or not isinstance(labels, Tensor):
            return False
        if labels.dim() != 1 or labels.is_floating_point():
            return False
        classes = {*labels.tolist()}
        new = classes - {*self._compared.classes}
        self._compared.classes.extend(new)
        return bool(new)

    def _own_loss(self, model: Any, inputs: Any, total: Any) -> tuple[Tensor, Any]:
        """Returns the trainer's own loss, and the outputs of its forward pass."""
        noted: list[Any] = []
        hook = model.register_forward_hook(lambda module, args, outputs: noted.append(outputs))
        try:
            return super().compute_loss(model, inputs, num_items_in_batch=total), noted[0]
        finally:
            hook.remove()

    def _loss_of_trainer(self, model: Any, inputs: Any, return_outputs: bool, total: Any) -> Any:
        """Returns the trainer's own loss, because every sample is trained on: the run only counts."""
        _, labels = self._parted(inputs)
        loss, outputs = self._own_loss(model, {**inputs}, total)
        takes_labels = self.label_smoother is None and self.compute_loss_func is None
        made = without_loss(outputs) if takes_labels else outputs
        mean = self._reduced(inputs, made, labels)
        if self._is_compared():
            by_total = GivenLosses(*self._losses.by_position(made, labels), total).plain()
            warn_if_other(loss.detach(), mean.detach(), by_total.detach() * self._scale(total))
        return (loss, outputs) if return_outputs else loss

    def _scale(self, total: Any) -> int:
        # The gradients are averaged over the processes, but `total` counts the positions of all processes.
        if self.args.average_tokens_across_devices and total is not None:
            return self.accelerator.num_processes
        return 1

    def _loss_of_head(self, model: Any, inputs: Any, return_outputs: bool, total: Any) -> Any:
        """Returns the loss of the selected samples, from the outputs of the forward pass for the loss of the trainer."""
        trainer_loss, outputs = self._own_loss(model, inputs, total)
        more = aux_loss(self, outputs, total)
        lengths: Any = self._rows and self._rows[1]
        scale = self._scale(total)
        if self._is_compared():
            losses, valid = self._losses.by_position(outputs, lengths)
            check_same(
                trainer_loss.detach(),
                GivenLosses(losses, valid, total).plain().detach() * scale + more,
            )
        loss = self._reduced(inputs, outputs, lengths, total) * scale + more
        return (loss, outputs) if return_outputs else loss

    def _loss_of_pairs(self, model: Any, inputs: Any, return_outputs: bool, total: Any) -> Any:
        """Returns the loss of the selected pairs, from the margins in the loss of the trainer."""
        with Margins() as margins:
            trainer_loss, outputs = self._own_loss(model, inputs, total)
        losses, rewards = losses_of_pairs(self, inputs, outputs, margins.last, trainer_loss)
        loss = self.run.reduce(losses, self._rows and self._rows[0], *as_two_classes(rewards), 1)
        if self._inside.trains_in_full:
            loss = trainer_loss
        return (loss, outputs) if return_outputs else loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the states of the optimizer, of the scheduler without its pace, and of the run."""
        if not self._trains:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        with self._users_scheduler() as pace:
            super()._save_optimizer_and_scheduler(output_dir)
        state = {
            "run": self.run.state_dict(),
            "epoch": self.run.epoch,
            "batches": self._done,
            "pace": pace,
        }
        compared = self._compared
        state["compared"] = (compared.divides, compared.direct, compared.classes)
        state["loss"] = self._loss_settings
        if self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state | {"processes": self.args.world_size}, Path(output_dir) / FILE)

    # Parts

    @property
    def _head(self) -> HeadLosses | None:
        return self._losses if isinstance(self._losses, HeadLosses) else None

    @property
    def _of_pairs(self) -> bool:
        return trl_class(type(self), PAIR_TRAINERS) is not None

    def _fused_head(self) -> HeadLosses | None:
        """Losses of the fused head, if SFTTrainer computes its loss with it; None if the loss takes logits."""
        by_logits = (
            self.per_position
            or self.compute_loss_func
            or self.label_smoother
            or "signals" in self.selection_settings
        )
        if module_of_head(type(self)) and not by_logits:
            return HeadLosses(self.args.loss_type)
        return None

    def _with_ids(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Adds the ids of the examples of a joined row, or of pairs, while `run.ids` is still that of the same batch."""
        for batch in batches:
            if ROWS in batch or (self._of_pairs and self._trains):
                batch[ROWS] = self.run.ids, batch.get(ROWS)
            yield batch

    def _users_model(self) -> Any:
        """The model without the wrapper of peft, which has the names of the model's own class."""
        if hasattr(self.model, "get_base_model"):
            return self.model.get_base_model()
        return self.model

    def _state_of(self, checkpoint: Any) -> dict[str, Any] | None:
        """Returns what `_save_optimizer_and_scheduler` saved; None for a training from its beginning."""
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        if checkpoint in (None, False):
            return None
        file = Path(checkpoint) / FILE
        if not file.is_file():
            raise ValueError(
                f"thresher.transformers.Selection: {checkpoint} has no file {file.name}, the state of the run: it was saved "
                "without Selection, or with save_only_model=True. The method would start again in the middle of training. Load "
                "the weights with from_pretrained, and call train() without resume_from_checkpoint."
            )
        state = torch.load(file, weights_only=True, map_location="cpu")
        TRANSFORMERS_TRAINER.check_processes(checkpoint, state["processes"], self.args.world_size)
        if state["loss"] != self._loss_settings:
            warn(
                f"thresher.transformers.Selection: the checkpoint was saved with {state['loss']}, but this training has "
                f"{self._loss_settings}: the records and the data map mix both losses"
            )
        return state

    @property
    def _loss_settings(self) -> str:
        settings = vars(self.args)
        return ", ".join(f"{name}={settings[name]}" for name in LOSS_SETTINGS if name in settings)

    def _epochs_of(self, loader: Any) -> int:
        """Returns the number of epochs; with `max_steps`, the last one may not be trained to its end."""
        if self.args.max_steps <= 0:
            return int(self.args.num_train_epochs)
        return math.ceil(
            self.args.max_steps / math.ceil(len(loader) / self.args.gradient_accumulation_steps)
        )

    def _pace(self, run: Run, max_steps: int) -> None:
        """Paces the scheduler, and loads its state."""
        scheduler = self.lr_scheduler
        counts = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        counts = counts and self.args.max_steps <= 0  # with it, steps are those of full training
        self.lr_scheduler = run.pace(scheduler, max_steps) if counts else scheduler
        if self._saved is None:
            return
        pace = self._saved["pace"]
        if (pace is None) == counts:
            raise ValueError(
                f"thresher.transformers.Selection: the checkpoint was saved with another kind of scheduler than "
                f"{type(scheduler).__name__}, so its number of steps does not fit this one. Use the same lr_scheduler_type."
            )
        if counts and pace["total"] != self.lr_scheduler.total:
            raise ValueError(
                f"thresher.transformers.Selection: the checkpoint is of a schedule of {pace['total']} steps, and "
                f"this one has {self.lr_scheduler.total}. Go on with the same num_train_epochs and batch size."
            )
        self.lr_scheduler.load_state_dict(
            {"scheduler": self._scheduler_state, **pace} if counts else self._scheduler_state
        )

    @contextmanager
    def _users_scheduler(self) -> Iterator[dict[str, Any] | None]:
        """Replaces the paced scheduler by the user's for the block, and yields the state of the pace, None if there is none."""
        paced = self.lr_scheduler
        if not isinstance(paced, PacedLR):
            yield None
            return
        self.lr_scheduler = paced.scheduler
        try:
            yield {name: value for name, value in paced.state_dict().items() if name != "scheduler"}
        finally:
            self.lr_scheduler = paced

    def _forward(self, module: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the arguments of the criterion; for `per_position`, they are the outputs and the labels."""
        if self._head is not None:
            plain = {**batch}
            lengths = plain.pop(ROWS, None)
            return module(**plain, fused_lm_head=True), lengths
        plain, labels = self._parted(batch)
        return self._losses.pair(module(**plain), labels)

    def _parted(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Returns the inputs of a batch without labels, and the labels: a tensor, or a dictionary by name for several."""
        names = ["labels"] if "labels" in batch else self.label_names
        labels = {name: batch[name] for name in names if name in batch}
        if not labels:
            raise ValueError(
                f"thresher.transformers.Selection: the batch has no `labels`, only {', '.join(batch)}. Rename the labels in "
                "the dataset or the data_collator. If the loss is not a cross-entropy: "
                + GIVE_LOSSES
            )
        inputs = {name: value for name, value in batch.items() if name not in labels}
        return inputs, labels.get("labels", labels)

    def _compare(self, inputs: Mapping[str, Any], total: Any) -> None:
        """Checks that the loss is that of the trainer; finds out whether it is divided by the positions of the whole step."""
        _, labels = self._parted(inputs)
        function_of_user = self.compute_loss_func
        metrics = copy.deepcopy(getattr(self, "_metrics", None))
        found: list[tuple[Tensor, Tensor]] = []
        scale: Tensor | float = 1.0

        def note(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
            found.append(self._losses.by_position(outputs, labels))
            return torch.ones((), dtype=torch.float32, device=self.args.device)

        def own(total: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            self.compute_loss_func = function_of_user
            loss, outputs = self._own_loss(self.model, {**inputs}, total)
            # A fused head returns no logits, and losses of the user's function are compared by the loss alone.
            by_loss = self._losses.is_given or (
                isinstance(outputs, Mapping) and outputs.get("logits") is None
            )
            return loss, found[0] if by_loss else self._losses.by_position(
                without_loss(outputs), labels
            )

        try:
            checked = isolated_pass([self.model], devices=[self.args.device])
            with checked, Attributes(self.model).in_place(), self.compute_loss_context_manager():
                if "labels" in inputs:  # elsewhere Trainer would call the function without labels
                    self.compute_loss_func = note
                    with naming_collator(self._users_model()):
                        scale = super().compute_loss(
                            self.model, {**inputs}, num_items_in_batch=total
                        )
                self._compared.direct = not found
                if self._compared.direct and self.per_position is None:
                    raise ValueError(
                        f"thresher.transformers.Selection: compute_loss of {type(self).__name__} does not call "
                        f"compute_loss_func, as Trainer does, but computes another loss. {GIVE_LOSSES}"
                    )
                if self._compared.direct:
                    scale = 1.0
                    note(*self._forward(self.model, inputs))
                self._compared.divides = divides_by_total(
                    own, self._losses, found[0], takes_total=total is not None, scale=scale
                )
                cost = self._inside.cost
                cost.comparing += 2 * len(found[0][0])
                cost.forward += 2 * len(found[0][0])
        finally:
            self.compute_loss_func = function_of_user
            if metrics is not None:  # metrics that trl's trainers record in every call
                self._metrics = metrics

    def _reduced(
        self, inputs: Any, outputs: Any, labels: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the loss of the selected samples; takes the inputs, then what Trainer passes to `compute_loss_func`."""
        losses, valid = self._losses.by_position(outputs, labels)
        made, targets = self._losses.pair(outputs, labels)
        total = None if self._compared.divides is False else num_items_in_batch
        if total is not None and self._is_compared():
            check_labels_of_rows(self, valid)
        keep = None
        if self._tokens is not None:
            of_reference = partial(self._losses_of_reference, inputs, labels)
            keep = self._tokens.chosen(inputs, of_reference, losses, valid)
            self._inside.cost.add_scores((len(losses), 0))
        ids = self._rows and self._rows[0]
        # The first dimension is the samples, even if there are as many positions.
        repeat = None if ids is None else 1
        return self.run.reduce(
            losses, ids, made, targets, repeat, valid=valid, total=total, keep=keep
        )

    def _losses_of_reference(self, inputs: Any, labels: Any, outputs: Any) -> Tensor:
        if self._head is not None:
            return self._head.of_reference(outputs, inputs["labels"], labels)
        return self._losses.by_position(outputs, labels)[0]

    def _step_is_over(self, control: Any) -> None:
        """Ends the epoch after its last step: before evaluation and before checkpoints."""
        if not self._trains:
            return
        args = self.args
        state = self.state
        run = self.run
        if self._done < self._length:
            state.epoch = run.epoch + self._done / self._length
            return
        if next(self._batches, None) is not None:
            raise RuntimeError(self._wrong_length("more"))
        self._done = 0
        state.epoch = float(run.epoch)
        if run.epoch < run.epochs or control.should_training_stop:
            return
        control.should_training_stop = True
        if args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= state.global_step:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.STEPS:
            control.should_save = True

    def _wrong_length(self, more_or_fewer: str) -> str:
        return (
            f"The epoch has {more_or_fewer} batches than the {self._length} that len(loader) gave: the sampler does not yield as many "
            "ids as its __len__ says. Correct its __len__, or use the sampler of Trainer itself."
        )

    def _leave(self, *, together: bool = True) -> None:
        """Restores the scheduler, and detaches the run; `together`: whether all processes call it."""
        self._saved = None
        self._batches = iter(())
        if isinstance(self.lr_scheduler, PacedLR):
            self.lr_scheduler = self.callback_handler.lr_scheduler = self.lr_scheduler.scheduler
        if self._trains:
            self._trains = False
            self.run.detach(together=together)


@dataclass
class ComparedLoss:
    """What the comparison with the loss of a trainer has shown.

    Args:
        divides: Whether the trainer divides by `num_items_in_batch`; None before the comparison.
        direct: Whether the losses are computed without `compute_loss` of the trainer, which does not call a function.
        classes: Classes in the batches that were compared.
    """

    divides: bool | None = None
    direct: bool = False
    classes: list[int] = field(default_factory=list)


class StepEnd(TrainerCallback):
    """Callback that tells a trainer when a step is over.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Selection) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tells the trainer that a step is over."""
        self._trainer._step_is_over(control)


class HeldState:
    """Stand-in for a scheduler that keeps the state loaded into it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps a state."""
        self.state = state_dict


def ids_of_batch(run: Run, batch: Any) -> Tensor | None:
    """Returns the ids of the samples in a batch, int64; None if the batch has no tensor, for which Trainer raises an error.

    If a tensor has as many columns as rows, it is not clear which are samples, so tensors with fewer dimensions come first.

    Args:
        run: The run.
        batch: Batch that `run.loader` yielded.

    Raises:
        AttributionError: The samples cannot be found from any tensor of the batch.
    """
    tensors = sorted(leaves(batch), key=Tensor.dim)
    for tensor in tensors[:-1]:
        with suppress(AttributionError):
            return run.ids_of(tensor)
    return run.ids_of(tensors[-1]) if tensors else None
