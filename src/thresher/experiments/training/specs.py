"""Methods as written on the command line: `kakurenbo:max_fraction=0.4`, `selective_backprop:keep=0.33:forward_passes=twice`.

Settings are the method's own and, for methods of the batch stage, those of `thresher.attach` in `BATCH_SETTINGS`. Methods of
several stages are joined by a plus: `prune:scores=el2n.parquet:keep=0.75+selective_backprop:keep=0.67`.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from thresher import methods
from thresher.methods.contract import requirements_of

ENDING = ".parquet"
"""Of files of scores."""
WORDS = {"true": True, "false": False, "none": None}
PASSES = ("auto", "once", "twice")
DTYPES = ("bfloat16", "float16", "float32")

BATCH_SETTINGS = {
    "forward_passes": "{}",
    "score_every": "every={}",
    "score_dtype": "{}",
    "score_scale": "scale={}",
}
"""What a spec may say of `attach(forward_passes=..., scoring=Scoring(every_epochs, dtype, input_scale))`; form in labels."""


@dataclass(frozen=True)
class MethodSpec:
    """A method by name, with the settings that differ from its defaults.

    Args:
        name: One of `thresher.methods.names()`.
        given: Settings of the method by name.
        batch: Settings of its attachment by name, see `BATCH_SETTINGS`; for methods that select in the batch by its losses.
    """

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How it is called in results: its name, the settings given, and how it scores: `selective_backprop:keep=0.3 once`.

        Files are called by their stems.
        """
        own = ":".join((self.name, *(f"{key}={_called(value)}" for key, value in self.given.items())))
        return " ".join((own, *(form.format(self.batch[key]) for key, form in BATCH_SETTINGS.items() if key in self.batch)))

    @property
    def files(self) -> list[Path]:
        """Files among the settings that are there, such as scores."""
        named = (Path(value) for value in self.given.values() if isinstance(value, str) and value.endswith(ENDING))
        return [path for path in named if path.is_file()]

    def create(self) -> Any:
        """The method.

        Raises:
            ValueError: No such method or setting, or a value that it does not take; the message lists what is allowed.
        """
        kind = methods.load(self.name)
        parameters = inspect.signature(kind).parameters
        scored = _scores_batches(kind)
        if self.batch and not scored:
            raise ValueError(
                f"{self.name} has no setting {next(iter(self.batch))!r}: {', '.join(BATCH_SETTINGS)} are for methods that "
                f"select in the batch by its losses; it has {', '.join(parameters) or 'none'}"
            )
        for key, value in self.given.items():
            if key not in parameters:
                known = (*parameters, *(BATCH_SETTINGS if scored else ()))
                raise ValueError(f"{self.name} has no setting {key!r}; it has {', '.join(known) or 'none'}")
            _check_kind(f"{self.name}: `{key}`", value, parameters[key].default)
        _check_batch(self.name, self.batch)
        try:
            return methods.create(self.name, **self.given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.label}: {error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included, where the method is a dataclass; those of the batch stage after its own."""
        method = self.create()
        own = asdict(method) if is_dataclass(method) and not isinstance(method, type) else dict(self.given)
        return {**own, "forward_passes": "auto", **self.batch} if _scores_batches(method) else own

    def attachment(self) -> dict[str, Any]:
        """Arguments of `thresher.attach` that belong to the method."""
        found = {"forward_passes": self.batch["forward_passes"]} if "forward_passes" in self.batch else {}
        scoring = {argument: self.batch[key] for key, argument in SCORING.items() if key in self.batch}
        if not scoring:
            return found
        import torch

        from thresher.passes.scoring import Scoring

        if "dtype" in scoring:
            scoring["dtype"] = getattr(torch, scoring["dtype"])
        return {**found, "scoring": Scoring(**scoring)}


@dataclass(frozen=True)
class Composition:
    """Methods of several stages at work together, such as pruning before training and selection in the batch.

    Args:
        parts: At most one a stage.
    """

    parts: tuple[MethodSpec, ...]

    @property
    def name(self) -> str:
        """The names of the parts."""
        return "+".join(part.name for part in self.parts)

    @property
    def label(self) -> str:
        """How it is called in results: the labels of the parts."""
        return "+".join(part.label for part in self.parts)

    @property
    def batch(self) -> Mapping[str, Any]:
        """Settings of the attachment of the part that selects in the batch."""
        return {key: value for part in self.parts for key, value in part.batch.items()}

    @property
    def files(self) -> list[Path]:
        """Of all parts."""
        return [path for part in self.parts for path in part.files]

    def create(self) -> list[Any]:
        """The methods.

        Raises:
            ValueError: See `MethodSpec.create`, or two methods of one stage.
        """
        methods = [part.create() for part in self.parts]
        stages = [method.stage for method in methods]
        for part, stage in zip(self.parts, stages, strict=True):
            if stages.count(stage) > 1:
                raise ValueError(f"{self.label}: {part.name} is not the only method of the stage {stage!r}; one a stage")
        return methods

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of each part by its name."""
        self.create()
        return {part.name: part.settings for part in self.parts}

    def attachment(self) -> dict[str, Any]:
        """Arguments of `thresher.attach` that belong to the parts."""
        return {key: value for part in self.parts for key, value in part.attachment().items()}


Spec = MethodSpec | Composition

SCORING = {"score_every": "every_epochs", "score_dtype": "dtype", "score_scale": "input_scale"}
"""Settings of a spec as arguments of `thresher.Scoring`."""


def parse_methods(text: str) -> list[Spec]:
    """Read `a,b:setting=value,c+d`; every method is made once, so that a mistake shows before anything runs.

    Raises:
        ValueError: Nothing given, a method given twice, or see `MethodSpec.create`.
    """
    specs = [_parse(part) for part in _split(text, ",") if part]
    seen: list[Any] = []
    for spec in specs:
        identity = (spec.name, spec.settings)
        if identity in seen:
            raise ValueError(f"--methods: {spec.label} is given twice, with the same settings")
        if any(spec.label == other.label for other in specs[: len(seen)]):
            raise ValueError(f"--methods: two methods would be called {spec.label} in the results; rename a file")
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


def _parse(text: str) -> Spec:
    parts = list(_split(text, "+"))
    return _part(text) if len(parts) == 1 else Composition(tuple(_part(part) for part in parts))


def _part(text: str) -> MethodSpec:
    name, *settings = _split(text, ":")
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--methods: {text!r}: write settings as name:setting=value, got {setting!r}")
        if key in given:
            raise ValueError(f"--methods: {text!r}: the setting {key!r} is given twice")
        given[key] = _value(value)
    batch = {key: given.pop(key) for key in BATCH_SETTINGS if key in given}
    return MethodSpec(name, given, batch)


def _called(value: Any) -> Any:
    return Path(value).stem if isinstance(value, str) and value.endswith(ENDING) else value


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


def _scores_batches(method: Any) -> bool:
    """Whether a method or its class selects in the batch by what a forward pass tells, and not before any."""
    requires = requirements_of(method)
    return method.stage == "batch" and (isinstance(requires, property) or bool(requires.signals))


def _check_batch(name: str, batch: Mapping[str, Any]) -> None:
    """Settings of the batch stage, before the first run begins."""
    passes = batch.get("forward_passes", "auto")
    if passes not in PASSES:
        raise ValueError(f"{name}: `forward_passes` is one of {', '.join(PASSES)}, got {passes!r}")
    every, dtype, scale = (batch.get(key) for key in ("score_every", "score_dtype", "score_scale"))
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise ValueError(f"{name}: `score_every` is a number of epochs, a whole number of 1 or more, got {every!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"{name}: `score_dtype` is one of {', '.join(DTYPES)}, got {dtype!r}")
    if scale is not None and (not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale <= 1):
        raise ValueError(f"{name}: `score_scale` is the share of height and width that is scored, within (0, 1], got {scale!r}")
    scoring = [key for key in SCORING if key in batch]
    if scoring and passes == "once":
        raise ValueError(f"{name}: `{scoring[0]}` is about passes that only score: it needs forward_passes=twice, got 'once'")
