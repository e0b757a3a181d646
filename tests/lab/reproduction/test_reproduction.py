"""A table from its runs to its page, on a small part of the digits."""

import base64
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from depth import in_verify
from in_process import InProcessWorkers
from thresher.scores import Scores
from thresher_lab import reproduction as papers
from thresher_lab.cli.reproduce import reproduce as command
from thresher_lab.comparison import compare as comparison
from thresher_lab.comparison.compare import Watcher
from thresher_lab.comparison.workers import RunError
from thresher_lab.report.table_charts import table_chart
from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    Artefact,
    ArtefactPart,
    Claim,
    PagePicture,
    PageTable,
    TableChart,
    batches_of,
    cost,
    minus,
    reproduce,
)
from thresher_lab.reproduction.page import chart_file, pictures_of, reproduction_page, summary_sentence
from thresher_lab.training.specs import parse_methods

SMALL = Artefact(
    name="small",
    paper="A paper, table 1",
    shows="what half of the samples do",
    here="Digits",
    parts=[
        ArtefactPart("half", "digits@100", 1, {"half": "random_backprop:keep=0.5"}, {"half": "12.3"}, controls=("uniform",)),
        ArtefactPart("pruned", "digits@100", 1, {"pruned": "prune:scores={scores}:keep=0.5"}, scores=("el2n", 1, 1)),
    ],
    claims=[
        Claim(
            "half of the samples cost less", minus(cost("half", FULL_ROW), cost("half", "half")), counted=True, says="Table 1"
        ),
        Claim("they cost less than a quarter", minus(lambda *_: 0.25, cost("half", "half")), counted=True, says="Table 1"),
        Claim(
            "they take less than no time",  # in steps: a busy machine may not tell by its seconds
            lambda measured, seed: -measured["half"]["half"][seed]["cost"]["steps"] - 0.01 * seed,
            says="Table 1: no time",
        ),
    ],
)

app = typer.Typer()
app.command()(command)


class Counting(Watcher):
    def __init__(self):
        self.trained = 0

    def finished(self, job, run, *, reused):
        self.trained += not reused


@pytest.fixture(scope="module", autouse=True)
def _in_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "Workers", InProcessWorkers)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    watcher = Counting()
    found = reproduce(SMALL, work, jobs=1, watcher=watcher)
    return work, found, watcher.trained


def test_what_a_table_says(made):
    _, found, trained = made
    # Full training is shared by both parts.
    assert trained == 3 * (1 + 2 + 1)
    assert [claim["verdict"] for claim in found["claims"]] == ["holds by count", "fails by count", "not reproduced"]
    assert found["verdict"] == "not reproduced" and found["seeds"] == [0, 1, 2]
    half, pruned = found["tables"]
    assert [row[0].strip() for row in half["rows"]] == ["full", "half", "random samples at the cost of half"]
    assert half["rows"][1][-1] == "12.3" and pruned["rows"][1][0] == "pruned"
    assert half["header"][-3:-1] == ["steps", "batches"]
    assert [row[-3:-1] for row in half["rows"]] == [["2", "full"], ["2", "as selected"], ["1", "full"]]
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", half["rows"][0][1])
    assert [part["name"] for part in found["parts"]] == ["half", "pruned"] and found["parts"][0]["metric"] == "accuracy"


def test_finished_runs_and_scores_are_not_made_again(made):
    work, found, _ = made
    (scores,) = (work / "scores").iterdir()
    written, watcher = scores.stat().st_mtime_ns, Counting()
    assert reproduce(SMALL, work, jobs=1, watcher=watcher) == found
    assert watcher.trained == 0 and scores.stat().st_mtime_ns == written


def test_the_page_tells_first_what_did_not_reproduce(made):
    found = made[1]
    good = {**found, "name": "good", "paper": "Another", "verdict": "reproduced", "claims": found["claims"][:1]}
    text = reproduction_page([good, found])
    assert text.index('## <a id="small"></a>A paper, table 1: not reproduced') < text.index("Another: reproduced")
    assert "| [Another](#good) | what half of the samples do | reproduced | 1 holds by count |" in text
    assert "| 1 not reproduced, 1 holds by count, 1 fails by count |" in text
    failed, rest = text.split("All tables and figures:\n")
    assert "| [A paper, table 1](#small) | Table 1: no time | they take less than no time | -" in failed
    assert "less than no time" in rest and "| Table 1 | half of the samples cost less |" in rest
    assert "half of the samples cost less" not in failed and "did not reproduce:" not in reproduction_page([good])
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        (["reproduced"] * 7 + ["not reproduced"] * 4 + ["cannot tell"] * 11, "7 reproduce, 4 do not, and 11 need more seeds"),
        (["reproduced", "not reproduced", "cannot tell"], "1 reproduces, 1 does not, and 1 needs more seeds"),
    ],
)
def test_the_page_says_how_many_reproduce(made, verdicts, sentence):
    results = [{**made[1], "verdict": verdict} for verdict in verdicts]
    text = f"Of {len(verdicts)} tables and figures, {sentence} to decide at least one claim."
    assert summary_sentence(results) == text and f"\n{text}\n" in reproduction_page(results)


