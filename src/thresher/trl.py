"""Selection with TRL's GRPOTrainer: skips rows without a gradient; a policy may choose the prompts.

Five methods of the trainer are wrapped; each wrapper calls the original method.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thresher.rl import Uniform, choose_rollouts, group_advantages, has_signal
from thresher.run.trainers import trl_class
from thresher.warning import warn

RIGHT_PADDED = frozenset(
    {
        "completion_ids",
        "completion_mask",
        "old_per_token_logps",
        "tool_mask",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
    }
)
"""Entries of TRL's loss batch with a column per token of the completion."""
BY_ROW = RIGHT_PADDED | {"prompt_ids", "prompt_mask", "advantages"}
"""Entries of TRL's loss batch with a row per rollout."""
MEAN_OVER_ROWS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
MEAN_OVER_TOKENS = "bnpo"
"""Loss types whose divisor is the number of rows, or of tokens, of the micro-batch; others use the tokens of the whole step."""
EXACT_LOSSES = MEAN_OVER_ROWS | {MEAN_OVER_TOKENS, "dapo", "cispo", "vespo"}
SUM_FIRST = "sum_then_normalize"
"""Setting `multi_objective_aggregation` with which advantages are computed within each group."""
STATE = "thresher_prompts.pt"


class Picks:
    """Counts of what a selection has done since this process began.

    Attributes:
        groups: Number of groups of rollouts (a group has the rollouts of one prompt).
        groups_with_signal: Number of groups whose rewards differ. Groups with equal rewards have no gradient.
        tokens_generated: Number of generated tokens on this rank.
        rows: Number of rows in batches of the loss, on this rank; with several iterations over a batch, each iteration counts.
        rows_trained: Number of rows that were trained on.
        tokens_trained: Number of completion tokens in the rows that were trained on.

    Example:
        >>> picks = Picks()
        >>> picks.groups, picks.groups_with_signal, picks.rows, picks.rows_trained = 4, 1, 32, 8
        >>> print(picks.summary())
        groups with a signal    1 of 4 (25 %)
        rows trained on         8 of 32 (25 %)
        tokens generated        0
        tokens trained on       0
        time saved              unknown: compare with training without the selection
    """

    def __init__(self) -> None:
        self.groups = self.groups_with_signal = self.tokens_generated = 0
        self.rows = self.rows_trained = self.tokens_trained = 0

    def summary(self) -> str:
        """Returns the counts as text, one per line."""
        facts = {
            "groups with a signal": _of(self.groups_with_signal, self.groups),
            "rows trained on": _of(self.rows_trained, self.rows),
            "tokens generated": f"{self.tokens_generated:,}",
            "tokens trained on": f"{self.tokens_trained:,}",
            "time saved": "unknown: compare with training without the selection",
        }
        return "\n".join(f"{name:<24}{value}" for name, value in facts.items())


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({100 * part / max(1, whole):.0f} %)"


