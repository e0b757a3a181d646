"""What a method is: three protocols, one for each stage, and the declaration of what a method needs and does.

Nothing here imports torch, so that the methods can be listed without it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

State = dict[str, Any]
"""What a batch method remembers from step to step: tensors and plain values by name, never changed, always replaced."""


@dataclass(frozen=True)
class Requirements:
    """What a method needs of the training it is attached to, and which optional functions of the contract it defines.

    Args:
        signals: Names of the signals by which a batch method chooses, such as `("loss",)`. Empty: the method chooses before
            any forward pass. Epoch methods name their signals in `columns()` instead.
        optimizer: Whether plans scale the learning rate, so that `attach` must be given the optimizer.
        refresh: Mode of the model in the forward-only pass over samples that a plan names in `refresh`: "eval" or "train".
            None: the plans never ask for such a pass.
        full_pass: Names of everything that `full_pass(epoch, epochs)` may return, out of "error", "feature" and "label".
            Empty: the method does not define that function.
        own_order: Whether plans decide the order of training (`EpochPlan(drawn=True)`), which takes a loader with
            `shuffle=True`.
        active: Whether the method defines `active(progress, step)`.
        report: Whether the method defines `report(state)`.
        check: Whether the method defines `check(ids)`.
        cost: Whether the method has a property `cost`: the number of samples that were put through a (forward, backward) pass
            before training, for scores that the method uses.
        switches: Settings of the method that make a need go away, by the name of the need, for messages: "optimizer",
            "refresh", "feature", "sum" (a column that adds up), or a signal; such as {"optimizer": "adjust_lr=False"}.

    Example:
        >>> Requirements(signals=("loss", "confidence")).model
        False
        >>> Requirements(refresh="eval").model
        True
    """

    signals: tuple[str, ...] = ()
    optimizer: bool = False
    refresh: Literal["eval", "train"] | None = None
    full_pass: tuple[str, ...] = ()
    own_order: bool = False
    active: bool = False
    report: bool = False
    check: bool = False
    cost: bool = False
    switches: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def model(self) -> bool:
        """Whether the run makes forward passes of its own for the epoch plans, so that it must have the model."""
        return self.refresh is not None or bool(self.full_pass)


NO_REQUIREMENTS = Requirements()


@runtime_checkable
class BeforeMethod(Protocol):
    """A method that decides before training which samples there are at all; a frozen dataclass."""

    stage: ClassVar[Literal["before"]]

    def kept(self, n: int) -> Any:
        """Returns the ids of the samples that are kept of a dataset of n samples: shape (K,), int64, ascending."""
        ...


@runtime_checkable
class EpochMethod(Protocol):
    """A method that decides before each epoch; a frozen dataclass that owns no tensors and no random state.

    With `requires = Requirements(full_pass=...)` it also defines `full_pass(epoch, epochs)`, which returns the names of what it
    must know of all samples before this plan: "error" (the gradient of a sample's mean loss with respect to the model's
    outputs), "feature" (the input of the last `nn.Linear`) and "label". The run then makes a forward-only pass over all
    samples, and `records` has these columns too: (N, numbers per sample), float32; labels (N,), int64.
    """

    stage: ClassVar[Literal["epoch"]]

    def columns(self) -> dict[str, Any]:
        """Returns what must be remembered of each sample: column name to `thresher.Column`."""
        ...

    def plan_epoch(self, records: Any, *, epoch: int, epochs: int, generator: Any) -> Any:
        """Returns a `thresher.EpochPlan` from the records alone: pure, the same on every rank and after every resume."""
        ...


@runtime_checkable
class BatchMethod(Protocol):
    """A method that decides inside each batch; a frozen dataclass that owns no tensors and no random state.

    What `requires` declares, it also defines: `active(progress, step) -> bool`, where `progress` is the share of training that
    is done (where it returns False, the whole batch is trained and `plan_batch` is not called); `report(state)`, which returns
    numbers by name for the history, once an epoch; `check(ids)`, which raises ValueError where the method cannot choose among
    the samples with these ids.
    """

    stage: ClassVar[Literal["batch"]]

    def init_state(self) -> State:
        """Returns what the method remembers before the first step."""
        ...

    def count(self, n: int) -> int | None:
        """Returns how many rows of a batch of n are kept, where that is known before the losses are; else None."""
        ...

    def plan_batch(self, signals: Any, state: State, *, step: int, generator: Any) -> tuple[Any, State]:
        """Returns a `thresher.BatchPlan` and the next state, a new dict; pure, and independent of the order of the rows.

        `signals` maps a name to an (n,) tensor; `id` is always among them: int64, each once. `generator` is on the CPU.
        """
        ...


Method = BeforeMethod | EpochMethod | BatchMethod

STAGES: dict[str, Any] = {"before": BeforeMethod, "epoch": EpochMethod, "batch": BatchMethod}

CONTRACT_FUNCTIONS = {
    "before": {"kept", "cost"},
    "epoch": {"columns", "plan_epoch", "full_pass", "cost"},
    "batch": {"init_state", "count", "plan_batch", "active", "report", "check", "cost"},
}
"""Functions and properties of the contract by stage."""

FORMER: dict[str, dict[str, str]] = {
    "before": {},
    "epoch": {
        "scales_lr": "requires = Requirements(optimizer=True)",
        "refreshes": 'requires = Requirements(refresh="eval")',
        "surveys": "requires = Requirements(full_pass=(...))",
        "survey": "full_pass(epoch, epochs), and requires = Requirements(full_pass=(...))",
        "draws": "requires = Requirements(own_order=True)",
    },
    "batch": {"signals": "requires = Requirements(signals=(...))"},
}
"""Attributes by which methods of each stage used to declare what they need, and what replaces them."""


def requirements_of(method: Any) -> Requirements:
    """Returns what a method declares in `requires`; nothing where it declares nothing."""
    return getattr(method, "requires", NO_REQUIREMENTS)


def way_around(method: Any, *needs: str) -> str:
    """Returns how to do without something that a method needs, to end a sentence with; "" where there is no way.

    Args:
        method: The method.
        needs: Names of what it needs, as in `Requirements.switches`.

    Example:
        >>> from thresher import Kakurenbo
        >>> way_around(Kakurenbo(), "optimizer")
        ', or use Kakurenbo(adjust_lr=False)'
    """
    switches = requirements_of(method).switches
    settings = dict.fromkeys(switches[need] for need in needs if need in switches)
    return f", or use {type(method).__name__}({', '.join(settings)})" if settings else ""


def check_declaration(method: Any) -> None:
    """Refuses a method whose declaration and functions do not belong together, or with attributes that mean nothing.

    Args:
        method: An instance with a valid `stage`.

    Raises:
        TypeError: `requires` is not a `Requirements`, a declared function is missing, a defined one is not declared, or a
            public attribute is neither a setting nor part of the contract; the message names the nearest right one.
    """
    kind, requires = type(method), requirements_of(method)
    if not isinstance(requires, Requirements):
        raise TypeError(f"{kind.__name__}.requires must be a thresher.Requirements, got {type(requires).__name__}")
    for function in sorted(CONTRACT_FUNCTIONS[method.stage] & {one.name for one in fields(Requirements)}):
        declared, defined = bool(getattr(requires, function)), hasattr(kind, function)
        if declared and not defined:
            raise TypeError(f"{kind.__name__} declares Requirements({function}=...), but does not define {function}")
        if defined and not declared:
            raise TypeError(
                f"{kind.__name__} defines {function}, but does not declare it: requires = Requirements({function}=...)"
            )
    known = CONTRACT_FUNCTIONS[method.stage] | {"stage", "requires", "card"} | {one.name for one in fields(Requirements)}
    settings = {one.name for one in fields(kind)} if is_dataclass(kind) else set()
    for name, value in sorted(_public(kind).items()):
        if name in CONTRACT_FUNCTIONS[method.stage] | {"stage", "requires", "card"} or (
            name in settings and hasattr(kind, "requires")
        ):
            continue
        if name in FORMER[method.stage]:
            raise TypeError(
                f"{kind.__name__}.{name} is no longer part of the contract of methods: write {FORMER[method.stage][name]}"
            )
        if name in settings:
            continue
        helper = callable(value) or isinstance(value, property)
        nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8 if helper else 0.0)
        if nearest:
            raise TypeError(
                f"{kind.__name__}.{name} is neither a setting nor part of the contract of methods; the nearest name is "
                f"{nearest[0]!r}. Call it _{name} if it is the method's own; see thresher.Requirements."
            )


def _public(kind: type) -> dict[str, Any]:
    """Returns the public attributes of a class by name, without other ways to construct an instance."""
    found = {name: value for base in reversed(kind.__mro__[:-1]) if base is not Protocol for name, value in vars(base).items()}
    return {k: v for k, v in found.items() if not k.startswith("_") and not isinstance(v, classmethod | staticmethod)}
