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
from thresher_lab.recipes.running import task_of
from thresher_lab.report.table_charts import table_chart
from thresher_lab.reproduction.artefact import (
    FULL_ROW,
    LEAST_RATIO,
    Artefact,
    ArtefactPart,
    Claim,
    PageTable,
    TableChart,
    batches_of,
    reproduce,
)
from thresher_lab.reproduction.measures import cost, cost_saved
from thresher_lab.reproduction.page import (
    chart_file,
    index_page,
    paper_pages,
    pictures_of,
    reason_to_train,
    section,
    single_page,
)
from thresher_lab.training.specs import parse_methods
from thresher_lab.training.store import write_json

SMALL = Artefact(
    name="small",
    paper="A paper, table 1",
    shows="what half of the samples do",
    here="Digits",
    parts=[
        ArtefactPart(
            "half",
            "digits@100",
            1,
            {"half": "random_backprop:keep=0.5"},
            {"half": "12.3"},
            controls=("uniform",),
        ),
        ArtefactPart(
            "pruned",
            "digits@100",
            1,
            {"pruned": "prune:scores={scores}:keep=0.5"},
            scores=("el2n", 1, 1),
        ),
    ],
    claims=[
        Claim(
            "half of the samples cost less",
            lambda measured, seed: cost_saved(measured["half"], seed, "half", FULL_ROW),
            counted=True,
            says="Table 1",
        ),
        Claim(
            "they cost less than a quarter",
            lambda measured, seed: 0.25 - cost(measured["half"], seed, "half"),
            counted=True,
            says="Table 1",
        ),
        Claim(
            "they take less than no time",  # in steps: a busy machine may not tell by its seconds
            lambda measured, seed: -measured["half"]["half"][seed]["cost"]["steps"] - 0.01 * seed,
            says="Table 1: no time",
        ),
    ],
    seeds=(0, 1, 2),
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
    assert [claim["verdict"] for claim in found["claims"]] == [
        "holds by count",
        "fails by count",
        "not reproduced",
    ]
    assert found["verdict"] == "not reproduced" and found["seeds"] == [0, 1, 2]
    half, pruned = found["tables"]
    assert [row[0].strip() for row in half["rows"]] == [
        "full",
        "half",
        "random samples at the cost of half",
    ]
    assert half["rows"][1][-1] == "12.3" and pruned["rows"][1][0] == "pruned"
    assert half["header"][-3:-1] == ["steps", "batches"]
    assert [row[-3:-1] for row in half["rows"]] == [
        ["2", "full"],
        ["2", "as selected"],
        ["1", "full"],
    ]
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", half["rows"][0][1])
    assert [part["name"] for part in found["parts"]] == ["half", "pruned"] and found["parts"][0][
        "metric"
    ] == "accuracy"


def test_finished_runs_and_scores_are_not_made_again(made):
    work, found, _ = made
    (scores,) = (work / "scores").iterdir()
    written, watcher = scores.stat().st_mtime_ns, Counting()
    assert reproduce(SMALL, work, jobs=1, watcher=watcher) == found
    assert watcher.trained == 0 and scores.stat().st_mtime_ns == written


def short_page(*results, anew=None):
    """The first page of the one paper of some results."""
    return paper_pages(results, anew or {}, [], "index.md")["a-paper.md"]


def judged_claim(claim, verdict, mean, **more):
    own = {
        "claim": claim,
        "says": "Table 1: a sentence",
        "mean": mean,
        "above": 0.0,
        "scale": 100,
        "unit": "points",
        "verdict": verdict,
    }
    return own | more


def test_the_section_has_every_claim_and_table(made):
    text = section(made[1])
    assert (
        text.startswith('## <a id="small"></a>A paper, table 1: not reproduced')
        and "Seeds: 3." in text
    )
    assert (
        "| Table 1 | half of the samples cost less |" in text
        and "they take less than no time" in text
    )
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_a_sentence_of_several_claims_is_a_row(made):
    claims = [
        judged_claim("b: it gains", "cannot tell", 0.01, ci95=[-0.01, 0.03], seeds_needed=12),
        judged_claim(
            "a: it gains",
            "reproduced",
            0.02,
            ci95=[0.01, 0.03],
            note="backward pass: 1.77 forward passes",
        ),
        judged_claim(
            "c: it gains",
            "cannot tell",
            0.0,
            ci95=[-0.01, 0.01],
            seeds_needed=None,
            note="backward pass: 1.77 forward passes",
        ),
        judged_claim(
            "d: it gains",
            "not tested",
            0.5,
            ci95=[0.4, 0.6],
            note="backward pass: 0.99 forward passes",
        ),
        judged_claim("the setup can tell", "reproduced", 1.0, ci95=[0.9, 1.1], says=""),
    ]
    found = {**made[1], "claims": claims, "verdict": "cannot tell"}
    full = {
        **found,
        "name": "small@big",
        "paper": "A paper, table 1, at full size with `big`",
        "claims": [
            judged_claim("it gains", "not reproduced", -1.5, ci95=[-2, -1], scale=1, unit="of loss")
        ],
    }
    text = short_page(found, full)
    [row] = [line for line in text.splitlines() if line.startswith("| [Table 1]")]
    said, measured, verdict = (cell.strip() for cell in row.strip("|").split("|"))
    assert said == "[Table 1](a-paper-tables.md#small): a sentence"
    assert measured == (
        "c: it gains: +0.00 [-1.00, +1.00] points, limit +0; best of 3: +2.00; 3 seeds; "
        "at full size -1.50 [-2.00, -1.00] of loss; 3 seeds"
    )
    assert verdict == (
        "1 reproduced, 1 not tested, 2 cannot tell; backward pass: 1.77, 0.99 forward passes; needs over 1,000 seeds; "
        "at full size not reproduced"
    )
    assert "Main sentences: 1 (not reproduced). Side sentences: none." in text
    tested = {**found, "claims": [claims[3], claims[1]]}
    assert "Main sentences: 1 (reproduced)." in short_page(tested)


def test_the_first_lines_are_the_answer_the_counts_and_the_remark(made, monkeypatch):
    monkeypatch.setitem(papers.ANSWERS, "A paper", "It does.")
    found = {**made[1], "remark": "It selects at random."}
    text, minor = short_page(found), short_page({**found, "name": "kakurenbo-figure-9"})
    assert text.startswith("# A paper: does it hold?\n\nIt does.\n\nMain sentences: 2 (")
    assert "Side sentences: none.\n\n**It selects at random.**" in text
    assert "| main sentence" in text and "| side sentence" not in text
    assert "Main sentences: none. Side sentences: 2 (" in minor and "| main sentence" not in minor


def test_the_settings_stand_above_the_tables(made, monkeypatch):
    monkeypatch.setitem(
        papers.PAPER_SETTINGS, "A paper", ("Of its text.", [["a", "b", "c", "d", "e"]])
    )
    pages = paper_pages([made[1]], {}, [], "i.md")
    above, _, _ = pages["a-paper-tables.md"].partition('<a id="small">')
    assert '<a id="settings"></a>Settings\n\nOf its text.\n\n| setting | paper |' in above
    assert "| a | b | c | d | e |\n\n## " in above and "Of its text." not in pages["a-paper.md"]


@pytest.mark.parametrize("paper", papers.PAPERS, ids=lambda paper: paper.name)
def test_the_settings_are_those_that_are_trained(paper):
    assert all(len(row) == 5 and all(row) for row in paper.settings) and paper.settings_from
    here = {row[0]: set(re.findall(r"[\d.]*\d", row[3])) for row in paper.settings}
    for part in (part for artefact in paper.artefacts for part in artefact.parts):
        task = task_of(part.task)
        assert f"{task.lr:g}" in here["learning rate"], part.task
        assert str(task.batch_size) in here["batch size"], part.task
        assert str(part.epochs) in here["epochs"], part.task


def test_the_index_counts_verdicts_and_says_what_must_be_trained(made):
    good = {
        **made[1],
        "name": "good",
        "paper": "Another (arXiv 1), table 2",
        "verdict": "reproduced",
    }
    text = index_page([made[1], good], {"old": "Its arms were not alike."})
    assert (
        "| [A paper](a-paper.md) |  | not reproduced | 2 (1 fails by count, 1 not reproduced) | none |"
        in text
    )
    assert (
        "| [Another (arXiv 1)](another.md) |  | reproduced |" in text
        and "- `old`: Its arms were not alike.\n" in text
    )
    assert "To be trained anew" not in index_page([made[1]], {})
    assert list(paper_pages([made[1], good], {}, [], "i.md")) == [
        "a-paper.md",
        "a-paper-tables.md",
        "another.md",
        "another-tables.md",
    ]
    assert "To be trained anew ([why](index.md#anew)): `small`." in short_page(
        made[1], anew={"small": "3 of 5 seeds."}
    )


def test_reasons_to_train_anew(made):
    found = made[1]
    assert reason_to_train(found, SMALL) == "3 of 5 seeds."
    five = {**found, "seeds": [0, 1, 2, 3, 4]}
    assert reason_to_train(five, SMALL) == ""
    assert (
        reason_to_train({**five, "outdated": "Its arms were not alike."}, SMALL)
        == "Its arms were not alike."
    )
    changed = replace(SMALL, claims=SMALL.claims[1:])
    assert reason_to_train(five, changed) == "Its claims have changed."
    assert (
        reason_to_train({**five, "name": "small@big"}, changed) == ""
    )  # a recipe leaves claims out


RESULTS, EVIDENCE = (
    Path(__file__).parents[3] / "benchmarks/results/reproduce",
    Path(__file__).parents[3] / "docs/evidence",
)


def committed():
    files = [
        file
        for name in papers.ARTEFACTS
        for file in (RESULTS / f"{name}.json", *sorted(RESULTS.glob(f"{name}@*.json")))
    ]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def test_the_pages_of_this_repository_are_those_of_its_results():
    found = committed()
    assert any("@" in one["name"] for one in found) and not any(
        one.get("outdated") for one in found
    )
    reasons = {
        one["name"]: reason_to_train(one, papers.ARTEFACTS[one["name"].partition("@")[0]])
        for one in found
    }
    anew = {name: "Not trained yet." for name in papers.ARTEFACTS if name not in reasons}
    anew |= {name: reason for name, reason in reasons.items() if reason}
    declared = {one["name"]: papers.ARTEFACTS[one["name"].partition("@")[0]].chart for one in found}
    charts = [name for name, chart in declared.items() if chart]
    assert (EVIDENCE / "reproduce.md").read_text() == index_page(found, anew)
    for name, text in paper_pages(found, anew, charts, "reproduce.md").items():
        assert (EVIDENCE / name).read_text() == text
    for one in found:
        if (
            one["name"] in charts
        ):  # drawn from the tables of today, whatever the version of matplotlib
            drawn = (EVIDENCE / "figures" / chart_file(one["name"])).read_text()
            again = table_chart(one["tables"], declared[one["name"]])
            assert again.count(b"<text") == drawn.count("<text")
    for name, content in (picture for one in found for picture in pictures_of(one).items()):
        assert (EVIDENCE / "figures" / name).read_bytes() == content


def test_the_results_have_the_words_and_conditions_of_the_declarations():
    for one in committed():
        declared = {
            claim.text: claim for claim in papers.ARTEFACTS[one["name"].partition("@")[0]].claims
        }
        declared_words = papers.ARTEFACTS[one["name"]] if "@" not in one["name"] else None
        if declared_words and not reason_to_train(one, declared_words):
            for field in ("paper", "shows", "here", "beside"):
                assert one[field] == getattr(declared_words, field), one["name"]
        ratios = {part["name"]: part["backward_to_forward"] for part in one["parts"]}
        for claim in one["claims"]:
            if (of := declared.get(claim["claim"])) is None:
                continue
            assert claim["says"] == of.says, one["name"]
            assert claim["unit"] in (of.unit, "of loss")
            if of.timed:
                ratio = ratios.get(of.part_of(ratios), min(ratios.values()))
                assert claim["note"].endswith(f"backward pass: {ratio:.2f} forward passes")
                low, high = claim["ci95"] or (claim["mean"], claim["mean"])
                if claim["verdict"] == "not tested":
                    assert ratio < LEAST_RATIO and high < of.above
                else:
                    assert (claim["verdict"] == "reproduced") == (low > of.above)


def verdicts(name, says):
    return {
        claim["verdict"]
        for one in committed()
        for claim in one["claims"]
        if one["name"].startswith(name) and says in claim["says"] and "@" not in one["name"]
    }


def test_the_answers_are_those_of_the_results():
    assert verdicts("kakurenbo", "with all strategies accuracy is very close") == {"reproduced"}
    assert "cannot tell" in verdicts("kakurenbo", "with five networks")
    assert verdicts("kakurenbo", "the total time falls") == {
        "not tested",  # .195 with a cheap backward pass
        "reproduced",
        "cannot tell",
    }
    assert verdicts("kakurenbo", "there is a speedup") == {"reproduced"}
    assert verdicts("kakurenbo-others", "importance sampling") == {"reproduced", "holds by count"}
    assert verdicts("kakurenbo-figure-3-time", "C.2: the speedup") == {"reproduced"}
    assert verdicts("selective-backprop", "than with standard SGD") == {"cannot tell"}
    assert verdicts("selective-backprop", "importance sampling") == {"reproduced"}
    assert verdicts("selective-backprop", "stale losses") == {"cannot tell"}
    assert "reproduced" not in verdicts("adaselection", "outperforms all the candidate")
    drops = [
        claim["verdict"]
        for one in committed()
        for claim in one["claims"]
        if "only a marginal drop" in claim["says"]
    ]
    assert drops.count("not reproduced") == 2 and len(drops) == 5
    for says in ("without sacrificing performance", "least used in SB"):
        assert verdicts("diet-sb", says) == {"reproduced"}
    assert verdicts("diet-sb", "conclusion: Diet SB is able") == {"reproduced"}
    assert verdicts("diet-sb-runtime", "Table 1: the order") == {"reproduced", "cannot tell"}


def summary_of(name, part, row):
    """The row of a committed table, with its difference to full training in points."""
    [found] = [one for one in committed() if one["name"] == name]
    [rows] = [one["rows"] for one in found["tables"] if one["title"].startswith(f"{part}: ")]
    [cells] = [cells for cells in rows if cells[0] == row]
    return dict(zip(found["tables"][0]["header"], cells, strict=True))


def test_the_numbers_of_the_answers_are_those_of_the_tables():
    answers = {paper.partition(" ")[0]: answer for paper, answer in papers.ANSWERS.items()}
    hides = [
        float(summary_of(name, part, "v1111")["cost"]) < 0.95
        for name, part in [
            *(
                ("kakurenbo-table-5", one.name)
                for one in papers.ARTEFACTS["kakurenbo-table-5"].parts
            ),
            ("kakurenbo-table-5@cifar10-resnet8@10000", "best rate"),
            ("kakurenbo-table-5-hurt", "text"),
        ]
    ]
    assert hides == [True] * 3 + [False]
    words = answers["KAKURENBO"].replace("\n", " ")
    assert (
        "in all four set-ups of its ablations" in words
        and "(in one it hides next to nothing)" in words
    )
    alone = summary_of("kakurenbo-table-5@cifar10-resnet8@10000", "best rate", "v1000")
    lost = re.match(r"-([\d.]+)", alone["difference to full [95 % interval]"])
    assert lost and f"hiding alone loses {float(lost[1]):.1f} points" in words
    timed = summary_of("diet-sb-runtime", "runtime", "Diet-SB 62.5% (25%)")
    lost = re.match(r"-([\d.]+)", timed["difference to full [95 % interval]"])
    assert lost and f"loses {float(lost[1]):.1f} points" in answers["Diet"]
    assert f"costs {float(timed['cost']):.2f} times full" in answers["Diet"]
    for row, words in (
        ("Diet-SB 50% (25%)", "loses {} points or more"),
        ("EL2N 25%", "EL2N alone {}"),
    ):
        cifar = summary_of("diet-sb-b@cifar10-resnet8@10000", "b", row)
        lost = re.match(r"-([\d.]+)", cifar["difference to full [95 % interval]"])
        assert lost and words.format(lost[1]) in answers["Diet"]
    costs = (
        float(summary_of("diet-sb-b", "b", f"Diet-SB {share} (25%)")["cost"])
        for share in ("50%", "62.5%")
    )
    assert f"at {min(costs):.2f} times its cost or more" in answers["Diet"].replace("\n", " ")


def test_times_of_kakurenbo_are_near_its_passes():
    """A ratio far above was measured apart from its full training: 1.54 for the passes of .89."""
    for one in committed():
        for part in one["parts"] if one["name"].startswith("kakurenbo") else []:
            for row in part["summary"]:
                if row["method"].startswith("kakurenbo"):
                    assert row["cpu_ratio"] < 1.4 * row["cost_ratio"], (one["name"], part["name"])


def test_few_sentences_are_not_tested():
    rows = [
        row for row in (EVIDENCE / "reproduce.md").read_text().splitlines() if row.startswith("| [")
    ]
    sentences = " ".join(cell for row in rows for cell in row.split("|")[4:6])
    assert sum(map(int, re.findall(r"(\d+) not tested", sentences))) == 1 and len(rows) == 4


def test_a_page_of_a_paper_has_at_most_1500_words_and_twelve_main_sentences():
    papers_of = {one["paper"].partition(", ")[0] for one in committed()}
    names = ("kakurenbo", "selective-backprop", "adaselection", "diet-selective-backprop")
    assert papers_of == set(papers.STAND_INS) and len(papers_of) == len(names)
    for name in names:
        text = (EVIDENCE / f"{name}.md").read_text()
        answer = next(one for one in papers.ANSWERS.values() if one in text)
        assert text.split("\n")[2] == answer and answer.count(". ") == 0, name
        assert 200 < len(text.split()) <= 1500, name
        assert (EVIDENCE / "reproduce.md").read_text().count(answer) == 1
    for paper in papers.STAND_INS:
        main = [
            one
            for one in papers.ARTEFACTS.values()
            if one.paper.startswith(paper) and not one.name.startswith(papers.MINOR)
        ]
        assert len({claim.says for one in main for claim in one.claims if claim.says}) <= 12, paper


def test_what_is_outdated_is_not_counted(made, monkeypatch, tmp_path):
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": SMALL})
    folder = tmp_path / "results"
    write_json(folder / "small.json", {**made[1], "outdated": "Its arms were not alike."})
    sys.modules[command.__module__]._write_pages(tmp_path / "index.md", folder)
    assert (
        "| [A paper](a-paper.md) |  | not tested | 2 (2 not tested) | none |"
        in (tmp_path / "index.md").read_text()
    )
    assert (
        "- `small`: Its arms were not alike. 3 of 5 seeds.\n" in (tmp_path / "index.md").read_text()
    )
    assert (
        "| not tested; Its arms were not alike. |" in (tmp_path / "a-paper-tables.md").read_text()
    )


def test_pictures_stand_beside_the_page(made, monkeypatch, tmp_path):
    png = base64.b64encode(b"\x89PNG, nearly").decode()
    found = {**made[1], "pictures": [{"title": "Lowest", "png": png}]}
    assert pictures_of(found) == {"small-1.png": b"\x89PNG, nearly"} and pictures_of(made[1]) == {}
    assert "Lowest:\n\n![Lowest](figures/small-1.png)\n" in section(found)
    monkeypatch.setattr(
        papers, "ARTEFACTS", {"small": replace(SMALL, pictures=lambda _: {"Lowest": png})}
    )
    given = ["small", "--work", str(made[0]), "--page", str(tmp_path / "page.md"), "--jobs", "1"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert (tmp_path / "figures" / "small-1.png").read_bytes() == b"\x89PNG, nearly"


def test_the_chart_of_the_tables_stands_beside_the_page(made, monkeypatch, tmp_path):
    table = PageTable("By epoch", ["epoch", "loss"], [["0", "2.5"], ["1", "1.5"]])
    drawn = replace(SMALL, tables=lambda *_: [table], chart=TableChart("lines", y="loss"))
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": drawn})
    given = ["small", "--work", str(made[0]), "--page", str(tmp_path / "page.md"), "--jobs", "1"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert (
        f"![{SMALL.shows}](figures/small.svg)\n\nBy epoch:"
        in (tmp_path / "a-paper-tables.md").read_text()
    )
    assert "By epoch" in (tmp_path / "figures" / "small.svg").read_text()
    monkeypatch.setattr(sys.modules[command.__module__], "find_spec", lambda _: None)
    without = CliRunner().invoke(app, given)
    assert without.exit_code == 0 and "The pages have no charts" in without.stderr
    assert "figures/" not in (tmp_path / "a-paper-tables.md").read_text()


@in_verify
def test_each_seed_may_have_scores_of_its_own(made, tmp_path):
    work = tmp_path / "work"
    part = replace(SMALL.parts[1], score_sets=True)
    seen = []

    def scores_of(measured, seed):
        seen.append(measured["pruned"]["pruned"][seed]["scores"])
        return float(seed)

    reproduce(replace(SMALL, parts=[part], claims=[Claim("they differ", scores_of)]), work, jobs=1)
    names = [
        "digits@100-el2n-1x1.parquet",
        "digits@100-el2n-1x1-1.parquet",
        "digits@100-el2n-1x1-2.parquet",
    ]
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
    done = CliRunner().invoke(
        app, ["all", "--work", str(work), "--page", str(tmp_path / "page.md"), "--jobs", "1"]
    )
    assert done.exit_code == 0, done.output
    anew = {"small": "3 of 5 seeds."}
    assert (tmp_path / "page.md").read_text() == index_page([found], anew)
    for name, text in paper_pages([found], anew, [], "page.md").items():
        assert (tmp_path / name).read_text() == text
    assert "half of the samples cost less" in done.output


def test_the_piped_list_has_every_name_and_recipe_whole():
    words = CliRunner().invoke(app, []).output.split()
    assert set(papers.ARTEFACTS) <= set(words)
    for artefact in papers.ARTEFACTS.values():
        assert set(artefact.recipes) <= set(words)
    assert words.count("selective-backprop-cifar10") == 1


def test_options_without_a_name_are_not_ignored():
    every = CliRunner().invoke(app, ["--recipe", "all", "--dry-run"])
    assert every.exit_code == 0
    assert every.output == CliRunner().invoke(app, ["all", "--recipe", "all", "--dry-run"]).output
    for given in (["--dry-run"], ["--smoke"], ["--recipe", "wrn-28-10"], ["--batch-size", "8"]):
        done = CliRunner().invoke(app, given)
        assert "name a table or figure, or `all`" in str(done.exception), given


def test_a_result_without_a_claim_says_so():
    found = {**committed()[0], "claims": [], "verdict": "not tested"}
    text = section(found)
    assert "On one task, none is judged." in text and "| verdict |" not in text
    assert "cannot tell" not in text.splitlines()[0]


def test_verdicts_on_reconstructed_equations_say_so():
    for one in committed():
        if one["name"].startswith("adaselection"):
            for claim in one["claims"]:
                ours = "AdaSelection is" in claim["claim"] or "beta" in claim["claim"]
                assert not ours or claim["note"].startswith("with our reconstruction")
    short = (EVIDENCE / "adaselection.md").read_text().splitlines()
    for line in short:
        if line.startswith("| [Figure 8]") or "| AdaSelection is better" in line:
            assert "with our reconstruction" in line


def test_bike_is_judged_by_the_table():
    [small, full] = [
        claim
        for one in committed()
        for claim in one["claims"]
        if claim["says"].startswith("Table 4: on bike, Big Loss")
    ]
    assert small["verdict"] == full["verdict"] == "reproduced"
    assert small["says"].endswith("the words of section 4 say the opposite")


def test_unknown_names_are_told_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(papers, "ARTEFACTS", {"small": SMALL})
    done = CliRunner().invoke(app, ["small", "tabel", "--work", str(tmp_path / "work")])
    assert (
        isinstance(done.exception, ValueError)
        and str(done.exception) == "no table or figure 'tabel'; there are all, small"
    )
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(RunError("it broke"), 1, "it broke"), (KeyboardInterrupt(), 130, "Stopped")],
)
def test_stopped_or_failed_runs_are_kept(monkeypatch, tmp_path, error, code, said):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(papers, "ARTEFACTS", {"small": SMALL})
    monkeypatch.setattr("thresher_lab.reproduction.artefact.reproduce", fails)
    done = CliRunner().invoke(app, ["small", "--work", str(tmp_path)])
    assert (
        done.exit_code == code
        and said in done.output
        and f"Finished runs are kept in {tmp_path}" in done.output
    )


def test_what_stands_beside_a_table_and_conditions_are_on_the_page(made):
    condition = {**made[1]["claims"][0], "says": "", "claim": "the setup can tell"}
    found = {
        **made[1],
        "claims": [condition],
        "verdict": "not tested",
        "beside": "See [results.md](results.md).",
    }
    text = single_page(found)
    assert (
        "| (a condition of our setup) | the setup can tell |" in text
        and "\nSee [results.md](results.md).\n" in text
    )
    assert text.startswith("# A paper, table 1\n\nEach claim is a number")


def test_a_condition_that_does_not_hold_tests_nothing(made):
    condition = Claim("the setup can tell", lambda measured, seed: -1.0 - 0.1 * seed)
    found = reproduce(replace(SMALL, claims=[condition, *SMALL.claims]), made[0], jobs=1)
    assert [claim["verdict"] for claim in found["claims"]] == [
        "not reproduced",
        *["not tested"] * 3,
    ]
    assert found["verdict"] == "not tested"
    assert {claim["note"] for claim in found["claims"][1:]} == {
        "a condition of the setup does not hold"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["kakurenbo-table-2", "--smoke"],
            "--smoke, --dry-run, --batch-size and --accumulate go with --recipe",
        ),
        (["diet-sb-a", "--accumulate", "2"], "--batch-size and --accumulate go with --recipe"),
        (
            ["all", "--recipe", "wrn-28-10"],
            "--recipe and --task: give one table or figure, got kakurenbo-table-2-deit, ",
        ),
        (["diet-sb-a", "--epochs", "2"], "--epochs and --seeds go with --task"),
        (["diet-sb-a", "--task", "digits", "--recipe", "wrn-28-10"], "--task is given without"),
        (
            ["all", "--recipe", "all"],
            "--recipe all: goes with --dry-run, which prints all commands, or --smoke",
        ),
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
    assert all(
        f" {name} --recipe {recipe}" in line
        for line, (name, recipe) in zip(commands, pairs, strict=True)
    )


@pytest.mark.filterwarnings("ignore:AdaSelection. `pool` is")
def test_a_table_at_another_batch_says_what_it_is(tmp_path):
    work = tmp_path / "work"
    given = [
        "--recipe",
        "adaselection-line",
        "--smoke",
        "--batch-size",
        "8",
        "--work",
        str(work),
        "--jobs",
        "1",
        "-q",
    ]
    done = CliRunner().invoke(app, ["adaselection-pools", *given])
    assert done.exit_code == 0, done.output
    assert "8 samples per step in place of 16: learning rate 0.01 -> 0.005" in done.output
    [file] = (work / "results").iterdir()
    found, text = json.loads(file.read_text()), (work / f"{file.stem}.md").read_text()
    assert [part["task"] for part in found["parts"]] == ["smoke:adaselection-line@8x1"]
    assert (
        all(claim["mean"] is not None for claim in found["claims"])
        and found["parts"][0]["summary"][0]["steps"] == 8 * 16
    )
    assert (
        "`thresher reproduce adaselection-pools --recipe adaselection-line --batch-size 8 --smoke`"
        in text
    )
    assert {(claim["scale"], claim["unit"]) for claim in found["claims"]} == {
        (1, "of loss"),
        (100, "%"),
    } and found["parts"][0]["metric"] == "-loss"
    full = next(row["mean"] for row in found["parts"][0]["summary"] if row["method"] == "full")
    assert found["tables"][0]["rows"][0][1].split()[0] == f"{full:.{2 if full < -0.1 else 4}f}"
    assert (
        "made-up data: it shows that the command runs" in text
        and "scale of two CPU cores" not in text
    )
    assert "at the scale of the paper" not in text


def test_the_page_of_a_recipe_has_the_chart_of_its_tables(tmp_path):
    given = ["--recipe", "adaselection-line", "--smoke", "--work", str(tmp_path), "-q"]
    done = CliRunner().invoke(app, ["adaselection-weights", *given])
    assert done.exit_code == 0, done.output
    [page] = tmp_path.glob("*.md")
    place = f"figures/{page.stem}.svg"
    assert f"]({place})" in page.read_text()
    assert b"Big Loss" in (tmp_path / place).read_bytes()


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


TIME_TO_TARGET = "selective-backprop-time-to-target"


def test_a_task_without_its_data_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("THRESHER_DATA", raising=False)
    given = [TIME_TO_TARGET, "--task", "cifar10-resnet8@10000", "--work", str(tmp_path / "work")]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, FileNotFoundError)
    assert "torchvision.datasets.CIFAR10 with download=True" in str(done.exception)
    assert not (tmp_path / "work").exists()


