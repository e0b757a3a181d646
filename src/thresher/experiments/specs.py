"""Methods as written on the command line: `kakurenbo`, `kakurenbo:max_fraction=0.4:tau=0.5`."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from thresher import methods

WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class MethodSpec:
    """A method by name, with the settings that differ from its defaults.

    Args:
        name: One of `thresher.methods.names()`.
        given: Settings by name.
    """

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How it is called in results: its name, and the settings given."""
        return ":".join((self.name, *(f"{key}={value}" for key, value in self.given.items())))

    def create(self) -> Any:
        """The method.

        Raises:
            ValueError: No such method or setting, or a value that it does not take; the message lists what is allowed.
        """
        parameters = inspect.signature(methods.load(self.name)).parameters
        for key, value in self.given.items():
            if key not in parameters:
                raise ValueError(f"{self.name} has no setting {key!r}; it has {', '.join(parameters) or 'none'}")
            _check_kind(f"{self.name}: `{key}`", value, parameters[key].default)
        try:
            return methods.create(self.name, **self.given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.label}: {error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included, where the method is a dataclass."""
        method = self.create()
        return asdict(method) if is_dataclass(method) and not isinstance(method, type) else dict(self.given)


def parse_methods(text: str) -> list[MethodSpec]:
    """Read `a,b:setting=value`; every method is made once, so that a mistake shows before anything runs.

    Raises:
        ValueError: Nothing given, a method given twice, or see `MethodSpec.create`.
    """
    specs = [_parse(part) for part in _split(text, ",") if part]
    seen: list[Any] = []
    for spec in specs:
        identity = (spec.name, spec.settings)
        if identity in seen:
            raise ValueError(f"--methods: {spec.label} is given twice, with the same settings")
        seen.append(identity)
    if not specs:
        raise ValueError(f"--methods: nothing given; there are {', '.join(methods.names())}")
    return specs


def parse_seeds(text: str) -> list[int]:
    """Read `0,1,2`.

    Raises:
        ValueError: Not whole numbers of 0 or more, none, or one twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--seeds: whole numbers of 0 or more, separated by commas, such as 0,1,2; got {text!r}")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds: a seed is given twice in {text!r}")
    return seeds


def _parse(text: str) -> MethodSpec:
    name, *settings = _split(text, ":")
    given = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--methods: {text!r}: write settings as name:setting=value, got {setting!r}")
        if key in given:
            raise ValueError(f"--methods: {text!r}: the setting {key!r} is given twice")
        given[key] = _value(value)
    return MethodSpec(name, given)


def _split(text: str, separator: str) -> Iterator[str]:
    """Split outside brackets, so that a value may be a tuple."""
    part, depth = "", 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check_kind(name: str, value: Any, default: Any) -> None:
    """A word where a number belongs, or a number where yes or no does, must not pass for true."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, got {value!r}")
    if isinstance(default, int | float) and not isinstance(default, bool) and not number:
        raise ValueError(f"{name} is a number, got {value!r}")
