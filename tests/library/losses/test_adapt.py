"""The adapter that a criterion gets: by type, by function, or the general one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loss_cases import CASES, B, everything, measure
from thresher.losses import adapt

# torch itself says that the mean of KLDiv is a peculiar one.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")


def test_functions_of_torch() -> None:
    pairs = {
        F.cross_entropy: "ce",
        F.nll_loss: "nll",
        F.binary_cross_entropy: "bce",
        F.binary_cross_entropy_with_logits: "bce-logits",
        F.mse_loss: "mse",
        F.l1_loss: "l1",
        F.smooth_l1_loss: "l1",
        F.huber_loss: "l1",
        F.kl_div: "kl",
    }
    for function, name in pairs.items():
        case = CASES[name]
        adapter = adapt(function)
        measured = measure(adapter, case.outputs, case.targets, B, wanted=everything(name))
        assert torch.equal(measured.value, function(case.outputs, case.targets)), function
        assert measured.signals["loss"].shape == (B,)
        assert adapter.kind != "unknown"


def test_a_subclass_with_its_own_forward_is_called() -> None:
    class Doubled(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 2 * super().forward(outputs, targets)

    case = CASES["ce"]
    measured = measure(
        adapt(Doubled()), case.outputs, case.targets, B, wanted={"correct", "confidence"}
    )
    torch.testing.assert_close(measured.value, 2 * F.cross_entropy(case.outputs, case.targets))
    torch.testing.assert_close(
        measured.signals["loss"], 2 * F.cross_entropy(case.outputs, case.targets, reduction="none")
    )


def test_not_callable() -> None:
    with pytest.raises(
        TypeError, match=r"`criterion` must be a loss module or a callable .* got str"
    ):
        adapt("cross_entropy")


@pytest.mark.parametrize(
    ("criterion", "allowed"),
    [
        (nn.MSELoss(reduction="batchmean"), "mean, sum, none$"),
        (nn.KLDivLoss(reduction="max"), "mean, sum, none, batchmean$"),
    ],
)
def test_unknown_reduction(criterion: nn.Module, allowed: str) -> None:
    with pytest.raises(
        ValueError, match=rf"`criterion` has reduction '(batchmean|max)'; allowed are {allowed}"
    ):
        adapt(criterion)
