"""The Python blocks of README and docs run as they stand, each page from top to bottom in one namespace."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from tools.release_check import OBJECTS, readme_loop
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
            if "from trl import" in block and find_spec("trl") is None:
                continue
            exec(compile(block, page, "exec"), namespace)
    return namespace


def test_the_loop_of_the_readme_trains_as_the_plain_one_and_writes_the_sheet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loops = [readme_loop(" -"), readme_loop(" +")]
    assert len(set(loops[1].splitlines()) - set(loops[0].splitlines())) == 4
    parameters = []
    for loop in loops:
        names = {}
        with torch.random.fork_rng():
            exec(OBJECTS + loop, names)
            parameters.append((*names["model"].parameters(), torch.get_rng_state()))
    assert all(map(torch.equal, *parameters))
    assert (tmp_path / "suspects.html").read_text().count("<img") == 100


def test_guide(monkeypatch, capsys):
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # so that its classes can be pickled
    run_all("docs/guide.md", vars(module))
    assert "fewer, if a backward pass counts as 2 forward passes" in capsys.readouterr().out
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
    assert cost.backward == cost.forward - cost.comparing


def test_the_tests_that_the_page_of_the_trainers_names_are_there():
    named = re.findall(r"\btest_\w+", (ROOT / "docs/frameworks.md").read_text())
    assert set(named) - {"test_frameworks"} == {
        path.stem for path in (ROOT / "tests/integration/frameworks").glob("test_*.py")
    }


def test_tables(capsys):
    """The first groups, the words and, nearly, the numbers are those that the page prints."""
    run_all("docs/tables.md", {})
    text = (ROOT / "docs/tables.md").read_text()
    shown = "".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    printed = capsys.readouterr().out.splitlines()
    number = re.compile(r"\d+(?:\.\d+)?")
    words = [[number.sub("#", line).split() for line in lines] for lines in (shown, printed)]
    assert words[0] == words[1]
    # Other processors round differently, which can exchange groups that are nearly equal, but not the faulty one.
    for before, line, now in zip(["", *shown[:-1]], shown, printed, strict=True):
        if before.startswith("group"):
            assert line.split()[:2] == now.split()[:2]
            wanted = [float(value) for value in line.split()[2:]]
            assert [float(value) for value in now.split()[2:]] == pytest.approx(wanted, rel=0.2)
        if re.match(r"\d+ of ", line):
            assert float(now.split()[0]) == pytest.approx(float(line.split()[0]), abs=3)


def test_composition(capsys):
    """The first documents are the random ones, in nearly any order."""
    run_all("docs/composition.md", {})
    first = capsys.readouterr().out.strip().splitlines()[-1]
    assert set(map(int, re.findall(r"\d+", first))) == set(range(0, 100, 10))


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_cleanlab_takes_the_labels_of_a_data_map():
    pytest.importorskip("cleanlab", reason="needs the dependency group verify")
    labels = np.arange(300) % 3
    wrong = np.arange(0, 300, 10)
    given = np.where(np.isin(np.arange(300), wrong), (labels + 1) % 3, labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = nn.functional.one_hot(torch.tensor(labels)) + 0.15 * torch.randn(300, 3)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = thresher.observe(
            loader=DataLoader(TensorDataset(x, torch.tensor(given)), 30, shuffle=True),
            criterion=nn.CrossEntropyLoss(),
            model=model,
            optimizer=optimizer,
            epochs=5,
        )
        for _ in range(5):
            for inputs, targets in run.loader:
                optimizer.zero_grad()
                run.criterion(run.model(inputs), targets).backward()
                optimizer.step()
    probabilities = cross_val_predict(LogisticRegression(), x, given, cv=5, method="predict_proba")
    names = {"np": np, "found": run.data_map(), "probabilities": probabilities}
    [block] = [block for block in blocks("docs/observe.md") if "cleanlab" in block]
    exec(compile(block, "docs/observe.md", "exec"), names)
    assert names["found"]["label"].tolist() == given.tolist()
    assert np.isin(wrong, names["issues"]).mean() > 0.9
    assert np.isin(wrong, names["both"]).mean() > 0.9
    for scores in ("quality", "observed"):
        assert np.isin(np.argsort(names[scores])[:30], wrong).mean() > 0.9


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
