"""Text to be continued: sequences of 64 bytes or words, and the same moved on by one as what should follow each of them.

A user's file in UTF-8, else the documentation that Python brings (`pydoc_data.topics`, its topics in the order of their
names, 400 to 500 kB by the version of Python). The first nine tenths are to train on, the rest to test on; sequences do not
overlap, and what is left of the last one is dropped.
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
"""All that a byte can be: what vocabulary there is does not depend on the text."""
WORDS = 8192
"""Words told apart, with the one for all that are rare."""
END_OF_LINE = "\n"


def find_text(file: Path | None = None) -> Path | None:
    """The user's file; None for Python's documentation.

    Raises:
        FileNotFoundError: There is no such file, or none was given and this Python lacks its documentation.
    """
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"--data {file}: no such file; give a text in UTF-8, or none for Python's documentation")
    if file is None and find_spec("pydoc_data") is None:
        raise FileNotFoundError("this Python lacks its documentation (pydoc_data); give a text in UTF-8 by --data FILE")
    return file


def of_bytes(file: Path | None = None) -> Data:
    """Sequences of bytes, numbered as they are.

    Raises:
        ValueError: The file is not UTF-8, or too short.
    """
    tokens = torch.from_numpy(np.frombuffer(_text(file).encode(), np.uint8).astype(np.int64))
    return _data(tokens, "bytes", file)


def of_words(file: Path | None = None) -> Data:
    """Sequences of words as they stand between blanks, with one more for the end of each line, as for WikiText-2.

    The 8,191 words most frequent in what is trained on are numbered from 1 by their frequency; 0 are all others.

    Raises:
        ValueError: The file is not UTF-8, or too short.
    """
    words = [word for line in _text(file).splitlines() for word in (*line.split(), END_OF_LINE)]
    known = Counter(words[: _cut(len(words))]).most_common(WORDS - 1)
    numbers = {word: number for number, (word, _) in enumerate(known, 1)}
    return _data(torch.tensor([numbers.get(word, 0) for word in words], dtype=torch.int64), "words", file)


def _text(file: Path | None) -> str:
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not a text in UTF-8: {error}") from error


def _cut(tokens: int) -> int:
    return tokens * 9 // 10


def _data(tokens: Tensor, kind: str, file: Path | None) -> Data:
    cut = _cut(len(tokens))
    if len(tokens) - cut <= CONTEXT:
        raise ValueError(
            f"{file}: a text of {len(tokens)} {kind} is too short: the last tenth, to test on, must have {CONTEXT + 1} or more"
        )
    return Data(TensorDataset(*_sequences(tokens[:cut])), *_sequences(tokens[cut:]))


def _sequences(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each of shape (N, CONTEXT), int64."""
    used = (len(tokens) - 1) // CONTEXT * CONTEXT
    return tokens[:used].view(-1, CONTEXT), tokens[1 : used + 1].view(-1, CONTEXT)