def attach(
    trainer: Any,
    policy: Any = None,
    *,
    rollouts: int | None = None,
    refill: bool = False,
    cap: float = 3,
) -> Picks:
    """Attaches a selection to a GRPOTrainer; the rest of the script does not change.

    A group of rollouts whose rewards are all equal has advantages of 0, and no gradient. Its rows are left out of the forward
    and backward passes, and the loss is scaled such that the gradient equals the gradient of the whole batch, up to rounding.
    Metrics logged by TRL cover the kept rows.

    Args:
        trainer: GRPOTrainer of TRL, before it trains.
        policy: Policy that chooses the prompts, such as `thresher.rl.Greso(len(prompts))`. This changes the training
            data. Default: the prompts of the trainer's loader.
        rollouts: Number of rollouts of each group to train on, 2 or more: the rollouts whose rewards vary most (PODS,
            arXiv:2504.13818). This changes the training data. Default: all.
        refill: Whether to sample rollouts for further prompts until the batch is full of groups whose rewards differ (dynamic
            sampling of DAPO, arXiv:2503.14476). Each step then also generates more tokens. The policy chooses the further
            prompts, and has seen the rewards of the earlier ones. Without a policy, the prompts come in random order. Default:
            False.
        cap: Largest number of groups that a step may generate, as a multiple of its batch, 1 or more. If too few groups have
            different rewards, the batch stays smaller. Default: 3.

    Returns:
        `Picks`, whose counts are updated during training; print `summary()` to see them.

    Raises:
        TypeError: `trainer` is not a GRPOTrainer, or the policy is a class or lacks a method.
        ValueError: The trainer computes another loss than that of GRPOTrainer, a setting gives rows with an advantage of 0 a
            gradient or makes rows depend on each other, the policy has another number of prompts than the dataset, or
            `rollouts` or `cap` is out of its range.
        RuntimeError: Raised in training: a group has different prompts, or a batch has unknown entries.
    """
    if isinstance(trainer, Selection):
        raise ValueError(
            "thresher.trl.attach: the trainer has a selection already; call attach once"
        )
    _check_loss(trainer)
    _check_trainer(trainer)
    _check_choice(trainer, policy, rollouts)
    if refill:
        _check_refill(trainer, cap)
    if refill and policy is None:
        policy = Uniform(len(trainer.train_dataset), seed=trainer.args.seed)
    trainer.__class__ = type(f"Selected{type(trainer).__name__}", (Selection, type(trainer)), {})
    trainer._policy = policy
    trainer._rollouts = rollouts
    trainer._picks = Picks()
    trainer._cap = cap if refill else None
    return trainer._picks


def _check_loss(trainer: Any) -> None:
    """Checks that the loss is that of GRPOTrainer: how the gradient depends on the left-out rows is known only for it."""
    grpo = trl_class(type(trainer), ["GRPOTrainer"])
    if grpo is None:
        raise TypeError(
            f"thresher.trl.attach: `trainer` must be a GRPOTrainer of TRL, got {type(trainer).__name__}, whose loss is not "
            "supported. Train it without attach"
        )
    for name in ("compute_loss", "_compute_loss"):
        # Looked up on the trainer, too, because a function may be assigned to it.
        method = getattr(trainer, name)
        if getattr(method, "__func__", method) is not getattr(grpo, name):
            raise ValueError(
                f"thresher.trl.attach: {type(trainer).__name__} replaces {name} of GRPOTrainer, and skipping rows may change "
                "the gradient of its loss. Train it without attach, or use GRPOTrainer with one of its loss types"
            )


def _check_trainer(trainer: Any) -> None:
    def has(name: str, default: Any = False) -> Any:
        return getattr(trainer, name, default)  # older versions of TRL lack some of these

    acting = ("rollout_func", "tools", "environment_factories", "environment_factory")
    reasons = {
        "beta != 0: rows without an advantage have a gradient of the KL term": trainer.beta != 0,
        f"loss_type={trainer.loss_type!r}: its divisor is not known": trainer.loss_type
        not in EXACT_LOSSES,
        "an entropy bonus acts on all rows": has("_entropy_bonus_enabled"),
        "top_entropy_quantile < 1: its threshold is that of all rows": has(
            "top_entropy_quantile", 1.0
        )
        < 1,
        "the load-balancing loss of a mixture of experts acts on all rows": has("aux_loss_enabled"),
        "multi_objective_aggregation: advantages are relative to the batch": has(
            "multi_objective_aggregation", SUM_FIRST
        )
        != SUM_FIRST,
        "rollout_func, tools or environments": any(map(has, acting)),
        "images": has("_is_vlm"),
        "an iterable dataset has no prompts by number": not hasattr(
            trainer.train_dataset, "__len__"
        ),
    }
    refused = [reason for reason, holds in reasons.items() if holds]
    if refused:
        raise ValueError(
            f"thresher.trl.attach: skipping rows would change gradients. Not supported: {'; '.join(refused)}."
        )
    args = trainer.args
    batches = trainer.args.steps_per_generation * trainer.num_iterations
    if (
        args.save_strategy == "steps"
        and args.save_steps * args.gradient_accumulation_steps % batches
    ):
        warn(
            f"TRL resumes exactly only from a checkpoint between two generations: save_steps={args.save_steps} x "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} is not a multiple of the {batches} batches of a "
            "generation. Change save_steps."
        )


