"""What `thresher compare --dry-run` prints: which runs there would be, and about how long they take."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from thresher.cli._console import STANDARD_OUTPUT, announcer, open_console, write_result


def print_dry_run(
    task: str,
    methods: str,
    seeds: str,
    epochs: int,
    out: Path,
    *,
    json: Path | None = None,
    quiet: bool = False,
    most: int | None = None,
    factors: Sequence[float] = (),
    **options: Any,
) -> None:
    """Prints what a comparison would train, and about how long.

    Args:
        task: Name of a task, or the user's own training as FILE.py:FUNCTION.
        methods: Methods as on the command line, separated by commas.
        seeds: Seeds as on the command line, separated by commas.
        epochs: Number of epochs of every run.
        out: Folder of the comparison.
        json: File for the result as JSON; "-" for the standard output, and then nothing else is printed there.
        quiet: Whether to print no progress. Default: False.
        most: Largest number of seeds, where they are added until every verdict is decided. Default: none are added.
        factors: Factors on the learning rate that every arm is tried with first. Default: none.
        options: Further arguments of `dry_run`.
    """
    says = announcer("compare --dry-run", quiet=quiet)
    says("loading torch, for some seconds")
    from thresher.experiments.comparison.dry_run import dry_run
    from thresher.experiments.training.specs import parse_methods, parse_seeds

    found = dry_run(task, parse_methods(methods), parse_seeds(seeds), epochs, out, says=says, **options)
    console = open_console(to_stderr=json == STANDARD_OUTPUT)
    for line in dry_run_lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if most is not None:
        console.print(
            f"With --until-decided, up to {most} seeds: at most {most / len(parse_seeds(seeds)):.2g} times as long.",
            markup=False,
            highlight=False,
        )
    if factors:
        from thresher.experiments.comparison.rate_looks import LOOK_SEEDS

        found["rates"] = {"factors": [*factors], "seeds": [*LOOK_SEEDS], "in_time": False}
        times = 1 + len(factors) * len(LOOK_SEEDS) / len(parse_seeds(seeds))
        console.print(
            f"With --rates, {len(factors)} factors are tried with {len(LOOK_SEEDS)} seeds first. This is not in the time "
            f"above, which it makes {times:.2g} times as long where nothing is tried yet; and "
            "finished runs with another rate are not counted as finished here.",
            markup=False,
            highlight=False,
        )
    if json is not None:
        write_result(json, found)


def dry_run_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns one line for each method and control, and then what they take together.

    Args:
        found: Result of `comparison.dry_run.dry_run`.
    """
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for run in found["runs"]:
        by_label.setdefault(run["label"], []).append(run)
    lines = [_line(label, runs) for label, runs in by_label.items()]
    waiting = [run for run in found["runs"] if not run["finished"]]
    lines += found["left_out"]
    if found["not_estimated"]:
        lines.append(f"Taken to last as long as full training: {', '.join(found['not_estimated'])}.")
    if not waiting:
        return [*lines, f"All {len(found['runs'])} runs are finished; the command only writes the report."]
    finished = len(found["runs"]) - len(waiting)
    return [
        *lines,
        f"{_counted(len(waiting), 'run')} to train, {finished} finished: about {_long(found['wall_s'])} with "
        f"{_counted(found['jobs'], 'process', 'processes')} side by side on a machine of {_counted(found['cores'], 'core')} "
        f"that does nothing else, {_long(found['cpu_s'])} of CPU time.",
        "Controls are at the cost of the finished runs of a method; before there are any, at an estimated cost.",
    ]


def _line(label: str, runs: list[Mapping[str, Any]]) -> str:
    finished = sum(run["finished"] for run in runs)
    done = f", {finished} finished" if finished else ""
    count, epochs = _counted(len(runs), "run"), _counted(runs[0]["epochs"], "epoch")
    return f"{'  ' * runs[0]['control']}{label}: {count} of {epochs}{done}; about {_long(runs[0]['seconds'])} each"


def _counted(number: int, one: str, several: str = "") -> str:
    """Returns a number with its noun, whose plural ends with s where no other is given."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def _long(seconds: float) -> str:
    """Returns a time in words: seconds below two minutes, and else hours, minutes and seconds."""
    return (
        f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else str(timedelta(seconds=round(seconds)))
    )
