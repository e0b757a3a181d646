import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.winnow import batch_norm
from benchmarks.winnow.batch_norm import ARMS, BEGIN, END, SEEDS, Trained, load, markdown, results, rows_of, run, with_table
from benchmarks.winnow.tasks import Sets, problem_of
from torch import nn
from torch.utils.data import TensorDataset

from depth import in_verify

ROOT = Path(__file__).parents[3]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "winnow-batch-norm.json", ROOT / "docs" / "winnow.md"


def planted(seeds: int, arms: list[str]) -> list[Trained]:
    base = {arm: 90.0 - place for place, arm in enumerate(ARMS)}
    return [
        Trained(arm, seed, 0.5, base[arm] + 0.1 * seed, base[arm] + 0.1 * seed - ("drawn" in arm), 1.0)
        for seed in range(seeds)
        for arm in arms
    ]


def test_the_page_and_the_results_are_those_of_the_trainings() -> None:
    done, page = load(RESULTS), PAGE.read_text()
    assert {(one.arm, one.seed) for one in done} == {(arm, seed) for arm in ARMS for seed in range(SEEDS)}
    assert with_table(page, done) == page
    assert json.loads(RESULTS.read_text()) == json.loads(json.dumps(results(done)))


def test_planted_differences_are_found() -> None:
    rows = rows_of(planted(3, [*ARMS]))
    drawn, weighted = rows["winnow, drawn"], rows["winnow, weighted"]
    assert (drawn.n, drawn.own, drawn.anew) == (3, pytest.approx(88.1), pytest.approx(87.1))
    assert drawn.change.mean == pytest.approx(-1) and weighted.change.mean == 0
    assert drawn.to_full is not None and drawn.to_full.mean == pytest.approx(-2)
    assert weighted.to_smaller is not None and weighted.to_smaller.mean == pytest.approx(-2)
    line = next(line for line in markdown(rows).splitlines() if line.startswith("| winnow, drawn |"))
    assert line == "| winnow, drawn | 0.500 | 88.10 | -2.00 ± 0.00 | -1.00 ± 0.00 | 87.10 | -1.00 ± 0.00 | 3 |"


def test_seeds_that_an_arm_lacks_do_not_count() -> None:
    some = [one for one in planted(2, [*ARMS]) if (one.arm, one.seed) != ("smaller", 1)]
    rows = rows_of(some)
    assert {row.n for row in rows.values()} == {1} and "±" not in markdown(rows)
    assert rows_of(planted(2, ["full"])) == {}


def test_the_table_stands_between_its_marks() -> None:
    page = with_table(f"a\n{BEGIN}\nold\n{END}\nb\n", planted(2, [*ARMS]))
    assert page.startswith(f"a\n{BEGIN}\n\n| arm |") and page.endswith(f"\n{END}\nb\n") and "old" not in page


def test_runs_go_on_where_they_were_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    asked: list[Any] = []

    def trained(arm: str, seed: int) -> Trained:
        if len(asked) == 6 and stops:
            raise KeyboardInterrupt
        asked.append((arm, seed))
        return Trained(arm, seed, 0.5, 80.0 + seed, 80.0, 1.0)

    monkeypatch.setattr(batch_norm, "run", trained)
    monkeypatch.setattr("sys.argv", ["batch_norm", "--results", str(file), "--page", str(page)])
    stops = True
    with pytest.raises(KeyboardInterrupt):
        batch_norm.main()
    assert len(load(file)) == 6
    stops = False
    batch_norm.main()
    assert asked == [(arm, seed) for seed in range(SEEDS) for arm in ARMS]
    assert markdown(rows_of(load(file))) in page.read_text()


@in_verify
@pytest.mark.filterwarnings("ignore:Winnow trains on drawn rows")
def test_trainings_of_a_small_task(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 4
    images = torch.randn(1200, 1, 4, 4, generator=generator) + labels[:, None, None, None]
    part = images[200:], labels[200:]
    sets = Sets(TensorDataset(images[:200], labels[:200]), part, part)
    problem = problem_of("fashion-resnet8")

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10))

    task = replace(problem.task, network=network, batch_size=40)
    monkeypatch.setattr(batch_norm, "problem_of", lambda _: replace(problem, task=task, sets=lambda: sets, epochs=3))
    found = {arm: run(arm, 0) for arm in ARMS}
    assert all(one.own != one.anew for one in found.values())
    assert [one.cost for one in found.values()] == [1.0, 0.5, 0.5, 0.5]
    assert found["winnow, drawn"].own != found["winnow, weighted"].own
