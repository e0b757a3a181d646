"""The interface of methods: protocols of methods that choose before training, before each epoch or in each batch.

Nothing here imports torch, so methods can be listed without it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

RULE = "left out by its plan"
"""Rule of a method whose card gives none."""


@dataclass(frozen=True)
class Card:
    """Facts about a method that its settings do not give; `thresher methods NAME` prints them.

    A method of this package writes `summary`, `paper` and `rule` as plain strings, because `thresher methods` and
    `thresher why` read them from the source file without importing it.

    Args:
        biased: Whether the expected weighted gradient differs from the gradient over all data, and on which settings this
            depends.
        forwards: Forward passes beyond those of training, in words and numbers of samples, such as "none" or "every hidden
            sample once per epoch".
        claim: Saving or gain reported in the paper, with numbers. Default "": there is no paper.
        differences: Differences from the official code, one sentence each.
        bytes_per_sample: Memory that is kept for every sample of the dataset with the default settings, in bytes, without
            the weights of a plan. Default 0.
        caveat: Sentence that says when and why the method does not beat random selection of the same cost. Default "": it beats
            random selection on its test problem (`thresher.testing`).
        missing: Parts of the paper that are not implemented, one sentence each.
        summary: Description of the method in at most ten words, without a capital letter and a full stop.
        paper: Publication, such as "arXiv:2310.10102". Default "": there is none.
        rule: Text that says why a sample is skipped, for `thresher why`; "{setting}" stands for the value of that setting.

    Example:
        >>> card = Card(summary="keep the newest samples", biased="yes, towards new samples", forwards="none")
        >>> card.bytes_per_sample, card.rule
        (0, 'left out by its plan')
    """

    biased: str
    forwards: str
    claim: str = ""
    differences: tuple[str, ...] = ()
    bytes_per_sample: float = 0
    caveat: str = ""
    missing: tuple[str, ...] = ()
    summary: str = ""
    paper: str = ""
    rule: str = RULE


State = dict[str, Any]
"""Memory of a batch method from step to step: tensors and plain values by name. It is never changed, always replaced."""


@dataclass(frozen=True)
class Requirements:
    """Declaration of what a method needs, and of how its chosen samples are trained on.

    A method declares it in its class attribute (or property) `requires`; `attach` and `thresher.testing.check_method` check it.

    Args:
        signals: Names of the signals (numbers per sample) by which a batch method chooses, such as `("loss",)`. Default (): no
            signals, and the choice comes before any forward pass. Epoch methods name signals in `columns()` instead.
        optimizer: Whether plans scale the learning rate; `attach` then needs the optimizer. Default False.
        refresh: Mode of the model, "eval" or "train", in the forward pass over the samples in `EpochPlan.refresh`. Default
            None: plans never refresh samples.
        order: Order of training on the chosen samples. "loader" (default): the order of the loader. "plan": plans may set the
            order (`EpochPlan(drawn=True)`). "class": stratified batches. The last two need shuffle=True.
        records: Whether the choice depends on losses stored in the loop; training then stops with an error if there are none.
            False if stored values are for information only. Default True.
        smaller_batches: Whether epochs have as many steps as full training, with smaller batches
            (`EpochPlan(smaller_batches=True)`). `attach` then checks that there is a row for each step. Default False.
        divide: Divisor of the sum of the kept losses in a batch: "kept", the number of kept rows (their mean); or "batch", the
            number of all rows. Default "kept".
        switches: Settings with which the method can do without something that it needs, by the name of what it needs, such as
            {"optimizer": "adjust_lr=False"}; error messages quote them. Names are "optimizer", "refresh", "feature", "sum" (a
            column whose values are added up) and the names of signals. Default {}.

    Example:
        >>> Requirements(signals=("loss", "confidence")).order
        'loader'
    """

    signals: tuple[str, ...] = ()
    optimizer: bool = False
    refresh: Literal["eval", "train"] | None = None
    order: Literal["loader", "plan", "class"] = "loader"
    records: bool = True
    smaller_batches: bool = False
    divide: Literal["kept", "batch"] = "kept"
    switches: Mapping[str, str] = field(default_factory=dict, hash=False)


NO_REQUIREMENTS = Requirements()
"""Declaration of a method that has no attribute `requires`."""


@runtime_checkable
class BeforeMethod(Protocol):
    """A method that chooses before training which samples are used at all; a frozen dataclass.

    It may define the property `cost`: how many samples went through forward and backward passes to compute its scores.

    Example:
        >>> from thresher import Prune
        >>> isinstance(Prune("scores.parquet"), BeforeMethod)
        True
    """

    stage: ClassVar[Literal["before"]]

    def kept(self, n: int) -> Any:
        """Returns the ids of the kept samples, from a dataset of n samples: shape (K,), int64, ascending."""
        ...


@runtime_checkable
class EpochMethod(Protocol):
    """A method that chooses before each epoch; a frozen dataclass without tensors and random states.

    It may define these functions, which are called if they are there:

    - `check(ids)` raises ValueError if the method cannot choose among the samples with these ids; `attach` calls it.
    - `full_pass(epoch, epochs)` returns the names of the values that it needs for all samples before this plan: "error" (the
      gradient of a sample's mean loss with respect to the model's outputs), "feature" (the input of the last `nn.Linear`) and
      "label". The run then makes a forward pass over all samples and adds these values to `records`: errors and features of
      shape (N, numbers per sample), float32, and labels of shape (N,), int64.
    - The property `cost`, as for `BeforeMethod`.

    Example:
        >>> from thresher import InfoBatch
        >>> isinstance(InfoBatch(), EpochMethod)
        True
    """

    stage: ClassVar[Literal["epoch"]]

    def columns(self) -> dict[str, Any]:
        """Returns what to store for each sample from epoch to epoch, as a `thresher.Column` by name."""
        ...

    def plan_epoch(self, records: Any, *, epoch: int, epochs: int, generator: Any) -> Any:
        """Returns the `thresher.EpochPlan` of one epoch, which must be the same in every process and after every resume.

        Args:
            records: Stored values of the samples: a mapping from column names to tensors of shape (N,).
            epoch: Number of the epoch, from 0.
            epochs: Number of epochs of the training run.
            generator: Random generator on the CPU, seeded from the seed of the run and the epoch: the only source of chance.
        """
        ...


@runtime_checkable
class BatchMethod(Protocol):
    """A method that chooses in each batch; a frozen dataclass without tensors and random states.

    It may define these functions, which are called if they are there:

    - `active(progress, step)` returns whether the method chooses in this batch. If False, the whole batch is trained on and
      `plan_batch` is not called. `progress` is the share of training that is done, [0, 1].
    - `report(state)` returns numbers by name for the history; it is called once per epoch.
    - `check(ids)` raises ValueError if the method cannot choose among the samples with these ids.
    - The property `cost`, as for `BeforeMethod`.

    Example:
        >>> from thresher import BigLoss
        >>> isinstance(BigLoss(), BatchMethod)
        True
    """

    stage: ClassVar[Literal["batch"]]

    def init_state(self) -> State:
        """Returns the state of the method before the first step."""
        ...

    def count(self, n: int) -> int | None:
        """Returns the number of rows kept from a batch of n rows; None if it depends on the losses or on chance."""
        ...

    def plan_batch(
        self, signals: Any, state: State, *, step: int, generator: Any
    ) -> tuple[Any, State]:
        """Returns the `thresher.BatchPlan` of one batch and the next state, which is a new dict.

        The answer must not depend on the order of the rows.

        Args:
            signals: Mapping from the name of a signal to its values, shape (n,); "id" is always there: int64, all different.
            state: State that the last step returned; it must not be changed.
            step: Number of the batch since training began, from 0.
            generator: Random generator on the CPU, seeded from the seed of the run and the step: the only source of chance.
        """
        ...


Method = BeforeMethod | EpochMethod | BatchMethod

STAGES: dict[str, Any] = {"before": BeforeMethod, "epoch": EpochMethod, "batch": BatchMethod}

CONTRACT_FUNCTIONS = {
    "before": {"kept", "cost"},
    "epoch": {"columns", "plan_epoch", "full_pass", "check", "cost"},
    "batch": {"init_state", "count", "plan_batch", "active", "report", "check", "cost"},
}
"""Functions and properties that the contract knows, by stage."""


def defines(method: Any, function: str) -> bool:
    """Returns whether a method has an optional function or property of the contract.

    Args:
        method: Instance of a method.
        function: Name, such as "check".

    Example:
        >>> from thresher import Kakurenbo
        >>> defines(Kakurenbo(), "full_pass")
        False
    """
    # A setting may have that name, too. `OnSubset`, which wraps a method, passes on attributes that it does not define itself.
    attribute = getattr(type(method), function, None) or getattr(method, function, None)
    return callable(attribute) or isinstance(attribute, property)


def calls_model(method: Any) -> bool:
    """Returns whether a method needs forward passes besides those of the loop, and so the model.

    Args:
        method: Instance of an epoch method.

    Example:
        >>> from thresher import FullData, Kakurenbo
        >>> calls_model(Kakurenbo()), calls_model(FullData())
        (True, False)
    """
    return requirements_of(method).refresh is not None or defines(method, "full_pass")


def full_pass_names(method: Any, epochs: int) -> set[str]:
    """Returns the names of the values that a method needs for all samples before any epoch.

    Args:
        method: Instance of an epoch method.
        epochs: Number of epochs of the training run.

    Example:
        >>> from thresher import GradMatch
        >>> sorted(full_pass_names(GradMatch(gradient="bias"), epochs=60))
        ['error']
    """
    plans = range(epochs) if defines(method, "full_pass") else ()
    return {name for epoch in plans for name in method.full_pass(epoch, epochs)}


def requirements_of(method: Any) -> Requirements:
    """Returns the `Requirements` of a method; the defaults if it declares none.

    Args:
        method: Instance of a method.

    Example:
        >>> from thresher import Kakurenbo
        >>> requirements_of(Kakurenbo()).optimizer
        True
    """
    return getattr(method, "requires", NO_REQUIREMENTS)


def way_around(method: Any, *needs: str) -> str:
    """Returns the end of an error message: the settings with which a method can do without something; "" if there are none.

    Args:
        method: Instance of a method.
        needs: Names of what is missing, as in `Requirements.switches`.

    Example:
        >>> from thresher import Kakurenbo
        >>> way_around(Kakurenbo(), "optimizer")
        ', or use Kakurenbo(adjust_lr=False)'
    """
    switches = requirements_of(method).switches
    settings = dict.fromkeys(switches[need] for need in needs if need in switches)
    if settings:
        return f", or use {type(method).__name__}({', '.join(settings)})"
    return ""


OBSERVE = "thresher.observe"
"""What `share_given` returns for the method of `thresher.observe`."""


def share_given(method: Any) -> float | str | None:
    """Returns the share that the user passed in place of a method, or None.

    Example:
        >>> from thresher import Winnow
        >>> share_given(Winnow(0.5)), share_given(mark_as_given(Winnow(0.5), 0.5))
        (None, 0.5)
    """
    return getattr(method, "_share_given", None)


def mark_as_given(method: Any, given: float | str | None) -> Any:
    """Makes `title_given` name a method by the share that the user passed for it; returns the method.

    Example:
        >>> from thresher import Winnow
        >>> mark_as_given(Winnow(0.5), 0.5) == Winnow(0.5)
        True
    """
    # Not a field: it changes neither equality nor what is shown and saved.
    object.__setattr__(method, "_share_given", given)
    return method


def title_given(method: Any) -> str:
    """Returns the name of a method for messages, or what the user wrote in its place: a share, or a call of `observe`.

    Example:
        >>> from thresher import Winnow
        >>> title_given(Winnow(0.5)), title_given(mark_as_given(Winnow(0.5), "50%"))
        ('Winnow', "attach('50%')")
    """
    given = share_given(method)
    if given is None:
        return type(method).__name__
    return OBSERVE if given == OBSERVE else f"attach({given!r})"


def check_declaration(method: Any) -> None:
    """Checks `requires` of a method, and that each of its public attributes is a setting or part of the interface.

    Args:
        method: Instance of a method, with a valid `stage`.

    Raises:
        TypeError: `requires` is not a `Requirements`, or a public attribute is neither a setting nor part of the contract; the
            message then names the nearest right one.
        ValueError: A setting of `requires` is not one of the allowed values.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Misspelt:
        ...     stage = "epoch"
        ...     colums = 1
        >>> check_declaration(Misspelt())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: Misspelt.colums is neither a setting nor part of the interface of methods; the nearest name is 'columns'. ...
    """
    kind = type(method)
    requires = requirements_of(method)
    if not isinstance(requires, Requirements):
        raise TypeError(
            f"{kind.__name__}.requires must be a thresher.Requirements, got {type(requires).__name__}"
        )
    for name, words in (("divide", ("kept", "batch")), ("order", ("loader", "plan", "class"))):
        if (word := getattr(requires, name)) not in words:
            allowed = " or ".join(map(repr, words))
            raise ValueError(
                f"{kind.__name__} declares Requirements({name}={word!r}): it must be {allowed}"
            )
    known = CONTRACT_FUNCTIONS[method.stage] | {"stage", "requires", "card"}
    settings = {one.name for one in fields(kind)} if is_dataclass(kind) else set()
    for name, value in sorted(_public(kind).items()):
        if name not in known and name not in settings:
            _check_attribute(kind, name, value, known)


def _check_attribute(kind: type, name: str, value: Any, known: set[str]) -> None:
    """Raises TypeError for a public attribute whose name looks like a misspelled part of the contract."""
    known = known | {one.name for one in fields(Requirements)}
    helper = callable(value) or isinstance(value, property)
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8 if helper else 0.0)
    if nearest:
        raise TypeError(
            f"{kind.__name__}.{name} is neither a setting nor part of the interface of methods; the nearest name is "
            f"{nearest[0]!r}. Call it _{name} if it is the method's own; see thresher.Requirements."
        )


def _public(kind: type) -> dict[str, Any]:
    """Returns the public attributes of a class by name, without class methods and static methods."""
    attrs = {
        name: value
        for base in reversed(kind.__mro__[:-1])
        if base is not Protocol
        for name, value in vars(base).items()
    }
    return {
        k: v
        for k, v in attrs.items()
        if not k.startswith("_") and not isinstance(v, classmethod | staticmethod)
    }


def as_written(method: Any) -> str:
    """Returns the code that creates a method, with its first setting and the settings that differ from the defaults.

    Example:
        >>> from thresher import Winnow
        >>> as_written(Winnow(0.5, score="loss"))
        "Winnow(share=0.5, score='loss')"
    """
    if share_given(method) == OBSERVE:
        return OBSERVE
    if not is_dataclass(method):
        return repr(method)
    settings = [(one, getattr(method, one.name)) for one in fields(method) if one.repr and one.init]
    differs = [
        place == 0 or one.default is MISSING or value != one.default
        for place, (one, value) in enumerate(settings)
    ]
    shown = (
        f"{one.name}={value!r}"
        for (one, value), differing in zip(settings, differs, strict=True)
        if differing
    )
    return f"{type(method).__name__}({', '.join(shown)})"
