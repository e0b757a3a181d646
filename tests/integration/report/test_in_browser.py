import base64
import importlib.util
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from pypdf import PdfReader

from depth import DEEP, in_verify
from integration.inline import train_in_threads
from lab.report.cases import HOSTILE, comparison, save
from thresher_lab.comparison.compare import compare
from thresher_lab.comparison.summary import conclude, summarize
from thresher_lab.report.chart_images import write_chart_images
from thresher_lab.report.first_screen import bottom_line
from thresher_lab.report.loading import load_comparison, runs_by_method
from thresher_lab.report.page import SECTIONS, write_report
from thresher_lab.training.shown import ids_to_show, write_shown
from thresher_lab.training.specs import parse_methods

selenium = pytest.importorskip("selenium", reason="needs selenium")
from selenium.webdriver import Chrome, ChromeOptions, ChromeService  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs Debian's chromium and chromium-driver",
    ),
    in_verify,
]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
WIDE, PHONE = (1280, 900), (390, 844)


def made_up(folder):
    """Names that would be HTML, charts for everything that a run may tell, and a margin so wide that there is a pick."""
    results, samples = comparison({"full": 0.0, "kakurenbo": 0.45, HOSTILE: 0.4}, task="digits@50")
    results |= {"margin": 2.0, "summary": summarize(results["runs"], 2.0)}
    for run in results["runs"]:
        run["busy"] = run["method"] == "kakurenbo"
        for entry in run["history"]:
            entry["weight_loss"] = 0.5
    results["classes"] = [
        "T-shirt/top",
        HOSTILE,
        "Dress",
        "A name that is forty characters long ...",
        "Coat",
    ]
    results["device"], results["versions"] = HOSTILE, {HOSTILE: HOSTILE}
    save(folder, results, samples)


def trained(folder):
    """What two methods, full training and their controls leave behind."""
    specs = parse_methods("kakurenbo:tau=0.0,infobatch:delta=1.0")
    with pytest.MonkeyPatch.context() as patch:
        train_in_threads(patch)
        compare(
            "digits@256",
            specs,
            seeds=[0, 1],
            epochs=2,
            out=folder,
            jobs=1,
            controls=("uniform", "shorter"),
        )


# What was trained has no chart that was not made up as well: `make verify` looks at both.
@pytest.fixture(
    scope="module", params=[made_up, trained] if DEEP else [made_up], ids=lambda make: make.__name__
)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param.__name__)
    request.param(path)
    return path


@pytest.fixture(scope="module")
def made(folder):
    return load_comparison(folder)


@pytest.fixture(scope="module")
def address(folder):
    return write_report(folder).as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, address):
    """Shows the page, which is loaded once for all tests that do not ask for a fresh one."""

    def open_page(size=WIDE, scheme="light", *, fresh=False, untouched=False):
        metrics = {
            "width": size[0],
            "height": size[1],
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for log in ("browser", "performance"):
            browser.get_log(log)
        if fresh or browser.current_url != address:
            browser.get(address)
        if not untouched:
            scroll_through(browser)
        return browser

    return open_page


def scroll_through(browser):
    """Scrolls to every chart, where it is drawn, and back to the top."""
    chart = "document.querySelectorAll('.chart')[arguments[0]]"
    for number in range(len(browser.find_elements(By.CSS_SELECTOR, ".chart"))):
        if not browser.execute_script(f"return drawn.has({chart})", number):
            browser.execute_script(f"{chart}.scrollIntoView()", number)
            WebDriverWait(browser, 30).until(
                lambda page, at=number: page.execute_script(f"return drawn.has({chart})", at)
            )
    browser.execute_script("scrollTo(0, 0)")


DRAWN = """
    const plot = document.querySelector(`#${arguments[0]} .plot`);
    const size = (trace) => (trace.type === "heatmap" ? trace.z.flat().length : trace.x.length);
    return {
      traces: plot.data.map((trace) => [trace.legendgroup ?? "", trace.type, size(trace)]),
      points: plot.querySelectorAll(".scatterlayer .point, .barlayer .point").length,
      images: plot.querySelectorAll(".heatmaplayer image").length,
    }"""


def expected(figure):
    """What DRAWN finds of a figure: its traces, points of those that are shown, and heatmaps, which are images."""
    traces = [
        [
            trace.legendgroup or "",
            trace.type,
            np.size(trace.z if trace.type == "heatmap" else trace.x),
        ]
        for trace in figure.data
    ]
    dotted = [
        trace.type == "bar" or (trace.type == "scatter" and "markers" in trace.mode)
        for trace in figure.data
    ]
    return {
        "traces": traces,
        "points": sum(
            traces[at][2]
            for at, trace in enumerate(figure.data)
            if dotted[at] and trace.visible is None
        ),
        "images": sum(trace.type == "heatmap" for trace in figure.data),
    }


def test_nothing_is_requested_and_nothing_complained_of(opened, made):
    browser = opened(fresh=True)
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in sent
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if not url.startswith("data:")] == [browser.current_url]
    assert browser.get_log("browser") == []
    assert browser.title.startswith(made[0]["task"])


