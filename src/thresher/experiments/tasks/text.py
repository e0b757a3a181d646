"""Language models on a text: a file of the user or, by default, the documentation of Python."""

from functools import partial

from torch import nn

from thresher.experiments.tasks.base import Task
from thresher.experiments.tasks.data import text
from thresher.experiments.tasks.metrics import EvaluationBatches, accuracy
from thresher.experiments.tasks.networks.transformer import CausalTransformer

SEQUENCES_AT_ONCE = 50
"""Number of sequences per evaluation batch: outputs for 8,192 words at 64 positions take 2 MB per sequence."""


def next_token_accuracy(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns the share of positions at which the next token has the largest output."""
    pieces = [piece for x, y in batches for piece in zip(x.split(SEQUENCES_AT_ONCE), y.split(SEQUENCES_AT_ONCE), strict=True)]
    right = sum(accuracy(model, [piece]) * piece[1].numel() for piece in pieces)
    return right / sum(targets.numel() for _, targets in pieces)


TEXT_TASKS = (
    Task(
        "text",
        text.find_text,
        text.byte_sequences,
        partial(CausalTransformer, text.BYTES, context=text.CONTEXT),
        lr=0.005,
        batch_size=32,
        weight_decay=0.1,
        optimise="adamw",
        evaluate=next_token_accuracy,
        has_images=False,
    ),
    Task(
        "text-words",
        text.find_text,
        text.word_sequences,
        partial(CausalTransformer, text.VOCABULARY, context=text.CONTEXT),
        lr=0.005,
        batch_size=32,
        weight_decay=0.1,
        optimise="adamw",
        evaluate=next_token_accuracy,
        has_images=False,
    ),
)
