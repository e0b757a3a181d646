"""The command line in two processes that torchrun has started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from depth import DEEP
from thresher.scores import Scores

pytestmark = pytest.mark.skipif(not DEEP, reason="commands in processes that torchrun starts")

LAUNCH = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "thresher",
]
MOST_SECONDS = 300
SCRIPT = """
import os, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Data(TensorDataset):
    reads = 0
    def __getitem__(self, place):
        Data.reads += 1
        if os.environ["MODE"] == "one fails" and os.environ["RANK"] == "1" and Data.reads > 200:
            raise RuntimeError("the disk of the second process is gone")
        time.sleep(0.005 * (os.environ["MODE"] == "slow"))
        return super().__getitem__(place)

def build(seed):
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    model, order = nn.Linear(4, 2), torch.Generator().manual_seed(seed)
    loader = DataLoader(Data(x, (x[:, 0] > 0).long()), 32, shuffle=True, generator=order)
    return model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), lambda model: 0.5
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path


def launched(folder, *arguments, mode=""):
    environment = os.environ | {"MODE": mode, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*LAUNCH, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    out, err = process.communicate(timeout=MOST_SECONDS)
    return process.returncode, out, err


COMPARE = (
    "compare",
    "mine.py:build",
    "--methods=infobatch",
    "--epochs=6",
    "--seeds=0",
    "--controls=",
    "--out=x",
)


def test_a_comparison_is_stopped_by_ctrl_c_and_goes_on(mine):
    process = launched(mine, *COMPARE, mode="slow")
    assert process.stdout is not None
    assert any("[1/2] full" in line for line in process.stdout)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert (
        code
        and err.count("Stopped. Finished runs are kept in x; the same command goes on from there.")
        == 1
    )
    assert not (mine / "x" / "results.json").exists()
    code, out, err = ended(launched(mine, *COMPARE))
    assert code == 0, err
    assert (
        out.count("[1/2] full, seed 0: metric 50.00 %, kept from before") == 1
        and out.count("[2/2] infobatch") == 1
    )
    written = json.loads((mine / "x" / "results.json").read_text())
    assert (written["processes"], written["device"][:3]) == (2, "2 x") and (
        mine / "x" / "report.html"
    ).exists()


def test_one_process_fails_and_all_end_with_one_message(mine):
    code, _, err = ended(launched(mine, *COMPARE, mode="one fails"))
    assert code
    assert (
        err.count(
            "RuntimeError: the disk of the second process is gone. Finished runs are kept in x."
        )
        == 1
    )
    assert "process 1 of 2: " in err and "Connection closed" not in err


def test_a_recipe_and_commands_that_one_process_runs(tmp_path):
    code, out, err = ended(
        launched(
            tmp_path, "train", "adaselection-line", "--smoke", "--epochs", "2", "--out", "line"
        )
    )
    assert code == 0 and out.count("of the cost of full training") == 1, err
    assert {"model.pt", "results.json"} <= {path.name for path in Path(tmp_path, "line").iterdir()}
    code, out, _ = ended(launched(tmp_path, "recipes"))
    assert code == 0 and out.count("deepcam") == 1
    code, out, err = ended(launched(tmp_path, "advise", "digits"))
    assert (
        code
        and not out
        and err.count("`advise` trains in one process, and torchrun or accelerate launch has") == 1
    )


@pytest.mark.parametrize(
    ("name", "recipe", "claims"),
    [("adaselection-beta", "adaselection-line", 1), ("diet-sb-b", "diet-sb-resnet20-cifar10", 5)],
)
def test_a_table_with_a_recipe(tmp_path, name, recipe, claims):
    code, out, err = ended(
        launched(tmp_path, "reproduce", name, "--recipe", recipe, "--smoke", "--work", "w", "-q")
    )
    assert code == 0, err
    found = json.loads((tmp_path / "w" / "results" / f"{name}@{recipe}-smoke.json").read_text())
    assert len(found["claims"]) == claims and all(
        claim["mean"] is not None for claim in found["claims"]
    )
    assert found["device"].startswith("2 x") and out.count(f'<a id="{name}@{recipe}-smoke"') == 1
    for file in (tmp_path / "w").glob("scores/*"):
        scores = Scores.load(file)
        models = len(scores.provenance["seeds"])
        assert (
            scores.backward == models * scores.provenance["epochs"] * scores.samples
            and scores.values.isfinite().all()
        )
