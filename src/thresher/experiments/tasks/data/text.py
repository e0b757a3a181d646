"""Text for language models: sequences of 64 bytes or words, with the same sequences shifted by one as targets.

The text is a file of the user in UTF-8, else the documentation of Python (`pydoc_data.topics`, sorted by name, 400 to 500 kB
depending on the version). The first nine tenths are for training, the rest is for testing. Sequences do not overlap, and an
incomplete last sequence is dropped.
"""

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from thresher.experiments.tasks.data.base import Data

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
        raise FileNotFoundError(f"--data {file}: no such file; give a text in UTF-8, or none for Python's documentation")
    if file is None and find_spec("pydoc_data") is None:
        raise FileNotFoundError("this Python lacks its documentation (pydoc_data); give a text in UTF-8 by --data FILE")
    return file


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
    words = [word for line in _read_text(file).splitlines() for word in (*line.split(), END_OF_LINE)]
    known = Counter(words[: _training_length(len(words))]).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(known, 1)}
    return _as_data(torch.tensor([numbers.get(word, 0) for word in words], dtype=torch.int64), "words", file)


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
