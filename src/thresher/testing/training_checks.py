"""Checks of a method at work: nothing in a step waits for the device, and a training with the method learns and resumes."""

import copy
from typing import Any

import torch

from thresher.methods.contract import requirements_of
from thresher.passes.scoring import Scoring
from thresher.testing.promise import promise
from thresher.testing.subjects import BATCH_SIZES, BatchSubject, ContractError, EpochSubject, Subject
from thresher.testing.training import AttachedTraining


@promise("batch")
def check_waiting(subject: BatchSubject) -> None:
    """Checks that a method with a known number of rows never waits for the device, by means of tensors without values.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Waits(thresher.BigLoss):
        ...     def scores(self, signals):
        ...         return signals["loss"] / signals["loss"].max().item()
        >>> try:
        ...     check_waiting(Waits(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error)[:65])
        Waits: plan_batch waits for the device: it reads values of a tens
    """
    if subject.method.count(16) is None:
        return
    state = subject.method.init_state()
    for step in range(3):
        signals = {name: values.to("meta") for name, values in subject.batch(16, step).items()}
        try:
            _, state = subject.ask(signals, state, step, check_values=False)
        except ContractError as error:
            cause = error.__cause__
            if cause is None:
                raise
            subject.fail(
                "plan_batch waits for the device: it reads values of a tensor (`.item()`, `.cpu()`, `if tensor`, `nonzero`, a "
                f"boolean mask as an index), or mixes devices. On tensors without values: {type(cause).__name__}: {cause}"
            )


@promise("epoch", "batch")
def check_device(subject: Subject) -> None:
    """Checks that a method answers on a GPU as on the CPU; without CUDA it checks nothing.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> check_device(thresher.BigLoss(keep=0.5)) is None
        True
    """
    if not torch.cuda.is_available():
        return
    if isinstance(subject, EpochSubject):
        records = subject.seen()
        for epoch in range(subject.epochs):
            given = {**records, **subject.full_pass(epoch, subject.samples)}
            there = subject.ask({name: values.cuda() for name, values in given.items()}, epoch)
            same = there.ids.tolist() == subject.ask(given, epoch).ids.tolist()
            subject.expect(same, "plans differently where the records are on a GPU")
    if isinstance(subject, BatchSubject):
        states = [subject.method.init_state(), subject.method.init_state()]
        for step, n in enumerate(BATCH_SIZES):
            signals = subject.batch(n, step)
            here, states[0] = subject.ask(signals, states[0], step)
            there, states[1] = subject.ask({name: values.cuda() for name, values in signals.items()}, states[1], step)
            subject.expect(there.rows.tolist() == here.rows.tolist(), "chooses differently where the signals are on a GPU")


@promise("before", "epoch", "batch")
def check_training(subject: Subject) -> None:
    """Checks that a training with a method learns, and that it continues unchanged from a state saved within an epoch.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import dataclasses
        >>> import thresher
        >>> class Diverges(thresher.UniformSubset):
        ...     requires = thresher.Requirements(optimizer=True)
        ...     def plan_epoch(self, records, *, epoch, epochs, generator):
        ...         plan = super().plan_epoch(records, epoch=epoch, epochs=epochs, generator=generator)
        ...         return dataclasses.replace(plan, lr_scale=1e6)
        >>> try:
        ...     check_training(Diverges(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error)[:42])
        Diverges: training does not lower the loss
    """
    passes: list[dict[str, Any]] = [{}]
    if isinstance(subject, BatchSubject) and requirements_of(subject.method).signals:
        passes = [{"forward_passes": "once"}, {"forward_passes": "twice"}]
        if "feature" in requirements_of(subject.method).signals:  # which the loop's own forward pass does not show
            passes = [{"forward_passes": "twice", "scoring": Scoring(validation=lambda: (torch.eye(6), torch.arange(6) % 3))}]
    for settings in passes:
        whole = _check_learning(subject, settings)
        _check_resuming(subject, settings, whole)


def _check_learning(subject: Subject, settings: dict[str, Any]) -> AttachedTraining:
    """Trains once, on the samples that the plans have, and returns the finished training."""
    with subject.asked("a training with it attached"):
        whole = AttachedTraining(subject, **settings)
        start = copy.deepcopy(whole.net)
        whole.train()
    for epoch, plan in whole.planned.items() if not isinstance(subject, BatchSubject) else ():
        seen, ids = sorted(i for entry in whole.log if entry[0] == epoch for i in entry[1]), plan.ids.tolist()
        if plan.keys is not None:  # each step draws its rows from the next of these ids
            ids = seen if len(seen) == round(plan.share * len(ids)) == len({*seen} & {*ids}) else ids
        subject.expect(seen == sorted(ids), f"epoch {epoch} trains on other samples than its plan has")
    before, after = whole.loss(start), whole.loss()
    subject.expect(after < before, f"training does not lower the loss: {before:.3f} before, {after:.3f} after")
    return whole


def _check_resuming(subject: Subject, settings: dict[str, Any], whole: AttachedTraining) -> None:
    """Compares a training that is interrupted, saved and resumed with one that is not; detaches all of them."""
    with subject.asked("saving and resuming its training"):
        first = AttachedTraining(subject, **settings)
        steps = [entry[0] for entry in whole.log].count(2)
        first.train(stop=(2, max(1, steps // 2)))
        checkpoint = first.save(subject)
        second = AttachedTraining(subject, **settings)
        torch.manual_seed(99)
        second.load(checkpoint)
        second.train()
    same = [*first.log, *second.log] == whole.log and second.result() == whole.result()
    subject.expect(same, "a training that is resumed in the middle of an epoch differs from one without interruption")
    for training in (whole, first, second):
        training.run.detach()