def test_every_chart_is_drawn_with_every_point_in_every_view(opened, made):
    browser = opened()
    for chart in (chart for section in SECTIONS.values() for chart in section):
        figures = chart.figures(*made)
        inputs = browser.find_elements(
            By.CSS_SELECTOR, f"#{chart.key} .choice input, #{chart.key} .choice option"
        )
        assert len(inputs) == (len(figures) if len(figures) > 1 else 0)
        for number, figure in enumerate(figures.values()):
            if inputs:
                inputs[number].click()
            assert browser.execute_script(DRAWN, chart.key) == expected(figure)
    assert browser.get_log("browser") == []


def test_charts_have_as_many_points_as_results_json_has_values(opened, folder):
    results = json.loads((folder / "results.json").read_text())
    epochs, seeds = results["epochs"], len({run["seed"] for run in results["runs"]})
    compared = list(
        dict.fromkeys(run["method"] for run in results["runs"] if run["control_of"] is None)
    )
    browser = opened()
    sizes = {
        chart: browser.execute_script(DRAWN, chart)["traces"]
        for chart in ("cost", "curves", "easy", "histogram")
    }
    assert sum(size for _, _, size in sizes["cost"]) == len(results["summary"])
    band = [2 * epochs] * (seeds > 1)
    for chart in ("curves", "easy"):
        by_method = {
            method: [size for name, _, size in sizes[chart] if name == method]
            for method in compared
        }
        assert by_method == {method: [*band, epochs] for method in compared}
    [[_, kind, size]] = sizes["histogram"]
    assert (kind, size) == ("heatmap", (len(results["loss_bins"]) - 1) * epochs)


def cells(browser, column):
    return [
        row.find_elements(By.CSS_SELECTOR, "th, td")[column].text
        for row in browser.find_elements(By.CSS_SELECTOR, "#verdict tbody tr")
    ]


def test_the_table_is_sorted_by_keyboard(opened, made):
    browser = opened()
    button = browser.find_elements(By.CSS_SELECTOR, "#verdict thead button")[3]
    costs = sorted(f"{row['cost_ratio']:.3f}" for row in made[0]["summary"])
    browser.execute_script("document.querySelectorAll('#verdict thead button')[2].focus()")
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element == button
    for key, order, expected in (
        (Keys.ENTER, "ascending", costs),
        (Keys.SPACE, "descending", costs[::-1]),
    ):
        browser.switch_to.active_element.send_keys(key)
        assert cells(browser, 3) == expected
        assert button.find_element(By.XPATH, "..").get_attribute("aria-sort") == order
        assert len(browser.find_elements(By.CSS_SELECTOR, "#verdict [aria-sort=none]")) == 7


def test_rows_without_a_difference_sort_last_either_way(opened):
    browser = opened()
    for _ in range(2):
        browser.find_elements(By.CSS_SELECTOR, "#verdict thead button")[2].click()
        assert cells(browser, 2).index("") == len(cells(browser, 2)) - 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_page_is_as_wide_as_the_window(opened, size, scheme):
    browser = opened(size, scheme, fresh=(size, scheme) == (PHONE, "light"))
    assert browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [
        size[0],
        size[0],
    ]
    right = "return [...document.querySelectorAll('.plot')].map(plot => plot.querySelector('svg').getBoundingClientRect().right)"
    WebDriverWait(browser, 10).until(
        lambda page: max(page.execute_script(right)) <= size[0]
    )  # charts follow the window


