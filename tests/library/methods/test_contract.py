"""The declaration of what a method needs, and every error of a declaration that does not match the method."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from thresher import Kakurenbo, methods
from thresher.methods.contract import Requirements, check_declaration, requirements_of, way_around


class Plain:
    """An epoch method without a declaration."""

    stage = "epoch"

    def columns(self) -> dict[str, Any]:
        return {}

    def plan_epoch(self, records: Any, *, epoch: int, epochs: int, generator: Any) -> Any: ...


class InBatch:
    stage = "batch"

    def init_state(self) -> dict[str, Any]:
        return {}

    def count(self, n: int) -> int | None:
        return n

    def plan_batch(self, signals: Any, state: Any, *, step: int, generator: Any) -> Any: ...


def refused(kind: type, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__}{message}"):
        check_declaration(kind())


@pytest.mark.parametrize("name", sorted(methods.BUILT_IN))
def test_the_methods_of_this_package_declare_what_they_define(name: str) -> None:
    kind = methods.load(name)
    check_declaration(kind(*["scores.parquet"] * (name in ("ccs", "prune", "rho_loss"))))


@pytest.mark.parametrize("kind", [Plain, InBatch])
def test_a_method_without_a_declaration_needs_nothing(kind: type) -> None:
    check_declaration(kind())
    assert requirements_of(kind()) == Requirements()


def test_a_need_of_the_model() -> None:
    assert not Requirements(signals=("loss",), optimizer=True, own_order=True).model
    assert Requirements(refresh="train").model
    assert Requirements(full_pass=("error",)).model


def test_requirements_are_hashable_and_compare_by_value() -> None:
    assert hash(Requirements(switches={"loss": "a"})) == hash(Requirements(switches={"loss": "a"}))
    assert Requirements(switches={"loss": "a"}) != Requirements()


def test_the_way_around_names_each_setting_once() -> None:
    method = Kakurenbo()
    assert way_around(method, "correct", "confidence", "loss") == ", or use Kakurenbo(move_back=False)"
    assert way_around(method, "optimizer", "sum") == ', or use Kakurenbo(adjust_lr=False, merge="scatter")'
    assert way_around(method, "loss") == way_around(Plain(), "optimizer") == ""


def test_the_declaration_must_be_requirements() -> None:
    class Dict(Plain):
        requires = {"optimizer": True}

    refused(Dict, r"\.requires must be a thresher\.Requirements, got dict$")


@pytest.mark.parametrize("function", ["active", "report", "check", "cost"])
def test_a_declared_function_must_be_defined_and_a_defined_one_declared(function: str) -> None:
    declared = type("Declared", (InBatch,), {"requires": Requirements(**{function: True})})
    refused(declared, rf" declares Requirements\({function}=\.\.\.\), but does not define {function}$")
    defined = type("Defined", (InBatch,), {function: lambda self: None})
    refused(defined, rf" defines {function}, but does not declare it: requires = Requirements\({function}=\.\.\.\)$")
    check_declaration(type("Both", (declared, defined), {})())


def test_a_full_pass_must_be_declared_and_defined() -> None:
    declared = type("Declared", (Plain,), {"requires": Requirements(full_pass=("label",))})
    refused(declared, r" declares Requirements\(full_pass=\.\.\.\), but does not define full_pass$")
    defined = type("Defined", (Plain,), {"full_pass": lambda self, epoch, epochs: ()})
    refused(defined, r" defines full_pass, but does not declare it: requires = Requirements\(full_pass=\.\.\.\)$")


@pytest.mark.parametrize(
    ("base", "attribute", "nearest"),
    [
        (Plain, {"colums": lambda self: {}}, "columns"),
        (Plain, {"optimiser": True}, "optimizer"),
        (Plain, {"require": Requirements()}, "requires"),
        (Plain, {"refreshed": True}, "refresh"),
        (Plain, {"full_passes": lambda self, epoch, epochs: ()}, "full_pass"),
        (InBatch, {"activ": property(lambda self: True)}, "active"),
        (InBatch, {"signal": ("loss",)}, "signals"),
        (InBatch, {"counts": lambda self, n: n}, "count"),
    ],
)
def test_an_unknown_attribute_is_told_the_nearest_right_one(base: type, attribute: dict[str, Any], nearest: str) -> None:
    (name,) = attribute
    kind = type("Misspelt", (base,), attribute)
    refused(
        kind, rf"\.{name} is neither a setting nor part of the contract .*; the nearest name is '{nearest}'. Call it _{name}"
    )


def test_settings_and_helpers_have_any_name() -> None:
    @dataclass(frozen=True)
    class Own(Plain):
        requires: ClassVar[Requirements] = Requirements()
        colum: float = 0.5
        draws: int = 3  # a setting of that name, in a method that declares its needs

        def threshold_of(self, epoch: int) -> float:
            return self.colum * epoch

        @classmethod
        def column(cls) -> "Own":
            return cls()

        def _colums(self) -> None: ...

    check_declaration(Own())
