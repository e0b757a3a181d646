"""Methods written as text: `kakurenbo:max_fraction=0.4`, `selective_backprop:keep=0.33:forward_passes=twice`.

Settings are those of the method and, for methods of the batch stage, the arguments of `thresher.attach` in `BATCH_SETTINGS`.
Methods of several stages are joined by a plus: `prune:scores=el2n.parquet:keep=0.75+selective_backprop:keep=0.67`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from thresher import methods
from thresher.methods import requirements_of
from thresher_lab.training.placebo import placebo_of

SCORES_SUFFIX = ".parquet"
"""Suffix of the files of scores."""
FORWARD_PASSES = ("auto", "once", "twice")
SCORE_DTYPES = ("bfloat16", "float16", "float32")

BATCH_SETTINGS = {
    "forward_passes": "{}",
    "score_every": "every={}",
    "score_dtype": "{}",
    "score_scale": "scale={}",
}
"""Settings of a spec for `attach(forward_passes=...)`, and the format of each in labels."""

RUN_SETTINGS = {
    "spend": "in {}",
    "stratify": "stratify={}",
    "placebo": "placebo",
    "batches": "{}",
}
"""Settings of a spec of any method: `attach(spend=..., stratify=...)`, whether its signals are permuted, and whether its batches
are composed "by_length", with the format of each in labels."""

FORMATS = BATCH_SETTINGS | RUN_SETTINGS


@dataclass(frozen=True)
class MethodSpec:
    """A method by name, with the settings that differ from its defaults.

    Args:
        name: Name of the method, one of `thresher.methods.names()`.
        given: Settings of the method by name.
        batch: Arguments of `thresher.attach` by their names in `BATCH_SETTINGS`, only for methods that select in the batch
            (those beginning with `score_` only for those that do so by the losses of its samples), and in `RUN_SETTINGS`.

    Example:
        >>> spec = MethodSpec("selective_backprop", {"keep": 0.3}, {"forward_passes": "twice"})
        >>> spec.label
        'selective_backprop:keep=0.3 twice'
        >>> spec.create().keep
        0.3
        >>> spec.attachment()
        {'forward_passes': 'twice'}
    """

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> "tuple[MethodSpec, ...]":
        """The method itself, as the only one of a composition."""
        return (self,)

    @property
    def label(self) -> str:
        """The name in results: method, given settings, and how it scores, such as `selective_backprop:keep=0.3 once`.

        A file appears without its folder and suffix.
        """
        text = ":".join(
            (self.name, *(f"{key}={_stem(value)}" for key, value in self.given.items()))
        )
        return " ".join(
            (
                text,
                *(
                    form.format(self.batch[key])
                    for key, form in FORMATS.items()
                    if key in self.batch
                ),
            )
        )

    @property
    def text(self) -> str:
        """The method as it is written on the command line, which `parse_methods` reads."""
        return ":".join(
            (self.name, *(f"{key}={value}" for key, value in {**self.given, **self.batch}.items()))
        )

    @property
    def files(self) -> list[Path]:
        """The files among the settings, such as scores, that exist."""
        named = (
            Path(value)
            for value in self.given.values()
            if isinstance(value, str) and value.endswith(SCORES_SUFFIX)
        )
        return [path for path in named if path.is_file()]

    def load(self) -> type:
        """Returns the class of the method.

        Raises:
            ValueError: No method has this name.
        """
        return methods.load(self.name)

    def create(self) -> Any:
        """Returns the method.

        Raises:
            ValueError: There is no such method or setting, or a value is not allowed; the message lists what is allowed.
        """
        kind = self.load()
        allowed = _batch_settings(kind)
        refused = [key for key in self.batch if key in BATCH_SETTINGS and key not in allowed]
        if refused:
            raise ValueError(
                f"{self.name} has no setting {refused[0]!r}: `forward_passes` is for methods that select in the batch, and "
                f"{', '.join(SCORING)} for those that do so by its losses"
            )
        methods.validate_settings(self.name, kind, self.given, allowed)
        _check_batch(self.name, self.batch)
        try:
            method = kind(**self.given)
            return placebo_of(method) if self.batch.get("placebo") else method
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.label}: {error}") from error

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, with the defaults if the method is a dataclass, and then the arguments of `thresher.attach`."""
        method = self.create()
        if is_dataclass(method) and not isinstance(method, type):
            settings = asdict(method)
        else:
            settings = dict(self.given)
        return {
            **settings,
            **({"forward_passes": "auto"} if "score_every" in _batch_settings(method) else {}),
            **self.batch,
        }

    def attachment(self) -> dict[str, Any]:
        """Returns the arguments of `thresher.attach` that belong to the method."""
        options = {
            key: self.batch[key]
            for key in ("forward_passes", "spend", "stratify")
            if key in self.batch
        }
        scoring = {
            argument: self.batch[key] for key, argument in SCORING.items() if key in self.batch
        }
        if not scoring:
            return options
        import torch

        from thresher import Scoring

        if "dtype" in scoring:
            scoring["dtype"] = getattr(torch, scoring["dtype"])
        return {**options, "forward_passes": Scoring(**scoring)}


