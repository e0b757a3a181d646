"""`thresher demo`: a comparison on real data in a few minutes."""

from pathlib import Path

from thresher.cli._comparison import run_and_print
from thresher.cli._options import OutOption

DEMO_EPOCHS = 20
DEMO_METHODS = (
    "kakurenbo,infobatch,selective_backprop:keep=0.33:forward_passes=once,selective_backprop:keep=0.33:forward_passes=twice"
)


def demo(out: OutOption = Path("runs/demo")) -> None:
    """Compare KAKURENBO, InfoBatch and Selective-Backprop with full training and controls on 5,000 digits of MNIST."""
    run_and_print("mnist-5k", DEMO_METHODS, "0,1,2", DEMO_EPOCHS, out, data=None, jobs=2)
