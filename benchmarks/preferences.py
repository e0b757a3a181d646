"""How well the margins of preference training find wrong choices, and what training without the suspects changes.

`python -m benchmarks.preferences --ratings FILE` trains tiny models on two sources of pairs:

- rule: the answer with more words of one half of the vocabulary is right; a fifth of the choices is flipped. A reward model and
  a language model with DPO, both transformers of one layer.
- ratings: pairs of texts whose mean ratings differ by at least 0.5 and less than 2 (see `benchmarks.people`, also for FILE). The
  choice is by one rating of each text, drawn by the seed, and wrong if the means say otherwise. A reward model that is linear in
  the mean of embeddings of words. A fifth of the texts is only for the test.

Each trains with `FullData` and `observe`, and again without the first k suspects, where k is the number of wrong choices; DPO
also with all pairs and the loss `robust`, whose label smoothing is the share of wrong choices. Accuracy is on right pairs that
were not trained on. Models, numbers of pairs, rates and epochs were set with seed 100. With it, transformers of one layer and of
none learned too little from the ratings with DPO: an accuracy of 0.59 and 0.58 after three epochs of 4,000 pairs.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets  # pyright: ignore[reportMissingImports]
import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from trl.trainer.dpo_config import DPOConfig  # pyright: ignore[reportMissingImports]
from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.reward_config import RewardConfig  # pyright: ignore[reportMissingImports]
from trl.trainer.reward_trainer import RewardTrainer  # pyright: ignore[reportMissingImports]

import thresher
from benchmarks.kept import add_line, read_lines
from benchmarks.marks import between_marks
from benchmarks.people import judged, read_ratings
from thresher.transformers import Selection
from thresher_lab.training.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "results" / "preferences-runs.jsonl"
PAGE = ROOT / "docs" / "evidence" / "wrong-labels.md"
MARKS = "<!-- tables of benchmarks.preferences -->", "<!-- end of the tables of preferences -->"
SEEDS = 5
WORDS = 8_000
LENGTH = 64
"""Number of words in the vocabulary, and of words that are read of a text."""
KINDS: dict[str, Any] = {
    "reward model": (RewardTrainer, RewardConfig),
    "DPO": (DPOTrainer, DPOConfig),
}
PAIRS = {"rule": (800, 200), "ratings": (12_000, 2_000)}
"""Number of pairs to train on, and to test with."""
EPOCHS = {"rule": 6, "ratings": 4}
BATCHES = {"rule": 16, "ratings": 64}
RATE = 3e-3


class WordScores(transformers.PreTrainedModel):
    """A reward that is linear in the mean of embeddings."""

    config_class = transformers.Qwen2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, 1)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """Returns the rewards of texts, shape (N, 1)."""
        sums = (self.words(input_ids) * attention_mask[..., None]).sum(1)
        rewards = self.score(sums / attention_mask.sum(1, keepdim=True).sqrt())
        return SequenceClassifierOutput(logits=rewards)


MODELS: dict[tuple[str, str], Any] = {
    ("rule", "reward model"): transformers.Qwen2ForSequenceClassification,
    ("rule", "DPO"): transformers.Qwen2ForCausalLM,
    ("ratings", "reward model"): WordScores,
}
"""Tiny models by pairs and training."""


class Pairs(NamedTuple):
    """Answers, the better one first, and whether the choice is wrong."""

    answers: list[tuple[str, str]]
    wrong: NDArray[np.bool_]

    def table(self) -> datasets.Dataset:
        """Returns the pairs as chosen, with the wrong ones exchanged."""
        chosen = [
            pair[wrong] for pair, wrong in zip(self.answers, self.wrong.tolist(), strict=True)
        ]
        rejected = [
            pair[not wrong] for pair, wrong in zip(self.answers, self.wrong.tolist(), strict=True)
        ]
        columns = {"prompt": ["<text>"] * len(chosen), "chosen": chosen, "rejected": rejected}
        return datasets.Dataset.from_dict(columns)


def by_rule(count: int, generator: np.random.Generator) -> Pairs:
    """Returns pairs of eight words each."""
    answers: list[tuple[str, str]] = []
    while len(answers) < count:
        words = generator.integers(0, 20, (2, 8))
        good = (words >= 10).sum(1)
        if good[0] != good[1]:
            texts = [" " + " ".join(f"w{word}" for word in words[row]) for row in np.argsort(-good)]
            answers.append((texts[0], texts[1]))
    return Pairs(answers, generator.random(count) < 0.2)


def by_ratings(count: int, generator: np.random.Generator, path: Path, *, test: bool) -> Pairs:
    """Returns pairs of texts, with the choice by one rating of each; a fifth of the texts is for testing only."""
    texts, ratings = read_ratings(path)
    texts = [" ".join(text.split()[:LENGTH]) for text in texts]
    means = [float(np.mean(of)) for of in ratings]
    pool = np.flatnonzero((np.arange(len(texts)) % 5 == 0) == test)
    answers: list[tuple[str, str]] = []
    wrong: list[bool] = []
    while len(answers) < count:
        i, j = pool[generator.integers(0, len(pool), 2)]
        if not 0.5 <= means[i] - means[j] < 2:
            continue
        difference = generator.choice(ratings[i]) - generator.choice(ratings[j])
        if difference:
            answers.append((f" {texts[i]}", f" {texts[j]}"))
            wrong.append(bool(difference < 0))
    return Pairs(answers, np.array(wrong))


def tokenizer_of(pairs: Pairs) -> Any:
    """Returns a tokenizer of the most frequent words."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = ["<pad>", "<eos>", "<unk>", "<text>"]
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=WORDS, special_tokens=special)
    made.train_from_iterator((text for pair in pairs.answers for text in pair), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def trained(
    kind: str, source: str, rows: Any, test: Any, tokens: Any, seed: int, **settings: Any
) -> tuple[Any, float]:
    """Trains a tiny model, and returns its trainer and its accuracy on the test pairs."""
    of, config = KINDS[kind]
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokens),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "num_labels": 1,
        "pad_token_id": 0,
    }
    made = transformers.Qwen2Config(**sizes)
    model = MODELS[source, kind](made)
    own: dict[str, Any] = {} if of is RewardTrainer else {"ref_model": copy.deepcopy(model)}
    if of is DPOTrainer:
        settings["precompute_ref_log_probs"] = True
    if settings.pop("observe", False):
        own |= {"selection": thresher.FullData(), "selection_settings": {"observe": True}}
        of = type("Observing", (Selection, of), {})
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            folder,
            num_train_epochs=EPOCHS[source],
            per_device_train_batch_size=BATCHES[source],
            per_device_eval_batch_size=100,
            learning_rate=RATE,
            seed=seed,
            max_length=None,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            **settings,
        )
        trainer = of(
            model,
            args=args,
            train_dataset=rows,
            eval_dataset=test,
            processing_class=tokens,
            **own,
        )
        trainer.train()
        found: Any = trainer.evaluate()
    return trainer, found.get("eval_accuracy", found.get("eval_rewards/accuracies"))


