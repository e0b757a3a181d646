"""Language models on a text: a user's file, else Python's documentation."""

from functools import partial

from torch import nn

from thresher.experiments.tasks.base import Batches, Task, accuracy
from thresher.experiments.tasks.data import text
from thresher.experiments.tasks.networks.transformer import CausalTransformer

AT_ONCE = 50
"""Sequences that are tested together: scores of 8,192 words for each of 64 positions take 2 MB a sequence."""


def next_right(model: nn.Module, batches: Batches) -> float:
    """Share of positions whose next token is scored highest."""
    pieces = [piece for x, y in batches for piece in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True)]
    right = sum(accuracy(model, [piece]) * piece[1].numel() for piece in pieces)
    return right / sum(targets.numel() for _, targets in pieces)


TASKS = (
    Task(
        "text",
        text.find_text,
        text.of_bytes,
        partial(CausalTransformer, text.BYTES, context=text.CONTEXT),
        lr=0.005,
        batch_size=32,
        weight_decay=0.1,
        optimise="adamw",
        evaluate=next_right,
        pictures=False,
    ),
    Task(
        "text-words",
        text.find_text,
        text.of_words,
        partial(CausalTransformer, text.WORDS, context=text.CONTEXT),
        lr=0.005,
        batch_size=32,
        weight_decay=0.1,
        optimise="adamw",
        evaluate=next_right,
        pictures=False,
    ),
)
