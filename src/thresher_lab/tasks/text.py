"""Language models on a text: a file of the user or, by default, the documentation of Python.

The text is a file of the user in UTF-8, else the documentation of Python (`pydoc_data.topics`, sorted by name, 400 to 500 kB
depending on the version). The first nine tenths are for training, the rest is for testing. Sequences do not overlap, and an
incomplete last sequence is dropped.
"""

from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from thresher_lab.tasks.base import Data, EvaluationBatches, Task, accuracy
from thresher_lab.tasks.networks import CausalTransformer

CONTEXT = 64
"""Length of a sequence."""
BYTES = 256
"""Number of values of a byte: the vocabulary does not depend on the text."""
VOCABULARY = 8192
"""Number of different words, including the one that stands for all rare words."""
END_OF_LINE = "\n"


def find_text(file: Path | None = None) -> Path | None:
    """Returns the file of the user; None for the documentation of Python.

    Raises:
        FileNotFoundError: There is no such file, or none was given and this Python has no documentation.
    """
    if file is not None and not file.is_file():
        raise FileNotFoundError(
            f"--data {file}: no such file; give a text in UTF-8, or none for Python's documentation"
        )
    if file is None and find_spec("pydoc_data") is None:
        raise FileNotFoundError(
            "this Python lacks its documentation (pydoc_data); give a text in UTF-8 by --data FILE"
        )
    return file


def find_wikitext(file: Path | None = None) -> Path | None:
    """Returns the file of the user; no other text stands for WikiText-2.

    Raises:
        FileNotFoundError: No file was given, or there is no such file.
    """
    if file is None:
        raise FileNotFoundError(
            "wikitext2-transformer: give a part of WikiText-2 as published, such as wiki.train.tokens, by --data FILE"
        )
    return find_text(file)


def byte_sequences(file: Path | None = None) -> Data:
    """Returns sequences of bytes; the number of a token is the value of its byte.

    Raises:
        ValueError: The file is not UTF-8, or it is too short.
    """
    tokens = torch.from_numpy(np.frombuffer(_read_text(file).encode(), np.uint8).astype(np.int64))
    return _as_data(tokens, "bytes", file)


def word_sequences(file: Path | None = None) -> Data:
    """Returns sequences of words, which are separated by blanks; the end of a line is a word, too, as in WikiText-2.

    The 8,191 most frequent words of the training text have the numbers from 1 in the order of their frequency; all other words
    have the number 0.

    Raises:
        ValueError: The file is not UTF-8, or it is too short.
    """
    words = [
        word for line in _read_text(file).splitlines() for word in (*line.split(), END_OF_LINE)
    ]
    known = Counter(words[: _training_length(len(words))]).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(known, 1)}
    return _as_data(
        torch.tensor([numbers.get(word, 0) for word in words], dtype=torch.int64), "words", file
    )


def _read_text(file: Path | None) -> str:
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not a text in UTF-8: {error}") from error


def _training_length(tokens: int) -> int:
    return tokens * 9 // 10


def _as_data(tokens: Tensor, kind: str, file: Path | None) -> Data:
    cut = _training_length(len(tokens))
    if len(tokens) - cut <= CONTEXT:
        raise ValueError(
            f"{file}: a text of {len(tokens)} {kind} is too short: the last tenth, to test on, must have {CONTEXT + 1} or more"
        )
    return Data(TensorDataset(*_sequences(tokens[:cut])), *_sequences(tokens[cut:]))


def _sequences(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, each of shape (N, CONTEXT), int64."""
    used = (len(tokens) - 1) // CONTEXT * CONTEXT
    return tokens[:used].view(-1, CONTEXT), tokens[1 : used + 1].view(-1, CONTEXT)


SEQUENCES_AT_ONCE = 50
"""Number of sequences per evaluation batch: outputs for 8,192 words at 64 positions take 2 MB per sequence."""


def next_token_accuracy(model: nn.Module, batches: EvaluationBatches) -> float:
    """Returns the share of positions at which the next token has the largest output."""
    pieces = [
        piece
        for x, y in batches
        for piece in zip(x.split(SEQUENCES_AT_ONCE), y.split(SEQUENCES_AT_ONCE), strict=True)
    ]
    right = sum(accuracy(model, [piece]) * piece[1].numel() for piece in pieces)
    return right / sum(targets.numel() for _, targets in pieces)


TEXT_TASKS = tuple(
    Task(
        name,
        find,
        load,
        partial(CausalTransformer, vocabulary, context=CONTEXT),
        lr=0.005,
        batch_size=32,
        weight_decay=0.1,
        optimize="adamw",
        evaluate=next_token_accuracy,
        has_images=False,
    )
    for name, find, load, vocabulary in (
        ("text", find_text, byte_sequences, BYTES),
        ("text-words", find_text, word_sequences, VOCABULARY),
        ("wikitext2-transformer", find_wikitext, word_sequences, VOCABULARY),
    )
)
