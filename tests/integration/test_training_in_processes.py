"""`attach` in several processes: the training is that of one process, and what cannot be so is refused in all of them."""

import functools
import operator
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

import thresher
import training_processes as cases
from clock_cases import assert_right
from depth import depth
from made_once import made_once
from thresher.run.several_processes import check_attached_late_enough

SIZES = (2,) if depth(1, 2) == 1 else (2, 4)
NAMES = {
    2: tuple(case.__name__ for case in cases.CASES),
    4: ("plans", "prepared", "resharded", "grown"),
}


class Results(list[Any]):
    """What every case returned in each process.

    Args:
        found: Cases by name, of each process.
        folder: Where the processes have saved.
    """

    def __init__(self, found, folder):
        super().__init__(found)
        self.folder = folder


@pytest.fixture(scope="module", params=SIZES)
def results(request, tmp_path_factory):
    """What every case returned in each process."""
    size = request.param

    def run(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cases.begun_alone(str(folder))
        mp.spawn(cases.run_cases, (size, str(folder), NAMES[size]), nprocs=size)

    folder = made_once(tmp_path_factory, f"processes-{size}", run)
    cases.WORLD[0] = size
    return Results(
        [torch.load(folder / str(rank), weights_only=False) for rank in range(size)], folder
    )


def of_all(found, *path):
    return [functools.reduce(operator.getitem, path, one) for one in found]


def without_comparing(entry):
    return {
        name: value for name, value in entry.items() if name not in ("comparing", "matching_error")
    }


def forward(one):
    return one["forward"] - sum(entry["comparing"] for entry in one["history"])


def assert_one_training(found, whole):
    """Checks what each process found against the same training in one process."""
    for one in found:
        for own, expected in zip(one["weights"], whole["weights"], strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    assert torch.equal(found[0]["trained"], whole["trained"])
    for name, column in whole["records"].items():
        torch.testing.assert_close(found[0]["records"][name], column, equal_nan=True)
    # Each process compares a batch of its own, so the forward passes that compare losses differ.
    expected = [without_comparing(entry) for entry in whole["history"]]
    for one in found:
        assert [without_comparing(entry) for entry in one["history"]] == expected
    assert sum(map(forward, found)) == forward(whole)
    assert of_all(found, "syncs") == [sum(map(len, whole["seen"]))] * len(found)
    for number, batches in enumerate(whole["seen"]):
        steps = [
            torch.cat(parts).sort().values
            for parts in zip(*(one["seen"][number] for one in found), strict=True)
        ]
        assert [step.tolist() for step in steps] == [
            batch.sort().values.tolist() for batch in batches
        ]


@pytest.mark.parametrize(("name", "kind"), cases.PLANNED)
def test_the_training_is_that_of_one_process(results, name, kind):
    whole = cases.trained(cases.loader_of(kind, 0, 1, cases.samples()), 0, 1, cases.METHODS[name]())
    assert_one_training([one["plans"][f"{name}, {kind}"] for one in results], whole)


def test_an_order_that_was_drawn_is_that_of_one_process(results):
    """As long as all losses are refreshed: of two losses of one epoch, that of the lowest process counts, not the later one."""
    name = "ImportanceSampling"
    whole = cases.trained(
        cases.loader_of("Shuffle", 0, 1, cases.samples()), 0, 1, cases.OWN_ORDER[name]()
    )
    found = [one["plans"][f"{name}, Shuffle"] for one in results]
    # With the losses, their mean differs, too.
    for one in (whole, *found):
        one["records"] = {}
        one["history"] = [
            {key: value for key, value in entry.items() if key != "mean_loss"}
            for entry in one["history"]
        ]
    assert_one_training(found, whole)


@pytest.mark.parametrize("name", cases.OWN_ORDER)
def test_processes_that_draw_an_order_have_one_model(results, name):
    found = [one["plans"][f"{name}, Shuffle"] for one in results]
    assert all(
        torch.equal(own, other)
        for own, other in zip(found[0]["weights"], found[-1]["weights"], strict=True)
    )
    assert of_all(found, "history") == [found[0]["history"]] * len(found)


@pytest.mark.parametrize("kind", ["accelerate", "accelerate, seedable"])
@pytest.mark.parametrize("name", cases.PREPARED)
def test_loaders_that_accelerate_prepared(results, name, kind):
    whole = cases.trained(cases.loader_of(kind, 0, 1, cases.samples()), 0, 1, cases.METHODS[name]())
    assert_one_training([one["prepared"][f"{name}, {kind}"] for one in results], whole)


def steps_of(found, number):
    """Ids of all processes in each step of an epoch."""
    return [torch.cat(parts) for parts in zip(*(one["seen"][number] for one in found), strict=True)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", cases.RESHARDED)
def test_a_run_goes_on_with_other_numbers_of_processes(results, name):
    """In the middle of an epoch: the same batches of all processes together, and the same weights and records."""
    found, folder = list(results), results.folder
    whole = [one["resharded"][f"{name}, {len(found)}"] for one in found]
    assert all(one["resharded"][f"{name}, as it was"] for one in found)
    for fewer in range(len(found) - 1, 0, -1):
        assert_gone_on([one["resharded"][f"{name}, {fewer}"] for one in found[:fewer]], whole)
    assert_gone_on([cases.gone_on(folder / f"checkpoint-{name}", name)], whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", cases.GROWN)
def test_a_run_of_one_process_goes_on_with_several(results, name):
    assert_gone_on(
        of_all(results, "grown", name),
        [cases.gone_on(results.folder / f"alone-{name}", name)],
        name in cases.METHODS,
    )


def assert_gone_on(found, whole, records=True):
    """Checks the rest of a training, with the records where each sample came once."""
    for number in range(cases.EPOCHS - 1):
        steps = [
            [step.sort().values.tolist() for step in steps_of(some, number)]
            for some in (found, whole)
        ]
        assert steps[0] == steps[1]
    for own, expected in zip(found[0]["weights"], whole[0]["weights"], strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    assert torch.equal(found[0]["trained"], whole[0]["trained"])
    for column in whole[0]["records"] if records else ():
        torch.testing.assert_close(
            found[0]["records"][column], whole[0]["records"][column], equal_nan=True
        )
    assert sum(of_all(found, "forward")) == sum(of_all(whole, "forward"))


two = pytest.mark.parametrize("results", [2], indirect=True)


@two
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_processes_and_one_go_on_from_what_process_0_has_saved(results):
    whole = cases.from_one_file(results.folder / "one-file")
    assert_gone_on([one["one_file"] for one in results], [whole])


@two
def test_what_only_process_0_has(results):
    found, elsewhere = of_all(results, "errors")
    assert found == {"records": "10", "trained": "260", "data_map": "10", "plan": "no plan"}
    for name in ("run.records", "run.trained", "run.data_map()"):
        message = elsewhere[name.removeprefix("run.").removesuffix("()")]
        assert message.startswith(
            f"{name}: only process 0 stores the values of all samples, and this is process 1 of 2. Call"
        )
    assert elsewhere["plan"] == "no plan"


@two
def test_all_processes_read_one_clock(results):
    if "clocks" not in results[0]:
        pytest.skip("read in two processes")
    for ranks in zip(*of_all(results, "clocks"), strict=True):
        (case, clocks), *others = ranks
        assert_right(case, clocks)
        assert all(other == (case, clocks) for other in others)


@two
def test_a_data_map_is_that_of_one_process(results):
    whole, found = cases.observed(0, 1), results[0]["observed"]
    assert list(found) == list(whole)
    for name, values in whole.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-9, err_msg=name)


@two
def test_all_data_is_the_loop_without_a_run_bit_for_bit(results):
    for one in results:
        assert all(one["nothing_left_out"].values()), one["nothing_left_out"]


@two
@pytest.mark.parametrize(
    "case",
    [
        "once",
        "twice",
        "twice by chance",
        "twice by chance, smaller last batch",
        "twice by chance, beside a plan",
    ],
)
def test_methods_that_choose_in_the_batch(results, case):
    """All processes train on as many batches, of as many rows, and have the same model."""
    found = [one["in_the_batch"][case] for one in results]
    assert all(
        torch.equal(one, other) for one, other in zip(*of_all(found, "weights"), strict=True)
    )
    own, other = ([[len(ids) for ids in epoch] for epoch in one["seen"]] for one in found)
    assert own == other
    assert len(set(of_all(found, "forward"))) == 1
    losses = found[0]["records"]["loss"]
    assert torch.isfinite(losses).float().mean() > (0.99 if "beside a plan" in case else 0.9999)
    if "by chance" in case:
        smaller = [rows for epoch in own for rows in epoch if rows < cases.BATCH]
        assert min(map(len, own)) >= 2
        assert all(entry["complete"] for one in found for entry in one["history"])
        assert (0 < len(smaller) <= cases.EPOCHS) if "smaller" in case else not smaller


@two
def test_a_run_goes_on_in_the_middle_of_an_epoch(results):
    for one in results:
        assert all(one["resumed"].values()), one["resumed"]


REFUSED = {
    "shuffle=True": "RandomSampler, by which each of the 2 processes would train on all.*DistributedSampler.*thresher.Shuffle",
    "another rank": "loads the samples for process [01] of 2, but this is process [01] of 2",
    "another group": "loads the samples for process [01] of 3",
    "over other samples": f"DistributedSampler over 9 samples, but its dataset has {cases.N}",
    "a stream": "Stream, an IterableDataset.*Use a map-style dataset",
    "own order": "ImportanceSampling draws the order of training, but .* use shuffle=True",
    "stale losses": "Use every_epochs=1",
    "by chance without losses": "Tossed keeps a random number of rows.*Use forward_passes='twice'",
    "another seed": "DisagreementError.*\n  seed is 0 on rank 0, and 1 on rank 1",
    "another setting": r"method is UniformSubset\(keep=0.5, .*\) on rank 0, and UniformSubset\(keep=0.6, .*\) on rank 1",
    "another size": "samples is 8 on rank 0, and 16 on rank 1",
    "another sampler seed": "sampler.seed is 0 on rank 0, and 1 on rank 1",
    "too few samples": "the dataset has 1 samples, but there are 2 processes",
    "another epoch": "sampler.set_epoch` sets it is 0 on rank 0, and 1 on rank 1",
}


@two
@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_all_processes(results, case):
    for one in results:
        with pytest.raises(RuntimeError, match=REFUSED[case]):
            raise RuntimeError(one["refusals"][case])


@two
def test_a_state_that_one_process_alone_saves_is_refused_and_the_training_goes_on(results):
    """Within an epoch the other process is in the middle of the gradients, which must not be mixed with a call of the run."""
    found = of_all(results, "one_alone")
    for when in ("within", "between"):
        assert (
            "run.state_dict() was reached in process 0 of 2, but not within 0.3 s in process 1. Call"
            in found[0][when]
        )
    assert found[0]["waits"] == [
        f"{what} was reached in process 0 of 2, but not within 0.3 s in process 1. Still waiting: all processes must reach it."
        for what in ("thresher.attach", "The end of epoch 0")
    ]
    assert found[1]["waits"] == []
    assert [one["undisturbed"] for one in found] == [True, True]


def test_attached_too_early(monkeypatch):
    run = thresher.attach(
        thresher.FullData(),
        loader=cases.loader_of("Shuffle", 0, 1, cases.samples(8)),
        criterion=torch.nn.MSELoss(),
        epochs=1,
    )
    monkeypatch.setattr("thresher.run.several_processes.in_several_processes", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(
        RuntimeError,
        match="before torch.distributed.init_process_group, so each of the 2 processes",
    ):
        iter(run.loader)
    check_attached_late_enough(had_group=True)


@two
@pytest.mark.parametrize(
    ("name", "kept"), [("accumulated", cases.STEPS), ("islice", cases.STEPS), ("break", 7)]
)
def test_the_last_epoch_ends_with_detach(results, name, kept):
    """The losses of its last steps come home, also where the loop left it without a step or a question."""
    warned, trained, entries = zip(*(one["left_open"][name] for one in results), strict=True)
    assert set(warned) == {name != "break"} and set(entries) == {cases.EPOCHS}
    before = sum(int(part.sum()) for part in trained)
    assert before >= 2 * cases.BATCH * kept


@two
def test_one_process_alone_may_log_a_loss_and_not_ask_for_a_plan_after_the_training(results):
    for own, other in zip(*(one["left_open"]["weights"] for one in results), strict=True):
        assert torch.equal(own, other)
    assert (
        f"The samples of epoch {cases.EPOCHS + 1} are not chosen yet: attach got epochs={cases.EPOCHS}"
        in results[0]["left_open"]["length"]
    )
