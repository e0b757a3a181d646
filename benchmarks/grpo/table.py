"""The tables of the arms: rewards at equal tokens and at equal steps, and tokens until a reward is reached.

What was decided before the first counted training: two tasks, half and 80 % of whose prompts teach the base model nothing;
seven arms, each at the rate that was best on two seeds and prompts that are not counted; eight seeds; 32,000 generated tokens.
The target is three quarters of what plain GRPO gains on average. Differences are paired by seed, with 95 % intervals.

What was changed later: the grid had four rates. After 77 counted trainings a lower and a higher rate were added, because arms
had their best rate at an edge. Trainings that are not counted choose alone, and one arm got another rate on one task. After all
560 trainings, two arms were added: Thompson with refill, and refill with four rollouts. Thompson was removed when all were done.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from benchmarks.grpo.arms import ARMS, BUDGET, PLAIN, SEEDS, SHARES, chosen_factor
from benchmarks.grpo.tasks import LEVELS
from benchmarks.marks import between_marks
from benchmarks.winnow.jobs import Done, Job
from thresher_lab.comparison.statistics import Paired
from thresher_lab.training.files import markdown_table

MARKS = (
    "<!-- tables of the arms of benchmarks.grpo -->",
    "<!-- end of the tables of the arms of grpo -->",
)
STEPS, GENERATED, TRAINED, REWARD = range(4)
"""Columns of a point of a curve."""
TARGET = 0.75

Curve = Sequence[Sequence[float]]


def reward_at(curve: Curve, column: int, value: float) -> float:
    """Returns the reward where a column has a value, between the two nearest points; the last one where it ends before."""
    for before, after in pairwise(curve):
        if after[column] >= value:
            part = (value - before[column]) / (after[column] - before[column])
            return before[REWARD] + part * (after[REWARD] - before[REWARD])
    return curve[-1][REWARD]


def until(curve: Curve, column: int, reward: float) -> float | None:
    """Returns the value of a column where the reward is first reached; None where it never is."""
    for before, after in pairwise(curve):
        if after[REWARD] >= reward:
            part = (reward - before[REWARD]) / (after[REWARD] - before[REWARD])
            return before[column] + max(0.0, part) * (after[column] - before[column])
    return None


def curves(done: Done, task: str, share: float) -> dict[str, dict[int, Curve]]:
    """Returns the curves of each arm with a counted training by seed, of the seeds that all of these arms have."""
    found: dict[str, dict[int, Curve]] = {}
    for arm in ARMS:
        factor = chosen_factor(done, task, arm, share)
        jobs = (
            [] if factor is None else [Job(task, arm, share, factor, seed) for seed in range(SEEDS)]
        )
        if own := {job.seed: done[job]["points"] for job in jobs if job in done}:
            found[arm] = own
    common = set[int]().union(*found.values()).intersection(*found.values())
    return {arm: {seed: of[seed] for seed in sorted(common)} for arm, of in found.items()}


def target_of(plain: Mapping[int, Curve]) -> float:
    """Returns the reward that is aimed at: three quarters of the mean gain of plain GRPO."""
    first, last = (
        fmean(reward_at(curve, GENERATED, tokens) for curve in plain.values())
        for tokens in (1e-9, BUDGET)
    )
    return first + TARGET * (last - first)


def tokens_saved(
    own: Mapping[int, Curve], plain: Mapping[int, Curve], column: int
) -> Paired | None:
    """Returns the tokens to the target over those of plain GRPO less 1, in percent; None where a seed does not reach it."""
    target = target_of(plain)
    pairs = [
        (until(own[seed], column, target), until(plain[seed], column, target)) for seed in plain
    ]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    return (
        Paired.of([100 * (first / second - 1) for first, second in known])
        if len(known) == len(pairs) > 1
        else None
    )


def _tokens(own: Mapping[int, Curve], plain: Mapping[int, Curve], column: int) -> str:
    paired, target = tokens_saved(own, plain, column), target_of(plain)
    if paired is not None:
        return f"{interval(paired, 0)} %"
    reached = [
        sum(until(curve, column, target) is not None for curve in of.values())
        for of in (own, plain)
    ]
    return f"{reached[0]} of {len(own)} seeds reach it; plain: {reached[1]}"


def interval(paired: Paired, places: int = 1) -> str:
    """Returns a mean with half of its 95 % interval."""
    if paired.low is None:
        return f"{paired.mean:+.{places}f}"
    return f"{paired.mean:+.{places}f} ± {paired.mean - paired.low:.{places}f}"


def _row(name: str, own: Mapping[int, Curve], plain: Mapping[int, Curve]) -> tuple[str, ...]:
    def less(column: int, value: float) -> Paired:
        return Paired.of(
            [
                100 * (reward_at(own[seed], column, value) - reward_at(plain[seed], column, value))
                for seed in plain
            ]
        )

    steps = min(curve[-1][STEPS] for of in (own, plain) for curve in of.values())
    return (
        ARMS[name].text,
        f"{100 * fmean(reward_at(curve, GENERATED, BUDGET) for curve in own.values()):.1f}",
        "" if name == PLAIN else interval(less(GENERATED, BUDGET)),
        "" if name == PLAIN else _tokens(own, plain, GENERATED),
        "" if name == PLAIN else _tokens(own, plain, TRAINED),
        "" if name == PLAIN else f"{interval(less(STEPS, steps))} (after {steps:.0f})",
    )


def verdict(done: Done) -> str:
    """Returns a table of how many tasks show that an arm needs fewer generated tokens than plain GRPO, or more."""
    cells, rows = _cells(done), list[tuple[str, ...]]()
    for name, arm in ARMS.items():
        if name == PLAIN or not all(name in of for of in cells.values()):
            continue
        found = [tokens_saved(of[name], of[PLAIN], GENERATED) for of in cells.values()]
        fewer = sum(one is not None and one.high is not None and one.high < 0 for one in found)
        more = sum(one is not None and one.low is not None and one.low > 0 for one in found)
        missed = sum(one is None for one in found)
        rows.append(
            (arm.text, *map(str, (fewer, more, missed, len(found) - fewer - more - missed)))
        )
    header = (
        f"tokens generated to the target, of {len(cells)} tasks",
        "fewer",
        "more",
        "a seed does not reach it",
        "open",
    )
    return markdown_table(header, rows)


def _cells(done: Done) -> dict[tuple[float, str], dict[str, dict[int, Curve]]]:
    found = {(share, task): curves(done, task, share) for share in SHARES for task in LEVELS}
    return {cell: of for cell, of in found.items() if len(of.get(PLAIN, ())) > 1}


def text(done: Done) -> str:
    """Returns the verdict and the tables in Markdown."""
    cells = _cells(done)
    if not cells:
        return "Not measured yet."
    header = (
        "arm",
        "reward, %",
        "less plain's",
        "tokens generated to the target",
        "tokens trained on to it",
        "reward less plain's, equal steps",
    )
    parts = [verdict(done)]
    for (share, task), of in cells.items():
        rows = [_row(name, of[name], of[PLAIN]) for name in of]
        title = f"**{100 * share:.0f} % of the prompts teach nothing at first, {task}** ({len(of[PLAIN])} seeds)"
        parts.append(f"{title}\n\n{markdown_table(header, rows)}")
    return "\n\n".join(parts)


def with_tables(page: str, text: str) -> str:
    """Returns a page with the tables between their marks."""
    return between_marks(page, *MARKS, text)
