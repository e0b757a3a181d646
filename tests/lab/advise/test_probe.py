import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import in_verify
from thresher import methods
from thresher_lab.advise import probe as probing
from thresher_lab.advise.forecast import (
    all_learned,
    forecast,
    is_foreseeable,
    planned_shares,
    saved_by_plans,
)
from thresher_lab.advise.pace import Pace, Spent, median_seconds, pace_of, prepared_loader, take_turns, torch_threads
from thresher_lab.advise.probe import Probe, RecordSignals
from thresher_lab.recipes.running import task_of
from thresher_lab.training.specs import MethodSpec, parse_methods

CPU = torch.device("cpu")
COMPUTING = Pace(loader=0.0, forward=2.0, backward=4.0, optimizer=1.0, scoring=1.75)
WAITING = Pace(loader=93.0, forward=2.0, backward=4.0, optimizer=1.0, scoring=1.75)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(probing, "TIMED_ROUNDS", 1)
    monkeypatch.setattr(probing, "TIMED_SECONDS", 0.01)


def signals(loss, correct=True, confidence=1.0):
    n = len(loss)
    return {
        "loss": torch.tensor(loss),
        "correct": torch.full((n,), correct),
        "confidence": torch.full((n,), confidence),
    }


# The model of time


def test_loading_and_computing_take_their_sum_or_the_longer_of_the_two():
    pace = Pace(loader=3.0, forward=1.0, backward=2.0, optimizer=1.0, scoring=0.5)
    assert (pace.compute, pace.full, pace.waiting) == pytest.approx((4.0, 7.0, 3 / 7))
    assert pace.step(1.0) == 4.0
    hidden = Pace(3.0, 1.0, 2.0, 1.0, 0.5, overlap=1.0)
    assert (hidden.full, hidden.waiting, hidden.step(1.0)) == (4.0, 0.0, 3.0)
    assert Pace(3.0, 1.0, 2.0, 1.0, 0.5, overlap=0.5).full == 5.5
    assert Pace(8.0, 1.0, 2.0, 1.0, 0.5, overlap=1.0).waiting == 0.5


def test_two_passes_break_even_where_scoring_costs_what_leaving_out_saves():
    keep = COMPUTING.break_even
    assert keep == pytest.approx(0.75)
    assert COMPUTING.scoring + keep * COMPUTING.compute == pytest.approx(COMPUTING.compute)


def test_parts_are_differences_of_growing_pieces():
    seconds = {"loader": 3.0, "forward": 1.0, "both": 3.0, "compute": 4.0, "loop": 5.5, "scoring": 0.5}
    pace = pace_of(seconds)
    assert (pace.forward, pace.backward, pace.optimizer) == (1.0, 2.0, 1.0)
    assert pace.overlap == 0.5 and pace.full == seconds.pop("loop")
    assert pace_of(seconds).overlap == 0.0


def test_a_smaller_batch_takes_what_the_line_through_half_and_whole_ones_says():
    pace = Pace(loader=0.0, forward=2.0, backward=6.0, optimizer=0.0, scoring=1.0, half=6.0)
    assert (pace.half_share, pace.of_smaller(1.0), pace.of_smaller(0.5)) == (0.75, 1.0, 0.75)
    assert pace.of_smaller(0.25) == pytest.approx(0.625)
    assert Pace(0.0, 2.0, 6.0, 0.0, 1.0).of_smaller(0.3) == pytest.approx(0.3)
    assert Pace(0.0, 2.0, 6.0, 0.0, 1.0, half=9.0).half_share == 1.0
    faster = Pace(0.0, 2.0, 6.0, 0.0, 1.0, half=2.0)
    assert faster.of_smaller(0.25) == pytest.approx(0.125)
    seconds = {"loader": 1.0, "forward": 2.0, "both": 8.0, "compute": 8.0, "scoring": 1.0, "half": 6.0}
    assert pace_of(seconds).half == 6.0


@pytest.mark.parametrize(("loop", "overlap"), [(9.0, 0.0), (7.0, 0.0), (4.0, 1.0), (3.5, 1.0)])
def test_an_overlap_is_a_share_whatever_was_measured(loop, overlap):
    seconds = {"loader": 3.0, "forward": 4.5, "both": 4.2, "compute": 4.0, "loop": loop, "scoring": 0.5}
    pace = pace_of(seconds)
    assert pace.overlap == overlap
    assert (pace.forward, pace.backward, pace.optimizer) == (4.0, 0.0, 0.0)


