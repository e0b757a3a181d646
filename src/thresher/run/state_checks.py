"""The checks of `load_state_dict`, which refuse a state before anything is changed."""

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from thresher import rng
from thresher.cost import Cost
from thresher.distributed.packed import PackedPlan
from thresher.loading.loader import SelectedLoader
from thresher.records import Records
from thresher.run.batch_stage import BatchStage
from thresher.run.epochs import COUNTED
from thresher.shards import Shard

FieldCheck = Callable[[str, Any], None]
"""Function of the name of a field and its value, which raises ValueError where the value is not what it must be."""

VERSION = 5
"""Number of the form of a saved state."""

MARKS = ("ids", "refresh")
"""Parts of a plan that are marks of samples."""
OF_KEPT = ("weights", "keys", "scores")
"""Parts of a plan that have a number for each sample that is kept."""
BY_ID = "by_id"
"""Entry of the plan of a process: names of the parts that are in the tensors of all samples."""

MOST = 2**63
"""Upper limit of whole numbers that have no other."""


def refuse(name: str, must: str, value: Any) -> NoReturn:
    """Raises the error about one field.

    Raises:
        ValueError: Always.
    """
    got = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise ValueError(
        f"load_state_dict: `{name}` must be {must}, got {got}. The state is damaged, or was changed after run.state_dict() "
        "returned it; nothing was loaded. Load another checkpoint."
    )


def check_version(state: Mapping[str, Any]) -> None:
    """Refuses a state of another form.

    Args:
        state: Result of `run.state_dict()`.

    Raises:
        ValueError: It has another version.
    """
    if state.get("version") != VERSION:
        raise ValueError(
            f"load_state_dict: the state has version {state.get('version')}, this is version {VERSION}. Load it with the "
            "version of thresher that saved it, or begin the training again; nothing was loaded."
        )


def plain(kinds: tuple[type, ...], must: str, low: float = -MOST, high: float = MOST) -> FieldCheck:
    """Returns a check for a plain value of some types; numbers lie between two limits, both included."""

    def check(name: str, value: Any) -> None:
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits or (isinstance(value, int | float) and not low <= value <= high):
            refuse(name, must, value)

    return check


def whole_number(low: int = 0, high: int = MOST) -> FieldCheck:
    """Returns a check for a whole number."""
    most = "" if high == MOST else f" and at most {high}"
    return plain((int,), f"a whole number of at least {low}{most}", low, high)


TRUTH = plain((bool,), "True or False")
TEXT = plain((str,), "a text")
NUMBER = plain((int, float), "a number", -sys.float_info.max, sys.float_info.max)


def tensor(like: Tensor, shape: tuple[int | None, ...], low: int | None = None, high: int | None = None) -> FieldCheck:
    """Returns a check for a tensor.

    Args:
        like: Tensor of the dtype that is wanted.
        shape: Shape that is wanted; None for any size.
        low: Smallest value that is allowed. Default: any.
        high: Upper limit of the values, excluded. Default: none.
    """
    sizes = ", ".join("any" if size is None else str(size) for size in shape) + "," * (len(shape) == 1)
    within = "" if low is None else f" with values of at least {low}" + ("" if high is None else f" and below {high}")

    def check(name: str, value: Any) -> None:
        must = f"a {like.dtype} tensor of shape ({sizes}){within}"
        if not isinstance(value, Tensor) or value.dtype != like.dtype or value.dim() != len(shape):
            refuse(name, must, value)
        if any(size not in (None, own) for size, own in zip(shape, value.shape, strict=True)):
            refuse(name, must, value)
        if low is not None and value.numel() and (int(value.min()) < low or (high is not None and int(value.max()) >= high)):
            refuse(name, must, value)

    return check


def or_none(check: FieldCheck) -> FieldCheck:
    """Returns a check for None or what another check takes."""
    return lambda name, value: None if value is None else check(name, value)


