"""Facts about a method that a reader must know before using it: the class attribute `card` of every method.

Nothing here imports torch, so that the methods can be listed without it.
"""

from dataclasses import dataclass

RULE = "left out by its plan"
"""Rule of a method whose card gives none."""


@dataclass(frozen=True)
class Card:
    """Facts about a method that its settings do not give; `thresher methods NAME` prints them.

    A method of this package writes `summary`, `paper` and `rule` as plain strings, because `thresher methods` and
    `thresher why` read them from the source file without importing it.

    Args:
        biased: Answer to the question whether the expected weighted gradient differs from that of all data, and on which
            settings the answer depends.
        forwards: Forward passes beyond those of training, in words and numbers of samples, such as "none" or "every hidden
            sample once per epoch".
        claim: Saving or gain that the paper reports, with its numbers. Default "": there is no paper.
        differences: Differences to the official code, one sentence each.
        bytes_per_sample: Memory that is kept for every sample of the dataset with the default settings, in bytes, without
            the weights of a plan. Default 0.
        caveat: Sentence that says where and why the method does not beat random selection of the same cost. Default "": it
            beats random selection on its planted problem (`thresher.testing`).
        missing: Parts of the paper that are not implemented, one sentence each.
        summary: Description of the method in at most ten words, without a capital letter and a full stop.
        paper: Publication, such as "arXiv:2310.10102". Default "": there is none.
        rule: Reason why the method skips a sample, for `thresher why`; settings of the method stand in braces.

    Example:
        >>> card = Card(summary="keep the newest samples", biased="yes, towards new samples", forwards="none")
        >>> card.bytes_per_sample, card.rule
        (0, 'left out by its plan')
    """

    biased: str
    forwards: str
    claim: str = ""
    differences: tuple[str, ...] = ()
    bytes_per_sample: float = 0
    caveat: str = ""
    missing: tuple[str, ...] = ()
    summary: str = ""
    paper: str = ""
    rule: str = RULE
