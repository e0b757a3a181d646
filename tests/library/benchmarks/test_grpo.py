"""The tables of what skipping saves in GRPOTrainer, and of the arms."""

import json
from pathlib import Path

import pytest
from benchmarks.grpo import arms, step, table
from benchmarks.winnow.jobs import Job, load

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def test_ratios_are_those_of_each_turn():
    found = {
        "plain": [(1.0, 2.0), (2.0, 4.0), (1.0, 1.0)],
        "skips": [(0.5, 1.8), (0.8, 3.0), (0.6, 0.9)],
    }
    assert step.ratios(found, 0) == [0.5, 0.4, 0.6] and step.ratios(found, 1) == pytest.approx(
        [0.9, 0.75, 0.9]
    )
    text = step.text({"1/3": found})
    assert "| 1/3 | 0.50 (0.40 to 0.60) | 0.90 (0.75 to 0.90) | at most 0.70 | met |" in text
    assert "missed" in step.text({"2/3": found})


def test_a_curve_is_read_between_its_points():
    curve = [[0, 0, 0, 0.2], [1, 100, 50, 0.4], [2, 300, 60, 0.3], [3, 400, 90, 0.8]]
    assert table.reward_at(curve, table.GENERATED, 50) == pytest.approx(0.3)
    assert (
        table.reward_at(curve, table.STEPS, 3)
        == 0.8
        == table.reward_at(curve, table.GENERATED, 10_000)
    )
    assert table.until(curve, table.GENERATED, 0.3) == pytest.approx(50)
    assert (
        table.until(curve, table.TRAINED, 0.55) == pytest.approx(75)
        and table.until(curve, table.GENERATED, 0.9) is None
    )


def curve_to(reward, tokens=32_000):
    """Rises evenly from 0 to a reward."""
    return [[step, step * tokens / 10, step * 100, step * reward / 10] for step in range(11)]


def test_tokens_to_the_target_are_paired_and_not_told_where_a_seed_never_reaches_it():
    plain = {0: curve_to(0.8), 1: curve_to(0.4)}
    assert table.target_of(plain) == pytest.approx(0.45)
    assert table.tokens_saved(plain, plain, table.GENERATED) is None
    plain = {0: curve_to(0.8), 1: curve_to(0.8), 2: curve_to(0.8)}
    saved = table.tokens_saved(
        {0: curve_to(1.6), 1: curve_to(1.6), 2: curve_to(0.8)}, plain, table.GENERATED
    )
    assert saved is not None and saved.mean == pytest.approx(-100 / 3) and saved.high > 0


def test_the_tables_are_those_of_the_seeds_that_all_arms_have():
    done = {}
    for task in table.LEVELS:
        for share in arms.SHARES:
            for arm in arms.ARMS:
                for job in arms.looks_of(task, arm, share):
                    done[job] = {"metric": float(job.factor == 1.0)}
                for seed in range(3 if arm == "greso" else 4):
                    reward = {"greso": 0.9, "refill": 0.4}.get(arm, 0.8) + seed / 100
                    done[Job(task, arm, share, 1.0, seed)] = {"points": curve_to(reward)}
    text = table.text(done)
    assert text.count("(3 seeds)") == 4 and "| Greso | 91.0 | +10.0 ± 0.0 | -11 ± 0 % |" in text
    assert "| refill (DAPO) | 41.0 | -40.0 ± 0.0 | 0 of 3 seeds reach it; plain: 3 |" in text
    assert "| Greso | 4 | 0 | 0 | 0 |" in text and "| refill (DAPO) | 0 | 0 | 4 | 0 |" in text
    assert next(arms.ready({})) == Job("wrong digits", "plain", 0.5, 0.15, 1000)
    assert {job.arm for job in arms.ready(done)} == arms.ARMS.keys() - {
        "thompson",
        "placebo",
        "thompson refill",
    }
    assert table.text({}) == "Not measured yet."


def test_an_arm_without_counted_trainings_has_no_row():
    done = {}
    for task in table.LEVELS:
        for share in arms.SHARES:
            for arm in ("plain", "refill"):
                done |= {
                    job: {"metric": float(job.factor == 1.0)}
                    for job in arms.looks_of(task, arm, share)
                }
                done |= {
                    Job(task, arm, share, 1.0, seed): {"points": curve_to(0.8 + seed / 100)}
                    for seed in range(2)
                }
    assert "| refill (DAPO) | 0 | 0 | 0 | 4 |" in table.text(
        done
    ) and "| Greso |" not in table.text(done)
    greso = {job: {"metric": 1.0} for job in arms.looks_of("copies", "greso", 0.5)}
    greso |= {
        Job("copies", "greso", 0.5, 0.15, seed): {"points": curve_to(0.9)} for seed in range(2)
    }
    assert (
        table.text(done | greso).count("| Greso |") == 1
    )  # on its task, and not among the verdicts


def test_the_page_is_that_of_the_results():
    page = (ROOT / "docs" / "evidence" / "grpo.md").read_text()
    assert step.with_table(page, step.text(json.loads((RESULTS / "grpo.json").read_text()))) == page
    assert table.with_tables(page, table.text(load(RESULTS / "grpo-runs.jsonl.gz"))) == page