def _check_choice(trainer: Any, policy: Any, rollouts: int | None) -> None:
    if isinstance(policy, type):
        raise TypeError(
            f"thresher.trl.attach: `policy` must be an instance, got a class: pass {policy.__name__}(len(prompts))"
        )
    if policy is None:
        needed = ()
    else:
        needed = ("propose", "observe", "state_dict", "load_state_dict")
    if missing := ", ".join(name for name in needed if not hasattr(policy, name)):
        raise TypeError(
            f"thresher.trl.attach: the policy {type(policy).__name__} lacks {missing}; see thresher.rl.Uniform"
        )
    prompts = getattr(policy, "prompts", None)
    if prompts is not None and prompts != len(trainer.train_dataset):
        raise ValueError(
            f"thresher.trl.attach: the policy has {prompts} prompts, but the dataset has {len(trainer.train_dataset)}"
        )
    if rollouts is None:
        return
    if not 2 <= rollouts <= trainer.num_generations:
        raise ValueError(
            f"thresher.trl.attach: `rollouts` must be within [2, {trainer.num_generations}], got {rollouts}"
        )
    if trainer.scale_rewards == "batch":
        raise ValueError(
            "thresher.trl.attach: `rollouts` does not support scale_rewards='batch'; use scale_rewards='group'"
        )
    if trainer.args.per_device_train_batch_size * rollouts % trainer.num_generations:
        raise ValueError(
            f"thresher.trl.attach: `rollouts`={rollouts} of {trainer.num_generations} leaves a fraction of the "
            f"{trainer.args.per_device_train_batch_size} rows of a batch; use a batch size that is a multiple of "
            f"{trainer.num_generations}"
        )


def _check_refill(trainer: Any, cap: float) -> None:
    if not cap >= 1:
        raise ValueError(f"thresher.trl.attach: `cap` must be 1 or more, got {cap!r}")
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if rows % trainer.num_generations:
        raise ValueError(
            f"thresher.trl.attach: `refill` needs whole groups on each rank; {rows} rows of a generation "
            "(per_device_train_batch_size x steps_per_generation) are not a multiple of "
            f"num_generations={trainer.num_generations}"
        )


_Base: Any = object
"""Base class of the wrappers, which call the methods of the trainer by `super`."""


