"""The methods, one a file. Listing them imports none of them, nor torch."""

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

GROUP = "thresher.methods"
"""Entry-point group for methods of other packages: name -> "package.module:Class"."""


@dataclass(frozen=True)
class MethodInfo:
    """What is known of a method without importing it.

    Args:
        target: Where it is, as "package.module:Class".
        stage: "before", "epoch" or "batch".
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
    "ada_selection": MethodInfo(
        "thresher.methods.ada_selection:AdaSelection",
        "batch",
        "mix base selectors by weights that adapt",
        "arXiv:2306.10728",
        rule="not chosen in its batch, by the mixed score of the selectors",
    ),
    "big_loss": MethodInfo(
        "thresher.methods.big_loss:BigLoss",
        "batch",
        "train on the batch's largest losses",
        "arXiv:2306.10728",
        rule="its loss was not among the largest of its batch",
    ),
    "small_loss": MethodInfo(
        "thresher.methods.small_loss:SmallLoss",
        "batch",
        "train on the batch's smallest losses",
        "arXiv:2001.03316",
        rule="its loss was not among the smallest of its batch",
    ),
    "gradient_norm": MethodInfo(
        "thresher.methods.gradient_norm:GradientNorm",
        "batch",
        "train on the batch's largest last-layer gradients",
        "arXiv:2306.10728",
        rule="its gradient norm was not among the largest of its batch",
    ),
    "ada_boost": MethodInfo(
        "thresher.methods.ada_boost:AdaBoost",
        "batch",
        "train on the batch's largest AdaBoost weights",
        "arXiv:2306.10728",
        rule="its AdaBoost weight was not among the largest of its batch",
    ),
    "coreset_extremes": MethodInfo(
        "thresher.methods.coreset_extremes:CoresetExtremes",
        "batch",
        "train on the batch's largest and smallest losses",
        "arXiv:2306.10728",
        rule="its loss was in the middle of its batch",
    ),
    "coreset_center": MethodInfo(
        "thresher.methods.coreset_center:CoresetCenter",
        "batch",
        "train on the losses closest to the batch's mean",
        "arXiv:2306.10728",
        rule="its loss was far from the mean of its batch",
    ),
    "rho_loss": MethodInfo(
        "thresher.methods.rho_loss:RhoLoss",
        "batch",
        "train on what is learnable: loss above the irreducible loss",
        "arXiv:2206.07137",
        rule="its loss was little above its irreducible loss",
    ),
    "batch_importance": MethodInfo(
        "thresher.methods.batch_importance:BatchImportance",
        "batch",
        "draw rows by gradient norm, weigh them without bias",
        "arXiv:1803.00942",
        rule="not drawn in its batch, by its gradient norm",
    ),
    "obftf": MethodInfo(
        "thresher.methods.obftf:Obftf",
        "batch",
        "train on the part of a batch with the batch's mean loss",
        "arXiv:2104.13114",
        rule="not in the part of its batch whose mean loss is the batch's",
    ),
    "importance_sampling": MethodInfo(
        "thresher.methods.importance_sampling:ImportanceSampling",
        "epoch",
        "draw samples by loss, with replacement",
        "arXiv:2310.10102",
        rule="not drawn, by its loss",
    ),
    "forgetting": MethodInfo(
        "thresher.methods.forgetting:Forgetting",
        "epoch",
        "hide the samples that are forgotten least",
        "arXiv:1812.05159",
        rule="it was forgotten less often than others",
    ),
    "epoch_selective_backprop": MethodInfo(
        "thresher.methods.epoch_selective_backprop:EpochSelectiveBackprop",
        "epoch",
        "Selective-Backprop once an epoch, by last losses",
        "arXiv:2310.10102",
        rule="hidden by chance of the percentile of its last loss",
    ),
    "grad_match": MethodInfo(
        "thresher.methods.grad_match:GradMatch",
        "epoch",
        "a weighted subset whose gradient is that of all data",
        "arXiv:2103.00123",
        rule="not in the subset that matches the gradient",
    ),
    "minibatch_dropping": MethodInfo(
        "thresher.methods.minibatch_dropping:MinibatchDropping",
        "epoch",
        "drop whole mini-batches at random",
        "arXiv:1910.13349",
        rule="its mini-batch was dropped",
    ),
    "rais": MethodInfo(
        "thresher.methods.rais:Rais",
        "epoch",
        "draw samples by robust estimates of gradient norm, weigh them",
        "Johnson & Guestrin, NeurIPS 2018",
        rule="not drawn, by its last gradient norm and how old that is",
    ),
    "mercury": MethodInfo(
        "thresher.methods.mercury:Mercury",
        "epoch",
        "draw samples by loss, refreshed a group at a time, weigh them",
        "SenSys 2021",
        rule="not drawn, by its last loss",
    ),
    "prune": MethodInfo(
        "thresher.methods.prune:Prune",
        "before",
        "keep a part of the dataset by a score",
        "arXiv:2107.07075",
        rule="pruned before training, by its score",
    ),
    "full": MethodInfo("thresher.methods.full:FullData", "epoch", "every sample, every epoch", rule="nothing is left out"),
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
