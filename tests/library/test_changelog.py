"""The changelog describes this version, and the states that it saves."""

import re
from pathlib import Path

import thresher
from thresher.run import checkpoint

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def newest_section():
    return re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1]


def test_the_newest_section_is_that_of_this_version():
    assert newest_section().startswith(f"[{thresher.__version__}] - ")
    assert len(newest_section().splitlines()) <= 55


def test_it_names_the_version_of_the_states():
    assert re.findall(r"They have version (\d+)\.", newest_section()) == [str(checkpoint.VERSION)]
