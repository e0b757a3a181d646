"""Checks for settings of Trainer with which a selection would be wrong."""

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from thresher.loading.samplers import foreign_batches
from thresher.methods.contract import calls_model, requirements_of, title_given
from thresher.methods.full import FullData
from thresher.methods.stages import split_by_stage
from thresher.run.attach import method_of
from thresher.run.trainers import Integration, trl_class
from thresher.warning import warn

PAIR_TRAINERS = frozenset({"DPOTrainer", "RewardTrainer"})
"""Trainers of TRL that learn from pairs of answers, with a loss of each pair."""


TRANSFORMERS_TRAINER = Integration(
    "thresher.transformers.Selection",
    "Trainer",
    "Trainer needs the number of batches to know when accumulation ends. Use the sampler of Trainer itself; or, for a method "
    "that chooses within a batch, a fixed `keep` or, except in SFTTrainer, forward_passes='once'.",
    "Use the sampler of Trainer itself.",
)
unsupported = TRANSFORMERS_TRAINER.not_supported


def check_settings_of(trainer: Any) -> None:
    """Checks that the settings of a trainer are supported.

    Args:
        trainer: Trainer with a selection, before it trains.

    Raises:
        ValueError: A setting is not supported.
    """
    args = trainer.args
    check_trainer_of_trl(type(trainer))
    if trainer._of_pairs:
        check_pairs(trainer)
    if args.max_steps > 0 and not _keeps_steps(trainer):
        raise unsupported(
            f"TrainingArguments(max_steps={args.max_steps})",
            "How many steps an epoch has depends on the method: give num_train_epochs alone, or "
            "selection_settings={'spend': 'batches'}, which has as many steps as full training. So has {'forward_passes': "
            "'once'}, for a method that chooses within a batch.",
        )
    if args.max_steps <= 0 and (
        args.num_train_epochs != int(args.num_train_epochs) or args.num_train_epochs < 1
    ):
        raise unsupported(
            f"TrainingArguments(num_train_epochs={args.num_train_epochs})",
            "Methods choose samples for whole epochs: give a whole number, 1 or more.",
        )
    if trainer.compute_loss_func is not None and trainer.per_position is None:
        raise unsupported(
            "Trainer(compute_loss_func=) alone",
            "It returns the mean loss, and the method needs the loss of each position: give per_position=, a function "
            "(outputs, labels) -> (losses, valid).",
        )
    for name, why in _NEVER_SUPPORTED.items():
        if getattr(args, name):
            raise unsupported(f"TrainingArguments({name}=True)", why)
    _check_processes(trainer)


def check_trainer_of_trl(kind: type) -> None:
    """Checks that a trainer, if it is one of TRL's, is one with a loss of each sample.

    Args:
        kind: Class of a trainer.

    Raises:
        ValueError: The trainer is another one of TRL's.
    """
    base = trl_class(kind)
    if base is None or base.__name__ in {"SFTTrainer", *PAIR_TRAINERS}:
        return
    way_out = (
        "Its loss compares answers or follows a teacher, so Selection has no loss of each row. Train without Selection. To leave "
        "out rows, observe the same ones with RewardTrainer or DPOTrainer (pairs), SFTTrainer (texts) or Trainer (verdicts), and "
        "pass train_dataset=rows.select(ids)."
    )
    if base.__name__ == "GRPOTrainer":
        way_out = "Use thresher.trl.attach(trainer), which leaves out rows whose gradient is 0. See docs/rl.md."
    raise unsupported(f"{base.__name__} of TRL", way_out)


def check_pairs(trainer: Any) -> None:
    """Checks that each pair has a loss, and that the method chooses pairs before an epoch.

    Args:
        trainer: RewardTrainer or DPOTrainer with a selection.

    Raises:
        ValueError: The loss, the method or the data_collator is not supported.
    """
    name = type(trainer).__name__
    weighted = getattr(trainer, "use_weighting", False)
    loss_types = getattr(trainer, "loss_types", ["sigmoid"])
    if weighted or loss_types not in (["sigmoid"], ["sigmoid_norm"]):
        raise unsupported(
            f"DPOConfig(loss_type={loss_types}, use_weighting={weighted})",
            "Use loss_type='sigmoid' or 'sigmoid_norm' and use_weighting=False, or train without Selection.",
        )
    if trainer.per_position is not None or trainer._tokens is not None:
        raise unsupported(
            f"per_position= or TokenSelection with {name}",
            "Its loss is one of pairs: leave it out.",
        )
    keeps_rows = trainer.selection_settings.get("collate_keeps_rows")
    if not type(trainer.data_collator).__module__.startswith("trl.") and not keeps_rows:
        raise unsupported(
            f"A data_collator of your own with {name}",
            "A batch does not show which pair is which. If it keeps the order of the pairs, pass "
            "selection_settings={'collate_keeps_rows': True}.",
        )
    check_chooses_before(trainer, name, "A batch has two rows for a pair.")


def check_chooses_before(trainer: Any, setting: str, why: str) -> None:
    """Checks that the method neither chooses in the batch nor makes extra forward passes, which need a row per sample.

    Args:
        trainer: Trainer with a selection.
        setting: Setting or trainer whose rows are no samples.
        why: Sentences that say which rows it has, and what to use instead.

    Raises:
        ValueError: The method needs one row per sample.
    """
    _, epoch_method, batch_method = split_by_stage(method_of(trainer.selection))
    if batch_method is not None or calls_model(epoch_method):
        raise unsupported(
            f"{setting} with {title_given(batch_method or epoch_method)}",
            f"{why} This method needs one row per sample. Use a method that chooses before each epoch without extra forward "
            "passes, such as selection=0.5 or InfoBatch.",
        )


