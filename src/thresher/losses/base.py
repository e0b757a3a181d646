"""Gets the losses of single samples from any criterion, and reduces them to the scalar that it would have returned.

The loss m of a sample is the mean over its valid positions, where a position is one entry of the losses before they are
averaged. The share s of a sample is the sum of the class weights over its valid positions, or their number if there are
no class weights. Without plan weights the scalar is the criterion's own, bit for bit. With plan weights v it is
sum(v s m) / sum(s), and sum(v s m) / sum(v s) if the criterion has class weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.attribution.rows import Attribution, RowLayout
from thresher.losses import signals as reading
from thresher.losses.signals import NOT_OF_VALUES, WIDE_SIGNALS
from thresher.records import NEVER_SEEN
from thresher.trees import leaves
from thresher.warning import warn


class LossAndSignals(NamedTuple):
    """Result of a criterion for one batch.

    Attributes:
        value: The loss for the training loop, with gradient: a scalar, shape (); or the losses by position, shape (rows, ...),
            if the user's criterion returns these.
        signals: Signals by name, each of shape (n,), detached; `loss` is among them.
    """

    value: Tensor
    signals: dict[str, Tensor]


class Criterion:
    """Base class of the adapters, which compute the losses of single samples with the user's criterion.

    A position is one entry of the losses before they are averaged, such as one token or one pixel of a sample.

    Args:
        original: The user's criterion.

    Attributes:
        kind: Meaning of the model's outputs; "unknown" if the shapes of a call must decide.
        reduction: How the criterion reduces losses to a scalar: "mean", "sum", "none" or "batchmean".
        ignore_index: Target value of the positions that the criterion ignores; None if all count.
        smoothing: Label smoothing, in [0, 1).
        keeps_positions: Whether the loop gets the losses by position, which it reduces itself, rather than a scalar.
        over_classes: Whether the loss at a position depends on the outputs of all classes, as in cross-entropy, rather than on
            a single output, as in a squared error.
    """

    kind: reading.OutputKind = "unknown"
    reduction = "none"
    ignore_index: int | None = None
    smoothing = 0.0
    keeps_positions = False
    over_classes = True

    def __init__(self, original: Any) -> None:
        self.original = original

    @property
    def class_weights(self) -> bool:
        """Whether the criterion divides by the sum of class weights."""
        return False

    def value(self, outputs: Any, targets: Any) -> Tensor:
        """Returns the loss that the user's loop gets if no sample is weighted: a scalar, unless `keeps_positions`."""
        raise NotImplementedError

    def value_and_positions(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the scalar and the losses by position, from one call of the criterion.

        The losses are None if the criterion can be called again for them, because it draws no random numbers and keeps no
        state.
        """
        raise NotImplementedError

    def positions(self, outputs: Any, targets: Any) -> Tensor:
        """Returns the losses by position, class weights included, shape (rows, ...).

        Raises:
            ValueError: The criterion returns something other than one loss per sample, or it would mix samples.
        """
        raise NotImplementedError

    def plain_positions(self, outputs: Any, targets: Any) -> Tensor:
        """Returns the losses by position without class weights, shape (rows, ...), from an extra call of the criterion.

        The next call of the criterion draws the same random numbers.
        """
        with restore_random_states(outputs):
            return self.positions(outputs, targets)

    def signals_alone(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor | None:
        """Returns the loss of each sample, shape (n,), to check whether it depends on the rest of the batch.

        None means that there is nothing to check: the losses cannot depend on it, or are random.
        """
        # A random criterion gives other losses in a second call, so a comparison would tell nothing about the batch.
        before = torch.get_rng_state()
        self.value(outputs, targets)
        drawn = not torch.equal(torch.get_rng_state(), before)
        _ = torch.set_rng_state(before)
        if drawn:
            return None
        return self.signals(outputs, targets, layout, set())["loss"]

    def means(self, rows: Tensor, targets: Any) -> Tensor:
        """Returns the loss of each sample, shape (n,).

        Args:
            rows: Losses by position without class weights, shape (n, positions).
            targets: Second argument of the criterion.
        """
        return as_measured(rows.mean(1))

    def shares(self, rows: Tensor, targets: Any) -> Tensor:
        """Returns the number of valid positions of each sample, or the sum of their class weights, shape (n,).

        Args:
            rows: Losses by position, shape (n, positions).
            targets: Second argument of the criterion.
        """
        return rows.new_full(rows.shape[:1], rows.shape[1])

    def measure(
        self,
        outputs: Any,
        targets: Any,
        layout: RowLayout,
        *,
        weights: Tensor | None,
        wanted: set[str],
    ) -> LossAndSignals:
        """Returns the scalar for the loop and the signals of each sample.

        Args:
            outputs: Outputs of the model.
            targets: Targets of the outputs.
            layout: Layout of the rows as samples.
            weights: Weights of the samples from the plan, shape (n,), float; None if all are 1.
            wanted: Names of the signals besides the loss.
        """
        if weights is None:
            value, positions = self.value_and_positions(outputs, targets)
            rows = None if positions is None else layout.rows(positions.detach())
            return LossAndSignals(value, self.signals(outputs, targets, layout, wanted, rows=rows))
        # Before the call: a criterion that is refused must not have drawn random numbers or changed its state.
        self.check_weights(outputs, targets)
        positions = self.positions(outputs, targets)
        rows = layout.rows(positions)
        # `torch.dot` takes equal dtypes only, and losses may be of half precision or float64.
        weights = weights.to(rows.dtype)
        if self.keeps_positions:
            # The loop reduces what its criterion returned: for flattened tokens one loss per token, not one row per sample.
            value = (rows * weights.unsqueeze(1)).reshape(positions.shape)
        else:
            value = self._weighted_value(rows, targets, weights)
        # Recorded losses are those without class weights, so these rows cannot serve if there are any.
        plain = None if self.class_weights else rows.detach()
        return LossAndSignals(value, self.signals(outputs, targets, layout, wanted, rows=plain))

    def in_step(
        self,
        wanted: set[str],
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        weights_over_n: Tensor | None,
    ) -> "tuple[Tensor, dict[str, Tensor] | DeferredSignals]":
        """Computes scalar loss and signals as `measure` does, but may return signals that are computed later.

        Args:
            wanted: Names of the signals besides the loss.
            outputs: Outputs of the model.
            targets: Targets of the outputs.
            attribution: Samples to which the loss belongs.
            weights: Weights of the samples in the loss, shape (n,), float; None if all are 1.
            weights_over_n: `weights / n`, shape (n,), if it was computed before; else None.
        """
        return self.measure(outputs, targets, attribution.layout, weights=weights, wanted=wanted)

    @torch.no_grad()
    def signals(
        self,
        outputs: Any,
        targets: Any,
        layout: RowLayout,
        wanted: set[str],
        *,
        rows: Tensor | None = None,
        all_count: bool = False,
    ) -> dict[str, Tensor]:
        """Returns the signals of each sample by name, shape (n,); `loss` is among them.

        Args:
            outputs: Outputs of the model.
            targets: Targets of the outputs.
            layout: Layout of the rows as samples.
            wanted: Names of the signals besides the loss.
            rows: Losses by position without class weights, shape (n, positions), if they are known already; else None.
            all_count: Whether it is certain that the criterion ignores no target.
        """
        if rows is None:
            rows = layout.rows(self.plain_positions(outputs, targets))
        # If every target counts, the mean over one position needs no test for ignored targets.
        if all_count and rows.shape[1] == 1:
            loss = rows.squeeze(1)
        else:
            loss = self.means(rows, targets)
        # `batch_loss` is made of the losses, which `read` does not have.
        signals = {"loss": loss, **self.read(outputs, targets, wanted - {"batch_loss"}, layout.n)}
        if "batch_loss" in wanted:
            return signals | {"batch_loss": reading.batch_loss(loss)}
        return signals

    def check_weights(self, outputs: Any, targets: Any) -> None:
        """Checks that losses can be weighted within this criterion.

        Raises:
            ValueError: The scalar is not known to be the mean, or the sum, of the losses by position.
        """

    def _weighted_value(self, rows: Tensor, targets: Any, weights: Tensor) -> Tensor:
        total = torch.dot(weights, rows.sum(1))
        if self.reduction == "sum":
            return total
        if self.reduction == "none":
            # A callable, which has no reduction: its scalar is the mean of what it returns.
            return total / rows.numel()
        # The divisor is that of the criterion itself: the number of positions, or the sum of their class weights. The weights of
        # samples then multiply the class weights.
        shares = self.shares(rows.detach(), targets)
        return total / (torch.dot(weights, shares) if self.class_weights else shares.sum())

    def reads(self, outputs: Any, targets: Any) -> reading.OutputKind:
        """Returns the meaning of the outputs of this call; the shapes decide if the type of the criterion does not."""
        if self.kind != "unknown" or not (
            isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        ):
            return self.kind
        indices = not (targets.is_floating_point() or targets.is_complex())
        # One logit per sample scores no classes: read as such, target 0 would always be right, with confidence 1.
        scores = (
            outputs.dim() > 1
            and outputs.shape[1] > 1
            and outputs.shape[:1] + outputs.shape[2:] == targets.shape
        )
        return "classes" if indices and scores else "unknown"

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Returns log-probabilities along dimension 1, from outputs that score classes."""
        return F.log_softmax(outputs.float(), 1)

    def probs(self, outputs: Tensor) -> Tensor:
        """Returns probabilities, from outputs that score independent labels."""
        return outputs.float()

    def read(self, outputs: Any, targets: Any, wanted: set[str], n: int) -> dict[str, Tensor]:
        """Returns the wanted signals besides the loss, by name, each of shape (n,), `error` of shape (n, ...).

        Args:
            outputs: Outputs of the model.
            targets: Targets of the outputs.
            wanted: Names of the signals.
            n: Number of samples.

        Raises:
            ValueError: The outputs of this criterion do not define a wanted signal.
        """
        signals: dict[str, Tensor] = {}
        if "batch_confidence" in wanted:
            signals["batch_confidence"] = reading.batch_confidence(outputs, n=n)
        # Both come from the same errors, which are computed once.
        if wanted & {"error", "grad_norm"}:
            errors = self.errors(outputs, targets, RowLayout(n, None))
            signals |= {"error": errors} if "error" in wanted else {}
            signals |= {"grad_norm": errors.norm(dim=1)} if "grad_norm" in wanted else {}
        if "stratum" in wanted:
            # Before outputs without classes are refused: `stratum` is -1 for them.
            signals["stratum"] = reading.strata(
                targets, n, of_classes=self.reads(outputs, targets) == "classes"
            )
        rest = wanted - {"error", "grad_norm", "batch_confidence", "stratum"}
        if not rest:
            return signals
        kind = self.reads(outputs, targets)
        if kind == "classes" and "label" in rest:
            labels = self.class_targets(targets)
            # `as_classes` would check the values of probabilities, which waits for the device.
            soft = labels.is_floating_point() and labels.dim() == 2
            signals["label"] = labels.argmax(1) if soft else reading.as_classes(labels, n)
            rest = rest - {"label"}
        if kind == "classes" and rest:
            log_probs = self.log_probs(outputs)
            if rest & (reading.ABOUT_CLASSES | reading.OF_THE_LABEL | {"uncertainty"}):
                valid = self.valid(targets)
                signals |= reading.of_classes(
                    log_probs, self.class_targets(targets), rest, n=n, valid=valid
                )
            if rest & reading.PREDICTIONS:
                # With one position per sample, an ignored target that is no class equals no prediction: nothing to mask.
                one = targets.dim() == 1 and len(targets) == n
                index = self.ignore_index
                ignore = None if one and index is not None and index < 0 else index
                predictions = reading.classes(log_probs, targets, n=n, ignore_index=ignore)
                signals |= {name: predictions[name] for name in rest & reading.PREDICTIONS}
        if kind == "classes":
            return signals
        if kind == "labels" and not rest & reading.ABOUT_CLASSES:
            if "uncertainty" in rest:
                signals["uncertainty"] = reading.label_uncertainty(self.probs(outputs), n=n)
            if rest & reading.OF_THE_LABEL:
                signals |= reading.label_agreement(self.probs(outputs), targets, rest, n=n)
            if rest & reading.PREDICTIONS:
                predictions = reading.labels(self.probs(outputs), targets, n=n)
                signals |= {name: predictions[name] for name in rest & reading.PREDICTIONS}
            return signals
        raise ValueError(unreadable(self.original, rest))

    def class_targets(self, targets: Tensor) -> Tensor:
        """Returns the targets as class indices or as probabilities of the classes."""
        return targets

    def label_errors(self, probs: Tensor, targets: Tensor) -> Tensor:
        """Returns the gradient of each label's loss with respect to its logit.

        Args:
            probs: Probabilities of the labels, the sigmoid of the logits.
            targets: Targets of the labels, same shape, in [0, 1].
        """
        # d/dz of -(positive y log p + (1 - y) log(1 - p)) with p = sigmoid(z); nn.BCELoss has no `pos_weight`.
        weight, positive = (getattr(self.original, name, None) for name in ("weight", "pos_weight"))
        if positive is None:
            error = probs - targets
        else:
            error = probs * (1 + (positive - 1) * targets) - positive * targets
        return error if weight is None else error * weight

    def ignores_negatives_of(self, targets: Any) -> bool:
        """Returns whether targets are one label per sample, and only negative labels can be ignored (such as -100)."""
        return (
            self.ignore_index is not None
            and self.ignore_index < 0
            and isinstance(targets, Tensor)
            and targets.dim() == 1
        )

    def valid(self, targets: Tensor) -> Tensor | None:
        """Returns which positions count, shape of `targets`, bool; None if all do."""
        if self.ignore_index is None or targets.is_floating_point():
            return None
        return targets != self.ignore_index

    def errors(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor:
        """Returns the gradient of each sample's mean loss with respect to the model's outputs.

        If the outputs are probabilities or log-probabilities, it is the gradient with respect to their logits.

        Args:
            outputs: Outputs of the model, a tensor.
            targets: Targets of the outputs.
            layout: Layout of the rows as samples.

        Returns:
            Shape (n, outputs per sample), float32, detached; p - y for a classifier. 0 if no position counts.

        Raises:
            ValueError: `outputs` is not a tensor, or the loss has no gradient.
        """
        if self.kind == "classes":
            targets, valid = self.class_targets(targets), self.valid(targets)
            error = layout.rows(
                reading.class_errors(
                    self.log_probs(outputs), targets, valid=valid, smoothing=self.smoothing
                )
            )
            if valid is not None:
                # A sample without a valid position has errors of 0: 0 / 1 keeps them, and 0 / 0 would be NaN.
                return error / layout.rows(valid).sum(1, keepdim=True).clamp(min=1)
            # The entries of a sample are positions times classes, or, without a class dimension, positions alone.
            return error / (error.shape[1] // (outputs.shape[1] if self.over_classes else 1))
        if self.kind == "labels":
            error = layout.rows(self.label_errors(self.probs(outputs), targets))
            return error / error.shape[1]
        return self._gradient(outputs, targets, layout)

    def _gradient(self, outputs: Any, targets: Any, layout: RowLayout) -> Tensor:
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise ValueError(unreadable(self.original, {"grad_norm"}))
        # Signals are read under no_grad. The leaf is apart from the loop's graph, which its own backward pass still needs.
        with torch.enable_grad():
            leaf = outputs.detach().float().requires_grad_()
            means = self.means(layout.rows(self.plain_positions(leaf, targets)), targets)
            if not means.requires_grad:
                raise ValueError(unreadable(self.original, {"grad_norm"}))
            (gradient,) = torch.autograd.grad(means.sum(), leaf)
        return layout.rows(gradient)


@contextmanager
def restore_random_states(outputs: Any) -> Iterator[None]:
    """Restores torch's random states after the block, so that the next call of a criterion draws the same numbers."""
    # A criterion draws on the devices of its arguments. The states of other devices are left alone.
    devices = {leaf.device for leaf in leaves(outputs) if leaf.is_cuda}
    before = torch.get_rng_state()
    on_devices = [(one, torch.cuda.get_rng_state(one)) for one in devices]
    try:
        yield
    finally:
        torch.set_rng_state(before)
        for device, state in on_devices:
            torch.cuda.set_rng_state(state, device)


def as_measured(losses: Tensor) -> Tensor:
    """Replaces -inf by NaN in measured losses, because -inf in the records means that a sample has no loss."""
    return losses.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.nan)


def unreadable(criterion: Any, wanted: set[str], way_around: str = "") -> str:
    """Returns the error message for signals that a criterion does not define, with what to do.

    Args:
        criterion: The user's criterion.
        wanted: Names of the signals.
        way_around: End of the sentence with another solution, such as ", or use Kakurenbo(move_back=False)".
    """
    names = " and ".join(f"`{name}`" for name in sorted(wanted))
    return (
        f"{names} {'are' if len(wanted) > 1 else 'is'} not defined for criterion {criterion!r}. Pass attach(signals=function) "
        f"with function(outputs, targets) -> {{'{min(wanted)}': (n,) tensor, ...}}{way_around}."
    )


class DeferredSignals(NamedTuple):
    """Outputs whose signals are computed later, because one computation for many small batches takes a fraction of the time.

    Attributes:
        log_probs: Log-probabilities, shape (n, C), detached.
        targets: Class indices, shape (n,), int64.
        criterion: Adapter that reads the signals.
        wanted: Names of the signals besides the loss.
    """

    log_probs: Tensor
    targets: Tensor
    criterion: "Criterion"
    wanted: set[str]

    @property
    def numel(self) -> int:
        """Number of log-probabilities that are held until the signals are computed."""
        return self.log_probs.numel()

    @property
    def form(self) -> int:
        """Number of classes: signals with the same number of classes can be computed together."""
        return self.log_probs.shape[1]

    def now(self) -> dict[str, Tensor]:
        """Computes the signals of each sample, by name, each of shape (n,)."""
        return self.criterion.signals(
            self.log_probs, self.targets, RowLayout(len(self.targets)), self.wanted
        )

    @staticmethod
    def together(several: "Sequence[DeferredSignals]") -> dict[str, Tensor]:
        """Computes the signals of several batches at once, by name, with the samples in the order of the batches."""
        log_probs = torch.cat([one.log_probs for one in several])
        targets = torch.cat([one.targets for one in several])
        return DeferredSignals(log_probs, targets, several[0].criterion, several[0].wanted).now()


def _kind(given: Any) -> str:
    return "None" if given is None else type(given).__name__


Signals = Callable[[Any, Any], Mapping[str, Tensor]]
"""`(outputs, targets) -> {name: (n,) tensor}`."""


class SignalReader:
    """Computes the signals of each sample that a run needs, such as its loss or confidence.

    Args:
        criterion: The user's criterion per sample; None if the loop calls only `run.reduce`.
        user_function: Argument `signals` of `attach`: the user's function for signals that the criterion does not define; or None.
        recorded: Names of the signals, besides the loss, that are stored from epoch to epoch.
        chosen_by: Names of all signals, besides the loss, that are needed: the stored ones and those that a batch method
            chooses by.
        without: Signals that the method can do without, each with the warning to give if the loss does not define it.
        way_around: Function that is called with the names of missing signals, and returns the end of the error message: the
            settings with which the method does not need them.
    """

    def __init__(
        self,
        criterion: Criterion | None,
        user_function: Signals | None,
        *,
        recorded: set[str],
        chosen_by: set[str],
        without: Mapping[str, str],
        way_around: Callable[..., str],
    ) -> None:
        self.criterion = criterion
        self._user_function = user_function
        self.recorded = recorded
        self.chosen_by = chosen_by
        self._way_around = way_around
        self._without = {name: words for name, words in without.items() if name in recorded}
        self._said = False

    def measuring(self) -> Callable[..., tuple[Tensor, Any]]:
        """Returns the function that attribution calls for the scalar and the recorded signals.

        It is the criterion's own `in_step` if the user computes no signals, and the type of the criterion defines the recorded
        ones.
        """
        if self._user_function is None and self.criterion is not None:
            # Decided once per run. If the type of the criterion says what its outputs mean, steps go to `in_step` without a
            # detour.
            by_shapes = self.recorded & NOT_OF_VALUES and self.criterion.kind == "unknown"
            if not by_shapes:
                return partial(self.criterion.in_step, self.recorded)
        return self._measure

    def _measure(
        self,
        outputs: Any,
        targets: Any,
        attribution: Attribution,
        weights: Tensor | None,
        weights_over_n: Tensor | None,
    ) -> tuple[Tensor, Any]:
        assert self.criterion is not None
        n = attribution.layout.n
        user_signals = self._ask(outputs, targets, n)
        undefined = self._undefined(outputs, targets)
        wanted = self.recorded - user_signals.keys() - undefined
        value, signals = self.criterion.in_step(
            wanted, outputs, targets, attribution, weights, weights_over_n
        )
        signals = signals if isinstance(signals, dict) else signals.now()
        return value, signals | user_signals | self._never_seen(undefined, n, value)

    def _undefined(self, outputs: Any, targets: Any) -> Set[str]:
        """Returns the optional signals that the loss does not define, in each call: only the shapes tell for a callable."""
        assert self.criterion is not None
        if self._user_function is not None or self.criterion.reads(outputs, targets) != "unknown":
            return set()
        undefined = self.recorded & NOT_OF_VALUES
        if undefined - self._without.keys():
            raise ValueError(
                unreadable(self.criterion.original, undefined, self._way_around(*sorted(undefined)))
            )
        return undefined

    def _never_seen(self, missing: Set[str], n: int, loss: Tensor) -> dict[str, Tensor]:
        """Returns `NEVER_SEEN` for each signal that a loss does not define, shape (n,), and warns once."""
        words = [self._without[name] for name in sorted(missing) if self._without[name]]
        if words and not self._said:
            self._said = True
            warn(" ".join(words) + " This warning is given once.")
        return {
            name: torch.full((n,), NEVER_SEEN, dtype=torch.float32, device=loss.device)
            for name in missing
        }

    def signals(
        self,
        outputs: Any,
        targets: Any,
        layout: RowLayout,
        wanted: set[str],
        *,
        all_count: bool = False,
    ) -> dict[str, Tensor]:
        """Computes the wanted signals of each sample, shape (n,), `loss` among them.

        Args:
            outputs: Outputs of the model.
            targets: Targets of the batch.
            layout: Layout of the rows as samples.
            wanted: Names of the signals besides the loss.
            all_count: Whether it is certain that the criterion ignores no target.
        """
        assert self.criterion is not None
        user_signals = self._ask(outputs, targets, layout.n)
        wanted = wanted - user_signals.keys()
        return {
            **self.criterion.signals(outputs, targets, layout, wanted, all_count=all_count),
            **user_signals,
        }

    def beside(
        self,
        outputs: Any,
        targets: Any,
        n: int,
        wanted: set[str],
        missing: Callable[[set[str]], str],
        loss: Tensor,
    ) -> dict[str, Tensor]:
        """Computes the wanted signals of samples whose losses are known already.

        Args:
            outputs: Outputs of the model; None if the caller did not pass them.
            targets: Targets of the batch; None if the caller did not pass them.
            n: Number of samples.
            wanted: Names of the signals besides the loss.
            missing: Function of the names of signals that cannot be computed, which returns the message of the error.
            loss: The losses, shape (n,).

        Raises:
            ValueError: Outputs, targets or criterion are missing.
        """
        user_signals = self._ask(outputs, targets, n)
        wanted = wanted - user_signals.keys()
        if "stratum" in wanted and (outputs is None or targets is None):
            # The targets alone have a stratum if the type of the criterion says that they are classes; shapes of outputs
            # cannot.
            of_classes = self.criterion is not None and self.criterion.kind == "classes"
            user_signals |= {"stratum": reading.strata(targets, n, of_classes=of_classes)}
            wanted = wanted - {"stratum"}
        if not wanted:
            return user_signals
        criterion = None if outputs is None or targets is None else self.criterion
        if criterion is None or criterion.reads(outputs, targets) == "unknown":
            user_signals |= self._never_seen(wanted & self._without.keys(), n, loss)
            wanted = wanted - user_signals.keys()
        if not wanted:
            return user_signals
        if criterion is None:
            raise ValueError(missing(wanted))
        with torch.no_grad():
            return {**criterion.read(outputs, targets, wanted, n), **user_signals}

    def _ask(self, outputs: Any, targets: Any, n: int) -> dict[str, Tensor]:
        """Calls the user's function, and checks the signals that it returns."""
        if self._user_function is None:
            return {}
        try:
            with torch.no_grad():
                signals = dict(self._user_function(outputs, targets))
        except (AttributeError, TypeError) as error:
            # If both arguments were passed, the error lies in the user's function. run.reduce passes None for a missing
            # argument.
            if outputs is not None and targets is not None:
                raise
            raise ValueError(
                f"attach(signals=function): the function got outputs={_kind(outputs)} and targets={_kind(targets)}, as passed "
                f"to run.reduce, and failed: {error}. Pass outputs= and targets= to run.reduce"
            ) from error
        for name, tensor in signals.items():
            # Only methods that choose rows of a batch take several numbers per sample; records have one.
            wide = name in WIDE_SIGNALS and name in self.chosen_by
            if not isinstance(tensor, Tensor) or (tensor.shape[:1] if wide else tensor.shape) != (
                n,
            ):
                if isinstance(tensor, Tensor):
                    got = tuple(tensor.shape)
                else:
                    got = type(tensor).__name__
                raise ValueError(
                    f"`signals` must return tensors of shape ({n},), got {got} for {name!r}"
                )
        # The function may return more than this method needs. Unneeded signals would be carried through every step.
        return {name: tensor for name, tensor in signals.items() if name in self.chosen_by}