class Selection(_Base):
    """Wrappers of methods of a GRPOTrainer, which `attach` installs."""

    _policy: Any
    _rollouts: int | None
    _cap: float | None
    _picks: Picks
    _rewards: Tensor

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Returns the batch of the loss without the rows that have no gradient."""
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        picks = self._picks
        rows = len(inputs["advantages"])
        keep = _rows_to_keep(inputs, self.accelerator)
        if len(keep) < rows:
            inputs = without_other_rows(inputs, keep, self.loss_type)
        picks.rows += rows
        picks.rows_trained += len(keep)
        picks.tokens_trained += int(inputs["completion_mask"].sum())
        self._metrics["train"]["thresher/rows_trained"].append(len(keep) / rows)
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Generates rollouts of the prompts of the policy, keeps some of each group, and refills the batch."""
        make = super()._generate_and_score_completions
        if not self.model.training:
            return make(inputs)
        wanted = len(inputs) * self.accelerator.num_processes // self.num_generations
        made, signal = self._made(make, inputs, wanted)
        if self._cap is None:
            return made
        return self._refilled(make, made, signal, wanted, self._cap)

    def _made(self, make: Any, inputs: Any, count: int) -> tuple[dict[str, Any], Tensor]:
        """Generates rollouts of `count` prompts. Returns those of this rank, and which groups of all ranks have a signal."""
        world = self.accelerator.num_processes
        rank = self.accelerator.process_index
        group = self.num_generations
        ids: list[int] = []
        if self._policy is not None:
            # Every rank draws the same prompts and takes its part of them. The prompts that the loader has read are not used.
            ids = list(self._policy.propose(count))
            rows = [self.train_dataset[number] for number in ids for _ in range(group)]
            inputs = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
        made = make(inputs)
        rewards = self._rewards.view(-1, group)
        signal = has_signal(rewards)
        self._picks.groups += len(signal)
        self._picks.groups_with_signal += int(signal.sum())
        if self._policy is not None:
            self._policy.observe(ids, rewards.double().cpu())
        if self._rollouts is not None:
            made = self._of_some_rollouts(made, rewards, self._rollouts)
        return made, signal

    def _refilled(
        self, make: Any, made: dict[str, Any], signal: Tensor, wanted: int, cap: float
    ) -> dict[str, Any]:
        """Generates rollouts of further prompts until enough groups have a signal. Returns a batch of as many rows as `made`.

        If `cap` is reached first, groups without a signal fill up the batch.
        """
        world = self.accelerator.num_processes
        size = self._rollouts or self.num_generations
        most = int(cap * wanted) // world * world
        asked = wanted
        full = wanted // world * size
        with_signal = []
        without = []
        while True:
            here = self._own(signal).repeat_interleave(size)
            with_signal.append(_rows(made, here))
            without.append(_rows(made, ~here))
            held = sum(len(part["advantages"]) for part in with_signal) // size
            # The rank with the fewest groups with a signal decides, because all ranks must generate equally often.
            of_ranks = self.accelerator.gather(torch.tensor([held], device=self.accelerator.device))
            least = int(of_ranks.min()) * world
            if least >= wanted or asked >= most:
                break
            # Enough to fill the batch if the share of groups with a signal stays the same; a multiple of the number of ranks.
            further = -(-(wanted - least) * asked // max(least, 1))
            further = min(-(-further // world) * world, wanted, most - asked)
            asked += further
            made, signal = self._made(make, None, further)
        return self._counting(_rows(_joined([*with_signal, *without]), slice(full)))

    def _of_some_rollouts(self, made: Any, rewards: Tensor, count: int) -> Any:
        """Keeps the rollouts of each group whose rewards vary most, and computes their advantages relative to each other."""
        rewards = rewards.nan_to_num(nan=0.0)
        chosen = choose_rollouts(rewards, count)
        kept = rewards.gather(1, chosen)
        advantages = kept - kept.mean(1, keepdim=True)
        if self.scale_rewards == "group":
            advantages = group_advantages(kept)
        # Numbers among the rows of this rank, which are a part of those of all ranks.
        groups = torch.arange(len(rewards), device=chosen.device) * self.num_generations
        rows = self._own(chosen + groups.unsqueeze(1)) - self._own(groups)[0]
        batch = _rows(made, rows)
        batch["advantages"] = self._own(advantages).to(made["advantages"])
        return self._counting(batch)

    def _own(self, values: Tensor) -> Tensor:
        """Returns the values of this rank, flat, from those of the groups of all ranks."""
        return values.view(self.accelerator.num_processes, -1)[self.accelerator.process_index]

    def _counting(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sets the number of tokens of all ranks in a batch, by which losses are divided."""
        batch["num_items_in_batch"] = self.accelerator.gather(_counted(batch).sum()).sum()
        return batch

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Returns the rewards. Stores them, and checks that the rollouts of each group have the same prompt."""
        score = super()._calculate_rewards
        by_function = score(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            # Counted here, before TRL masks completions that were cut off.
            self._picks.tokens_generated += sum(map(len, completion_ids_list))
            # A group may be on two ranks, and the hash function of Python differs between processes.
            marks = torch.tensor(
                [zlib.crc32(repr(prompt).encode()) for prompt in prompts],
                device=self.accelerator.device,
            )
            self._check_groups(self.accelerator.gather(marks).tolist())
            total = (by_function * self.reward_weights.to(by_function.device)).nansum(1)
            self._rewards = total.masked_fill(by_function.isnan().all(1), torch.nan)
        return by_function

    def _check_groups(self, prompts: list[int]) -> None:
        group = self.num_generations
        for start in range(0, len(prompts) - len(prompts) % group, group):
            if len(set(prompts[start : start + group])) > 1:
                sampler = type(self._get_train_sampler()).__name__
                raise RuntimeError(
                    f"thresher.trl: rows {start} to {start + group - 1} are a group of {group} rollouts but have different "
                    f"prompts, so their advantages mix prompts. The sampler is {sampler}: use the sampler of TRL, and choose "
                    "prompts with `policy`."
                )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves the state of the policy into the checkpoint of the self."""
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self._policy is not None and self.args.should_save and folder.is_dir():
            torch.save(self._policy.state_dict(), folder / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Loads the state of the policy from a checkpoint."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self._policy is None:
            return
        file = Path(checkpoint) / STATE
        if not file.is_file():
            raise ValueError(
                f"thresher.trl: {checkpoint} has no {STATE}: it was saved without this policy. Resume without it"
            )
        self._policy.load_state_dict(torch.load(file, weights_only=True))


def _rows_to_keep(inputs: Mapping[str, Tensor], accelerator: Any) -> Tensor:
    """Returns the rows that have a gradient, filled up to the same number on every rank, at least one.

    TRL gathers a metric of each row from all ranks, and DDP waits for all ranks.
    """
    tokens = _counted(inputs).sum(1)
    signal = (inputs["advantages"] != 0) & (tokens > 0)
    count = max(1, int(accelerator.gather(signal.sum().unsqueeze(0)).max()))
    # The shortest rows fill up, those without tokens last, because TRL's metrics are means over tokens.
    order = tokens.masked_fill(tokens == 0, tokens.max() + 1)
    others = order.argsort(stable=True)
    return torch.cat((signal.nonzero().flatten(), others[~signal[others]]))[:count].sort().values


def _rows(batch: Mapping[str, Any], which: Tensor | slice) -> dict[str, Any]:
    """Returns some rows of a batch, given by their numbers, by a mask or by a slice."""
    return {
        name: value[which] if isinstance(value, Tensor) and value.dim() else value
        for name, value in batch.items()
    }


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins several batches: pads prompts on the left and completions on the right, with 0."""
    joined = dict(parts[0])
    for name, value in parts[0].items():
        if isinstance(value, Tensor) and value.dim():
            width = max(part[name].shape[-1] for part in parts)
            joined[name] = torch.cat(
                [
                    part[name] if value.dim() == 1 else _padded(part[name], width, name)
                    for part in parts
                ]
            )
    return joined


def _padded(rows: Tensor, width: int, name: str) -> Tensor:
    more = width - rows.shape[1]
    return functional.pad(rows, (0, more) if name in RIGHT_PADDED else (more, 0))


def _counted(inputs: Mapping[str, Any]) -> Tensor:
    """Returns the mask of the tokens that the loss counts."""
    tools = inputs.get("tool_mask")
    if tools is None:
        return inputs["completion_mask"]
    return inputs["completion_mask"] * tools


def without_other_rows(inputs: Mapping[str, Any], keep: Tensor, loss_type: str) -> dict[str, Any]:
    """Keeps some rows of a batch, scaled such that their gradient equals the gradient of the whole batch.

    Args:
        inputs: Batch for the loss of TRL: tensors with a row per rollout, and the number of tokens of the step.
        keep: Rows to keep, ascending, shape (K,), int64; all other rows must have advantages of 0.
        loss_type: Setting `loss_type` of the trainer, which determines the divisor of the loss.

    Raises:
        RuntimeError: The batch has unknown entries.

    Example:
        >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> batch = {"advantages": torch.tensor([0.0, 1.0]), "completion_mask": mask, "completion_ids": mask}
        >>> kept = without_other_rows(batch, torch.tensor([1]), "grpo")
        >>> kept["advantages"], kept["completion_ids"]
        (tensor([0.5000]), tensor([[1, 1]]))
    """
    present = {name: value for name, value in inputs.items() if value is not None}
    unknown = sorted(set(present) - BY_ROW - {"num_items_in_batch"})
    if unknown:
        raise RuntimeError(
            f"thresher.trl: unknown entries in the batch: {', '.join(unknown)}. Use a tested TRL (docs/rl.md)"
        )
    mask = _counted(present)
    scale = 1.0
    if loss_type in MEAN_OVER_ROWS:
        scale = len(keep) / len(mask)
    elif loss_type == MEAN_OVER_TOKENS:
        scale = float(mask[keep].sum().clamp(min=1) / mask.sum().clamp(min=1))
    used = present["completion_mask"][keep].any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    kept_inputs = dict(inputs)
    for name in BY_ROW & present.keys():
        rows = present[name][keep]
        kept_inputs[name] = rows[:, :width] if name in RIGHT_PADDED and rows.shape[1] > 1 else rows
    kept_inputs["advantages"] = kept_inputs["advantages"] * scale
    return kept_inputs
