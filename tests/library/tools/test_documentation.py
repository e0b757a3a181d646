"""The documentation site: its links, its pages of the public names, its notebook."""

import ast
import importlib.util
import json
import re
import shutil
from importlib import import_module

import pytest
from tools import documentation
from tools.documentation import NAVIGATION, BrokenLinkError, notebook_page, settings, site

import thresher

made = site()


def test_every_page_has_its_place_in_the_navigation():
    parts = settings(None, None, None, made.pages)["nav"]
    assert [title for part in parts for title in part] == [*NAVIGATION] and len(NAVIGATION) == 6
    entries = [entry for part in parts for held in part.values() for entry in held]
    listed = [
        page
        for entry in entries
        for group in ([[entry]] if isinstance(entry, str) else entry.values())
        for page in group
    ]
    assert sorted(listed) == sorted(made.pages) and len(set(listed)) == len(listed)
    assert {page for held in NAVIGATION.values() for page in held} >= {
        "index.md",
        "choosing.md",
        "faq.md",
        "first-steps.md",
    }


def test_every_public_name_has_a_page_of_what_it_is():
    for name in thresher.__all__:
        if name == "__version__":
            continue
        page = made.pages[f"api/{name}.md"]
        place = page.partition("::: ")[2].split()[0]
        module, _, attribute = place.rpartition(".")
        found = (
            import_module(place)
            if module == "thresher"
            else getattr(import_module(module), attribute)
        )
        assert found is getattr(thresher, name), name
        assert "(" + f"{name}.md)" in made.pages["api/index.md"]


def test_links_lead_to_pages_and_files_of_the_site():
    for place, text in made.pages.items():
        for label, target in documentation.LINK.findall(documentation.CODE.sub("", text)):
            path = target.partition("#")[0]
            if path and "://" not in path:
                parts = [*place.split("/")[:-1], *path.split("/")]
                while ".." in parts:
                    at = parts.index("..")
                    del parts[at - 1 : at + 1]
                assert "/".join(parts) in {*made.pages, *made.files}, (place, label, target)


def test_a_broken_link_is_refused(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[there](other.md) and [not there](missing.md), `[code](nothing.md)`")
    (tmp_path / "other.md").write_text("")
    monkeypatch.setattr(documentation, "ROOT", tmp_path)
    with pytest.raises(BrokenLinkError, match="page.md links to missing.md, which is not there"):
        documentation._linked(page, "page.md", {}, {})
    page.write_text("[there](other.md#part) `[code](nothing.md)` [far](https://example.org)")
    files = {}
    text = documentation._linked(page, "deep/page.md", {}, files)
    assert text == "[there](../files/other.md#part) `[code](nothing.md)` [far](https://example.org)"
    assert files == {"files/other.md": tmp_path / "other.md"}


def test_the_notebook_runs_and_is_a_page(capsys):
    notebook = json.loads((documentation.ROOT / "examples" / "first_steps.ipynb").read_text())
    names, last = {}, None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse(cell["source"])
            shown = (
                tree.body.pop()
                if isinstance(tree.body[-1], ast.Expr) and cell["source"].endswith("half")
                else None
            )
            exec(compile(tree, "first_steps", "exec"), names)
            last = (
                shown and eval(compile(ast.Expression(shown.value), "first_steps", "eval"), names)
            ) or last
    printed = capsys.readouterr().out
    assert (
        "full training 9" in printed
        and "at cost 0.50" in printed
        and "Winnow(share=0.5)" in printed
    )
    assert last._repr_html_().startswith("<table>")
    assert names["half_accuracy"] > 0.85
    page = notebook_page(notebook)
    assert page.startswith("# First steps") and page.count("```python") == 5


def test_what_a_notebook_printed_is_on_its_page():
    cell = {
        "cell_type": "code",
        "source": ["print(1)\n", "print(2)"],
        "outputs": [{"text": ["1\n", "2\n"]}, {"data": {}}],
    }
    assert (
        notebook_page({"cells": [cell]})
        == "```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n2\n```\n"
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("needs the dependency group docs: make docs")
    folder = tmp_path_factory.mktemp("built") / "site"
    assert documentation.main([str(folder)]) == 0
    return folder


def test_the_site_is_built_without_a_warning(built):
    assert (built / "api" / "attach.html").is_file() and (built / "search").is_dir()
    assert len([*built.rglob("*.html")]) >= len(made.pages)


def test_no_page_loads_anything_from_elsewhere(built):
    for page in built.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link rel=.?stylesheet.?|img)[^>]*(?:src|href)=.?(https?:[^ >\"]*)",
            page.read_text(),
        )
        assert not loaded, page


def test_a_page_that_was_opened_from_a_file_searches_without_a_network(built):
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = selenium.ChromeOptions()
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,900",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(flag)
    browser = selenium.Chrome(
        options=options, service=selenium.ChromeService(shutil.which("chromedriver"))
    )
    try:
        browser.get((built / "methods" / "kakurenbo.html").as_uri())
        field = browser.find_element("css selector", "input.md-search__input")
        field.click()
        field.send_keys("stratified batches")
        wait = importlib.import_module("selenium.webdriver.support.ui").WebDriverWait(browser, 20)
        results = wait.until(
            lambda one: one.find_elements("css selector", ".md-search-result__item a")
        )
        assert "stratified.html" in results[0].get_attribute("href")
        for width in (1280, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            for page in ("index.html", "guide.html", "methods/kakurenbo.html"):
                browser.get((built / page).as_uri())
                cut = "return [...document.querySelectorAll('pre code')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
                assert browser.execute_script(cut) == 0, (width, page)
                assert browser.execute_script(
                    "return document.documentElement.scrollWidth <= window.innerWidth"
                ), (width, page)
    finally:
        browser.quit()