def test_charts_follow_the_theme(opened):
    browser = opened(scheme="dark")
    colors = """
        const plot = document.querySelector('#cost .plot')._fullLayout;
        return [getComputedStyle(document.body).color, plot.font.color, plot.shapes[0].line.color]"""
    dark = browser.execute_script(colors)
    browser.find_element(By.ID, "theme").send_keys(Keys.ENTER)
    light = browser.execute_script(colors)
    assert dark == ["rgb(233, 233, 236)", "rgb(233, 233, 236)", "#e9e9ec"]
    assert light == ["rgb(28, 29, 33)", "rgb(28, 29, 33)", "#1c1d21"]
    browser.execute_script(
        "delete document.documentElement.dataset.theme; drawAll()"
    )  # follows the system again


def test_a_method_is_switched_off_on_the_whole_page(opened, made):
    browser = opened()
    name = [*runs_by_method(made[0])][1]
    shown = "return ['cost', 'curves', 'easy'].map(key => document.getElementById(key).querySelector('.plot')._fullData"
    shown += f".some(trace => trace.legendgroup === '{name}' && trace.visible))"
    assert browser.execute_script(shown) == [True] * 3
    button = next(
        b for b in browser.find_elements(By.CSS_SELECTOR, "#cost .legend button") if b.text == name
    )
    button.send_keys(Keys.ENTER)
    assert browser.execute_script(shown) == [False] * 3
    assert browser.switch_to.active_element.text == name
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.execute_script(shown) == [True] * 3


def test_sheets_change_with_the_method(opened):
    browser = opened()
    visible = "return [...document.querySelectorAll('div.sheets')].map(s => s.offsetHeight > 0)"
    assert browser.execute_script(visible) == [True, False, False]
    browser.find_elements(By.CSS_SELECTOR, "#sheets input")[1].click()
    assert browser.execute_script(visible) == [False, True, False]
    broken = "return [...document.querySelectorAll('div.sheets:not([hidden]) img')].filter(i => i.naturalWidth !== 8).length"
    assert browser.execute_script(broken) == 0


def test_an_own_training_has_pictures_texts_and_names(browser, tmp_path):
    results, samples = comparison(seeds=(0,), controls=False)
    results["classes"] = ["T-shirt/top", HOSTILE, "Dress", "Bag", "Coat"]
    for run in results["runs"]:
        run["shown"] = f"runs/{run['method']}.shown"
    save(tmp_path, results, samples)
    for run in results["runs"]:
        ids = ids_to_show(samples[run["samples"]], samples["runs/0.parquet"])
        write_shown(
            tmp_path / run["shown"],
            lambda i: np.full((90, 30), i) if i % 2 else f"{i} {HOSTILE} " * 20,
            ids,
        )
    browser.get(write_report(tmp_path).as_uri())
    browser.find_element(By.ID, "sheets").location_once_scrolled_into_view  # noqa: B018
    cards = browser.execute_script(CARDS)
    assert len(cards) > 30 and {kind for kind, *_ in cards} == {"IMG", "P"}
    for kind, width, text, said in cards:
        number, name = said.split(", class ")
        assert (
            width == 21
            if kind == "IMG"
            else text.startswith(f"{number} {HOSTILE}") and len(text) == 200
        )
        assert name.startswith(results["classes"][int(number) % 5])
    assert browser.get_log("browser") == [] and browser.title.startswith("mine.py:build")
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) == 0


CARDS = """
    return [...document.querySelectorAll("#sheets .sheets:not([hidden]) li")].map((card) => [
      card.children[0].tagName, card.children[0].naturalWidth, card.children[0].textContent, card.children[1].innerText,
    ])"""


