"""The example that fine-tunes a model on descriptions of packages: with a made-up list, and without the pretrained model."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lightning_cases  # noqa: F401  # prepares the import of torchvision, which transformers looks for
from thresher_lab.training.trainers import build_trainer

FILE = Path(__file__).parents[2] / "examples" / "by_feature" / "finetune.py"
WORDS = {
    "games": "play level score",
    "perl": "module cpan binding",
    "sound": "audio mixer synth",
    "fonts": "glyph serif bold",
}


def listed(packages=90):
    """The output of apt: four sections that often occur, each with words of its own, and one that seldom does."""
    stanzas = ["Package: rare\nSection: zope\nDescription: seldom seen"]
    for number in range(packages):
        for section, words in WORDS.items():
            chosen = " ".join(words.split()[number % 3 :])
            stanzas.append(
                f"Package: {section}{number}\nSection: {section}\nDescription: {chosen} number {number}\n more text: long"
            )
    return "\n\n".join(stanzas)


@pytest.fixture
def example(monkeypatch, tmp_path):
    monkeypatch.setenv("DESCRIPTIONS", str(tmp_path / "descriptions.json"))
    spec = importlib.util.spec_from_file_location("finetune", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "TRAIN", 200)
    monkeypatch.setattr(module, "TEST", 160)
    monkeypatch.setattr(module, "SECTIONS", 4)
    monkeypatch.setattr(module, "pretrained", lambda: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed()))
    return module


def test_runs(example, capsys):
    with torch.random.fork_rng():
        example.main()
    printed = capsys.readouterr().out
    assert "a tiny BERT from random weights" in printed
    assert float(printed.split("test accuracy ")[1].split()[0]) > 0.8
    # 0.5 with the passes that compare losses, of one batch or of two.
    assert re.search(r"0\.5[01]\d of full training", printed)


def test_one_package_of_each_source(example):
    text = """Package: b
Source: shared (1.2)
Section: games
Description: the second

Package: a
Source: shared
Section: games
Description: the third

Package: c
Section: contrib/games
Description: not in main

Package: d
Section: perl
Description: the second

Package: e
Section: perl
Description: colon: kept
 Section: inside"""
    assert example.read_packages(text) == [("perl", "colon: kept"), ("games", "the second")]


def test_the_list_is_made_once(example, tmp_path, monkeypatch):
    first = example.descriptions()
    assert len(first) == 360 and {section for section, _ in first} == {*WORDS}
    monkeypatch.setattr(example.subprocess, "run", None)
    assert (
        example.descriptions() == first == json.loads((tmp_path / "descriptions.json").read_text())
    )
    train, test, names = example.data(None)
    assert (len(train), len(test), names) == (200, 160, sorted(WORDS))


def test_what_it_needs(example, monkeypatch):
    monkeypatch.setattr(
        example.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed(10))
    )
    with pytest.raises(
        SystemExit, match=r"apt lists 40 packages, and this example needs 360: run `apt-get update`"
    ):
        example.descriptions()
    monkeypatch.setattr(example.shutil, "which", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"reads Debian's package lists: run it on Debian or Ubuntu"
    ):
        example.descriptions()


def test_compare_takes_its_function(example):
    made = build_trainer(example.make_trainer, 3, num_train_epochs=1, learning_rate=0.5)
    assert len(made.eval_dataset) == 160 and made.args.learning_rate == 0.5
