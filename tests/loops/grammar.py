"""Features of training loops, each drawn by itself; a drawn loop has one value of each."""

import random
from typing import Any

Spec = dict[str, Any]
"""Value of each feature by its name."""

FEATURES: dict[str, tuple[Any, ...]] = {
    "task": ("classes", "tokens", "regression", "labels"),
    "labels": ("all", "some rows without"),
    "batch": ("triple", "dict", "pair and ids"),
    "collate": ("default", "own"),
    "sampler": (
        "shuffle", "in order", "generator", "replacement", "weighted", "subset", "own", "batch sampler", "Shuffle",
    ),
    "rows": (24, 22, 25),
    "drop_last": (False, True),
    "workers": (0, 1),
    "model": ("tanh", "linear", "dropout", "batch norm", "evaluation", "two heads"),
    "inputs": ("as they are", "made in the loop", "more rows"),
    "criterion": ("mean", "smoothed", "class weights", "unreduced"),
    "loss": ("criterion", "reduce", "reduce outputs=", "reduce ids=", "criterion ids="),
    "form": ("as returned", "flattened", "processed"),
    "passes": ("one", "two"),
    "log": ("none", "before the loss", "before backward", "after backward", "after step"),
    "step": (
        "plain", "accumulated", "in parts", "closure", "SAM", "made again", "made again in parts", "skipped", "given up",
        "skipped at the end",
    ),
    "zero": ("at the start", "before backward", "after step"),
    "loop": ("for", "islice", "next", "zip", "break"),
    "read": ("nothing", "records", "trained", "cost", "length", "state", "summary"),
    "when": ("after step", "before backward", "after backward"),
    "method": (
        "FullData", "observe", "0.5", "uniform", "infobatch", "kakurenbo", "selective", "selective twice", "uniform rows",
    ),
    "optimizer": (True, False),
    "resume": ("never", "after an epoch", "in an epoch"),
}  # fmt: skip
"""Values by feature; the first one is the plainest, to which `shrink` returns."""

PLAIN = {name: values[0] for name, values in FEATURES.items()}
NOT_EACH_BATCH_ONCE = ("replacement", "weighted")
TAKES_LOSSES_BACK = (
    "SAM",
    "made again",
    "made again in parts",
    "skipped",
    "given up",
    "skipped at the end",
)
IN_BATCH = ("selective", "selective twice", "uniform rows")

# Combinations that no loop has, or whose result the documentation leaves open.
IMPOSSIBLE = (
    lambda s: s["criterion"] in ("smoothed", "class weights")
    and s["task"] not in ("classes", "tokens"),
    lambda s: s["criterion"] != "mean" and "reduce" in s["loss"],
    lambda s: s["criterion"] == "unreduced" and (s["task"] != "classes" or s["method"] in IN_BATCH),
    lambda s: s["labels"] != "all" and (s["task"] != "tokens" or s["method"] in IN_BATCH),
    lambda s: s["form"] == "flattened" and s["task"] != "tokens",
    lambda s: s["form"] == "processed" and s["criterion"] != "mean",
    lambda s: s["model"] == "evaluation" and s["method"] == "kakurenbo",
    # The rows of the loop's own pass must be those of the batch.
    lambda s: s["inputs"] == "more rows" and (s["method"] in IN_BATCH or s["model"] == "batch norm"),
    # Without an optimizer each loss counts as a step.
    lambda s: not s["optimizer"]
    and (
        s["step"] not in ("plain", "in parts")
        or s["method"] == "kakurenbo"
        or s["log"] == "after step"
        or s["resume"] != "never"
    ),
    lambda s: s["read"] == "state" and s["when"] != "after step",
    lambda s: s["passes"] == "two" and (s["step"] in TAKES_LOSSES_BACK or s["method"] in IN_BATCH),
    # A method that chooses in the batch chooses anew in each pass and part.
    lambda s: s["method"] in IN_BATCH and s["step"] in (*TAKES_LOSSES_BACK, "in parts", "closure"),
    lambda s: s["method"] in IN_BATCH and (s["model"] == "two heads" or s["log"] != "none"),
    # Rows of several candidate batches make up a batch, so positions and lengths are those of the buffer.
    lambda s: s["method"] == "selective twice" and (s["resume"] == "in an epoch" or s["loop"] == "break"),
    lambda s: s["step"] == "closure" and (s["log"] == "after step" or s["zero"] == "after step"),
    lambda s: s["zero"] == "before backward" and s["step"] in ("accumulated", "in parts", *TAKES_LOSSES_BACK),
    lambda s: s["step"] == "accumulated" and s["resume"] != "never",
    lambda s: s["sampler"] in NOT_EACH_BATCH_ONCE and s["method"] not in ("FullData", "observe"),
    lambda s: s["sampler"] == "batch sampler" and s["drop_last"],
    # The length of a resumed epoch is that of the whole epoch.
    lambda s: s["loop"] in ("next", "islice", "zip") and s["resume"] == "in an epoch",
    lambda s: s["workers"] and s["loop"] in ("break", "next"),
    # An epoch that was left early goes on when it is resumed.
    lambda s: s["resume"] != "never" and s["loop"] == "break",
    lambda s: s["model"] == "batch norm" and ("in parts" in s["step"] or s["rows"] == 25 or s["method"] in IN_BATCH),
)  # fmt: skip


def possible(spec: Spec) -> bool:
    """Returns whether a loop can have these features together."""
    return not any(rule(spec) for rule in IMPOSSIBLE)


def draw(seed: int) -> Spec:
    """Returns the features of loop number `seed`."""
    rng = random.Random(seed)
    while True:
        plainness = rng.choice([0.2, 0.5, 0.8])
        spec = {
            name: values[0] if rng.random() < plainness else rng.choice(values)
            for name, values in FEATURES.items()
        }
        # Starting processes takes a second.
        if spec["workers"] and rng.random() < 0.9:
            spec["workers"] = 0
        if possible(spec):
            return spec


def shrink(spec: Spec, fails: Any) -> Spec:
    """Returns a spec with as many plain values as possible for which `fails(spec)` is still true."""
    changed = True
    while changed:
        changed = False
        for name, plain in PLAIN.items():
            simpler = spec | {name: plain}
            if simpler != spec and possible(simpler) and fails(simpler):
                spec = simpler
                changed = True
    return spec


def described(spec: Spec) -> str:
    """Returns the features that are not plain."""
    return repr({name: value for name, value in spec.items() if value != PLAIN[name]})