def table(parts: Mapping[str, FieldCheck], others: FieldCheck | None = None, may_lack: tuple[str, ...] = ()) -> FieldCheck:
    """Returns a check for a mapping.

    Args:
        parts: Checks of the entries that it must have.
        others: FieldCheck of further entries. Default: there must be none.
        may_lack: Names of entries that may be missing.
    """

    def check(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            refuse(name, f"a mapping with {', '.join(parts) or 'names and values'}", value)
        missing = [part for part in parts if part not in value and part not in may_lack]
        unknown = [part for part in value if part not in parts and others is None]
        if missing or unknown:
            which = f"lacks {missing}" if missing else f"has {unknown}, which this version does not know"
            raise ValueError(
                f"load_state_dict: `{name}` {which}. The state is damaged, or of another version of thresher; nothing was "
                "loaded. Load another checkpoint."
            )
        for part, own in value.items():
            if not isinstance(part, str):
                refuse(f"{name}, the names", "texts", part)
            (parts.get(part) or others or TEXT)(f"{name}.{part}", own)

    return check


def sequence(check: FieldCheck) -> FieldCheck:
    """Returns a check for a list whose entries another check takes."""

    def check_all(name: str, value: Any) -> None:
        if not isinstance(value, list | tuple):
            refuse(name, "a list", value)
        for place, entry in enumerate(value):
            check(f"{name}[{place}]", entry)

    return check_all


IDS = torch.empty(0, dtype=torch.int64)
BITS = torch.empty(0, dtype=torch.uint8)
WEIGHTS = torch.empty(0, dtype=torch.float32)
ANY: FieldCheck = lambda *_: None  # noqa: E731
RANDOM_STATES: dict[str, FieldCheck] = {"torch": ANY, "python": ANY, "numpy": ANY, "generators": sequence(ANY), "cuda": ANY}


def _ids_or_bits(name: str, value: Any) -> None:
    tensor(BITS if isinstance(value, Tensor) and value.dtype == torch.uint8 else IDS, (None,))(name, value)


PLAN = table(
    {
        "ids": _ids_or_bits,
        "weights": or_none(tensor(WEIGHTS, (None,))),
        "refresh": or_none(tensor(BITS, (None,))),
        "lr_scale": NUMBER,
        "drawn": TRUTH,
        "facts": table({}, NUMBER),
        "smaller_batches": TRUTH,
        "keys": or_none(tensor(WEIGHTS, (None,))),
        "share": NUMBER,
        "width": NUMBER,
        "scores": or_none(tensor(WEIGHTS, (None,))),
        "note": TEXT,
    }
)
SHUFFLE = table(
    {
        "seed": plain((int,), "a whole number", -float("inf"), float("inf")),
        "samples": whole_number(),
        "epoch": whole_number(),
        "begun": or_none(whole_number()),
        "sampler": TEXT,
    },
    may_lack=("sampler",),
)
HISTORY = sequence(
    table(
        {"epoch": whole_number(), "complete": TRUTH, **{name: whole_number() for name in COUNTED}},
        plain((bool, int, float, str, type(None)), "a plain value"),
        may_lack=COUNTED,
    )
)


FORM = table(
    {
        **dict.fromkeys(("version", "kept", "records", "trained"), ANY),
        "plan": table(dict.fromkeys((*MARKS, *OF_KEPT), ANY)),
        "ranks": sequence(table({}, ANY)),
    }
)


def check_form(state: Any) -> None:
    """Checks that a state has the parts of one, whatever is in them.

    Args:
        state: Argument of `load_state_dict`.

    Raises:
        TypeError: It is no mapping.
        ValueError: It has another version, or lacks a part.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict: `state` must be a result of run.state_dict(), got {type(state).__name__}")
    check_version(state)
    FORM("state", state)
    if not state["ranks"]:
        refuse("state.ranks", "what each process had by itself", state["ranks"])
    for rank, own in enumerate(state["ranks"]):
        if not isinstance(plan := own.get("plan"), Mapping):
            continue
        by_id, parts = plan.get(BY_ID), state["plan"]
        if not isinstance(by_id, list | tuple) or not all(name in parts for name in by_id):
            refuse(f"state.ranks[{rank}].plan.{BY_ID}", f"names out of {', '.join(parts)}", by_id)
        for name in by_id:
            if not isinstance(parts[name], Tensor):
                refuse(f"state.plan.{name}", "a tensor", parts[name])


def fields_of_process(loader: SelectedLoader, stage: BatchStage | None) -> dict[str, FieldCheck]:
    """Returns the checks of what a process has by itself, by name."""
    ids = tensor(IDS, (None,), 0, None if loader.streams else loader.n)
    number_or_none = or_none(plain((int, float), "a number of at least 0", 0))
    return {
        "method": TEXT,
        "settings": TEXT,
        "n": whole_number(),
        "epochs": whole_number(1),
        "seed": plain((int,), "a whole number", -float("inf"), float("inf")),
        "epoch": whole_number(),
        "active": TRUTH,
        "ran_out": TRUTH,
        "consumed": whole_number(),
        "stayed": whole_number(),
        "checksum": whole_number(0, 2**32 - 1),
        "plan": ANY,
        "batch_stage": or_none(_stage(stage)),
        "passes": or_none(TEXT),
        "history": HISTORY,
        "waiting": table({"ids": ids, "weights": or_none(tensor(WEIGHTS, (None,)))}),
        "seen": whole_number(),
        "epoch_start": or_none(table({**RANDOM_STATES, "workers_ran": TRUTH}, may_lack=("cuda",))),
        "shuffle": or_none(SHUFFLE),
        "cost": table(
            {field.name: whole_number() if field.default == 0 else number_or_none for field in fields(Cost)}
            | {"unknown": or_none(TEXT)}
        ),
        "rng": table(RANDOM_STATES, may_lack=("cuda",)),
    }


MAY_LACK = ("ran_out", "stayed", "shuffle")
"""Names of what a process may lack."""


def fields_of(loader: SelectedLoader, stage: BatchStage | None, trained: Tensor, records: Records) -> FieldCheck:
    """Returns the check of the types, shapes, dtypes and ranges of all that a process goes on with."""
    return table(
        fields_of_process(loader, stage)
        | {
            "version": whole_number(),
            "kept": or_none(tensor(IDS, (None,))),
            "plan": or_none(PLAN),
            "trained": tensor(trained, tuple(trained.shape), 0),
            "records": table({name: tensor(column, tuple(column.shape)) for name, column in records.items()}),
        },
        may_lack=MAY_LACK,
    )


def _stage(stage: BatchStage | None) -> FieldCheck:
    counters = {name: whole_number() for name in ("step", "candidates", "kept", "batches")}
    own = {} if stage is None else {name: _like(value) for name, value in stage.method.init_state().items()}
    seed = plain((int,), "a whole number", -float("inf"), float("inf"))
    return table({"state": table(own), "seed": seed, "facts": table({}, NUMBER), **counters})


def _like(first: Any) -> FieldCheck:
    """Returns a check for a value that takes the place of a first one; a dimension that was empty may have grown."""
    if isinstance(first, Tensor):
        return tensor(first, tuple(size or None for size in first.shape))
    return plain((int, float) if type(first) in (int, float) else (type(first),), f"a value such as {first!r}")


def check_position(
    state: Mapping[str, Any], loader: SelectedLoader, stage: BatchStage | None, passes: str | None, shard: Shard
) -> None:
    """Checks what the fields of a state say together: the epoch, its plan, and the rows that wait.

    Args:
        state: State whose fields are checked already.
        loader: Loader of the run.
        stage: Batch method at work; None where there is none.
        passes: How the run chooses rows in the end.
        shard: Samples whose records this process holds.

    Raises:
        ValueError: Fields do not agree.
    """
    last = state["history"][-1]["epoch"] + 1 if state["history"] else 0
    if state["epoch"] != last:
        refuse("epoch", f"{last}, the epoch after the last of `history`", state["epoch"])
    plan, waiting = state["plan"], state["waiting"]
    if (plan is None) != loader.streams:
        refuse("plan", "None, since the loader streams" if loader.streams else "a plan", plan)
    own = state["batch_stage"]
    if (own is None) != (stage is None):
        refuse("batch_stage", "None, since no batch method was attached" if stage is None else "that of a batch method", own)
    if plan is not None:
        try:
            PackedPlan(**plan).unpacked(shard).check(shard)
        except (TypeError, ValueError) as error:
            raise ValueError(f"load_state_dict: `plan` is damaged; nothing was loaded. {error}") from error
        if plan["weights"] is not None and not bool(plan["weights"].isfinite().all()):
            refuse("plan.weights", "finite", plan["weights"])
    if waiting["weights"] is not None and waiting["weights"].shape != waiting["ids"].shape:
        refuse("waiting.weights", f"of shape {tuple(waiting['ids'].shape)}, as `waiting.ids` is", waiting["weights"])
    if len(waiting["ids"]) and passes != "twice":
        refuse("waiting.ids", "empty, since this run does not gather rows over batches", waiting["ids"])
    size = loader.batch_sampler.batch_size
    most = MOST if plan is None else max(loader.n, len(plan["ids"]), loader.candidates + size)
    whole_number(0, most if state["active"] else 0)("consumed", state["consumed"])
    if state["consumed"] and state["epoch_start"] is None:
        refuse("epoch_start", "the random states at the beginning of the epoch in progress", None)


def check_shuffle(state: Mapping[str, Any], loader: SelectedLoader) -> None:
    """Checks that the loader has the order of a state, which is not drawn again where it is that of a `Shuffle`.

    Warns where later epochs have another order than the run that was saved.

    Args:
        state: State whose fields are checked already.
        loader: Loader of the run.

    Raises:
        ValueError: An interrupted epoch would go on in another order.
    """
    saved, own = state.get("shuffle"), loader.order_state()
    was, now = _order_of(saved), _order_of(own)
    if state["consumed"] and state["plan"] is not None and not state["plan"]["drawn"]:
        if was != now:
            raise ValueError(
                f"load_state_dict: the state was saved in the middle of an epoch by a loader with {was}, this one has {now}: "
                "the rest of the epoch would be in another order. Nothing was loaded. Use the same sampler, or save between "
                "epochs."
            )
        if saved is not None:
            whole_number()("shuffle.begun", saved["begun"])
            whole_number(0, state["consumed"])("stayed", state.get("stayed"))
    elif was != now and saved is not None and own is not None:
        warnings.warn(f"load_state_dict: the state was saved by a loader with {was}, this one has {now}", stacklevel=5)


def _order_of(shuffle: Mapping[str, Any] | None) -> str:
    """Returns what the orders of a loader depend on, in words; None: a sampler that is no `Shuffle`."""
    if shuffle is None:
        return "another sampler"
    return f"{shuffle.get('sampler', 'Shuffle')}(seed={shuffle['seed']}) over {shuffle['samples']} samples"


def check_generators(state: Mapping[str, Any], loader: SelectedLoader, device: torch.device, *, restored: bool) -> None:
    """Checks that the random states of a state can be restored, and that the loader draws as the one that was saved.

    Args:
        state: State whose fields are checked already.
        loader: Loader of the run.
        device: Device of the records.
        restored: Whether the random states at the time of saving are to be restored.

    Raises:
        ValueError: They cannot.
    """
    replays = bool(state["consumed"])
    parts = [("epoch_start", state["epoch_start"])] if replays else []
    for name, states in [*parts, *([("rng", state["rng"])] if restored else [])]:
        saved, own = len(states["generators"]), len(loader.generators())
        if saved != own:
            way_out = "save between epochs" if replays else "pass restore_rng=False"
            raise ValueError(
                f"load_state_dict: the state has the random states of {saved} generators, and the loader of this run draws "
                f"from {own}; nothing was loaded. Give the DataLoader and its sampler a `generator` where they had one, or "
                f"{way_out}."
            )
        try:
            rng.check_states(states, device, loader.generators())
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(
                f"load_state_dict: `{name}` has random states that cannot be restored ({error}); nothing was loaded. Load "
                "another checkpoint, or pass restore_rng=False where only `rng` is damaged."
            ) from error
    if replays and state["epoch_start"]["workers_ran"] and not loader.persistent_workers:
        raise ValueError(
            "load_state_dict: the state was saved in the middle of an epoch by a loader with persistent workers, which draw "
            "fewer random numbers; this loader has none, and its order would be another. Nothing was loaded. Use "
            "persistent_workers=True as before, or save between epochs."
        )
