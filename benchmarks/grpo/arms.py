"""The arms: ways to choose prompts and rollouts in GRPO, each trained until it has generated a number of tokens."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.grpo import tasks
from benchmarks.winnow.jobs import FIRST_LOOK, Done, Job
from thresher import rl

PROMPTS, HELD_OUT, BATCH, GROUP = 400, 300, 16, 8
"""Prompts of the training; prompts that measure; prompts of a step; rollouts of a prompt."""
BUDGET = 32_000
"""Tokens that a training generates."""
SHARES = (0.5, 0.8)
"""Shares of the prompts that teach the base model nothing."""
RATE, FACTORS, LOOKS, SEEDS = 5e-4, (0.15, 0.3, 0.6, 1.0, 2.0, 4.0), 2, 8
"""Learning rate of AdamW; factors on it of the look; seeds of the look; seeds that count."""


class Placebo(rl.Thompson):
    """Thompson with the posterior of another prompt in place of each prompt's own: what its draws do without its knowledge."""

    def __init__(self, prompts: int, *, seed: int = 0) -> None:
        super().__init__(prompts, seed=seed)
        self.other = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed + 1))

    def observe(self, ids: list[int], rewards: torch.Tensor) -> None:
        """Books the rewards on other prompts."""
        super().observe(self.other[torch.tensor(ids)].tolist(), rewards)


@dataclass(frozen=True)
class Arm:
    """A way to choose.

    Args:
        text: Name of the arm in the table.
        policy: Policy of the number of prompts and a seed. Default: none, the prompts of the loader.
        settings: Further arguments of `thresher.trl.attach`.
        rollouts: Number of rollouts that are generated for a prompt.
    """

    text: str
    policy: Callable[..., Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rollouts: int = GROUP


PLAIN = "plain"
ARMS: Mapping[str, Arm] = {
    PLAIN: Arm("plain GRPO"),
    "refill": Arm("refill (DAPO)", settings={"refill": True}),
    "greso": Arm("Greso", rl.Greso),
    "thompson": Arm("Thompson", rl.Thompson),
    "placebo": Arm("Thompson, of other prompts", Placebo),
    "some": Arm("4 of 8 rollouts", settings={"rollouts": GROUP // 2}),
    "fewer": Arm("4 rollouts", rollouts=GROUP // 2),
    "thompson refill": Arm("Thompson, refill", rl.Thompson, {"refill": True}),
    "fewer refill": Arm("4 rollouts, refill", settings={"refill": True}, rollouts=GROUP // 2),
}


def looks_of(task: str, arm: str, share: float, factors: Sequence[float] = FACTORS) -> list[Job]:
    """Returns the trainings that the rate of an arm is chosen by."""
    return [
        Job(task, arm, share, factor, FIRST_LOOK + look)
        for factor in factors
        for look in range(LOOKS)
    ]


def chosen_factor(
    done: Done, task: str, arm: str, share: float, factors: Sequence[float] = FACTORS
) -> float | None:
    """Returns the factor on the rate with the best mean reward of the looks; None before all are done."""
    looks = looks_of(task, arm, share, factors)
    if not all(job in done for job in looks):
        return None
    means = {
        factor: fmean(done[job]["metric"] for job in looks if job.factor == factor)
        for factor in factors
    }
    return max(factors, key=lambda factor: (means[factor], -factor))


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now, seed by seed; the share of a job is that of prompts that teach nothing."""
    cells = [(task, arm, share) for share in SHARES for task in tasks.LEVELS for arm in ARMS]
    for cell in cells:
        yield from looks_of(*cell)
    for seed in range(SEEDS):
        for task, arm, share in cells:
            factor = chosen_factor(done, task, arm, share)
            if factor is not None:
                yield Job(task, arm, share, factor, seed)


def run(job: Job) -> dict[str, Any]:
    """Trains once, and returns what `train` does."""
    arm = ARMS[job.arm]
    rows = tasks.prompts(job.task, PROMPTS, f"training {job.seed}", job.share)
    policy = None if arm.policy is None else arm.policy(PROMPTS, seed=job.seed)
    return train(job, rows, policy, arm.rollouts, **arm.settings)


def train(
    job: Job,
    rows: list[dict[str, Any]],
    policy: Any,
    rollouts: int,
    reward: Callable[..., list[float]] = tasks.reward,
    **settings: Any,
) -> dict[str, Any]:
    """Trains once, and returns the final reward in percent and the points of its curve.

    A point has the number of steps, the tokens that were generated and trained on by then, the mean pass rate of prompts that
    are not trained on, and the CPU seconds of the training, without the time of this measurement.

    Args:
        job: The training.
        rows: Prompts and answers to train on.
        policy: Policy that chooses the prompts. Default: none.
        rollouts: Number of rollouts of a prompt.
        reward: Reward function.
        settings: Further arguments of `thresher.trl.attach`.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    import thresher.trl

    points = list[list[float]]()
    held_out = tasks.problems(job.task, HELD_OUT, "looks" if job.looks else "held out")

    class Curve(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.process_time()
            self.point(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = picks.tokens_generated >= BUDGET
            self.point(state.global_step)

        def point(self, step: int) -> None:
            measured_at = time.process_time()
            spent = round(measured_at - self.began, 3)
            rate = round(float(tasks.pass_rates(trainer.model, held_out).mean()), 5)
            points.append([step, picks.tokens_generated, picks.tokens_trained, rate, spent])
            self.began += time.process_time() - measured_at

    with TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH * rollouts,
            num_generations=rollouts,
            max_completion_length=tasks.LONGEST,
            learning_rate=RATE * job.factor,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=100_000,
            seed=job.seed,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        )
        trainer: Any = GRPOTrainer(
            model=tasks.base(job.task),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tasks.tokenizer(),
        )
        picks = thresher.trl.attach(trainer, policy, **settings)
        trainer.add_callback(Curve())
        trainer.train()
    return {
        "metric": 100 * points[-1][3],
        "points": points,
        "signal": picks.groups_with_signal / picks.groups,
    }
