"""`subset_backward` and `attach` in two processes that train one model: the weights are those of one process."""

import pytest
import torch
import torch.multiprocessing as mp

from several_processes import KEPT, STEPS, WORLD, run_cases

RANKS = range(WORLD)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every case returned in each process."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(run_cases, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / str(rank)) for rank in RANKS]


@pytest.mark.parametrize("case", ["orders", "no_sync"])
def test_weights_are_those_of_one_process_and_only_kept_rows_cost_a_backward_pass(results, case):
    for rank in RANKS:
        for name, found in results[rank][case].items():
            assert found["difference"] < 1e-5 and found["apart"] == 0, (name, found)
            assert 0.3 < found["flops"] < 0.4, (name, found)
            assert all(fallback is None for fallback in found["fallbacks"]), (name, found)


def test_the_cost_of_each_process_is_that_of_its_own_rows(results):
    steps_with_rows = 4, 3
    for rank in RANKS:
        for name, found in results[rank]["orders"].items():
            if name.startswith("attach"):
                backward, forward, unknown = found["cost"]
                assert (backward, forward) == (steps_with_rows[rank] * KEPT, 72), name
                assert bool(unknown) == ("blocks" in name), name


def test_gradients_are_averaged_once_in_each_step_also_where_a_process_keeps_no_row(results):
    for rank in RANKS:
        for name, (buckets, gradients) in results[rank]["reducer"].items():
            assert buckets == [gradients] * STEPS, name


def test_each_process_may_use_another_output(results):
    assert max(found["heads"] for found in results) < 1e-5


def test_gradients_in_double_precision(results):
    assert max(difference for found in results for difference in found["gradients"]) < 1e-11


def test_own_passes_run_inside_of_ddp_with_the_buffers_of_the_first_process(results):
    for rank in RANKS:
        found = results[rank]["own_passes"]
        assert found["shared True"] < 1e-6 and found["shared False"] < 1e-6
        assert found["equal True"] and not found["equal False"]
        assert (
            found["calls True"] == found["calls False"] == 0
        )  # processes make other numbers of passes
        assert found["modes True"] and found["modes False"]


def test_all_processes_go_on_alike_where_one_could_not_trace_the_model(results):
    assert results[0]["fallbacks"] == (False, False, True)
    assert results[1]["fallbacks"] == (False, True, True)


def test_statistics_that_processes_exchange_are_left_to_the_plain_model(results):
    for rank in RANKS:
        assert (
            "module '1' is a SyncBatchNorm, whose statistics all processes share"
            in results[rank]["synchronized"]
        )
