import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from lab.report.cases import CLASSES, HOSTILE, comparison, save
from thresher_lab.cli.report import report
from thresher_lab.comparison.summary import WALL_LEFT_BLANK, summarize, unfinished
from thresher_lab.report import page as pages
from thresher_lab.report.first_screen import bottom_line
from thresher_lab.report.page import SECTIONS, plotly_js, render_page, write_report
from thresher_lab.report.sheets import sheets, suspect_sheet


class Seen(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._within = [], [], None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag):
        self._within = None

    def handle_data(self, data):
        if self._within not in ("script", "style"):
            self.text.append(data)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(pages, "plotly_js", lambda: "/* plotly */")


@pytest.fixture(scope="module")
def compared():
    return comparison()


@pytest.fixture(scope="module")
def with_rows(compared):
    """The page of a comparison without the images of its samples, and without plotly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "plotly_js", lambda: "/* plotly */")
        return render_page(*compared)


def figures_of(html):
    [held] = re.findall(r'<script type="text/plain" id="figures">(.*?)</script>', html)
    by_chart = json.loads(zlib.decompress(base64.b64decode(held)))
    return [json.loads(text) for views in by_chart.values() for text in views]


def test_every_chart_is_on_the_page_with_its_views():
    results, samples = comparison()
    for run in results["runs"]:
        run["confusion"] = [[9, 1], [2, 8]]
        for entry in run["history"]:
            entry["weight_loss"] = 1.0
    html = render_page(results, samples)
    charts = [chart for section in SECTIONS.values() for chart in section]
    expected = sum(len(chart.figures(results, samples)) for chart in charts)
    ids = {
        attributes["id"]
        for tag, attributes in Seen(html).tags
        if tag == "figure" and "id" in attributes
    }
    assert ids == {chart.key for chart in charts} and len(charts) == len(ids)
    assert len(figures_of(html)) == expected > 30


def test_rows_have_the_figures_of_the_summary():
    results, _ = comparison()
    html = render_page(results, {})
    text = " ".join("".join(Seen(html).text).split())
    for row in results["summary"]:
        assert f"{100 * row['mean']:.2f} ± {100 * row['std']:.2f}" in text
        assert row["verdict"] in text
    low, high = results["summary"][1]["ci95"]
    assert f"[{100 * low:+.2f}, {100 * high:+.2f}]" in text


def test_controls_are_named_and_so_is_what_was_left_out():
    results, _ = comparison()
    results["left_out"] = [{"method": HOSTILE, "control": "placebo", "why": "it has no signals"}]
    text = " ".join("".join(Seen(render_page(results, {})).text).split())
    assert (
        "Indented rows are controls of the same cost: random (uniform) and fewer epochs (shorter)."
        in text
    )
    assert f"Skipped the placebo control of {HOSTILE}: it has no signals." in text
    alone, _ = comparison(controls=False)
    assert "Indented rows" not in render_page(alone, {})


def test_hostile_names_are_text():
    results, samples = comparison(
        {"full": 0.0, HOSTILE: 0.3, "infobatch": 0.2}, metric=HOSTILE, task=HOSTILE
    )
    results["device"], results["versions"] = HOSTILE, {HOSTILE: HOSTILE}
    html = render_page(results, samples)
    seen = Seen(html)
    assert not [
        tag
        for tag, attributes in seen.tags
        if tag == "img" or any(name.startswith("on") for name in attributes)
    ]
    assert "".join(seen.text).count(HOSTILE) > 8
    names = {trace.get("legendgroup") for figure in figures_of(html) for trace in figure["data"]}
    assert HOSTILE in names


def test_nothing_is_fetched(with_rows):
    for tag, attributes in Seen(with_rows).tags:
        assert tag not in ("link", "iframe", "object")
        assert all(attributes.get(name, "data:").startswith("data:") for name in ("src", "href"))
    assert "default-src 'none'" in with_rows


def test_samples_are_images_or_rows(compared, with_rows):
    results, samples = compared
    images = np.zeros((50, 8, 8), np.uint8)
    found = [
        sheet for of_method in sheets(results, samples, images).values() for sheet in of_method
    ]
    cards = sum(len(sheet.cards) for sheet in found)
    assert cards > 100
    shown = Seen(render_page(results, samples, images)).tags
    found_suspects = suspect_sheet(results, samples, images)
    assert found_suspects is not None and suspect_sheet(results, samples, None) is None
    method, seed, sheet = found_suspects
    history = samples[
        next(
            run["samples"]
            for run in results["runs"]
            if (run["method"], run["seed"]) == (method, seed)
        )
    ]
    losses = [card["loss"] for card in sheet.cards]
    assert (
        method != "full"
        and losses == sorted(losses, reverse=True)
        and losses[0] == max(history.mean_loss)
    )
    assert [card["target"] for card in sheet.cards] == [
        str(card["id"] % CLASSES) for card in sheet.cards
    ]
    assert sum(tag == "img" for tag, _ in shown) == cards + len(sheet.cards)
    rows = Seen(with_rows).tags
    assert sum(tag == "img" for tag, _ in rows) == 0
    assert sum(tag == "tr" for tag, _ in rows) - sum(
        tag == "tr" for tag, _ in shown
    ) == cards + len(found)


def test_samples_that_the_runs_have_shown_are_on_the_page():
    results, samples = comparison(seeds=(0,), controls=False)
    history = samples["runs/0.parquet"]
    easiest, second = history.mean_loss.argsort()[:2].tolist()
    results["runs"][0]["shown"], results["classes"] = "a", ["T-shirt", HOSTILE, "c", "d", "e"]
    html = render_page(
        results,
        samples,
        None,
        {"a": {easiest: {"png": "AAAA"}, second: {"text": f"{HOSTILE} text"}}},
    )
    seen = Seen(html)
    assert [attributes["src"] for tag, attributes in seen.tags if tag == "img"] == [
        "data:image/png;base64,AAAA"
    ]
    text = " ".join("".join(seen.text).split())
    assert f"{HOSTILE} text" in text and f", class {HOSTILE}" in text and "not shown" in text
    assert (
        "A sheet shows at most 3 samples of a class, and no sample that an earlier sheet of the same method shows."
        in text
    )
    assert any(f"class {HOSTILE}" in (label or "") for label in seen.text)


def test_times_of_a_busy_machine_are_in_the_note():
    results, _ = comparison(seeds=(0,), controls=False)
    said = "The machine was busy, so all times, including CPU times, are unreliable: in 1 of 3 runs, its load exceeded its cores."
    for busy in (None, False, True):
        results["runs"][1]["busy"] = busy
        seen = Seen(render_page(results, {}))
        text = " ".join("".join(seen.text).split())
        assert (said in text) is (busy is True)


def test_a_wall_time_in_other_company_is_blank():
    results, _ = comparison(seeds=(0,), controls=False)
    for run in results["runs"]:
        run["other_runs"] = 0.0 if run["method"] == "kakurenbo" else 1.0
    results["summary"] = summarize(results["runs"], 0.5)
    table = render_page(results, {})
    cells = re.findall(r'data-label="wall time" data-value="([^"]*)">([^<]*)<', table)
    assert cells[0] == ("1.0", "1.000") and cells[1] == ("", "") and cells[2] != ("", "")
    assert WALL_LEFT_BLANK in table


def test_twenty_methods_are_a_page_below_4_mb():
    names = {f"method_{number}:keep=0.3 once": 0.2 for number in range(20)}
    results, samples = comparison(
        {"full": 0.0, **names}, seeds=(0, 1), epochs=20, samples=200, classes=10
    )
    images = np.random.default_rng(0).integers(256, size=(200, 28, 28), dtype=np.uint8)
    html = render_page(results, samples, images)
    assert html.count("data:image/png;base64,") > 400
    assert len(html.encode()) + 4 / 3 * len(zlib.compress(plotly_js().encode())) < 2_700_000


def test_older_results_have_a_page_too():
    results, _ = comparison(seeds=(0,))
    kept = (
        "method",
        "control_of",
        "mean",
        "std",
        "difference",
        "ci95",
        "cost_ratio",
        "wall_ratio",
        "verdict",
    )
    older = {name: results[name] for name in ("task", "epochs", "device", "versions", "runs")}
    older["summary"] = [{name: row[name] for name in kept} for row in results["summary"]]
    text = "".join(Seen(render_page(older, {})).text)
    assert "1 seed (0)" in text and "margin " not in text.partition("Against cost")[0]


def test_regression_has_no_classes_and_units_of_its_own():
    results, samples = comparison(classes=0, metric="R2")
    for run in results["runs"]:
        run["metric"]["value"] += 3
    results["summary"] = summarize(results["runs"], 0.5)
    html = render_page(results, samples)
    text = "".join(Seen(html).text)
    assert (
        f"{results['summary'][0]['mean']:.4f} ±" in text
        and "margin 0.5;" in text
        and "class 0" not in text
    )
    ids = {
        attributes["id"]
        for tag, attributes in Seen(html).tags
        if tag == "figure" and "id" in attributes
    }
    assert (
        "hidden" not in ids and "targets" not in ids and {"cost", "overlap-matrix", "parts"} <= ids
    )


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = save(tmp_path, *comparison(task="digits@50", seeds=(0,), controls=False))
    path = write_report(folder)
    before = path.read_text()
    assert path == folder / "report.html" and before.count("data:image/png;base64,") > 100
    monkeypatch.setattr(pages, "render_page", lambda *_, **__: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        write_report(folder)
    assert path.read_text() == before and {file.name for file in folder.iterdir()} == {
        "results.json",
        "runs",
        "report.html",
    }


def test_without_the_data_samples_are_rows_unless_it_was_given(tmp_path, monkeypatch):
    def missing(*_):
        raise FileNotFoundError("not there")

    monkeypatch.setattr(pages, "training_images", missing)
    folder = save(tmp_path, *comparison(seeds=(0,), controls=False))
    assert "<img" not in write_report(folder).read_text()
    with pytest.raises(FileNotFoundError):
        write_report(folder, tmp_path)


def test_the_command_says_where_the_page_is(tmp_path, capsys):
    folder = save(tmp_path, *comparison(seeds=(0,), controls=False))
    report(folder)
    assert capsys.readouterr().out.startswith(f"{folder / 'report.html'} (")
    with pytest.raises(FileNotFoundError, match="thresher compare"):
        report(tmp_path / "nothing")


def test_every_chart_is_drawn_after_every_run_of_a_comparison():
    """Runs end seed by seed, so a method may have fewer seeds than full training, and a control fewer than its method."""
    results, samples = comparison(NAMES_OF_PARTS, seeds=(0, 1, 2))
    for run in results["runs"]:
        run["confusion"] = [[9, 1], [2, 8]]
    full_first = sorted(results["runs"], key=lambda run: run["method"] != "full")
    for ordered in (sorted(results["runs"], key=lambda run: run["seed"]), full_first):
        for finished in range(1, len(ordered)):
            runs = ordered[:finished]
            part = results | {
                "runs": runs,
                "summary": summarize(runs),
                "running": {"finished": finished, "runs": len(ordered)},
            }
            named = {run["samples"] for run in runs if "samples" in run}
            held = {name: of for name, of in samples.items() if name in named}
            for chart in (chart for section in SECTIONS.values() for chart in section):
                chart.figures(part, held)
            assert f"Not finished: {finished} of at most {len(ordered)} runs." in bottom_of(part)


NAMES_OF_PARTS = {"full": 0.0, "kakurenbo": 0.3}


def bottom_of(results):
    return " ".join([*unfinished(results), *bottom_line(results)["sentences"]])