def passes_beside_head(trainer: Any) -> dict[str, Any]:
    """Returns the setting `forward_passes` for a batch method and a model with a fused head, which cannot be traced.

    Args:
        trainer: SFTTrainer with a selection.

    Raises:
        ValueError: `forward_passes` is set to "once".
    """
    batch_method = split_by_stage(method_of(trainer.selection))[2]
    passes = trainer.selection_settings.get("forward_passes", "auto")
    if (
        batch_method is None
        or not requirements_of(batch_method).signals
        or passes not in ("auto", "once")
    ):
        return {}
    if passes == "once":
        raise unsupported(
            "forward_passes='once' with SFTTrainer",
            "The loss comes from a fused head, whose forward pass cannot be traced for a backward pass of some rows only. Use "
            "forward_passes='twice', or a method that chooses before each epoch.",
        )
    warn(
        f"{title_given(batch_method)} chooses by a scoring pass before each step, as with forward_passes='twice': the fused "
        "head of SFTTrainer cannot be traced. Rows of several batches are joined into one batch, and need equal lengths: set "
        "SFTConfig(pad_to_multiple_of=) to the length of the longest example."
    )
    return {"forward_passes": "twice"}


def check_labels_of_rows(trainer: Any, valid: Tensor) -> None:
    """Checks that the share of kept labels is that of kept rows if several batches share the divisor `num_items_in_batch`.

    Args:
        trainer: Trainer with a selection, in a training step whose loss is divided by `num_items_in_batch`.
        valid: Mask or weights of the positions that count in a batch, shape (rows, ...).

    Raises:
        ValueError: Rows are chosen after their labels were counted, and have different numbers of labels.
    """
    args = trainer.args
    method = trainer._inside.chooser_of_rows
    shared = args.gradient_accumulation_steps > 1 or (
        args.world_size > 1 and args.average_tokens_across_devices
    )
    if method is None or not shared:
        return
    labels = valid.reshape(len(valid), -1).sum(1)
    if (labels != labels[0]).any():
        raise unsupported(
            f"{title_given(method)} in one pass, with gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}, {args.world_size} processes and rows of different numbers of labels,",
            "The batches of a step would weigh by all of their labels, not by those of the chosen rows. Use "
            "selection_settings={'forward_passes': 'twice'}, or one batch per step.",
        )


def _keeps_steps(trainer: Any) -> bool:
    """Whether an epoch has as many steps as full training."""
    _, epoch_method, batch_method = split_by_stage(method_of(trainer.selection))
    spend = trainer.selection_settings.get("spend")
    smaller = spend != "steps" and (
        spend == "batches" or requirements_of(epoch_method).smaller_batches
    )
    # "auto" may gather rows into fewer batches from the second epoch on.
    one_pass = trainer.selection_settings.get("forward_passes") == "once"
    return (batch_method is None or spend == "batches" or one_pass) and (
        smaller or isinstance(epoch_method, FullData)
    )


_NEVER_SUPPORTED = {
    "auto_find_batch_size": "It starts training again with the model as it is by then: set "
    "per_device_train_batch_size, and gradient_accumulation_steps if memory is short.",
    "enable_jit_checkpoint": "It saves between the batches of a step, and a resumed training would lack the losses of the "
    "first of these. Use save_strategy='steps' with save_steps=.",
    "torch_compile": "In this version the model must not be compiled. A loop with thresher.attach takes compiled models.",
}


def _check_processes(trainer: Any) -> None:
    args = trainer.args
    split = (
        trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
        or trainer.is_distributed_loading_by_transformers
    )
    if split or getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise unsupported(
            "A model in shards (DeepSpeed, FSDP, tensor or context parallelism)",
            "Use data parallelism: torchrun with a model that fits into the memory of each device.",
        )
    if args.n_gpu > 1 or trainer.is_model_parallel:
        raise unsupported(
            f"One process with several devices (n_gpu={args.n_gpu})",
            "Start one process per device with torchrun, or show one device with CUDA_VISIBLE_DEVICES.",
        )


def check_has_ids(loader: Any) -> None:
    """Checks that a loader has a map-style dataset, so that samples have indices.

    Args:
        loader: Training loader of a trainer.

    Raises:
        ValueError: The loader is not a DataLoader with a map-style dataset.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        dataset = type(getattr(loader, "dataset", loader)).__name__
        raise unsupported(
            f"A training loader over {dataset}",
            "Give a train_dataset with __getitem__ and __len__. A loop with thresher.attach also takes an IterableDataset.",
        )


def keeps_own_batches(trainer: Any, loader: DataLoader[Any]) -> bool:
    """Whether a trainer with batches of its own, such as that of sentence-transformers, trains without a run.

    Args:
        trainer: Trainer with a selection.
        loader: Its training loader.

    Raises:
        ValueError: The loader has batches of its own, and the method would change or observe them.
    """
    batches = foreign_batches(loader.batch_sampler)
    if batches is None:
        return False
    observes = trainer.selection_settings.get("observe")
    if observes or trainer._tokens is not None or not isinstance(trainer.selection, FullData):
        raise unsupported(
            f"{title_given(method_of(trainer.selection))}{' with observe' if observes else ''} with the batches of {batches}",
            "A selection would change these batches; and if the loss compares the rows of a batch (in-batch negatives), no "
            "sample has a loss of its own. Use selection=thresher.FullData() without observe, which trains as without a "
            "selection, or a Trainer with a shuffled loader and a loss per sample.",
        )
    warn(
        f"FullData keeps the batches of {batches}, and records nothing: training is as without a selection."
    )
    return True
