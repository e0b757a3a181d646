"""The wheel installs and works outside the repository; the core imports torch and NumPy only."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOOP = """
import sys, torch, thresher
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.arange(30) % 3), 5, shuffle=True)
run = thresher.attach(
    thresher.Kakurenbo(tau=0.0), loader=loader, criterion=nn.CrossEntropyLoss(), model=net, optimizer=optimizer, epochs=2
)
for _ in range(2):
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
print(thresher.__file__)
print(run.cost.backward)
others = {"accelerate", "lightning", "plotly", "pyarrow", "pydantic", "rich", "scipy", "sklearn", "transformers", "typer"}
others = (others | {"thresher_lab", "yaml"}) & set(sys.modules)
print(sorted(others))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, unpacked by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("thresher-*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--target",
        folder / "site",
        wheel,
    ]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    return wheel, folder / "site"


def run_outside(installed, tmp_path, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(installed[1])}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_contents(installed):
    names = zipfile.ZipFile(installed[0]).namelist()
    assert {
        "thresher/py.typed",
        "thresher_lab/recipes/resnet50.yaml",
        "thresher_lab/report/page.html.jinja",
        *(
            f"thresher_lab/reproduction/{paper}.toml"
            for paper in ("ada_selection", "diet_sb", "kakurenbo", "selective_backprop")
        ),
    } <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples"))]


def test_the_page_of_a_package_index_has_no_link_into_the_repository(installed):
    """It is rendered as an index does it, from the description in the metadata."""
    from email.parser import Parser

    from markdown_it import MarkdownIt

    wheel = zipfile.ZipFile(installed[0])
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    fields = Parser().parsestr(wheel.read(name).decode())
    assert fields["Description-Content-Type"] == "text/markdown"
    tokens = [
        one for block in MarkdownIt().parse(fields.get_payload()) for one in block.children or ()
    ]
    links = [
        str(one.attrs.get("href") or one.attrs.get("src"))
        for one in tokens
        if one.type in ("link_open", "image")
    ]
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    assert "](" not in "".join(
        one.content for one in tokens if one.type == "text"
    )  # what is left is well-formed


def test_trains_outside_the_repository(installed, tmp_path):
    file, backward, others = run_outside(installed, tmp_path, "-c", LOOP).splitlines()
    assert Path(file).is_relative_to(installed[1])
    assert 30 < int(backward) <= 60
    assert others == "[]"


def test_command_line(installed, tmp_path):
    listing = run_outside(installed, tmp_path, "-m", "thresher_lab.cli", "methods")
    assert all(name in listing for name in ("kakurenbo", "infobatch", "uniform", "full"))


def test_public_names():
    import thresher

    for name in thresher.__all__:
        assert getattr(thresher, name) is not None
    assert set(thresher.__all__) <= set(dir(thresher))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = thresher.Nothing


def test_methods_by_name():
    from thresher import methods

    assert {"full", "infobatch", "kakurenbo", "uniform"} <= set(methods.names())
    assert methods.create("kakurenbo", max_fraction=0.4).max_fraction == 0.4
    assert methods.name_of(methods.create("uniform", keep=0.5)) == "uniform"
    with pytest.raises(ValueError, match="no method 'nothing'; there are ada_boost, ada_selection"):
        methods.create("nothing")


def test_methods_of_other_packages(monkeypatch):
    """An entry point of another package makes its method known by name, without importing it."""
    from importlib.metadata import EntryPoint

    from thresher import methods

    point = EntryPoint("other", "collections:OrderedDict", methods.GROUP)
    monkeypatch.setattr(
        methods.registry, "entry_points", lambda group: [point] if group == methods.GROUP else []
    )
    assert "other" in methods.names()
    assert "from collections" in methods.infos()["other"].summary
    assert methods.load("other").__name__ == "OrderedDict"
