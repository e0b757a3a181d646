"""States of several processes in a checkpoint of Lightning; trainings are in integration/frameworks/test_two_processes.py."""

import pytest

import lightning_cases  # noqa: F401  # prepares the import of lightning
from thresher.lightning.selection import LIGHTNING_TRAINER


def test_another_number_of_processes_is_refused():
    LIGHTNING_TRAINER.check_processes("the checkpoint", 1, 1)
    with pytest.raises(
        ValueError, match=r"saved by 2 processes, but now there are 1\. Use the same number"
    ):
        LIGHTNING_TRAINER.check_processes("the checkpoint", 2, 1)