@dataclass(frozen=True)
class Composition:
    """Methods of several stages in one run, such as pruning before training and selection in the batch.

    Args:
        parts: Methods, at most one per stage.

    Example:
        >>> spec = Composition((MethodSpec("uniform", {"keep": 0.5}), MethodSpec("selective_backprop")))
        >>> spec.label
        'uniform:keep=0.5+selective_backprop'
        >>> [method.stage for method in spec.create()]
        ['epoch', 'batch']
    """

    parts: tuple[MethodSpec, ...]

    @property
    def name(self) -> str:
        """The names of the parts."""
        return "+".join(part.name for part in self.parts)

    @property
    def label(self) -> str:
        """The name in results: the labels of the parts."""
        return "+".join(part.label for part in self.parts)

    @property
    def text(self) -> str:
        """The methods as they are written on the command line."""
        return "+".join(part.text for part in self.parts)

    @property
    def batch(self) -> Mapping[str, Any]:
        """The arguments of `thresher.attach` by their names in `BATCH_SETTINGS`, of all parts."""
        return {key: value for part in self.parts for key, value in part.batch.items()}

    @property
    def files(self) -> list[Path]:
        """The files among the settings of all parts that exist."""
        return [path for part in self.parts for path in part.files]

    def create(self) -> list[Any]:
        """Returns the methods.

        Raises:
            ValueError: Two methods have the same stage, or an error of `MethodSpec.create`.
        """
        methods = [part.create() for part in self.parts]
        stages = [method.stage for method in methods]
        for part, stage in zip(self.parts, stages, strict=True):
            if stages.count(stage) > 1:
                raise ValueError(
                    f"{self.label}: {part.name} is not the only method of the stage {stage!r}; one a stage"
                )
        return methods

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of each part, by the name of its method."""
        self.create()
        return {part.name: part.settings for part in self.parts}

    def attachment(self) -> dict[str, Any]:
        """Returns the arguments of `thresher.attach` that belong to the parts."""
        return {key: value for part in self.parts for key, value in part.attachment().items()}


Spec = MethodSpec | Composition

SCORING = {"score_every": "every_epochs", "score_dtype": "dtype", "score_scale": "input_scale"}
"""Settings of a spec, and the arguments of `thresher.Scoring` that they stand for."""


def parse_methods(text: str) -> list[Spec]:
    """Parses `a,b:setting=value,c+d`, and creates each method once, so that a mistake is found before anything runs.

    Args:
        text: Methods separated by commas; methods of several stages are joined by a plus.

    Returns:
        The methods, in the order of the text.

    Raises:
        ValueError: No method is given, one is given twice, or an error of `MethodSpec.create`.

    Example:
        >>> for spec in parse_methods("full,kakurenbo:max_fraction=0.4,uniform:keep=0.5+selective_backprop:keep=0.5"):
        ...     print(spec.label)
        full
        kakurenbo:max_fraction=0.4
        uniform:keep=0.5+selective_backprop:keep=0.5
    """
    specs = [_parse_spec(part) for part in methods.split_outside_brackets(text, ",") if part]
    seen: list[Any] = []
    for spec in specs:
        identity = (spec.name, spec.settings)
        if identity in seen:
            raise ValueError(f"--methods: {spec.label} is given twice, with the same settings")
        if any(spec.label == other.label for other in specs[: len(seen)]):
            raise ValueError(
                f"--methods: two methods would be called {spec.label} in the results; rename a file"
            )
        seen.append(identity)
    if not specs:
        raise ValueError(f"--methods: nothing given; there are {', '.join(methods.names())}")
    return specs


MOST_SEEDS = 1000
"""Largest number of seeds of a comparison."""


def parse_seeds(text: str) -> list[int]:
    """Parses random seeds, and ranges of them, that are separated by commas.

    Raises:
        ValueError: There is no seed, one is not a whole number of 0 or more, one is given twice, or there are more than 1,000.

    Example:
        >>> parse_seeds("0-2,7")
        [0, 1, 2, 7]
    """
    seeds = list[int]()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
            raise ValueError(
                f"--seeds: whole numbers of 0 or more, separated by commas, such as 0,1,2 or 0-9; got {text!r}"
            )
        numbers = range(int(ends[0]), int(ends[1]) + 1)
        # Before a list is made of it, which may take all memory.
        if len(seeds) + len(numbers) > MOST_SEEDS:
            raise ValueError(f"--seeds: at most {MOST_SEEDS:,} seeds, got more in {text!r:.100}")
        seeds += numbers
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds: a seed is given twice in {text!r}")
    return seeds


def _parse_spec(text: str) -> Spec:
    parts = list(methods.split_outside_brackets(text, "+"))
    if len(parts) == 1:
        return _parse_method(text)
    return Composition(tuple(_parse_method(part) for part in parts))


def _parse_method(text: str) -> MethodSpec:
    try:
        return MethodSpec(*methods.parse(text, FORMATS))
    except ValueError as error:
        raise ValueError(f"--methods: {error}") from None


def _stem(value: Any) -> Any:
    if isinstance(value, str) and value.endswith(SCORES_SUFFIX):
        return Path(value).stem
    return value


def _batch_settings(method: Any) -> tuple[str, ...]:
    """Returns the names in `BATCH_SETTINGS` that a method, or its class, has.

    A method without signals has `forward_passes` alone: "twice" fills its rows up to full batches, without a scoring pass.
    """
    if method.stage != "batch":
        return ()
    requires = requirements_of(method)
    by_losses = isinstance(requires, property) or bool(requires.signals)
    return tuple(BATCH_SETTINGS) if by_losses else ("forward_passes",)


def _check_batch(name: str, batch: Mapping[str, Any]) -> None:
    """Checks the arguments of `thresher.attach`, before the first run begins."""
    if batch.get("spend") not in (None, "steps", "batches"):
        raise ValueError(f"{name}: `spend` is 'steps' or 'batches', got {batch['spend']!r}")
    if batch.get("stratify") not in (None, "auto", "class"):
        raise ValueError(
            f"{name}: `stratify` is 'auto', 'class' or None, got {batch['stratify']!r}"
        )
    if not isinstance(batch.get("placebo", True), bool):
        raise ValueError(f"{name}: `placebo` is True or False, got {batch['placebo']!r}")
    if batch.get("batches") not in (None, "by_length"):
        raise ValueError(f"{name}: `batches` is 'by_length', got {batch['batches']!r}")
    passes = batch.get("forward_passes", "auto")
    if passes not in FORWARD_PASSES:
        raise ValueError(
            f"{name}: `forward_passes` is one of {', '.join(FORWARD_PASSES)}, got {passes!r}"
        )
    every, dtype, scale = (batch.get(key) for key in ("score_every", "score_dtype", "score_scale"))
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise ValueError(
            f"{name}: `score_every` is a number of epochs, a whole number of 1 or more, got {every!r}"
        )
    if dtype is not None and dtype not in SCORE_DTYPES:
        raise ValueError(
            f"{name}: `score_dtype` is one of {', '.join(SCORE_DTYPES)}, got {dtype!r}"
        )
    if scale is not None and (
        not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale <= 1
    ):
        raise ValueError(
            f"{name}: `score_scale` is the share of height and width that is scored, within (0, 1], got {scale!r}"
        )
    scoring = [key for key in SCORING if key in batch]
    if scoring and passes == "once":
        raise ValueError(
            f"{name}: `{scoring[0]}` is about passes that only score: it needs forward_passes=twice, got 'once'"
        )
