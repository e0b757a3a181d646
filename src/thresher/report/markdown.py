"""A comparison as Markdown, for a pull request or a message: what to do, and the table of verdicts."""

from typing import Any

from thresher.experiments.comparison.closing import closing, time_beside_cost
from thresher.experiments.comparison.rates import rates_sentences
from thresher.experiments.comparison.summary import is_share
from thresher.experiments.training.tables import markdown_table
from thresher.report.loading import ResultsDict

MEASURES = ("cost", "CPU time", "memory of a step")


def as_markdown(results: ResultsDict) -> str:
    """Returns the results of a comparison as Markdown.

    Args:
        results: Content of results.json.
    """
    seeds = len({run["seed"] for run in results["runs"]})
    metric, share = results["runs"][0]["metric"]["name"], is_share(results["runs"])
    title = f"**{results['task']}**, {results['epochs']} epochs, {seeds} seed{'s' * (seeds > 1)}, {results['device']}"
    header = (
        "method",
        f"{metric}, %" if share else metric,
        "difference to full",
        "cost",
        "CPU time",
        "memory of a step",
        "verdict",
    )
    rows = [_cells(row, share) for row in results["summary"]]
    return (
        "\n\n".join(
            [title, *closing(results), *time_beside_cost(results), *rates_sentences(results), markdown_table(header, rows)]
        )
        + "\n"
    )


def _cells(row: dict[str, Any], share: bool) -> tuple[str, ...]:
    scale, form, signed = (100, ".2f", "+.2f") if share else (1, ".4g", "+.3g")
    spread = "" if row["std"] is None else f" ± {scale * row['std']:{form}}"
    bounds = "" if row["ci95"] is None else " [{}, {}]".format(*(f"{scale * bound:{signed}}" for bound in row["ci95"]))
    difference = "" if row["difference"] is None else f"{scale * row['difference']:{signed}}{bounds}"
    name = f"`{row['method']}`" if row["control_of"] is None else f"  `{row['method']}` for `{row['control_of']}`"
    ratios = (row.get("cpu_ratio"), row.get("memory_ratio"))
    shares = ("unknown" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    return name, f"{scale * row['mean']:{form}}{spread}", difference, f"{row['cost_ratio']:.3f}", *shares, row["verdict"]
