"""States of several processes in a checkpoint of Lightning; trainings are in integration/frameworks/test_two_processes.py."""

import pytest

import lightning_cases  # noqa: F401  # prepares the import of lightning
from thresher.lightning.selection import check_processes


def test_another_number_of_processes_is_refused():
    check_processes({"ranks": ({},)})
    with pytest.raises(
        ValueError, match=r"saved by 2 processes, but now there are 1\. Use the same number"
    ):
        check_processes({"ranks": ({}, {})})


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_is_one_process():
    check_processes({"ranks": ({},)})
