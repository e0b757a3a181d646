"""The primitives of shards in processes: they answer as ranks that are threads do, and plan as one process does."""

import pytest
import torch
import torch.multiprocessing as mp

from shard_cases import hard_columns, planned, records_of
from shard_processes import CASES, METHODS, RANKS, N, run_cases
from thresher.distributed.world import ProcessWorld
from thresher.testing.threaded_world import on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every case returned in each process."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(run_cases, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.__name__)
def test_processes_answer_as_threads(results, case):
    for process, thread in zip(results, on_ranks(RANKS, case), strict=True):
        assert process[case.__name__] == thread


def test_plans_are_those_of_one_process(results):
    for place, method in enumerate(METHODS):
        whole = planned(method, records_of(method, hard_columns(N, 1)))
        parts = [result["plans"][place] for result in results]
        assert [i for part in parts for i in part[0]] == whole.ids.tolist()
        assert [i for part in parts for i in part[3]] == ([] if whole.refresh is None else whole.refresh.tolist())
        assert all(part[1] == dict(whole.facts) and part[2] == len(whole.ids) for part in parts)
        if whole.weights is not None:
            assert parts[0][4] == parts[2][4] == whole.weights[10:20].tolist()


def test_rows_come_home(results):
    loss = [0.5, 0.0, 2.5, *[0.0] * 12, 0.5, *[0.0] * 11, 2.5, 0.0, 0.5]
    assert [x for result in results for x in result["home"][0]] == loss
    assert all(result["home"][2] == loss for result in results)


def test_a_rank_with_other_settings_is_told_on_all_ranks_at_once(results):
    told = [result["disagreement"][0] for result in results]
    assert told[0] == told[1] == told[2]
    assert told[0][0] == "seed is 0 on ranks 0, 2, and 1 on rank 1."
    assert told[0][1].startswith("method is Kakurenbo(") and told[0][2] == f"n is {N} on ranks 0, 2, and {N + 1} on rank 1."
    assert told[0][3] == "sampler.seed is 0 on ranks 0, 2, and 2 on rank 1." and told[0][4] == ""
    assert max(result["disagreement"][1] for result in results) < 60


def test_a_group_of_some_processes(results):
    assert results[0]["groups"] == [0, 2, 22] and results[2]["groups"] == [1, 2, 22]
    assert results[1]["groups"] == ["`process_group` is a group that this process is not in"]


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="there is no process group: call torch.distributed.init_process_group first"):
        ProcessWorld()
