import os

import pytest

from thresher_lab.training.loop import is_busy


@pytest.mark.parametrize(("load", "busy"), [(3.9, False), (4.0, False), (4.1, True)])
def test_more_work_than_cores_is_busy(monkeypatch, load, busy):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 99.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert is_busy() is busy


def test_without_a_load_average_it_is_not_known(monkeypatch):
    def unknown():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert is_busy() is None
    monkeypatch.delattr(os, "getloadavg")
    assert is_busy() is None
