"""The benchmark of large datasets: it measures what it says, judges, and writes."""

import json
from pathlib import Path

from benchmarks import many_ranks, scale

from depth import in_verify


@in_verify
def test_an_epoch_of_several_processes_is_measured():
    found = many_ranks.measure(20_000, ranks=2)
    assert list(found["first"]) == list(found["others"]) == list(scale.PARTS)
    assert min(found["seconds"].values()) > 0 and found["first"]["gathering"] > 0
    rows = scale.rows_of_ranks(found)
    assert len(rows) == 2 * len(scale.PARTS) and all(one["limit"] is None for one in rows)
    judged = scale.rows_of_ranks({**found, "n": scale.N, "others": dict.fromkeys(scale.PARTS, 2.6)})
    assert [
        one["name"] for one in judged if not one["ok"] and one["name"].startswith("others")
    ] == [
        "others: gathering",
        "others: planning",
        "others: rest",
    ]


def test_the_page_shows_the_results():
    results = json.loads(scale.RESULTS.read_text())
    page = Path(scale.__file__).parents[1] / "docs" / "scale.md"
    assert results["n"] == scale.N and not results["missed"]
    assert (
        "\n".join((scale.MARKS[0], "", scale.page_part(results), "", scale.MARKS[1]))
        in page.read_text()
    )
