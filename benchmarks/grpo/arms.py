"""The arms: ways to choose prompts and rollouts in GRPO, each trained until it has generated a number of tokens."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

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


@dataclass(frozen=True)
class Arm:
    """A way to choose.

    Args:
        text: Name of the arm in the table.
        policy: Policy of the number of prompts and a seed. Default: none, the prompts of the loader.
        settings: Further arguments of `thresher.trl.attach`.
        rollouts: Number of rollouts that are generated for a prompt.
        removed: Whether the policy was removed, so that the committed trainings can only be read.
    """

    text: str
    policy: Callable[..., Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rollouts: int = GROUP
    removed: bool = False


PLAIN = "plain"
ARMS: Mapping[str, Arm] = {
    PLAIN: Arm("plain GRPO"),
    "refill": Arm("refill (DAPO)", settings={"refill": True}),
    "greso": Arm("Greso", rl.Greso),
    "thompson": Arm("Thompson", removed=True),
    "placebo": Arm("Thompson, of other prompts", removed=True),
    "some": Arm("4 of 8 rollouts", settings={"rollouts": GROUP // 2}),
    "fewer": Arm("4 rollouts", rollouts=GROUP // 2),
    "thompson refill": Arm("Thompson, refill", removed=True),
    "fewer refill": Arm("4 rollouts, refill", settings={"refill": True}, rollouts=GROUP // 2),
}


def looks_of(task: str, arm: str, share: float) -> list[Job]:
    """Returns the trainings that the rate of an arm is chosen by."""
    return [
        Job(task, arm, share, factor, FIRST_LOOK + look)
        for factor in FACTORS
        for look in range(LOOKS)
    ]


def chosen_factor(done: Done, task: str, arm: str, share: float) -> float | None:
    """Returns the factor on the rate with the best mean reward of the looks; None before all are done."""
    looks = looks_of(task, arm, share)
    if not all(job in done for job in looks):
        return None
    means = {
        factor: fmean(done[job]["metric"] for job in looks if job.factor == factor)
        for factor in FACTORS
    }
    return max(FACTORS, key=lambda factor: (means[factor], -factor))


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now, seed by seed; the share of a job is that of prompts that teach nothing."""
    names = [name for name, arm in ARMS.items() if not arm.removed]
    cells = [(task, name, share) for share in SHARES for task in tasks.LEVELS for name in names]
    for cell in cells:
        yield from looks_of(*cell)
    for seed in range(SEEDS):
        for task, arm, share in cells:
            factor = chosen_factor(done, task, arm, share)
            if factor is not None:
                yield Job(task, arm, share, factor, seed)


def run(job: Job) -> dict[str, Any]:
    """Trains once, and returns the final reward in percent and the points of its curve.

    A point has the number of steps, the tokens that were generated and trained on by then, and the mean pass rate of prompts
    that are not trained on.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    import thresher.trl

    arm = ARMS[job.arm]
    rows = tasks.prompts(job.task, PROMPTS, f"training {job.seed}", job.share)
    policy = None if arm.policy is None else arm.policy(PROMPTS, seed=job.seed)
    points = list[list[float]]()
    held_out = tasks.problems(job.task, HELD_OUT, "looks" if job.looks else "held out")

    class Curve(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.point(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = picks.tokens_generated >= BUDGET
            self.point(state.global_step)

        def point(self, step: int) -> None:
            rate = round(float(tasks.pass_rates(trainer.model, held_out).mean()), 5)
            points.append([step, picks.tokens_generated, picks.tokens_trained, rate])

    with TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH * arm.rollouts,
            num_generations=arm.rollouts,
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
            reward_funcs=tasks.reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tasks.tokenizer(),
        )
        picks = thresher.trl.attach(trainer, policy, **arm.settings)
        trainer.add_callback(Curve())
        trainer.train()
    return {
        "metric": 100 * points[-1][3],
        "points": points,
        "signal": picks.groups_with_signal / picks.groups,
    }
