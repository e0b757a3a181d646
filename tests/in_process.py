"""Workers of a comparison that train in this process: no process has to start and import torch."""

from collections import deque

from thresher_lab.comparison.workers import Finished, Trainer


class InProcessWorkers:
    """Takes the place of `Workers`; trains a job when its first event is asked for."""

    def __init__(self, count, **settings):
        self._events = deque()
        self._jobs = deque()
        self._count = count
        self._train = Trainer(self._events.append, **settings)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def busy(self):
        return bool(self._jobs)

    @property
    def free(self):
        return len(self._jobs) < self._count

    def start(self, job):
        self._jobs.append(job)

    def next_event(self):
        if not self._events:
            done = self._train(self._jobs[0])
            assert isinstance(done, Finished), done
            self._events.append(done)
        event = self._events.popleft()
        if isinstance(event, Finished):
            self._jobs.popleft()
        return event