def test_the_page_of_this_repository_is_that_of_its_results():
    root = Path(__file__).parents[3]
    files = {name: root / "benchmarks" / "results" / "reproduce" / f"{name}.json" for name in papers.ARTEFACTS}
    at_full_size = sorted((root / "benchmarks" / "results" / "reproduce").glob("*@*.json"))
    assert at_full_size
    found = [json.loads(file.read_text()) for file in (*files.values(), *at_full_size) if file.exists()]
    missing = [name for name, file in files.items() if not file.exists()]
    charts = [name for name, artefact in papers.ARTEFACTS.items() if artefact.chart]
    assert (root / "docs" / "evidence" / "reproduce.md").read_text() == reproduction_page(found, missing, charts)
    for one in found:
        if one["name"] in charts:  # drawn from the tables of today, whatever the version of matplotlib
            drawn = (root / "docs" / "evidence" / "figures" / chart_file(one["name"])).read_text()
            assert table_chart(one["tables"], papers.ARTEFACTS[one["name"]].chart).count(b"<text") == drawn.count("<text")
    for name, content in (picture for one in found for picture in pictures_of(one).items()):
        assert (root / "docs" / "evidence" / "figures" / name).read_bytes() == content


def test_what_is_outdated_or_missing_is_named_and_not_counted(made):
    old = {**made[1], "name": "old", "outdated": "Its arms were not alike."}
    text = reproduction_page([old, made[1]], ["new"])
    assert "- [`old`](#old): Its arms were not alike.\n" in text and "- `new`: not trained yet.\n" in text
    assert "Of 1 tables and figures, 0 reproduce, 1 does not" in text
    assert text.index('<a id="small"></a>') < text.index('## <a id="old"></a>A paper, table 1: to be trained anew')
    assert "Numbers of an earlier version. Its arms were not alike." in text
    assert "To be trained" not in reproduction_page([made[1]])


