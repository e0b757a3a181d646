"""Plans of all papers name methods hundreds of times, for each of which the registry reads what packages are installed."""

import functools

import pytest

from thresher.methods import registry


@pytest.fixture(autouse=True)
def _packages_read_once(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
