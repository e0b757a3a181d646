"""Jobs that several processes train together: what the first one tells, and what the others do."""

import pytest

from thresher_lab.comparison import workers as together
from thresher_lab.comparison.controls import Job
from thresher_lab.comparison.workers import (
    Advanced,
    Failed,
    Finished,
    RunError,
    RunRefusedError,
    RunValueError,
    TogetherWorkers,
)
from thresher_lab.training.specs import MethodSpec

JOBS = {name: Job(MethodSpec("full"), 0, name) for name in ("fine", "broken", "wrong", "refused")}
KINDS = {"broken": RunError, "wrong": RunValueError, "refused": RunRefusedError}


@pytest.fixture
def trained(monkeypatch):
    """Labels of the jobs that were trained; some of them fail."""
    found = []

    class Trainer:
        def __init__(self, send, **_):
            self.send = send

        def rehearse(self, job):
            found.append("rehearsed")

        def __call__(self, job):
            found.append(job.label)
            self.send(Advanced(job, 1, 0.5))
            return (
                Failed(job, "why", KINDS[job.label], "trace")
                if job.label in KINDS
                else Finished(job, {})
            )

    monkeypatch.setattr(together, "Trainer", Trainer)
    return found


def workers(advanced=print):
    return TogetherWorkers(advanced, task="digits", epochs=1, folder=None)


def test_the_first_process_trains_one_job_after_the_other_and_tells_when_there_is_none(
    monkeypatch, trained
):
    told, events = [], []
    monkeypatch.setattr(together, "of_first", lambda value: told.append(value) or value)
    with workers(events.append) as own:
        assert own.leads([]) and own.free and not own.busy
        own.start(JOBS["fine"])
        assert own.busy and not own.free
        assert own.next_event() == Finished(JOBS["fine"], {}) and own.free
    assert (
        told == [JOBS["fine"], None]
        and [event.epochs for event in events] == [1]
        and trained == ["fine"]
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_job_that_fails_raises_and_no_further_job_is_told(monkeypatch, trained, name):
    told = []
    monkeypatch.setattr(together, "of_first", lambda value: told.append(value) or value)
    with pytest.raises(KINDS[name]) as raised, workers() as own:
        own.start(JOBS[name])
        own.next_event()
    assert told == [JOBS[name]] and str(raised.value.__cause__) == "\ntrace"


def test_another_process_follows_until_there_is_no_job_left(monkeypatch, trained, capsys):
    coming = [JOBS["fine"], JOBS["refused"], JOBS["fine"], None, JOBS["wrong"]]
    monkeypatch.setattr(together, "own_rank", lambda: 1)
    monkeypatch.setattr(together, "of_first", lambda value: coming.pop(0))
    with workers() as own:
        assert not own.leads([JOBS["fine"]])
        assert trained == ["rehearsed", "fine", "refused", "fine"] and capsys.readouterr().out == ""
        with pytest.raises(RunValueError, match="wrong, seed 0: why"):
            own.leads([])
    assert coming == []