def test_what_disturbs_a_whole_round_changes_no_ratio():
    slow = itertools.chain([1.0] * 2, [1.0, 1.0, 5.0, 5.0, 2.0, 2.0])  # once to warm up, then three rounds
    sides = {"base": lambda: Spent(10 * next(slow), 8.0), "half": lambda: Spent(5 * next(slow), 2.0)}
    assert median_seconds(sides, 3, seed=0) == {"base": 20.0, "half": 10.0}


def test_a_side_that_waits_for_nothing_is_held_against_the_first_by_cpu_time():
    wall = itertools.cycle([10.0, 30.0, 20.0])
    sides = {"base": lambda: Spent(20.0, 8.0), "half": lambda: Spent(next(wall), 2.0)}
    assert median_seconds(sides, 3, seed=0, by_cpu={"half"}) == {"base": 20.0, "half": 5.0}
    assert median_seconds(sides, 3, seed=0, by_cpu={"base", "half"}) == {"base": 8.0, "half": 2.0}


def test_turns_are_taken_in_changing_order():
    calls = []
    sides = {name: (lambda name=name: calls.append(name) or Spent(1.0, 1.0)) for name in "abcd"}
    median_seconds(sides, 6, seed=1)
    rounds = [tuple(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert rounds[0] == tuple("abcd") and all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds[1:])) > 1


def test_what_was_put_off_is_done_once_a_round_and_counts():
    seen = []
    sides = [lambda: seen.append("a") or Spent(1.0, 2.0), lambda: seen.append("b") or Spent(3.0, 4.0)]
    last = [None, lambda: seen.append("rest of b") or Spent(10.0, 20.0)]
    assert take_turns(sides, rounds=2, seed=0, calls=3, warm_up=0, last=last) == [[(3.0, 6.0)] * 2, [(19.0, 32.0)] * 2]
    assert [sorted(seen[i : i + 7]) for i in (0, 7)] == [["a"] * 3 + ["b"] * 3 + ["rest of b"]] * 2
    assert seen[6] == seen[13] == "rest of b"


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before


# What methods would leave out


def test_kakurenbo_follows_its_schedule_where_all_is_learnt():
    known = all_learned(signals([0.5] * 100, correct=False, confidence=0.1))
    left_out, forwarded = planned_shares(thresher.Kakurenbo(), [known], 10, seed=0)
    by_epoch = [0, 30, 30, 24, 24, 24, 18, 18, 12, 12]
    assert left_out == forwarded == pytest.approx(sum(by_epoch) / 1000)


def test_kakurenbo_hides_only_what_is_right_and_confident():
    doubtful = signals([0.01 * i for i in range(100)], confidence=0.5)
    assert planned_shares(thresher.Kakurenbo(), [doubtful], 10, seed=0) == (0.0, 0.0)
    doubtful["confidence"][:10] = 0.9
    assert planned_shares(thresher.Kakurenbo(), [doubtful], 10, seed=0)[0] == pytest.approx(9 * 10 / 1000)


def test_infobatch_prunes_half_of_what_is_below_the_mean_in_its_epochs():
    known = signals([0.0] * 60 + [1.0] * 40)
    left_out, forwarded = planned_shares(thresher.InfoBatch(), [known], 8, seed=0)
    assert (left_out, forwarded) == (pytest.approx(6 * 30 / 800), 0.0)
    assert planned_shares(thresher.InfoBatch(), [all_learned(known)], 8, seed=0)[0] == pytest.approx(6 * 50 / 800)


def test_an_epoch_is_planned_by_what_is_known_before_it_and_then_by_the_last():
    known = [signals([0.0] * learnt + [1.0] * (100 - learnt)) for learnt in (20, 40, 80)]
    by_epoch = [0, 10, 20, 40, 40, 40, 40, 0]
    assert planned_shares(thresher.InfoBatch(), known, 8, seed=0)[0] == pytest.approx(sum(by_epoch) / 800)


def test_what_is_left_out_is_not_loaded_and_what_is_forwarded_is():
    assert saved_by_plans(WAITING, WAITING.compute, 0.3, 0.0) == pytest.approx(0.3)
    assert saved_by_plans(WAITING, WAITING.compute, 0.3, 0.3) == pytest.approx(0.3 * (7 - 1.75) / 100)
    assert saved_by_plans(COMPUTING, COMPUTING.compute, 0.3, 0.3) == pytest.approx(0.3 * 0.75)
    assert saved_by_plans(COMPUTING, 7.7, 0.0, 0.0) == pytest.approx(-0.1)


