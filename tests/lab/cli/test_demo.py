"""What the demo prints beside its comparison."""

import numpy as np
import torch

from lab.report.cases import comparison, save
from thresher_lab.cli.demo import DEMO_TASK, demo, wrong_labels_found
from thresher_lab.tasks import built_in
from thresher_lab.tasks.images import mnist_5k
from thresher_lab.training.samples import RunHistory


def test_the_wrong_labels_found_are_counted_seed_by_seed(tmp_path, monkeypatch, capsys):
    """Of the largest losses, seven with the first seed and three with the second are of samples whose labels are right."""
    right = mnist_5k().train.tensors[1]
    labels = built_in(DEMO_TASK).load(None).train.tensors[1]
    wrong = labels != right
    assert int(wrong.sum()) == 800
    results, samples = comparison(
        {"full": 0.0, "winnow": 0.5}, seeds=(0, 1), task=DEMO_TASK, controls=False, samples=10
    )
    for run in results["runs"]:
        losses = np.where(torch.rand(4000) < 0.5, 0.1, 0.2)
        losses[wrong.nonzero()[:100, 0].numpy()] = 5.0
        losses[(~wrong).nonzero()[: (7, 3)[run["seed"]], 0].numpy()] = 9.0
        each = np.repeat(losses[:, None].astype(np.float32), 2, axis=1)
        samples[run["samples"]] = RunHistory(
            np.arange(4000), labels.numpy(), each, np.ones((4000, 2), np.uint8)
        )
    said = "100 samples with the largest mean loss under Winnow, 93 to 97 have a wrong label, with each seed. The demo"
    assert said in wrong_labels_found(results, save(tmp_path, results, samples))
    monkeypatch.setattr("thresher_lab.cli.demo.run_and_print", lambda *_, **__: results)
    demo(tmp_path)
    assert said in " ".join(capsys.readouterr().out.split())