def test_pictures_stand_beside_the_page(made, monkeypatch, tmp_path):
    png = base64.b64encode(b"\x89PNG, nearly").decode()
    found = {**made[1], "pictures": [{"title": "Lowest", "png": png}]}
    assert pictures_of(found) == {"small-1.png": b"\x89PNG, nearly"} and pictures_of(made[1]) == {}
    assert "Lowest:\n\n![Lowest](figures/small-1.png)\n" in reproduction_page([found])
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": replace(SMALL, pictures=lambda _: [PagePicture("Lowest", png)])})
    given = ["small", "--work", str(made[0]), "--page", str(tmp_path / "page.md"), "--jobs", "1"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert (tmp_path / "figures" / "small-1.png").read_bytes() == b"\x89PNG, nearly"


def test_the_chart_of_the_tables_stands_beside_the_page(made, monkeypatch, tmp_path):
    table = PageTable("By epoch", ["epoch", "loss"], [["0", "2.5"], ["1", "1.5"]])
    drawn = replace(SMALL, tables=lambda *_: [table], chart=TableChart("lines", y="loss"))
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": drawn})
    given = ["small", "--work", str(made[0]), "--page", str(tmp_path / "page.md"), "--jobs", "1"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert f"![{SMALL.shows}](figures/small.svg)\n\nBy epoch:" in (tmp_path / "page.md").read_text()
    assert "By epoch" in (tmp_path / "figures" / "small.svg").read_text()
    monkeypatch.setattr(sys.modules[command.__module__], "find_spec", lambda _: None)
    without = CliRunner().invoke(app, given)
    assert without.exit_code == 0 and "The page has no charts" in without.stderr
    assert "figures/" not in (tmp_path / "page.md").read_text()


@in_verify
def test_each_seed_may_have_scores_of_its_own(made, tmp_path):
    work = tmp_path / "work"
    part = replace(SMALL.parts[1], score_sets=True)
    seen = []

    def scores_of(measured, seed):
        seen.append(measured["pruned"]["pruned"][seed]["scores"])
        return float(seed)

    reproduce(replace(SMALL, parts=[part], claims=[Claim("they differ", scores_of)]), work, jobs=1)
    names = ["digits@100-el2n-1x1.parquet", "digits@100-el2n-1x1-1.parquet", "digits@100-el2n-1x1-2.parquet"]
    assert [Path(path).name for path in seen] == names
    first, second = (Scores.load(work / "scores" / name).values for name in names[:2])
    assert not torch.equal(first, second)


def test_the_kind_of_batches_is_that_of_the_method_in_the_batch():
    texts = {
        "uniform:keep=0.5": "full",
        "random_backprop": "as selected",
        "random_backprop:forward_passes=twice": "filled up",
        "random_backprop:forward_passes=twice:spend=batches": "as selected",
        "uniform:keep=0.5+selective_backprop:forward_passes=twice": "filled up",
    }
    assert {text: batches_of(parse_methods(text)[0]) for text in texts} == texts


def test_the_command_lists_makes_and_keeps(made, monkeypatch, tmp_path):
    work, found, _ = made
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": SMALL})
    listed = CliRunner().invoke(app, [])
    assert listed.exit_code == 0 and "what half of the samples do" in listed.output
    done = CliRunner().invoke(app, ["all", "--work", str(work), "--page", str(tmp_path / "page.md"), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "page.md").read_text() == reproduction_page([found])
    assert "half of the samples cost less" in done.output


def test_unknown_names_are_told_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": SMALL})
    done = CliRunner().invoke(app, ["small", "tabel", "--work", str(tmp_path / "work")])
    assert isinstance(done.exception, ValueError) and str(done.exception) == "no table or figure 'tabel'; there are all, small"
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("error", "code", "said"), [(RunError("it broke"), 1, "it broke"), (KeyboardInterrupt(), 130, "Stopped")]
)
def test_stopped_or_failed_runs_are_kept(monkeypatch, tmp_path, error, code, said):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(papers, "ARTEFACTS", {"small": SMALL})
    monkeypatch.setattr("thresher_lab.reproduction.artefact.reproduce", fails)
    done = CliRunner().invoke(app, ["small", "--work", str(tmp_path)])
    assert done.exit_code == code and said in done.output and f"Finished runs are kept in {tmp_path}" in done.output


def test_what_stands_beside_a_table_and_conditions_are_on_the_page(made):
    condition = {**made[1]["claims"][0], "says": "", "claim": "the setup can tell"}
    found = {**made[1], "claims": [condition], "verdict": "not tested", "beside": "See [results.md](results.md)."}
    text = reproduction_page([found])
    assert "| (a condition of our setup) | the setup can tell |" in text and "\nSee [results.md](results.md).\n" in text
    assert (
        "0 reproduce, 0 do not, and 0 need more seeds to decide at least one claim. 1 of the 1 is not tested by our setup."
        in text
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kakurenbo-table-2", "--smoke"], "--smoke, --dry-run, --batch-size and --accumulate go with --recipe"),
        (["diet-sb-a", "--accumulate", "2"], "--batch-size and --accumulate go with --recipe"),
        (["all", "--recipe", "wrn-28-10"], "--recipe: give one table or figure, got kakurenbo-table-2-deit, "),
        (["all", "--recipe", "all"], "--recipe all: goes with --dry-run, which prints all commands, or --smoke"),
        (["all", "--recipe", "all", "--smoke", "--batch-size", "8"], "and not with a batch"),
    ],
)
def test_options_of_recipes_that_do_not_fit(arguments, message):
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 1 and message in str(found.exception)


def test_all_commands_at_full_size_are_listed():
    found = CliRunner().invoke(app, ["all", "--recipe", "all", "--dry-run"])
    pairs = [(one.name, recipe) for one in papers.ARTEFACTS.values() for recipe in one.recipes]
    commands = [line for line in found.output.splitlines() if line.startswith("thresher")]
    assert found.exit_code == 0 and len(commands) == len(pairs) > 50
    assert all(f" {name} --recipe {recipe}" in line for line, (name, recipe) in zip(commands, pairs, strict=True))


@pytest.mark.filterwarnings("ignore:AdaSelection. `pool` is")
def test_a_table_at_another_batch_says_what_it_is(tmp_path):
    work = tmp_path / "work"
    given = ["--recipe", "adaselection-line", "--smoke", "--batch-size", "8", "--work", str(work), "--jobs", "1", "-q"]
    done = CliRunner().invoke(app, ["adaselection-pools", *given])
    assert done.exit_code == 0, done.output
    assert "8 samples per step in place of 16: learning rate 0.01 -> 0.005" in done.output
    [file] = (work / "results").iterdir()
    found, text = json.loads(file.read_text()), (work / f"{file.stem}.md").read_text()
    assert [part["task"] for part in found["parts"]] == ["smoke:adaselection-line@8x1"]
    assert all(claim["mean"] is not None for claim in found["claims"]) and found["parts"][0]["summary"][0]["steps"] == 8 * 16
    assert "`thresher reproduce adaselection-pools --recipe adaselection-line --batch-size 8 --smoke`" in text
    assert {claim["scale"] for claim in found["claims"]} == {1} and found["parts"][0]["metric"] == "-loss"
    full = next(row["mean"] for row in found["parts"][0]["summary"] if row["method"] == "full")
    assert found["tables"][0]["rows"][0][1].split()[0] == f"{full:.{2 if full < -0.1 else 4}f}"
    assert "made-up data: it shows that the command runs" in text and "scale of two CPU cores" not in text
    assert "at the scale of the paper" not in text


@in_verify
def test_a_dry_run_of_a_recipe_trains_nothing(tmp_path):
    given = [
        "adaselection-weights",
        "--recipe",
        "adaselection-line",
        "--smoke",
        "--dry-run",
        "--work",
        str(tmp_path / "work"),
        "-q",
    ]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    assert "ada_selection:keep=0.3" in found.output and not (tmp_path / "work").exists()