def test_smaller_batches_save_what_they_do_not_compute_and_load():
    pace = Pace(loader=2.0, forward=2.0, backward=6.0, optimizer=0.0, scoring=1.0, half=6.0)
    assert saved_by_plans(pace, 8.0, 0.5, 0.0) == pytest.approx(0.5)
    assert saved_by_plans(pace, 8.0, 0.5, 0.0, in_batches=True) == pytest.approx(1 - (6 + 1) / 10)
    known = signals([0.5] * 10) | {"uncertainty": torch.ones(10)}
    assert planned_shares(thresher.Winnow(share=0.3), [known], 4, 0)[0] == 0.7
    for text, saves in (("winnow:share=0.5", 0.3), ("uniform:keep=0.5:spend=batches", 0.3), ("uniform:keep=0.5", 0.5)):
        [spec] = parse_methods(text)
        assert forecast(spec, None, pace, {spec.label: 8.0}, [known], 4, 0)["saves"] == pytest.approx(saves)


def rows(pace, computes, losses=(0.0, 0.0, 0.0, 0.1)):
    found = []
    for text, compute in computes.items():
        [spec] = parse_methods(text)
        row = forecast(spec, None, pace, {spec.label: compute}, [signals(list(losses))], 20, 0)
        found.append(row)
    return {row["method"]: row for row in found}


def test_batch_methods_save_what_they_do_not_compute():
    found = rows(COMPUTING, {"random_backprop:keep=0.5": 3.5})["random_backprop:keep=0.5"]
    assert found["saves"] == found["at_most"] == pytest.approx(0.5)
    found = rows(WAITING, {"random_backprop:keep=0.5": 3.5})["random_backprop:keep=0.5"]
    assert found["saves"] == pytest.approx(0.035)


def test_a_refused_method_has_a_reason_and_no_figures():
    row = forecast(MethodSpec("kakurenbo"), "it cannot", COMPUTING, {}, [signals([1.0])], 20, 0)
    assert row["refused"] == "it cannot" and "saves" not in row


# The probe


def test_held_batches_are_those_of_the_dataset():
    data = TensorDataset(torch.arange(70.0).unsqueeze(1), torch.arange(70))
    loader = prepared_loader(DataLoader(data, batch_size=16), 3, CPU, seed=0)
    batches = list(loader)
    assert [len(y) for _, y in batches] == [16, 16, 16]
    assert all(torch.equal(x.squeeze(1), y.float()) for x, y in batches)
    assert len(torch.cat([y for _, y in batches]).unique()) == 48
    assert all(again is first for (again, _), (first, _) in zip(loader, batches, strict=True))
    loader.dataset.times = 2
    assert all(again is batches[i % 3][1] for i, (_, again) in enumerate(loader)) and len(loader) == 6
    assert [len(y) for _, y in prepared_loader(DataLoader(data, batch_size=100), 3, CPU, seed=0)] == [70]
    halves = prepared_loader(DataLoader(data, batch_size=16), 3, CPU, seed=0, halves=True)
    assert [len(y) for _, y in halves] == [8, 8, 8]


def test_held_batches_are_collated_as_the_user_does():
    data = TensorDataset(torch.arange(8.0).unsqueeze(1), torch.arange(8))

    def collate(samples):
        return torch.stack([2 * x for x, _ in samples]), torch.stack([y for _, y in samples])

    loader = prepared_loader(DataLoader(data, batch_size=4, collate_fn=collate), 2, CPU, seed=0)
    assert all(torch.equal(x.squeeze(1), 2.0 * y) for x, y in loader)
    run = thresher.attach(
        RecordSignals(thresher.FullData().columns()), loader=loader, criterion=torch.nn.MSELoss(reduction="none"), epochs=1
    )
    assert [len(y) for _, y in run.loader] == [4, 4]


def probe(epochs=3):
    task = task_of("digits@200")
    training = task.training(task.load(None), 0)
    return Probe(training, epochs=epochs, seed=0), training


