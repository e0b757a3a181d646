"""Policies over eight bins of difficulty, with so many prompts that each is seen about once; and an outcome gate.

What was decided before the first counted training: two tasks; eight bins by the pass rate of the base model, with as many prompts
each; eight arms, each at the rate that is best on two seeds and prompts that are not counted; eight seeds; 32,000 generated
tokens. Arms whose reward is shaped are compared with plain GRPO under the same shaped reward; the score is always the share of
right answers. Differences are paired by seed, with 95 % intervals, at equal generated tokens and at equal CPU time.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.grpo import arms, table, tasks
from benchmarks.winnow.jobs import Done, Job
from thresher import rl
from thresher_lab.comparison.statistics import Paired
from thresher_lab.training.files import markdown_table

MARKS = (
    "<!-- tables of the bins of benchmarks.grpo -->",
    "<!-- end of the tables of the bins of grpo -->",
)
EDGES = (0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
"""Pass rates between the eight bins. In the first bin, nearly all groups have equal rewards; in the last one, about two thirds."""
PER_BIN = 200
SHARE = 2 / (len(EDGES) + 1)
"""Share of the prompts that teach the base model nothing."""
FACTORS = {"wrong digits": (0.6, 1.0, 2.0, 4.0), "copies": (0.15, 0.3, 0.6, 1.0)}
"""Factors on the rate of the look. Of those of `arms`, the two that no arm chose there are left out."""
FLOOR = 0.1
CPU = 4
"""Column of a point of a curve."""


def shaped(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Returns 0.7 for a right answer, and up to 0.3 for the share of right digits."""
    rewards = list[float]()
    for text, right in zip(completions, answer, strict=True):
        same = sum(one == other for one, other in zip(text, right, strict=False))
        rewards.append(0.7 * (text == right) + 0.3 * same / max(len(text), len(right)))
    return rewards


@dataclass(frozen=True)
class Arm:
    """A way to choose.

    Args:
        text: Name of the arm in the table.
        groups: Whether Thompson chooses bins. Default: the prompts of the loader, or uniform with `refill`.
        rollouts: Number of rollouts of a prompt.
        reward: Reward function.
        settings: Further arguments of `thresher.trl.attach`.
    """

    text: str
    groups: bool = False
    rollouts: int = arms.GROUP
    reward: Callable[..., list[float]] = tasks.reward
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


REFILL = {"refill": True}
GATED = {"refill": True, "outcome": tasks.reward}
ARMS: Mapping[str, Arm] = {
    "plain": Arm("plain GRPO"),
    "fewer": Arm("4 rollouts", rollouts=arms.GROUP // 2),
    "refill": Arm("refill (DAPO)", settings=REFILL),
    "groups": Arm("Thompson over bins", groups=True),
    "groups refill": Arm("Thompson over bins, refill", groups=True, settings=REFILL),
    "shaped": Arm("shaped: plain GRPO", reward=shaped),
    "shaped groups refill": Arm("shaped: bins, refill", True, reward=shaped, settings=REFILL),
    "shaped gate": Arm("shaped: bins, refill, outcome", True, reward=shaped, settings=GATED),
}


@cache
def prompts(task: str, seed: str) -> list[dict[str, Any]]:
    """Returns different prompts in random order, as many of each bin.

    Args:
        task: Name of a task.
        seed: Name of the set.
    """
    count = PER_BIN * (len(EDGES) + 1)
    among = {one["prompt"]: one for one in tasks.problems(task, 30 * count, seed)}
    rates = tasks.pass_rates(tasks.base(task), list(among.values())).tolist()
    found = list[dict[str, Any]]()
    counts = [0] * (len(EDGES) + 1)
    for one, rate in zip(among.values(), rates, strict=True):
        place = bisect_right(EDGES, rate)
        if counts[place] < PER_BIN:
            counts[place] += 1
            found.append({**one, "bin": place})
    if len(found) < count:
        raise RuntimeError(f"{task}: the bins have only {counts} of {PER_BIN} prompts each")
    return random.Random(seed).sample(found, count)


def ready(done: Done) -> Iterator[Job]:
    """Yields the trainings that can run now, seed by seed."""
    cells = [(task, arm) for task in tasks.LEVELS for arm in ARMS]
    for task, arm in cells:
        yield from arms.looks_of(task, arm, SHARE, FACTORS[task])
    for seed in range(arms.SEEDS):
        for task, arm in cells:
            factor = arms.chosen_factor(done, task, arm, SHARE, FACTORS[task])
            if factor is not None:
                yield Job(task, arm, SHARE, factor, seed)


def run(job: Job) -> dict[str, Any]:
    """Trains once, and returns what `arms.train` does."""
    arm = ARMS[job.arm]
    rows = prompts(job.task, f"training {job.seed}")
    policy = None
    if arm.groups:
        bins = [row["bin"] for row in rows]
        policy = rl.Thompson(len(rows), groups=bins, floor=FLOOR, seed=job.seed)
    return arms.train(job, rows, policy, arm.rollouts, arm.reward, **arm.settings)


def curves(done: Done, task: str) -> dict[str, dict[int, table.Curve]]:
    """Returns the curves of each arm by seed, of the seeds that all arms have."""
    found = dict[str, dict[int, table.Curve]]()
    for arm in ARMS:
        factor = arms.chosen_factor(done, task, arm, SHARE, FACTORS[task])
        jobs = list[Job]()
        if factor is not None:
            jobs = [Job(task, arm, SHARE, factor, seed) for seed in range(arms.SEEDS)]
        found[arm] = {job.seed: done[job]["points"] for job in jobs if job in done}
    common = set[int].intersection(*(set(own) for own in found.values()))
    return {arm: {seed: own[seed] for seed in sorted(common)} for arm, own in found.items()}


def text(done: Done) -> str:
    """Returns the tables in Markdown."""
    parts = list[str]()
    for task in tasks.LEVELS:
        found = curves(done, task)
        seeds = len(found["plain"])
        if seeds < 2:
            continue
        rows = [_row(name, found) for name in ARMS]
        header = ("arm", "right, %", "less plain's", "at equal CPU time", "CPU seconds")
        parts.append(f"**{task}** ({seeds} seeds)\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts) or "Not measured yet."


def _row(name: str, found: Mapping[str, Mapping[int, table.Curve]]) -> tuple[str, ...]:
    own = found[name]
    base = "plain" if ARMS[name].reward is tasks.reward else "shaped"
    spent = min(curve[-1][CPU] for curve in (*own.values(), *found[base].values()))
    right = 100 * fmean(table.reward_at(one, table.GENERATED, arms.BUDGET) for one in own.values())
    seconds = fmean(curve[-1][CPU] for curve in own.values())
    differences = ("", "")
    if name != base:
        equal_time = f"{_less(own, found[base], CPU, spent)} (after {spent:.0f} s)"
        differences = (_less(own, found[base], table.GENERATED, arms.BUDGET), equal_time)
    return ARMS[name].text, f"{right:.1f}", *differences, f"{seconds:.0f}"


def _less(
    own: Mapping[int, table.Curve], base: Mapping[int, table.Curve], column: int, value: float
) -> str:
    differences = list[float]()
    for seed, curve in own.items():
        other = table.reward_at(base[seed], column, value)
        differences.append(100 * (table.reward_at(curve, column, value) - other))
    return table.interval(Paired.of(differences))
