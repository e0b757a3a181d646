"""The declaration of what a method needs, and every error of a declaration that does not match the method."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from thresher import EpochPlan, Kakurenbo, methods
from thresher.methods.contract import (
    Requirements,
    calls_model,
    check_declaration,
    defines,
    full_pass_names,
    requirements_of,
    way_around,
)


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


def test_what_calls_the_model() -> None:
    assert not calls_model(Plain())
    assert calls_model(type("Refreshes", (Plain,), {"requires": Requirements(refresh="train")})())
    assert calls_model(type("Passes", (Plain,), {"full_pass": lambda self, epoch, epochs: ()})())


def test_the_contract_fits_on_a_screen() -> None:
    assert len(fields(Requirements)) <= 9 and len(fields(EpochPlan)) <= 9


def test_requirements_are_hashable_and_compare_by_value() -> None:
    assert hash(Requirements(switches={"loss": "a"})) == hash(Requirements(switches={"loss": "a"}))
    assert Requirements(switches={"loss": "a"}) != Requirements()


def test_the_way_around_names_each_setting_once() -> None:
    method = Kakurenbo()
    assert (
        way_around(method, "correct", "confidence", "loss") == ", or use Kakurenbo(move_back=False)"
    )
    assert (
        way_around(method, "optimizer", "sum")
        == ', or use Kakurenbo(adjust_lr=False, merge="scatter")'
    )
    assert way_around(method, "loss") == way_around(Plain(), "optimizer") == ""


def test_the_declaration_must_be_requirements() -> None:
    class Dict(Plain):
        requires = {"optimizer": True}

    refused(Dict, r"\.requires must be a thresher\.Requirements, got dict$")


@pytest.mark.parametrize("function", ["active", "report", "check", "cost"])
def test_an_optional_function_is_there_where_it_is_defined_and_not_where_a_setting_has_its_name(
    function: str,
) -> None:
    assert not defines(InBatch(), function)
    assert defines(type("Defined", (InBatch,), {function: lambda self: None})(), function)
    assert defines(type("Given", (InBatch,), {function: property(lambda self: None)})(), function)
    assert not defines(type("Setting", (InBatch,), {function: 0.5})(), function)


def test_the_names_of_full_passes_are_those_of_all_plans() -> None:
    asks = type(
        "Asks",
        (Plain,),
        {"full_pass": lambda self, epoch, epochs: {1: ("error",), 3: ("label",)}.get(epoch, ())},
    )()
    assert [sorted(full_pass_names(asks, epochs)) for epochs in (1, 2, 4)] == [
        [],
        ["error"],
        ["error", "label"],
    ]
    assert full_pass_names(Plain(), 4) == set()


@pytest.mark.parametrize(("name", "word"), [("order", "own"), ("divide", "all")])
def test_a_word_of_the_declaration_must_be_known(name: str, word: str) -> None:
    kind = type("Wrong", (InBatch,), {"requires": Requirements(**{name: word})})
    with pytest.raises(
        ValueError, match=rf"Wrong declares Requirements\({name}='{word}'\): it must be '"
    ):
        check_declaration(kind())


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
def test_an_unknown_attribute_is_told_the_nearest_right_one(
    base: type, attribute: dict[str, Any], nearest: str
) -> None:
    (name,) = attribute
    kind = type("Misspelt", (base,), attribute)
    refused(
        kind,
        rf"\.{name} is neither a setting nor part of the interface .*; the nearest name is '{nearest}'. Call it _{name}",
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
