"""Lightning and Trainer with a selection in two processes that torchrun would start."""

import pytest
import torch
import torch.multiprocessing as mp

import framework_processes as cases
import thresher
from depth import in_verify
from lightning_cases import fit
from thresher.lightning import Selection


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Folder with a file for each case that is over, and the error of the one that failed; the processes start once."""
    folder, failed = tmp_path_factory.mktemp("processes"), None
    try:
        mp.start_processes(cases.run_cases, (str(folder),), nprocs=cases.WORLD, start_method="fork")
    except mp.ProcessRaisedException as error:
        failed = error
    return folder, failed


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_two_processes(case, processes):
    folder, failed = processes
    if not (folder / f"{case.__name__}.over").is_file():
        raise AssertionError(f"{case.__name__} did not reach its end") from failed


@in_verify
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:.*sync_dist=True")
def test_processes_that_fit_starts():
    found = []
    for callbacks in ([], [Selection(thresher.FullData())], [Selection(thresher.InfoBatch())]):
        module = cases.Normalized()
        fit(module, *callbacks, **cases.ON_TWO | {"strategy": "ddp_fork"})
        found.append(module.state_dict())
        for selection in callbacks:
            with pytest.raises(AttributeError, match="in the processes that fit starts"):
                _ = selection.run
    cases.assert_same(found[1], found[0])
    assert not torch.equal(found[2]["net.0.weight"], found[0]["net.0.weight"])
