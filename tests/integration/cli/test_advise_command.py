import json
import subprocess
import sys

PROCESS = [sys.executable, "-W", "error", "-m", "thresher_lab.cli"]

SLOW = """
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.full((4,), float(i % 2)), i % 2

def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    loader = DataLoader(Slow(), batch_size=16, shuffle=True)
    return model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), lambda model: 0.0
"""


def test_a_task_gives_words_and_figures(tmp_path):
    out = tmp_path / "there" / "advice.json"
    given = ["--budget", "0.5,25%", "--epochs", "4", "--seconds", "2", "--json", str(out)]
    done = subprocess.run(
        [*PROCESS, "advise", "digits@200", *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    stages = (
        "loading torch",
        "reading the data",
        "timing one step",
        "calling `evaluate`",
        "tracing",
        "timing the parts",
    )
    # On a busy machine, a line of the log says how long the model took to trace.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("subset_backward:")]
    for line, stage in zip(lines, stages, strict=True):
        assert line.startswith(f"advise: {stage}")
    found = json.loads(out.read_text())
    assert (
        done.stdout == "\n".join([*found["lines"], "", str(out), ""]) and len(found["lines"]) <= 24
    )
    assert found["lines"][
        -1
    ] == "thresher compare digits@200 --budget 0.5,0.25 --epochs 4 --out runs/digits-200" or (
        "spend=steps" in found["lines"][-1]
    )
    assert found["budget"] == [0.5, 0.25] and all(
        len(saved) == 2 for saved in found["ways"].values()
    )
    assert found["pace"]["compute"] > 0 and found["steps"] == 4


def test_a_loader_that_sleeps_is_the_bottleneck(tmp_path, called):
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    done = called("advise", f"{path}:build", "--seconds", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    assert "The loader is the bottleneck" in done.stdout


def test_a_mistake_is_one_message(called):
    done = called("advise", "digits", "--budget", "2")
    assert done.returncode == 2 and "--budget: shares of the cost of full training" in done.stderr
    done = called("advise", "nothing")
    assert done.returncode == 2 and "no task 'nothing'" in done.stderr