def test_images_of_all_views(made, tmp_path):
    written = write_chart_images(*made, tmp_path / "figures")
    views = sum(len(chart.figures(*made)) for section in SECTIONS.values() for chart in section)
    assert len(written) == len(set(written)) == views
    assert all(
        path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written
    )
    assert (tmp_path / "figures" / "curves-1-epochs.png") in written


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_first_screen_has_the_bottom_line_and_the_chart(opened, made, size, tmp_path):
    browser = opened(size, fresh=True, untouched=True)
    first = browser.find_element(By.ID, "bottom-line")
    box = "const box = arguments[0].getBoundingClientRect(); return [box.top, box.bottom, box.left, box.right]"
    code = first.find_elements(By.TAG_NAME, "pre")
    assert bool(code) == (bottom_line(made[0])["code"] is not None)
    # A phone shows the beginning of the chart, and the code below it.
    for element in (first.find_element(By.TAG_NAME, "p"), *(code if size == WIDE else ())):
        top, bottom, left, right = browser.execute_script(box, element)
        assert top >= 0 and bottom <= size[1] and left >= 0 and right <= size[0]
    top, bottom, left, right = browser.execute_script(
        box, first.find_element(By.TAG_NAME, "figure")
    )
    assert 0 <= top < size[1] - 100 and left >= 0 and right <= size[0] and bottom > top
    assert first.find_element(By.TAG_NAME, "p").text == conclude(made[0]).sentences[0]
    assert [one.text for one in code] == [bottom_line(made[0])["code"]] * len(code)
    assert len(first.find_elements(By.CSS_SELECTOR, "svg circle")) == len(made[0]["summary"]) - 1
    if folder := os.environ.get("THRESHER_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"first-screen-{size[0]}x{size[1]}.png"))


def test_charts_wait_until_they_are_scrolled_to(opened):
    """What draws the charts takes seconds to start on a phone: the page is there before it."""
    browser = opened(PHONE, fresh=True, untouched=True)
    assert browser.execute_script("return drawn.size") == 0
    longest = """
        const done = arguments[0];
        new PerformanceObserver((list) => done(Math.max(...list.getEntries().map((one) => one.duration))))
            .observe({ type: "longtask", buffered: true });
        setTimeout(() => done(0), 300);"""
    assert browser.execute_async_script(longest) < 1500
    scroll_through(browser)
    assert browser.execute_script("return typeof Plotly") == "object"
    assert browser.execute_script("return drawn.size") == len(
        browser.find_elements(By.CSS_SELECTOR, ".chart")
    )


def test_a_print_draws_what_was_not_scrolled_to(opened):
    browser = opened(PHONE, fresh=True, untouched=True)
    notices = """return [...document.querySelectorAll(".chart")].filter(
        (chart) => getComputedStyle(chart, "::before").content.includes("once more")).length"""
    charts = len(browser.find_elements(By.CSS_SELECTOR, ".chart"))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script(notices) == charts
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    WebDriverWait(browser, 30).until(
        lambda _: browser.execute_script("return drawn.size") == charts
    )
    assert browser.execute_script(notices) == 0
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_first_print_has_the_verdicts_and_the_charts(opened, made):
    """The library that draws is there before anything is scrolled to."""
    browser = opened(WIDE, fresh=True, untouched=True)
    WebDriverWait(browser, 30).until(
        lambda _: browser.execute_script("return typeof Plotly === 'object' && !!figures")
    )
    charts = len(browser.find_elements(By.CSS_SELECTOR, ".chart"))
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert browser.execute_script("return drawn.size") == charts
    pages = PdfReader(io.BytesIO(base64.b64decode(printed["data"]))).pages
    words = "".join("".join(page.extract_text() for page in pages).split())
    assert "Printthepageoncemore" not in words
    for row in made[0]["summary"]:
        assert "".join(row["verdict"].split()) in words, row["verdict"]
    for title in browser.execute_script(
        "return [...document.querySelectorAll('.chart .xtitle')].map((one) => one.textContent)"
    ):
        assert "".join(title.split()) in words, title
    if folder := os.environ.get("THRESHER_SCREENSHOTS"):
        Path(folder, "report.pdf").write_bytes(base64.b64decode(printed["data"]))


AXE = importlib.util.find_spec("axe_playwright_python")


@pytest.mark.skipif(
    AXE is None,
    reason="needs pip install --no-deps axe-playwright-python, for its copy of axe-core",
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_used_by_everybody(opened, scheme):
    browser = opened(scheme=scheme)
    browser.execute_script((Path(AXE.origin).parent / "axe.min.js").read_text())
    found = browser.execute_async_script(
        "const done = arguments[0]; axe.run().then((result) => done(result.violations))"
    )
    assert [(one["id"], [node["html"][:120] for node in one["nodes"]][:3]) for one in found] == []