def run(kind: str, source: str, seed: int, path: Path) -> dict[str, Any]:
    """Trains on all pairs, without suspects and, for DPO, with a robust loss; returns what was measured."""
    generator = np.random.default_rng(seed)
    count, held = PAIRS[source]
    if source == "rule":
        made = by_rule(count + held, generator)
        pairs = Pairs(made.answers[:count], made.wrong[:count])
        held_out = made.answers[count:]
    else:
        pairs = by_ratings(count, generator, path, test=False)
        held_out = by_ratings(held, generator, path, test=True).answers
    test = Pairs(held_out, np.zeros(held, dtype=np.bool_)).table()
    parts = (test, tokenizer_of(pairs), seed)
    rows = pairs.table()
    began = time.process_time()
    observed, accuracy = trained(kind, source, rows, *parts, observe=True)
    seconds = time.process_time() - began
    found = observed.run.data_map()
    number = int(pairs.wrong.sum())
    kept = np.setdiff1d(np.arange(count), found.suspects(number))
    accuracies = {
        "all": accuracy,
        "without suspects": trained(kind, source, rows.select(kept), *parts)[1],
    }
    if kind == "DPO":
        smoothing = {"loss_type": ["robust"], "label_smoothing": number / count}
        accuracies["robust"] = trained(kind, source, rows, *parts, **smoothing)[1]
    scores = judged(found["suspicion"], pairs.wrong)
    return {"wrong": number / count, "cpu_s": seconds, **scores, "accuracy": accuracies}


def table(lines: Sequence[Any]) -> str:
    """Returns the table of the page: means over the seeds, and the smallest AUROC."""
    rows = []
    for source, kind in MODELS:
        found = [line["result"] for line in lines if line["job"][:2] == [kind, source]]
        accuracies = [
            [one["accuracy"].get(name, np.nan) for one in found]
            for name in ("all", "without suspects", "robust")
        ]
        aurocs = [one["auroc"] for one in found]
        means = [np.mean([one[name] for one in found]) for name in ("wrong", "first")]
        shown = [f"{np.mean(of):.3f}" if np.isfinite(of).all() else "-" for of in accuracies]
        score = f"{np.mean(aurocs):.3f} ({min(aurocs):.3f})"
        rows.append([source, kind, f"{means[0]:.0%}", score, f"{means[1]:.2f}", *shown])
    return markdown_table(
        [
            "pairs",
            "training",
            "wrong",
            "AUROC (smallest)",
            "first 100",
            "accuracy, all pairs",
            "without the suspects",
            "robust loss",
        ],
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preferences", description=__doc__)
    parser.add_argument("--ratings", type=Path, help="vaderSentiment-3.3.2.tar.gz")
    given = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    done = {tuple(line["job"]) for line in read_lines(RUNS)}
    jobs = [(kind, source, seed) for source, kind in MODELS for seed in range(SEEDS)]
    for job in jobs:
        if job not in done and given.ratings is not None:
            add_line(RUNS, {"job": job, "result": run(*job, given.ratings)})
    text = table(read_lines(RUNS))
    PAGE.write_text(between_marks(PAGE.read_text(), *MARKS, text))


if __name__ == "__main__":
    main()
