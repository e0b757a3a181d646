"""What a reader must know of a method before using it: an attribute of every class, printed by `thresher methods NAME`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Facts about a method that its settings do not say.

    Args:
        biased: Whether the expected weighted gradient is that of all data, and what the answer depends on.
        forwards: Forward passes beyond those of training, in words and samples: "none", "every hidden sample once an epoch".
        claim: What the paper says it saves or gains, with the numbers; "" where there is no paper.
        differences: To the official code, a sentence each.
        bytes_per_sample: Remembered of every sample of the dataset by the default settings, weights of a plan not counted.
        caveat: Where and why it does not beat random selection of the same cost; "" where it does on its planted task.
        missing: Parts of the paper that are not there, a sentence each.
    """

    biased: str
    forwards: str
    claim: str = ""
    differences: tuple[str, ...] = ()
    bytes_per_sample: float = 0
    caveat: str = ""
    missing: tuple[str, ...] = ()
