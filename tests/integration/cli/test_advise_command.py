import json
import re
import subprocess
import sys

from depth import in_verify

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


def test_a_task_gives_a_table_words_and_figures(tmp_path):
    out = tmp_path / "there" / "advice.json"
    given = ["--methods", "full,uniform:keep=0.5,random_backprop:keep=0.25", "--epochs", "4", "--json", str(out), "--verbose"]
    done = subprocess.run([*PROCESS, "advise", "digits@200", *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    begun = ("loading torch", "reading the data", "calling `evaluate` once")
    stages = (*begun, *["training epoch"] * 3, "timing 8 kinds of steps in 9 rounds: about")
    for line, stage in zip(done.stderr.splitlines(), stages, strict=True):
        assert line.startswith(f"advise: {stage}")
    assert done.stdout.rstrip().endswith(str(out))
    found = json.loads(out.read_text())
    assert [row["method"] for row in found["methods"]] == ["uniform:keep=0.5", "random_backprop:keep=0.25"]
    assert found["epochs"] == 4 and found["probe"]["samples"] == 200
    table, words = done.stdout.split("A step takes")
    assert "digits@200, 4 epochs, cpu" in table and all(row["method"] in table for row in found["methods"])
    assert all("".join(sentence.split()) in "".join(done.stdout.split()) for sentence in found["sentences"])
    assert done.stdout.index("Can selection help here? ") > done.stdout.index(found["sentences"][-1][:20])
    assert found["next"] == "thresher advise digits@200 --budget 0.5 --epochs 4" and f"\n{found['next']}\n" in done.stdout
    assert found["answer"] in ("no", "perhaps", "unknown") and found["skipped"] == []
    assert "Two forward passes save time only while less than" in " ".join(words.split())


def test_without_verbose_the_answer_has_a_few_lines(called):
    done = called("advise", "digits@200", "--methods", "uniform:keep=0.5", "--epochs", "4", "--seconds", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 4 <= len(lines) <= 9 and lines[0].startswith("Can selection help here? ") and lines[1].startswith("Why: ")
    assert lines[-2:] == [
        "Next (trains short runs, which show what half of the cost loses here):",
        "thresher advise digits@200 --budget 0.5 --epochs 4",
    ]


@in_verify
def test_a_training_that_waits_for_its_input_is_told_so(tmp_path, called):
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    done = called(
        "advise", f"{path}:build", "--methods", "kakurenbo,infobatch,uniform:keep=0.7,random_backprop:keep=0.33", "-v"
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert int(re.search(r"Your input pipeline takes (\d+) % of a step\.", said)[1]) >= 90
    assert "Methods that select in the batch load every candidate: they cannot help." in said
    assert "infobatch and uniform:keep=0.7 can help. This does not hold for kakurenbo: the samples left out are loaded" in said
    assert "One forward pass" not in said


def test_a_mistake_is_one_message(called):
    done = called("advise", "digits", "--methods", "uniform:keep=2")
    assert done.returncode == 2 and done.stderr.count("\n") == 2 and "`keep` outside" not in done.stdout
    assert "UniformSubset: `keep`" in done.stderr
    done = called("advise", "nothing")
    assert done.returncode == 2 and "no task 'nothing'" in done.stderr