def test_results_on_a_task_have_its_name_and_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "Workers", InProcessWorkers)
    given = [TIME_TO_TARGET, "--task", "digits@100", "--epochs", "2", "--seeds", "0", "-q"]
    given += ["--work", str(tmp_path), "--jobs", "1"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    [file] = (tmp_path / "results").iterdir()
    assert file.name == f"{TIME_TO_TARGET}@digits@100.json"
    found = json.loads(file.read_text())
    assert [part["epochs"] for part in found["parts"]] == [2]
    assert "on `digits@100`" in (tmp_path / f"{file.stem}.md").read_text()
    planned = CliRunner().invoke(app, [*given, "--dry-run"])
    assert "8 of 8 runs are finished" in planned.output


def test_a_sentence_names_the_task_that_tested_it(made):
    found = made[1]
    on_task = {**found, "name": f"small@{found['parts'][0]['task']}"}
    paper = "A paper, table 1, at full size with `wrn-28-10`"
    at_full_size = {**found, "name": "small@wrn-28-10", "paper": paper}
    text = paper_pages([found, on_task, at_full_size], {}, [], "index.md")["a-paper.md"]
    assert "; on `digits@100` " in text and "; at full size " in text and "our recipe" not in text
    ours = {**at_full_size, "paper": "A paper, table 1, with our recipe `bike`"}
    text = short_page(found, ours)
    assert "; with our recipe " in text and "at full size" not in text
