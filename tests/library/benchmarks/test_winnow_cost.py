"""The benchmark of what Winnow costs: its loops, its arithmetic, its verdicts, and that it runs and writes."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import winnow_cost
from benchmarks.marks import between_marks
from benchmarks.measure import Interval
from benchmarks.winnow_cost import LIMIT, SHARES, Found, Sizes, epoch_figures, plan_figures
from torch.utils.data import TensorDataset

from thresher_lab.tasks.base import Data, Task
from thresher_lab.tasks.networks import perceptron

PAGE = Path(__file__).parents[3] / "docs" / "evidence" / "winnow-measured.md"


def interval(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high, 0.97)


def tiny(samples: int = 320) -> tuple[Task, Data]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 1, 4, 4, generator=generator)
    data = Data(
        TensorDataset(images, torch.arange(samples) % 10), images, torch.arange(samples) % 10
    )
    return Task(
        "tiny", lambda _: None, lambda _: data, lambda: perceptron(16), lr=0.01, batch_size=64
    ), data


class Counted:
    """A model that notes the sizes of its batches."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __call__(self, module: Any, inputs: Any) -> None:
        self.sizes.append(len(inputs[0]))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.35, 2 / 64])
def test_by_hand_has_as_many_steps_and_rows_as_winnow(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    task, data = tiny()
    sizes: dict[str, list[int]] = {"hand": [], "winnow": []}
    build = Task.build

    def noting(self: Task, seed: int) -> Any:
        model = build(self, seed)
        model.register_forward_pre_hook(Counted(current))
        return model

    monkeypatch.setattr(Task, "build", noting)
    current = sizes["hand"]
    list(islice(winnow_cost.by_hand(task, data, share), 10))
    current = sizes["winnow"]
    list(islice(winnow_cost.with_winnow(task, data, share, 3), 10))
    assert sizes["hand"] == sizes["winnow"] and sum(sizes["hand"]) == 2 * round(share * 320)


def test_what_each_side_takes_makes_the_figures() -> None:
    seconds = {"full": [9.0], "again": [11.0], "hand few": [1.0], "winnow few": [1.5]}
    seconds |= {"hand 0.5": [5.2], "winnow 0.5": [5.3], "hand 0.35": [3.5], "winnow 0.35": [4.2]}
    seconds |= {"steps 0.5": [5.0], "steps 0.35": [3.5]}
    found = {one.name: one for one in epoch_figures(seconds)}
    assert {name: one.value.median for name, one in found.items()} == pytest.approx(
        {
            "full training again (A/A)": 11 / 9,
            "by hand at 0.5, over share": 1.04,
            "Winnow at 0.5, over share": 1.06,
            "Winnow at 0.5, over by hand": 5.3 / 5.2,
            "Winnow at 0.5 in fewer steps, over share": 1.0,
            "by hand at 0.35, over share": 1.0,
            "Winnow at 0.35, over share": 1.2,
            "Winnow at 0.35, over by hand": 1.2,
            "Winnow at 0.35 in fewer steps, over share": 1.0,
            "step of 2 rows by hand, over a full step": 0.1,
            "step of 2 rows with Winnow, over a full step": 0.15,
        }
    )
    limits = {name for name, one in found.items() if one.limit == LIMIT}
    assert limits == {
        f"Winnow at {share:g}, over {what}" for share in SHARES for what in ("share", "by hand")
    }
    informing = {one.name: one.limit for one in epoch_figures(seconds, short_steps=True)}
    assert (
        informing["Winnow at 0.5, over by hand"] is None
        and informing["Winnow at 0.5, over share"] == LIMIT
    )


@pytest.mark.parametrize(
    ("value", "by_hand", "verdict"),
    [
        (interval(1.0, 1.05), None, "met"),
        (interval(1.04, 1.06), interval(1.1, 1.2), "cannot tell"),
        (interval(1.06, 1.1), None, "missed"),
        (interval(1.06, 1.1), interval(1.0, 1.2), "missed"),
        (interval(1.3, 1.4), interval(1.06, 1.2), "out of reach"),
    ],
)
def test_a_limit_is_judged_by_the_interval(
    value: Interval, by_hand: Interval | None, verdict: str
) -> None:
    assert Found("x", value, LIMIT, by_hand).verdict == verdict
    assert Found("x", value).verdict == ""


def test_plans_have_a_limit_and_the_rest_informs() -> None:
    ratios = {
        "again": [1.0],
        "plan, records known": [2.0],
        "plan, before records": [4.0],
        "start of an epoch": [9.0],
    }
    found = plan_figures(ratios)
    assert [one.verdict for one in found] == ["", "met", "missed", ""]
    assert found[0].name == "torch.randperm again (A/A)"


class Here:
    """A pool that is no process of its own."""

    def __init__(self, _: int) -> None: ...

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...

    def apply(self, function: Any, arguments: Sequence[Any]) -> Any:
        return function(*arguments)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winnow_cost, "get_context", lambda _: SimpleNamespace(Pool=Here))
    monkeypatch.setattr(winnow_cost, "networks", lambda _: {"tiny": tiny, "plain CNN": tiny})
    monkeypatch.setattr(
        winnow_cost, "QUICK", Sizes(plan=5000, pairs=2, samples=320, slow=64, rounds=1, processes=2)
    )


@pytest.mark.parametrize(("high", "code"), [(1.04, 0), (1.2, 1)])
def test_parts_that_are_not_measured_keep_their_figures(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    high: float,
    code: int,
) -> None:
    def table(part: str, value: Interval) -> dict[str, Any]:
        return {"part": part, "on": part, "figures": [Found("x", value, LIMIT).as_dict()]}

    out = tmp_path / "found.json"
    tables = [table("epochs", interval(1.06, high + 0.03)), table("slow", interval(9, 9))]
    out.write_text(json.dumps({"tables": tables, "quick": False}))
    monkeypatch.setattr(
        winnow_cost, "measured", lambda part, _: iter([table(part, interval(1.0, high))])
    )
    assert winnow_cost.main(["--only", "slow", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert written["missed"] == ["epochs: x"] and [
        one["value"]["high"] for one in map(only, written["tables"])
    ] == [
        pytest.approx(high + 0.03),
        high,
    ]
    assert written["cannot_tell"] == ["slow: x"] * code
    assert winnow_cost.main(["--only", "epochs", "slow", "--out", str(out)]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        winnow_cost.main(["--quick", "--only", "slow", "--out", str(out)])
    assert "was measured without --quick: give another --out" in " ".join(
        capsys.readouterr().err.split()
    )


def only(table: dict[str, Any]) -> dict[str, Any]:
    (figure,) = table["figures"]
    return figure


def test_the_page_is_that_of_the_results() -> None:
    found = (
        json.loads(winnow_cost.RESULTS.read_text())["tables"]
        if winnow_cost.RESULTS.exists()
        else []
    )
    page = PAGE.read_text()
    assert between_marks(page, *winnow_cost.MARKS, winnow_cost.page_part(found)) == page
