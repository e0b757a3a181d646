"""What the demo prints before its comparison."""

import numpy as np

import thresher
from thresher_lab.cli.demo import DEMO_METHODS, DEMO_TASK, demo
from thresher_lab.tasks import built_in
from thresher_lab.tasks.images import mnist_5k


def test_wrong_labels_among_the_suspects_are_counted(tmp_path, monkeypatch, capsys):
    """Of the hundred most suspicious samples, seven have a right label."""
    dataset = built_in(DEMO_TASK).load(None).train
    labels = dataset.tensors[1].numpy()
    wrong = labels != mnist_5k().train.tensors[1].numpy()
    assert wrong.sum() == 800
    suspicion = np.where(wrong, 0.5, 0.1)
    suspicion[wrong.nonzero()[0][:93]] = 0.9
    suspicion[(~wrong).nonzero()[0][:7]] = 0.9
    columns = {"id": np.arange(4000), "label": labels, "predicted": (labels + 1) % 10}
    columns |= {"suspicion": suspicion, "times_seen": np.full(4000, 8)}
    found = thresher.DataMap(columns, dataset)
    asked = []
    monkeypatch.setattr(
        "thresher_lab.comparison.observing.observed",
        lambda task, **options: asked.append((task, options)) or (found, None),
    )
    compared = []
    monkeypatch.setattr(
        "thresher_lab.cli.demo.run_and_print",
        lambda *given, **options: compared.append((*given[:2], options["brief"])),
    )
    demo(tmp_path)
    assert asked == [(DEMO_TASK, {"epochs": 8})]
    assert compared == [(DEMO_TASK, DEMO_METHODS, True)]
    first, second = capsys.readouterr().out.split("\n\n2. Half the cost: ")
    assert len(second.splitlines()) == 6
    lines = first.splitlines()
    assert len(lines) == 6 and max(map(len, lines[:4])) <= 80
    assert "800 of 4,000 labels (20 %) were replaced" in lines[1]
    assert lines[2] == "Of the 100 most suspicious samples, 93 have one of these labels."
    assert lines[3] == "Of the 800 most suspicious samples, 793 have one of these labels."
    sheet = (tmp_path / "suspects.html").read_text()
    assert sheet.count("<img") == 100 and f"{labels[0]} → {(labels[0] + 1) % 10}" in sheet


def test_quick_trains_one_seed_for_two_epochs(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(
        "thresher_lab.cli.demo.find_wrong_labels",
        lambda folder, epochs: trained.append(epochs) or (),
    )
    monkeypatch.setattr(
        "thresher_lab.cli.demo.run_and_print",
        lambda task, methods, seeds, epochs, out, **options: trained.append((seeds, epochs)),
    )
    demo(tmp_path, quick=True)
    assert trained == [2, ("0", 2)]
