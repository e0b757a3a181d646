"""The loss at each position of a model's outputs, and its comparison with the loss that the model computes itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thresher.attribution.rows import RowLayout
from thresher.comparing import same_losses
from thresher.losses.given import GivenLosses
from thresher.warning import warn

IGNORED = -100
"""Label of a position that does not count."""

PerPosition = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""`(outputs, labels) -> (losses, valid)`, both of shape (rows, ...)."""

GIVE_LOSSES = (
    "Give per_position=, a function (outputs, labels) -> (losses, valid) of the model's outputs without its own loss: the loss "
    "of each position, and the mask or the weights of those that count, both of shape (rows, ...). With class weights, return "
    "F.cross_entropy(logits, labels, reduction='none') and class_weights[labels]."
)


class ClassLosses:
    """Cross-entropy at each position; positions with the label -100 do not count.

    Args:
        shifts: Whether the outputs at a position predict the label at the next position, as in causal language models.
        smoothing: Share of the label that goes to all classes alike, [0, 1). Default 0.
        of_tokens: Whether the model is a language model, whose positions are tokens. Default: False.

    Attributes:
        token_loss: Name of the loss of a language model in the data map; "" for other models.

    Example:
        >>> import torch
        >>> losses, valid = ClassLosses(shifts=True).by_position((torch.zeros(1, 3, 4),), torch.tensor([[1, 2, -100]]))
        >>> valid
        tensor([[ True, False, False]])
    """

    is_given = False

    def __init__(self, *, shifts: bool, smoothing: float = 0.0, of_tokens: bool = False) -> None:
        self.token_loss = "smoothed_loss" if smoothing else "loss"
        if not of_tokens:
            self.token_loss = ""
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=smoothing)
        self._shifts = shifts

    def by_position(self, outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the losses in float32, and the mask of the positions that count, both in the shape of the labels.

        Args:
            outputs: Outputs of the model, with logits of shape (rows, ..., classes).
            labels: Classes, shape (rows, ...), int64.

        Raises:
            ValueError: The shapes do not fit, or the labels are not classes.
        """
        logits, targets = self._checked(outputs, labels)
        settings: Any = {"ignore_index": IGNORED, "label_smoothing": self.criterion.label_smoothing}
        losses = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="none", **settings
        )
        return losses.view(targets.shape), targets != IGNORED

    def pair(self, outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits of shape (rows, classes, ...) and targets of shape (rows, ...), for `nn.CrossEntropyLoss`."""
        logits, targets = self._checked(outputs, labels)
        return logits.movedim(-1, 1), targets

    def signals(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Returns the number of tokens that count in each sample."""
        return {"tokens": (targets != IGNORED).flatten(1).sum(1)}

    def _checked(self, outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[0]
        if (
            not isinstance(logits, Tensor)
            or labels.is_floating_point()
            or logits.shape[:-1] != labels.shape
        ):
            if isinstance(logits, Tensor):
                got = tuple(logits.shape)
            else:
                got = type(logits).__name__
            raise ValueError(
                f"thresher.transformers.Selection: labels of shape {tuple(labels.shape)} and dtype {labels.dtype} are not "
                f"classes of the model's logits, {got}. {GIVE_LOSSES}"
            )
        return logits.float(), F.pad(
            labels[:, 1:], (0, 1), value=IGNORED
        ) if self._shifts else labels


class UsersLosses:
    """Losses of the user's function.

    Args:
        function: Function `(outputs, labels) -> (losses, valid)`.
    """

    is_given = True
    token_loss = ""
    signals: Any = None

    def __init__(self, function: PerPosition) -> None:
        self.by_position = function
        self.criterion = self

    def __repr__(self) -> str:
        return f"per_position={getattr(self.by_position, '__name__', self.by_position)}"

    def pair(self, outputs: Any, labels: Tensor) -> tuple[Any, Tensor]:
        """Returns its arguments."""
        return outputs, labels

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor:
        """Returns the loss of each sample, shape (rows,)."""
        losses, valid = self.by_position(outputs, labels)
        return GivenLosses(losses, valid).means(RowLayout(len(losses)))


Losses = ClassLosses | UsersLosses
"""Objects that compute the losses of a trainer."""


def losses_of(model: Any, per_position: PerPosition | None, *, smoothing: float = 0.0) -> Losses:
    """Returns the object that computes the losses of a model.

    Args:
        model: Model of the package transformers, without the wrapper of peft.
        per_position: The user's function; None for the cross-entropy that the heads of most models compute.
        smoothing: Label smoothing of the cross-entropy, [0, 1). Default 0.
    """
    if per_position is not None:
        return UsersLosses(per_position)
    name = type(model).__name__
    decodes = _decodes(model)
    causal = name.endswith(("ForCausalLM", "LMHeadModel"))
    of_tokens = causal or name.endswith(("ForMaskedLM", "ForConditionalGeneration"))
    return ClassLosses(shifts=causal and not decodes, smoothing=smoothing, of_tokens=of_tokens)


def joint_signals(*functions: Any) -> Callable[[Any, Any], dict[str, Tensor]]:
    """Returns the function that returns the signals of several; a later function replaces signals of an earlier one.

    Args:
        functions: Functions `(outputs, targets) -> signals`; None is left out.
    """
    return lambda outputs, targets: {
        name: values
        for function in functions
        if function is not None
        for name, values in function(outputs, targets).items()
    }


_OTHER_LOSSES = (
    "Return losses and valid so that sum(valid * losses) / sum(valid), or / num_items_in_batch, is the loss of the trainer. "
    "With class weights, valid=class_weights[labels]. Or give the trainer this loss, by compute_loss_func= or its compute_loss."
)
_DECODER = "For an encoder with a decoder, the batch must have decoder_input_ids: use DataCollatorForSeq2Seq(tokenizer, model=model)."


@contextmanager
def naming_collator(model: Any) -> Iterator[None]:
    """Names the collator to use if an encoder with a decoder does not run without labels, from which some make their inputs.

    Args:
        model: Model of the package transformers.

    Raises:
        ValueError: The block raised one, and the model has a decoder.
    """
    try:
        yield
    except ValueError as error:
        if not _decodes(model):
            raise
        raise ValueError(
            f"thresher.transformers.Selection: without labels, the model raises: {error}. {_DECODER}"
        ) from error


def _decodes(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


OwnLoss = Callable[[Any], tuple[Tensor, tuple[Tensor, Tensor]]]
"""`num_items_in_batch -> (loss, positions)` of a trainer, with the positions of the outputs of the same forward pass."""


def divides_by_total(
    own: OwnLoss,
    losses: Losses,
    positions: tuple[Tensor, Tensor],
    *,
    takes_total: bool,
    scale: Tensor | float = 1.0,
) -> bool | None:
    """Compares losses with the loss of a trainer, and returns whether the trainer divides by `num_items_in_batch`.

    Returns None if no position of the batch counts.

    Args:
        own: Function that computes the loss of the trainer in evaluation mode.
        losses: Losses to compare.
        positions: The losses, and the mask of those that count, from a forward pass without labels.
        takes_total: Whether the trainer counts `num_items_in_batch`; some models accept it but ignore it.
        scale: Factor of the trainer on the loss of a function, such as the number of processes.

    Raises:
        ValueError: The loss of the trainer differs.
    """
    of_training, valid = positions
    if not valid.any():
        return None
    kind = "cross-entropy of its positions without labels"
    way_out = f"{GIVE_LOSSES} {_DECODER}"
    if losses.is_given:
        kind = "loss of per_position="
        way_out = _OTHER_LOSSES
    total = 2 * valid.sum() if takes_total else None
    try:
        trainer_loss, with_labels = own(total)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"thresher.transformers.Selection: the trainer has no loss of its own ({error}). {way_out}"
        ) from error
    by_mean = GivenLosses(*positions).plain() * scale
    by_total = GivenLosses(*positions, total).plain() * scale
    divides = takes_total and bool((trainer_loss - by_total).abs() < (trainer_loss - by_mean).abs())
    follows = _same(trainer_loss, by_total if divides else by_mean)
    if not losses.is_given:
        follows = follows and _same(of_training, with_labels[0], atol=1e-5)
    if not follows:
        divisor = f" with num_items_in_batch={total:.6g}" if takes_total else ""
        raise ValueError(
            f"thresher.transformers.Selection: the loss of the trainer is {trainer_loss.item():.6g} on a batch{divisor}, "
            f"but the mean {kind} is {by_mean.item():.6g}: the selection would train another loss. {way_out}"
        )
    return divides


def without_loss(outputs: Any) -> Any:
    """Removes the loss from the outputs of a model that was given labels; in a tuple it comes first."""
    return outputs if isinstance(outputs, Mapping) else outputs[1:]


def check_same(
    own: Tensor, other: Tensor, what: str = "its fused head", way_out: str = _OTHER_LOSSES
) -> None:
    """Checks that the loss of a trainer agrees with the loss computed from those of the single positions (tokens), or pairs.

    Args:
        own: Loss that the trainer computed, shape ().
        other: Loss computed from the losses of the positions, shape ().
        what: Source of the other loss. Default: the fused head.
        way_out: Sentences that tell what to do if they differ. Default: change the loss.

    Raises:
        ValueError: The two losses differ.
    """
    if not _same(own, other, equal_nan=True):
        raise ValueError(
            f"thresher.transformers.Selection: on a batch, the trainer's loss is {own.item():.6g}, but the loss computed from "
            f"{what} is {other.item():.6g}: the selection would train another loss. {way_out}"
        )


def warn_if_other(own: Tensor, *others: Tensor) -> None:
    """Warns if the loss of a trainer, with which a training in full goes on, is none of those of its cross-entropy.

    Args:
        own: Loss that the trainer computed, shape ().
        others: Losses computed from the losses of the positions, each of shape ().
    """
    if not any(_same(own, other, equal_nan=True) for other in others):
        warn(
            "thresher.transformers.Selection: the trainer computes another loss than the cross-entropy of the labels. It trains "
            f"with its loss, but run.records and mean_loss are of the cross-entropy. {GIVE_LOSSES}"
        )


def _same(own: Tensor, other: Tensor, atol: float = 1e-6, *, equal_nan: bool = False) -> bool:
    same = same_losses(own, other, rtol=(1e-4, 2e-2), atol=(atol, atol), equal_nan=equal_nan)
    return bool(same.all())
