import pytest
import torch
from torch import nn

import lightning_cases  # noqa: F401  # prepares the import of torchvision, which transformers looks for
from thresher.records import NEVER_SEEN
from thresher.transformers.losses import (
    ClassLosses,
    UsersLosses,
    divides_by_total,
    losses_of,
    without_loss,
)

LABELS = torch.tensor([[1, 2, 0], [1, -100, -100], [-100, -100, 3]])
LOGITS = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shifts", [False, True])
def test_positions(shifts):
    losses, valid = ClassLosses(shifts=shifts).by_position({"logits": LOGITS}, LABELS)
    assert losses.shape == valid.shape == LABELS.shape
    for row in range(3):
        for place in range(3):
            of = place + shifts
            label = int(LABELS[row, of]) if of < 3 else -100
            assert bool(valid[row, place]) == (label != -100)
            expected = 0.0 if label == -100 else -LOGITS[row, place].log_softmax(0)[label]
            assert float(losses[row, place]) == pytest.approx(float(expected), abs=1e-6)
    outputs, targets = ClassLosses(shifts=shifts).pair((LOGITS,), LABELS)
    assert torch.allclose(nn.functional.cross_entropy(outputs, targets, reduction="none"), losses)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (LOGITS, LABELS[:, :2]),
        (LOGITS, LABELS.float()),
        (None, LABELS),
        (LOGITS[..., 0], LABELS.float()),
    ],
)
def test_other_shapes(logits, labels):
    with pytest.raises(
        ValueError, match=r"are not classes of the model's logits.*Give per_position="
    ):
        ClassLosses(shifts=False).by_position({"logits": logits}, labels)


def test_losses_of_the_user():
    losses = UsersLosses(lambda outputs, labels: (outputs, labels != -100))
    found = losses.criterion(
        *losses.pair(torch.tensor([[1.0, 3.0], [5.0, 7.0], [2.0, 2.0]]), LABELS[:, 1:])
    )
    assert found.tolist() == [2.0, NEVER_SEEN, 2.0]
    assert losses_of(nn.Linear(1, 1), losses.by_position).is_given


def trainer_loss(losses, *, total, scale=1.0):
    """The loss of a trainer, whose logits with labels are LOGITS."""

    def loss(num_items):
        value = nn.functional.cross_entropy(LOGITS.mT, LABELS, reduction="sum") * scale
        value = value / (num_items if total and num_items is not None else (LABELS != -100).sum())
        return value, losses.by_position({"logits": LOGITS}, LABELS)

    return loss


@pytest.mark.parametrize(("total", "takes"), [(True, True), (False, True), (False, False)])
def test_the_loss_of_the_trainer(total, takes):
    losses = ClassLosses(shifts=False)
    positions = losses.by_position({"logits": LOGITS}, LABELS)
    assert (
        divides_by_total(trainer_loss(losses, total=total), losses, positions, takes_total=takes)
        == total
    )
    doubled = trainer_loss(
        losses, total=total, scale=2.0
    )  # as of two processes that average tokens
    assert divides_by_total(doubled, losses, positions, takes_total=takes, scale=2.0) == total
    with pytest.raises(
        ValueError,
        match=r"the loss of the trainer is .* but the mean cross-entropy of its positions without",
    ):
        divides_by_total(
            trainer_loss(losses, total=total, scale=1.001), losses, positions, takes_total=takes
        )
    others = LOGITS + 1e-3 * torch.tensor([1.0, -1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="decoder_input_ids"):
        positions = losses.by_position({"logits": others}, LABELS)
        divides_by_total(trainer_loss(losses, total=total), losses, positions, takes_total=takes)
    assert without_loss((1, 2)) == (2,)
    assert without_loss({"loss": 1}) == {"loss": 1}