def test_the_first_epochs_train_and_remember_what_methods_ask_for():
    one, training = probe(epochs=2)
    before = [p.clone() for p in training.model.parameters()]
    found = one.first_epochs(parse_methods("kakurenbo,infobatch,random_backprop"), 60)
    assert len(found) == 2 and (one.seen, one.trained) == (200, 2.0)
    for known in found:
        assert set(known) == {"loss", "correct", "confidence"} and known["correct"].dtype is torch.bool
        assert all(len(values) == 200 for values in known.values()) and known["loss"].isfinite().all()
    assert found[1]["loss"].mean() < found[0]["loss"].mean()
    assert any(not torch.equal(p, q) for p, q in zip(before, training.model.parameters(), strict=True))


def test_the_first_epoch_stops_when_its_time_is_up():
    one, _ = probe()
    [found] = one.first_epochs(parse_methods("infobatch"), 1e-9)
    assert (one.seen, one.trained) == (64, 64 / 200) and len(found["loss"]) == 64


def test_a_later_epoch_that_is_not_finished_does_not_count(monkeypatch):
    seconds = iter([0.0, *[1.0] * 6, 3.0])  # at the beginning, and after each of four steps an epoch
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    one, _ = probe()
    found = one.first_epochs(parse_methods("infobatch"), 2.0)
    assert [len(known["loss"]) for known in found] == [200] and one.trained == pytest.approx(1 + 192 / 200)


def test_timing_leaves_the_weights_as_they_are(quick):
    one, training = probe()
    specs = parse_methods(
        "kakurenbo,selective_backprop:keep=0.33:forward_passes=once,selective_backprop:keep=0.5:score_every=2"
    )
    before = [p.detach().clone() for p in training.model.parameters()]
    one.hold_still(specs)
    pace, own = one.pace(specs)
    assert all(torch.equal(p, q) for p, q in zip(before, training.model.parameters(), strict=True))
    assert set(own) == {spec.label for spec in specs} and all(seconds > 0 for seconds in own.values())
    assert pace.compute > pace.forward > 0 and pace.overlap == 0 and one.fallback is None


def test_parts_in_evaluation_mode_stay_there(quick):
    task = task_of("digits@200")
    training = task.training(task.load(None), 0)
    training.model.train()[0].eval()
    modes = [part.training for part in training.model.modules()]
    probe = Probe(replace(training, evaluate=lambda model: float(model.train().training)), epochs=3, seed=0)
    probe.try_evaluate()
    assert [part.training for part in training.model.modules()] == modes and False in modes
    probe._scoring()
    assert [part.training for part in training.model.modules()] == modes


def test_a_loader_without_a_batch():
    task = task_of("digits@20")
    training = task.training(task.load(None), 0)
    loader = DataLoader(training.loader.dataset, batch_size=64, drop_last=True)
    with pytest.raises(ValueError, match="the loader of 20 samples has no batch; give it more of them, or drop_last=False"):
        Probe(replace(training, loader=loader), epochs=3, seed=0)


@pytest.mark.parametrize(
    ("name", "settings", "foreseen"),
    [
        ("kakurenbo", {}, True),
        ("importance_sampling", {}, True),
        ("ada_selection", {}, True),
        ("forgetting", {}, False),
        ("rais", {}, False),
        ("grad_match", {}, False),
        ("prune", {"scores": "scores.parquet"}, False),
    ],
)
def test_which_plans_can_be_foreseen(name, settings, foreseen):
    assert is_foreseeable(methods.create(name, **settings)) is foreseen


def test_methods_of_several_stages_cannot():
    assert not is_foreseeable([methods.create("uniform"), methods.create("random_backprop")])
    [spec] = parse_methods("uniform+random_backprop")
    refusal = probe()[0].refusal(spec)
    assert refusal == "advise tries out methods that choose in the batch, or by the last signals of samples, one at a time"
    row = forecast(spec, refusal, COMPUTING, {}, [signals([1.0])], 20, 0)
    assert (row["stage"], row["refused"]) == (None, refusal)


@in_verify
def test_batches_of_as_many_samples_as_a_sample_has_rows_are_prepared_and_timed():
    """A collate function of the probe's own could have put the samples along either dimension; the default one does not."""
    task = task_of("relief-made@64")
    training = task.training(task.load(None), 0)
    assert next(iter(training.loader))[1].shape[:2] == (32, 32)
    _, times = Probe(training, epochs=2, seed=0).pace(parse_methods("kakurenbo"))
    assert all(seconds > 0 for seconds in times.values())
