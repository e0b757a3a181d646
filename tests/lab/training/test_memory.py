from threading import Thread

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from thresher_lab.tasks import built_in
from thresher_lab.training import loop as memory_module
from thresher_lab.training.loop import StepMemory, train
from thresher_lab.training.specs import parse_methods

CPU = torch.device("cpu")
HELD = 8 * 1024  # bytes of 1,024 doubles


def step_of(*sizes, goes_on=True):
    """A step that holds some tensors of 8 KiB each at once, one number after the other."""

    def step():
        for number in sizes:
            [torch.ones(1024, dtype=torch.float64) for _ in range(number)]
        return goes_on

    return step


@pytest.mark.parametrize(("sizes", "peak"), [((1,), 1), ((3, 1), 3), ((2, 5, 4), 5)])
def test_the_peak_is_what_is_held_at_once(sizes, peak):
    memory = StepMemory(CPU)
    held = torch.ones(100_000)
    assert memory.of(step_of(*sizes)) is True
    assert memory.take() == pytest.approx(peak * HELD, rel=0.05)
    assert memory.take() is None and len(held)


def test_what_frees_memory_from_before_takes_none():
    held = [torch.ones(1024, dtype=torch.float64)]
    memory = StepMemory(CPU)
    assert memory.of(lambda: not held.clear())
    assert memory.take() == 0


def test_no_step_no_peak():
    memory = StepMemory(CPU)
    assert memory.of(step_of(2, goes_on=False)) is False and memory.take() is None


def test_what_cannot_be_measured_is_unknown():
    memory = StepMemory(torch.device("meta"))
    assert memory.of(step_of(2)) is True and memory.take() is None
    memory = StepMemory(CPU)
    with profile(activities=[ProfilerActivity.CPU]):
        assert memory.of(step_of(2)) is True
    assert memory.take() is None
    thread = Thread(target=memory.of, args=(step_of(2),))
    thread.start()
    thread.join()
    assert memory.take() is None


def test_the_profiler_is_set_up_before_any_step_and_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        memory_module, "_on_host", lambda step, device: calls.append(step) or (True, 0)
    )
    memory_module._start_profiler.cache_clear()
    for _ in range(2):
        StepMemory(CPU)
    assert len(calls) == 1
    StepMemory(torch.device("meta"))
    assert len(calls) == 1


def test_a_third_of_the_rows_takes_less_memory():
    """A backward pass for the kept rows keeps no more of the forward pass than they need; a scoring pass keeps nothing."""
    task = built_in("digits@256")
    data = task.load(task.find(None))
    specs = "full,random_backprop:keep=0.34,selective_backprop:keep=0.34:forward_passes=twice"
    full, kept, twice = (train(task, data, spec, seed=0, epochs=2) for spec in parse_methods(specs))
    assert kept["step_memory"] < 0.8 * full["step_memory"]
    assert [entry["step_memory"] for entry in full["history"]] == pytest.approx(
        [full["step_memory"]] * 2, rel=0.1
    )
    longer = train(task, data, parse_methods("full")[0], seed=0, epochs=5)["history"]
    assert [entry["step_memory"] is not None for entry in longer] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert 0 < twice["step_memory"] < 3 * full["step_memory"]
