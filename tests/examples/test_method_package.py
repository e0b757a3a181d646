"""The package of a method that is not in this repository, installed beside Thresher."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from thresher.testing import check_method

PACKAGE = Path(__file__).parents[2] / "examples" / "method_package"

USE = """
import torch, thresher
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.zeros(6, 2), torch.arange(6) % 2), 2, shuffle=True)
run = thresher.attach("hard_half", loader=loader, criterion=torch.nn.CrossEntropyLoss(), epochs=2)
print("hard_half" in thresher.methods.names(), run.plan.ids.tolist())
"""


def test_an_installed_method_is_known_by_its_name(tmp_path):
    source = shutil.copytree(PACKAGE, tmp_path / "source")
    options = [
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        tmp_path / "site",
    ]
    subprocess.run([sys.executable, "-m", "pip", *options, source], check=True, capture_output=True)
    paths = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    shown = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split("\n")[0] == "True [0, 1, 2, 3, 4, 5]"


def test_it_keeps_the_contract_of_methods(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE)
    import hard_half

    check_method(hard_half.HardHalf())
