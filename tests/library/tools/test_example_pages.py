"""The pages that list examples are those that the tool writes, and it refuses examples without their facts."""

import shutil

import pytest
from tools import example_pages
from tools.example_pages import MARKS, PAGES, ROOT, Example, page_of, read_example, written

GOOD = '''"""Something, of a kind.

Library: lib
State: works with `x = y`
Refused: z: "words"

Text with `code`.

A second part.
"""

import lib


def train():
    return lib
'''
EXAMPLE = Example(
    title="Something, of a kind",
    library="lib",
    state="works with `x = y`",
    refused='z: "words"',
    text="Text with `code`.\n\nA second part.",
    link="../examples/loaders/one.py",
)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_what_the_tool_writes(page):
    text = (ROOT / page).read_text()
    assert written(text, ROOT / PAGES[page]) == text


def test_an_example_is_read(tmp_path):
    path = tmp_path / "examples" / "loaders" / "one.py"
    path.parent.mkdir(parents=True)
    path.write_text(GOOD)
    assert read_example(path) == EXAMPLE


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("Library: lib\n", ""),
        lambda text: text.replace("State: works with", "State: may work with"),
        lambda text: text.replace("Refused:", "Reason:"),
        lambda text: text.partition('"""\n\n')[2],
        lambda text: '"""Something."""\n',
    ],
)
def test_an_example_without_its_facts_is_refused(change, tmp_path):
    path = tmp_path / "one.py"
    path.write_text(change(GOOD))
    with pytest.raises(
        ValueError,
        match=r"one.py: the docstring must have a title.*'Library: ...' and 'State: works...'",
    ):
        read_example(path)


def test_the_page_has_a_table_and_a_section_for_each_example_with_a_text():
    page = page_of([EXAMPLE, Example("Other", "lib", "refused: use `z`", "", "", "../z.py")])
    assert page.splitlines()[:4] == [
        "| library | what | state |",
        "| --- | --- | --- |",
        "| lib | [Something, of a kind](../examples/loaders/one.py) | works with `x = y` |",
        "| lib | [Other](../z.py) | refused: use `z` |",
    ]
    assert page.endswith(
        '### lib: Something, of a kind\n\nText with `code`.\n\nA second part.\n\nRefused: z: "words".'
    )


def test_the_command_writes_the_pages(tmp_path):
    for page, folder in PAGES.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("\n\n".join(["before", *MARKS, "after"]))
        shutil.copytree(ROOT / folder, tmp_path / folder)
    example_pages.main(["--root", str(tmp_path)])
    for page in PAGES:
        text = (tmp_path / page).read_text()
        assert text.startswith("before") and text.endswith("after") and ".py) | works" in text
