"""The methods, one a file. Listing them imports none of them, nor torch."""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

GROUP = "thresher.methods"
"""Entry-point group for methods of other packages: name -> "package.module:Class"."""

State = dict[str, Any]
"""What a batch method remembers from step to step: tensors and plain values by name, never changed, always replaced."""


@dataclass(frozen=True)
class MethodInfo:
    """What is known of a method without importing it.

    Args:
        target: Where it is, as "package.module:Class".
        stage: "epoch" or "batch".
        summary: What it does.
        paper: Where it is described.
        rule: What makes it skip a sample; settings of the method in braces.
    """

    target: str
    stage: str
    summary: str
    paper: str = ""
    rule: str = "left out by its plan"


BUILT_IN = {
    "full": MethodInfo("thresher.methods.full:FullData", "epoch", "every sample, every epoch"),
    "uniform": MethodInfo(
        "thresher.methods.uniform:UniformSubset", "epoch", "a fresh random subset each epoch", rule="not in the random subset"
    ),
    "kakurenbo": MethodInfo(
        "thresher.methods.kakurenbo:Kakurenbo",
        "epoch",
        "hide easy samples, move doubtful ones back",
        "arXiv:2310.10102",
        rule="hidden: its loss was among the lowest, and it was right with confidence {tau} or more",
    ),
    "infobatch": MethodInfo(
        "thresher.methods.infobatch:InfoBatch",
        "epoch",
        "prune below the mean loss at random, rescale",
        "arXiv:2303.04947",
        rule="pruned: its loss was below the {threshold}, and it was drawn with chance {prune_fraction}",
    ),
    "selective_backprop": MethodInfo(
        "thresher.methods.selective_backprop:SelectiveBackprop",
        "batch",
        "train on the batch's large losses",
        "arXiv:1910.00762",
        rule="not chosen in its batch, by the rank of its loss",
    ),
    "random_backprop": MethodInfo(
        "thresher.methods.random_backprop:RandomBackprop",
        "batch",
        "train on a random part of the batch",
        rule="not drawn in its batch",
    ),
}


@runtime_checkable
class EpochMethod(Protocol):
    """A method that decides before each epoch; a frozen dataclass that owns no tensors and no random state."""

    stage: ClassVar[Literal["epoch"]]

    def columns(self) -> dict[str, Any]:
        """What must be remembered of each sample: column name to `thresher.Column`."""
        ...

    def plan_epoch(self, records: Any, *, epoch: int, epochs: int, generator: Any) -> Any:
        """A `thresher.EpochPlan` from the records alone: pure, the same on every rank and after every resume."""
        ...


@runtime_checkable
class BatchMethod(Protocol):
    """A method that decides inside each batch; a frozen dataclass that owns no tensors and no random state."""

    stage: ClassVar[Literal["batch"]]
    signals: ClassVar[tuple[str, ...]]
    """What it needs of a forward pass, such as `("loss",)`; empty: it can choose before any."""

    def init_state(self) -> State:
        """What it remembers before the first step."""
        ...

    def count(self, n: int) -> int | None:
        """How many rows of a batch of n are kept, where that is known before the losses are; else None."""
        ...

    def plan_batch(self, signals: Any, state: State, *, step: int, generator: Any) -> tuple[Any, State]:
        """A `thresher.BatchPlan` and the next state, a new dict: pure, and the samples' own whatever their rows.

        `signals` maps a name to an (n,) tensor; `id` is always among them: int64, each once. `generator` is on the CPU.
        """
        ...


def infos() -> dict[str, MethodInfo]:
    """Every registered method by name, built in or from an entry point."""
    others = {
        point.name: MethodInfo(point.value, "?", f"from {point.dist.name if point.dist else point.module}")
        for point in entry_points(group=GROUP)
    }
    return {**others, **BUILT_IN}


def names() -> list[str]:
    """Names that `create` takes."""
    return sorted(infos())


def load(name: str) -> type:
    """The class of a method.

    Raises:
        ValueError: No such method.
    """
    known = infos()
    if name not in known:
        raise ValueError(f"no method {name!r}; there are {', '.join(sorted(known))}")
    module, _, attribute = known[name].target.partition(":")
    return getattr(import_module(module), attribute)


def create(name: str, **settings: Any) -> Any:
    """Make a method by name.

    Args:
        name: One of `names()`.
        **settings: The fields of its class.

    Raises:
        ValueError: No such method, or a setting out of range.
        TypeError: No such setting.
    """
    return load(name)(**settings)


def name_of(method: Any) -> str:
    """The registered name of a method's class, else the class's own name."""
    target = f"{type(method).__module__}:{type(method).__qualname__}"
    return next((name for name, info in infos().items() if info.target == target), type(method).__qualname__)
