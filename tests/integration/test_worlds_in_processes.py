"""The calls between processes: they answer as ranks that are threads do."""

import pytest
import torch
import torch.multiprocessing as mp

from process_worlds import CASES, RANKS, N, run_cases
from threaded_world import on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every case returned in each process."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(run_cases, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.__name__)
def test_processes_answer_as_threads(results, case):
    for process, thread in zip(results, on_ranks(RANKS, case), strict=True):
        assert process[case.__name__] == thread


def test_the_last_rank_comes_first(results):
    *_, rows, nothing = results[0]["calls"]
    assert rows == [(2, []), (2, [0]), (1, []), (1, [0]), (0, []), (0, [0])] and nothing == []
    assert results[1]["calls"][-2:] == [[], []]


def test_rows_come_home(results):
    loss = [0.5, 0.0, 2.5, *[0.0] * 12, 0.5, *[0.0] * 11, 2.5, 0.0, 0.5]
    assert results[0]["home"] == (loss, loss) and results[1]["home"] == ([], [])


def test_an_error_of_rank_0_is_raised_in_all(results):
    assert results[0]["errors"] == ["ValueError: too few", "OnlyHereError: held"]
    for found in results[1:]:
        plain, unsendable = found["errors"]
        assert plain == "ValueError: too few" and unsendable.startswith(
            "RuntimeError: process 0 raised OnlyHereError: ('held'"
        )


def test_a_rank_with_other_settings_is_told_on_all_ranks_at_once(results):
    told = [result["disagreement"] for result in results]
    assert told[0] == told[1] == told[2]
    assert told[0][0] == "seed is 0 on ranks 0, 2, and 1 on rank 1."
    assert (
        told[0][1].startswith("method is Kakurenbo(")
        and told[0][2] == f"n is {N} on ranks 0, 2, and {N + 1} on rank 1."
    )
    assert told[0][3] == "sampler.seed is 0 on ranks 0, 2, and 2 on rank 1." and told[0][4] == ""


def test_a_group_of_some_processes(results):
    assert results[1]["groups"] == [0, 2, 11, [1, 0]] and results[2]["groups"] == [1, 2, 11, []]
    assert results[0]["groups"] == [
        "`process_group` does not contain this process; pass a group that does"
    ]
