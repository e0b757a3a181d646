"""Versions of other packages that the library follows."""

import pytest

from thresher import _version


@pytest.mark.parametrize(
    ("here", "newer"), [("2.6.0", False), ("2.6.9", False), ("2.7.0rc1", True), ("2.10", True)]
)
def test_a_newer_package_is_said(monkeypatch, recwarn, here, newer):
    monkeypatch.setattr(_version, "version", lambda package: here)
    if newer:
        with pytest.warns(
            UserWarning,
            match=f"thresher.lightning is tested with lightning up to 2.6, but {here} is installed",
        ):
            _version.warn_if_newer("lightning", (2, 6), "thresher.lightning")
    else:
        _version.warn_if_newer("lightning", (2, 6), "thresher.lightning")
    assert not recwarn
