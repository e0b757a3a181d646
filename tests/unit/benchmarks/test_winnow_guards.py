import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.winnow import guards
from benchmarks.winnow.guards import BEGIN, CHOSEN, END, RULES, SUBJECTS, Job, Watched

from thresher import Winnow
from thresher.records import Records
from thresher.rng import seeded

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "winnow-guards.json", ROOT / "docs" / "winnow.md"

QUIET = dict.fromkeys(RULES)


def planted(spoke_in: str = "") -> dict[Job, dict[str, Any]]:
    """Returns results in which the rule of the library speaks in one training, and nothing else happens."""
    done: dict[Job, dict[str, Any]] = {}
    while waiting := [job for job in guards.jobs(done) if job not in done]:
        for job in waiting:
            epochs = SUBJECTS[job.subject].problem.epochs
            agreement = 0.9 - 1.2 * job.wrong
            seen = {"agreement": agreement, "spread": 0.3, "uniform": float(agreement < 0.5)}
            found: dict[str, Any] = {"metric": 80.0 + job.seed, "cost": 0.5, "cpu_s": 1.0}
            found |= {name: [None, *[value] * (epochs - 1)] for name, value in seen.items()}
            if job.arm == "watched":
                found["spoke"] = QUIET | ({CHOSEN: 4} if job.subject == spoke_in else {})
            if job.arm == "on":
                found |= {"cost": 0.8, "metric": 90.0, "full_from": 4}
            done[job] = found
    return done


# The rules


def losses(level: float, seed: int) -> np.ndarray:
    hard = np.random.default_rng(0).gamma(1.0, 0.4, 200)
    return (level * hard * np.random.default_rng(seed).lognormal(0, 0.2, 200)).astype(np.float32)


def spoken(levels: list[float], others: float = 0.5) -> dict[str, int | None]:
    seen = [(losses(level, number), np.full(50, others, dtype=np.float32)) for number, level in enumerate(levels)]
    return {name: rule(seen) for name, rule in RULES.items()}


def test_no_rule_speaks_where_losses_fall():
    assert spoken([2.0, 1.5, 1.0, 0.9, 0.8]) == QUIET


def test_rules_speak_when_losses_rise_and_those_of_two_in_a_row_wait():
    found = spoken([2.0, 1.0, 1.5, 1.0, 1.6, 1.7])
    assert found["mean loss, once"] == found["log of losses, once"] == 2
    assert found["mean loss, twice"] == found[CHOSEN] == 5


def test_the_gap_to_the_others_widens_where_these_are_learned():
    falling = [np.full(50, level, dtype=np.float32) for level in (2.0, 1.0, 0.3, 0.1)]
    seen = [(losses(1.0, number), others) for number, others in enumerate(falling)]
    assert guards.gap_widens(seen) == 1 and RULES[CHOSEN](seen) is None


def test_losses_that_are_not_finite_speak():
    lost = np.full(200, np.nan, dtype=np.float32)
    seen = [(losses(1.0, 0), losses(1.0, 9)), (lost, lost), (lost, lost)]
    assert {name: rule(seen) for name, rule in RULES.items()} == {name: 2 if name.endswith("twice") else 1 for name in RULES}


def test_who_is_watched_never_acts_and_the_replayed_rule_is_that_of_the_library():
    levels, n, epochs = [2.0, 1.0, 1.8, 0.9, 1.7, 1.8, 1.9, 0.5], 500, 9
    first = {}
    for kind in (Winnow, Watched):
        method = kind(probe=200, probe_times=8)
        records = Records(method.columns(), n, torch.device("cpu"))
        guards.SEEN.clear()
        for epoch in range(epochs):
            plan = method.plan_epoch(records, epoch=epoch, epochs=epochs, generator=seeded(0, epoch))
            records.remember(plan.remember)
            if plan.facts["guard"]:
                first[kind] = epoch - 1
                break
            if plan.refresh is not None:
                records["loss"][plan.refresh] = torch.from_numpy(losses(levels[epoch], epoch)).bfloat16()
    assert first == {Winnow: 5}
    assert len(guards.SEEN) == 8 and RULES[CHOSEN](guards.SEEN) == 5


# What is run


# What is shown


def test_rows_by_hand():
    done = planted("digits")
    rows = {(row["task"], row["wrong"]): row for row in guards.agreement_rows(done)}
    assert rows["digits", 0.0]["fell_back"] == 0 and rows["digits", 0.0]["agreement"] == [0.9, 0.9]
    assert (rows["digits", 0.4]["fell_back"], rows["digits", 0.4]["trainings"]) == (2, 2)
    assert rows["digits", 0.4]["spread_where_low"] == [0.3, 0.3] and "bike" not in {task for task, _ in rows}
    probes = {row["training"]: row for row in guards.probe_rows(done)}
    assert probes["digits"]["spoke"][CHOSEN] == 3 and probes["digits"]["on"] == [90.0] * 3
    assert probes["mnist-5k"]["spoke"] == dict.fromkeys(RULES, 0) and probes["mnist-5k"]["on"] == [80.0, 81.0, 82.0]
    assert (probes["digits"]["cost"], probes["mnist-5k"]["cost"]) == pytest.approx((0.8, 0.5))


def test_tables_stand_between_their_marks():
    page = guards.with_tables(f"a\n{BEGIN}\nold\n{END}\nb\n", planted())
    assert page.startswith(f"a\n{BEGIN}\n") and page.endswith(f"{END}\nb\n") and "old" not in page
    assert "| digits | 40 % | 0.42 to 0.42 | 0.30 to 0.30 | 2 of 2 | 2 of 2 |" in page
    assert guards.with_tables(page, planted()) == page


def test_the_page_and_the_results_are_those_of_the_trainings():
    done, page = guards.load(RESULTS), PAGE.read_text()
    assert not [job for job in guards.jobs(done) if job not in done]
    assert guards.with_tables(page, done) == page
    assert json.loads(RESULTS.read_text()) == json.loads(json.dumps(guards.results(done)))


def test_the_guard_of_the_labels_has_no_false_alarm_and_sees_40_percent():
    rows = guards.agreement_rows(guards.load(RESULTS))
    assert len(rows) == 18
    assert not any(row["fell_back"] for row in rows if not row["wrong"])
    assert all(row["fell_back"] == row["trainings"] for row in rows if row["wrong"] == 0.4)
