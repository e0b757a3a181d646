"""Times the choice of the rows of a batch: each batch method beside Big Loss, at 128 rows and 10 classes.

The time goes from the outputs of the network to the plan: the signals that the method needs, and the choice.
`python -m benchmarks.selection_cost [--quick] [--out FILE.json] [--device cuda]`; exit code 1 where a method takes more than 3
times as long as Big Loss and its card does not say why.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thresher
from benchmarks.measure import Side, compare, ratios_table
from benchmarks.overhead import about
from thresher import methods, rng
from thresher.attribution.rows import RowLayout
from thresher.losses.adapters import adapt
from thresher.methods.contract import BatchMethod, requirements_of
from thresher.scores import Scores

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "selection_cost.json"
ROWS, CLASSES, FEATURES, KEEP = 128, 10, 64, 0.25
LIMIT = 3.0
SETTINGS: dict[str, dict[str, Any]] = {
    "rho_loss": {"irreducible": Scores(torch.arange(ROWS), torch.linspace(0, 1, ROWS))}
}
"""Settings that methods require."""
CARD_SAYS_WHY = (
    "ada_selection",
    "batch_importance",
    "div_bs",
    "threshold_keep",
)
"""Methods that may take longer than the limit, because their cards give the reason."""


def candidates() -> dict[str, BatchMethod]:
    """Returns every registered method that chooses inside the batch, at one share kept."""
    found: dict[str, Any] = {}
    for name, info in methods.infos().items():
        if info.stage == "batch" and name != "big_loss":
            found[name] = methods.create(name, keep=KEEP, **SETTINGS.get(name, {}))
    return found


def choosing(
    method: BatchMethod, outputs: torch.Tensor, targets: torch.Tensor
) -> Callable[[object], None]:
    """Returns a function that makes the choice of one step; the state goes from call to call."""
    adapter, ids = adapt(nn.CrossEntropyLoss()), torch.randperm(ROWS).to(outputs.device)
    wanted, layout = {*requirements_of(method).signals}, RowLayout(ROWS)
    feature = torch.randn(ROWS, FEATURES, device=outputs.device)
    state, step = method.init_state(), 0

    def choose(_: object) -> None:
        nonlocal state, step
        signals = (
            adapter.signals(outputs, targets, layout, wanted - {"loss", "feature"})
            if wanted
            else {}
        )
        if "feature" in wanted:  # of a pass that is not timed here
            signals["feature"] = feature
        _, state = method.plan_batch(
            {"id": ids, **signals}, state, step=step, generator=rng.seeded(0, step)
        )
        step += 1

    return choose


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns 1 where a limit is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.selection_cost", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="measure a few rounds only")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file for the results (default: %(default)s)"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    outputs = torch.randn(ROWS, CLASSES, device=given.device)
    targets = torch.randint(CLASSES, (ROWS,), device=given.device)
    sides = [
        Side(
            name, choosing(method, outputs, targets), limit=None if name in CARD_SAYS_WHY else LIMIT
        )
        for name, method in candidates().items()
    ]
    baseline = Side("big_loss", choosing(thresher.BigLoss(keep=KEEP), outputs, targets))
    pairs, calls = (3, 5) if given.quick else (41, 50)
    rows = compare(baseline, sides, pairs=pairs, calls=calls, warm_up=20, device=given.device)
    print(ratios_table(rows))
    missed = [row.name for row in rows if not row.ok]
    results = {
        "benchmark": "selection_cost",
        "quick": given.quick,
        **about(given.device),
        "missed": missed,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({**results, "measured": [row.as_dict() for row in rows]}, indent=1) + "\n"
    )
    print(f"{len(missed)} limits missed" + "".join(f"\n  {one}" for one in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
