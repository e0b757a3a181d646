"""The Python blocks of README and docs run as they stand, each page from top to bottom in one namespace."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_cases  # noqa: F401  # prepares the import of lightning
import thresher

ROOT = Path(__file__).parents[2]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run_all(page, namespace):
    assert blocks(page)
    with torch.random.fork_rng():
        for block in blocks(page):
            exec(compile(block, page, "exec"), namespace)
    return namespace


def test_readme(capsys):
    run_all("README.md", {})
    assert "fewer, if a backward pass counts as 2 forward passes" in capsys.readouterr().out


def test_guide(monkeypatch):
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # so that its classes can be pickled
    run_all("docs/guide.md", vars(module))
    parts = {"loader": module.loader, "criterion": module.criterion, "model": module.model}
    module.run.detach()
    run = thresher.attach(module.SmallestLosses(), epochs=1, **parts)
    for inputs, targets in run.loader:
        run.criterion(run.model(inputs), targets).backward()
    assert run.cost.backward == len(module.dataset) // 2


@pytest.mark.filterwarnings(
    "ignore:.*tensorboardX", "ignore:Checkpoint directory", "ignore:.*pin_memory"
)
def test_frameworks(tmp_path, monkeypatch):
    """Trains with Lightning, as the page shows it."""
    monkeypatch.chdir(tmp_path)
    names = run_all("docs/frameworks.md", {})
    cost, method = names["selection"].run.cost, names["selection"].method
    assert isinstance(method, thresher.InfoBatch)
    assert 0 < cost.backward < cost.full_backward == 4 * 1000
    cost = names["trainer"].run.cost
    assert 0 < cost.backward < cost.full_backward == cost.full_forward == 4 * 400
    assert cost.scoring == cost.backward == (cost.forward - cost.comparing) / 2
    assert names["run"].cost.scoring == names["run"].cost.backward == 400


def test_the_tests_that_the_page_of_the_trainers_names_are_there():
    named = re.findall(r"\btest_\w+", (ROOT / "docs/frameworks.md").read_text())
    assert set(named) - {"test_frameworks"} == {
        path.stem for path in (ROOT / "tests/integration/frameworks").glob("test_*.py")
    }


@pytest.mark.parametrize("page", ["docs/attribution.md", "docs/subset-backward.md"])
def test_docs(page):
    model, criterion = nn.Linear(4, 2), nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), 8)
    run = thresher.attach(
        thresher.FullData(), loader=loader, criterion=criterion, model=model, epochs=1
    )
    x, y = next(iter(run.loader))
    names = {
        "thresher": thresher,
        "torch": torch,
        "F": nn.functional,
        "model": model,
        "run": run,
        "x": x,
        "y": y,
    }
    run_all(page, names | {"kept": torch.tensor([0, 3])})
    assert all(parameter.grad is not None for parameter in model.parameters()) == (
        "backward" in page
    )
