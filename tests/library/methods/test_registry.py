import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import thresher
from thresher import methods
from thresher.methods import registry


@dataclass(frozen=True)
class Foreign:
    """A method of another package."""

    stage = "epoch"
    share: float = 0.5

    def columns(self) -> dict[str, Any]:
        return {}

    def plan_epoch(self, records: Any, *, epoch: int, epochs: int, generator: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("foreign", "foreign_package.methods:Foreign", methods.GROUP),
        EntryPoint("full", "foreign_package.methods:Foreign", methods.GROUP),
    ]

    def entry_points(*, group: str) -> list[EntryPoint]:
        return points if group == "thresher.methods" else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    module = type(sys)("foreign_package.methods")
    monkeypatch.setattr(Foreign, "__module__", "foreign_package.methods")
    module.Foreign = Foreign
    monkeypatch.setitem(sys.modules, "foreign_package", type(sys)("foreign_package"))
    monkeypatch.setitem(sys.modules, "foreign_package.methods", module)


def test_names_are_sorted_and_made_by_name() -> None:
    assert methods.names() == sorted(methods.names())
    assert {"full", "infobatch", "kakurenbo", "uniform"} <= set(methods.names())
    assert methods.create("kakurenbo", max_fraction=0.2) == thresher.Kakurenbo(0.2)
    assert methods.load("infobatch") is thresher.InfoBatch


def test_a_method_of_another_package(entry_point: None) -> None:
    assert "foreign" in methods.names()
    method = methods.create("foreign", share=0.25)
    assert method == Foreign(0.25)
    assert methods.name_of(method) == "foreign"
    assert methods.infos()["foreign"].summary == "from foreign_package.methods"


def test_another_package_cannot_take_a_built_in_name(entry_point: None) -> None:
    assert methods.load("full") is thresher.FullData


@pytest.mark.usefixtures("entry_point")
def test_an_unknown_name_is_told_the_known_ones() -> None:
    known = sorted([*methods.BUILT_IN, "foreign"])
    with pytest.raises(
        ValueError,
        match=f"^no method 'kakurembo'; did you mean 'kakurenbo'\\? There are {', '.join(known)}$",
    ):
        methods.create("kakurembo")


def test_a_class_that_is_not_registered_is_named_by_itself() -> None:
    assert methods.name_of(Foreign()) == "Foreign"


def test_the_protocols() -> None:
    assert isinstance(Foreign(), methods.EpochMethod)
    assert not isinstance(object(), methods.EpochMethod)
    assert isinstance(thresher.RandomBackprop(), methods.BatchMethod)
    assert not isinstance(Foreign(), methods.BatchMethod)
    assert not isinstance(thresher.RandomBackprop(), methods.EpochMethod)
    assert isinstance(thresher.Prune("scores.parquet"), methods.BeforeMethod)
    assert not isinstance(Foreign(), methods.BeforeMethod)


def test_listing_methods_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, thresher.methods as m; assert m.names() and all(i.summary for i in m.infos().values());"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
