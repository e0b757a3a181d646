"""Estimates from a short probe of a training what selection could save on it.

The probe trains for some epochs, or until its time is up, and asks every method that plans epochs what it would leave out by
the losses of these epochs, and by the losses if all samples but one were learned. Then it times the loader, the parts of a step
and the steps of each method in turns. Loading and computing take `overlap * max + (1 - overlap) * sum` together, where the
overlap is that of full training: 0 where one waits for the other, 1 where workers load while the model computes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thresher.experiments.advise.findings import record_of
from thresher.experiments.advise.forecast import loss_summary
from thresher.experiments.advise.outlook import GRADIENT_NORM, Outlook, outlook_of
from thresher.experiments.advise.probe import Probe, Says, quietly
from thresher.experiments.advise.ranking import named_methods, next_command, worth_trying
from thresher.experiments.advise.sentences import sentences
from thresher.experiments.advise.turns import torch_threads
from thresher.experiments.recipes.resolve import task_of
from thresher.experiments.tasks.script import errors_placed
from thresher.experiments.training.specs import Spec
from thresher.experiments.training.store import versions

PLANNED_EPOCHS = 20
PROBE_SECONDS = 60.0

Advice = dict[str, Any]


def advise(
    task: str,
    specs: Sequence[Spec],
    *,
    epochs: int = PLANNED_EPOCHS,
    data: Path | None = None,
    seconds: float = PROBE_SECONDS,
    seed: int = 0,
    threads: int = 1,
    says: Says = quietly,
) -> Advice:
    """Probes a training and estimates for each method what share of the time it could save.

    Args:
        task: Name of the training, see `recipes.resolve.task_of`.
        specs: Methods other than full training.
        epochs: Number of epochs of the planned training; the schedules of methods refer to it. Default: 20.
        data: Folder with the data, for tasks that take one.
        seconds: Time limit for the epochs of the probe, in seconds. Default: 60.
        seed: Random seed of the training and of the order in which things are timed. Default: 0.
        threads: Number of CPU threads of torch during the probe. Default: 1, as in a comparison.
        says: Function that is called with a line about what is done now, and how long it takes at most. Default: none.

    Returns:
        Plain values: task, epochs, device, versions, probe, step, outlook, losses, trace, break_even_keep, methods,
        worth_trying (the recommended methods, the best first), next (the command that compares the first ones) and sentences.
        The entry of a method has `record`, see `findings.Record`, `saves`, the share of the wall time of full training that it
        saves with the losses of the probe, and `at_most`, that share if all samples but one were learned; below 0 if slower.

    Raises:
        ValueError: An argument is out of its range, the training has no batch, or its `evaluate` returns no number.
        FileNotFoundError: The data is missing.
    """
    if epochs < 1 or threads < 1 or not seconds > 0:
        allowed = "`epochs` and `threads` must be 1 or more and `seconds` above 0"
        raise ValueError(f"advise: {allowed}, got {epochs}, {threads} and {seconds}")
    trainable = task_of(task)
    with torch_threads(threads), errors_placed(trainable):
        says("reading the data, and preparing the training")
        training = trainable.training(trainable.load(trainable.find(data)), seed)
        probe = Probe(training, epochs=epochs, seed=seed, says=says)
        probe.try_evaluate()
        pace, signals, rows = probe.forecasts(specs, seconds)
    rows = _with_records(specs, rows, traced=probe.fallback is None)
    outlook = outlook_of([known[GRADIENT_NORM].numpy() for known in signals if GRADIENT_NORM in known], pace)
    advice = {
        "task": task,
        "epochs": epochs,
        "device": str(probe.device),
        "versions": versions(),
        "probe": {"samples": probe.seen, "epochs": probe.trained},
        "step": pace.as_dict(),
        "outlook": outlook.as_dict(),
        "losses": loss_summary(signals[-1]),
        "trace": {"fallback": probe.fallback},
        "break_even_keep": pace.break_even,
        "methods": rows,
    }
    advice |= _recommended(task, specs, rows, outlook, epochs, data)
    return advice | {"sentences": sentences(advice)}


def _with_records(specs: Sequence[Spec], rows: Sequence[Advice], *, traced: bool) -> list[Advice]:
    """Returns the entries of methods with what was measured of them."""
    return [row | {"record": record_of(spec, traced=traced).as_dict()} for spec, row in zip(specs, rows, strict=True)]


def _recommended(
    task: str, specs: Sequence[Spec], rows: Sequence[Advice], outlook: Outlook, epochs: int, data: Path | None
) -> Advice:
    """Returns the methods that are worth trying, the best first, and the command that compares the first ones."""
    worth = [row["method"] for row in worth_trying(rows, outlook)]
    return {"worth_trying": worth, "next": next_command(task, named_methods(worth, specs), epochs=epochs, data=data)}
