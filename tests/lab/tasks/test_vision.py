import subprocess
import sys
from types import ModuleType

import pytest
import torch

import subset_cases
from depth import DEEP
from thresher_lab.tasks import vision


def test_torchvision_loads_with_a_torch_without_its_operators():
    subset_cases.optional("torchvision")
    assert vision.optional("torchvision.transforms").__name__ == "torchvision.transforms"
    assert torch.ops.torchvision.nms is not None


@pytest.mark.skipif(not DEEP, reason="imports torch and torchvision once more; make verify does")
def test_torchvision_loads_without_a_warning_in_a_new_process():
    subset_cases.optional("torchvision")
    code = """
from thresher_lab.tasks.vision import optional
import torch
assert optional("torchvision.transforms").__name__ == "torchvision.transforms"
assert torch.ops.torchvision.nms is not None
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def failing(monkeypatch, *errors):
    """An import that fails so many times, and the names it was asked for."""
    left, asked = list(errors), []

    def import_module(name):
        asked.append(name)
        if left:
            raise left.pop(0)
        return ModuleType(name)

    monkeypatch.setattr(vision.importlib, "import_module", import_module)
    monkeypatch.setattr(vision, "_declared", declared := [])
    monkeypatch.setattr(
        vision, "_declare_operators", lambda: (asked.append("declared"), declared.append(None))
    )
    return asked


def test_operators_are_declared_where_they_are_missed(monkeypatch):
    asked = failing(monkeypatch, RuntimeError("operator torchvision::nms does not exist"))
    assert vision.optional("timm.data").__name__ == "timm.data"
    assert asked == ["timm.data", "declared", "timm.data"]


def test_and_only_there(monkeypatch):
    asked = failing(monkeypatch)
    vision.optional("timm")
    assert asked == ["timm"]


@pytest.mark.parametrize(
    "errors",
    [
        (ImportError("no module"),),
        (RuntimeError("another library"),),
        (
            RuntimeError("operator torchvision::nms does not exist"),
            RuntimeError("operator torchvision::roi_align"),
        ),
        (RuntimeError("operator torchvision::nms does not exist"), ImportError("no module")),
    ],
)
def test_what_does_not_load_says_what_to_install(monkeypatch, errors):
    failing(monkeypatch, *errors)
    with pytest.raises(
        ValueError,
        match=r"^torchvision is needed, of a version for torch .*: pip install timm torchvision \(",
    ):
        vision.optional("torchvision.transforms")
