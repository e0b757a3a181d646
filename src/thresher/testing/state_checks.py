"""Checks of memory: a method leaves its arguments alone, and everything that it remembers can be saved and loaded."""

from torch import Tensor

from thresher.testing.promise import promise
from thresher.testing.questions import comparable, comparable_plan
from thresher.testing.subjects import BATCH_SIZES, BatchSubject, EpochSubject, Subject
from thresher.testing.training import save_and_load


@promise("epoch", "batch")
def check_inputs(subject: Subject) -> None:
    """Checks that a method neither changes the tensors that it is given nor keeps views of them.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class Halves(thresher.BigLoss):
        ...     def plan_batch(self, signals, state, *, step, generator):
        ...         signals["loss"].mul_(0.5)
        ...         return super().plan_batch(signals, state, step=step, generator=generator)
        >>> try:
        ...     check_inputs(Halves(keep=0.5))
        ... except AssertionError as error:
        ...     print(error)
        Halves: changes the signals it is given
    """
    if isinstance(subject, BatchSubject):
        _check_batch_inputs(subject)
    elif isinstance(subject, EpochSubject):
        _check_epoch_inputs(subject)


def _check_epoch_inputs(subject: EpochSubject) -> None:
    for epoch in range(subject.epochs):
        given = {**subject.seen("spoilt"), **subject.full_pass(epoch, subject.samples)}
        before = comparable(given)
        plan = subject.ask(given, epoch)
        subject.expect(comparable(given) == before, "changes the records it is given")
        content = comparable_plan(plan)
        for values in given.values():
            values.zero_()
        subject.expect(comparable_plan(plan) == content, "its plan holds on to the records: it changes when they do")


def _check_batch_inputs(subject: BatchSubject) -> None:
    state = subject.steps()[1]
    signals = subject.batch(16, 9, "spoilt")
    before, remembered = comparable(signals), comparable(state)
    plan, after = subject.ask(signals, state, 5)
    subject.expect(comparable(signals) == before, "changes the signals it is given")
    subject.expect(
        comparable(state) == remembered, "changes the state it is given; the next state is a new dict of new tensors"
    )
    answer = comparable_plan(plan), comparable(after)
    unchanged = {id(value) for name, value in after.items() if value is state.get(name)}
    for tensor in (*signals.values(), *(v for v in state.values() if isinstance(v, Tensor) and id(v) not in unchanged)):
        tensor.zero_()
    same = (comparable_plan(plan), comparable(after)) == answer
    subject.expect(same, "its plan or its state holds on to the signals: it changes when they do")


@promise("epoch", "batch")
def check_state(subject: Subject) -> None:
    """Checks that records and states save, load with weights_only=True, and lead to the same answers afterwards.

    Args:
        subject: Method under examination; callers pass the method itself.

    Example:
        >>> import thresher
        >>> class KeepsObject(thresher.BigLoss):
        ...     def init_state(self):
        ...         return {"object": object()}
        >>> try:
        ...     check_state(KeepsObject(keep=0.5))
        ... except AssertionError as error:
        ...     print(str(error).partition(";")[0])
        KeepsObject: its state does not load with weights_only=True (UnpicklingError)
    """
    if isinstance(subject, EpochSubject):
        records = subject.seen("spoilt")
        loaded = subject.table()
        loaded.load_state_dict(save_and_load(subject, records.state_dict()))
        for epoch in range(subject.epochs):
            same = comparable_plan(subject.ask(loaded, epoch)) == comparable_plan(subject.ask(records, epoch))
            subject.expect(same, "answers differently after its records were saved and loaded")
    if isinstance(subject, BatchSubject):
        answers, _ = subject.steps()
        state = subject.method.init_state()
        for step in range(3):
            _, state = subject.ask(subject.batch(BATCH_SIZES[step], step), state, step)
        again, _ = subject.steps(state=save_and_load(subject, state), start=3)
        subject.expect(again == answers[3:], "answers differently after its state was saved and loaded")
