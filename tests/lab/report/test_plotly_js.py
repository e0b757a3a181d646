import json
import re
from pathlib import Path

from thresher_lab.report.page import plotly_js

BUILT_FROM = Path(__file__).parents[3] / "tools" / "plotly"


def test_it_is_the_version_that_the_tool_names_with_its_licence():
    version = json.loads((BUILT_FROM / "package.json").read_text())["dependencies"]["plotly.js"]
    assert plotly_js().startswith(f"/*! plotly.js {version}: scatter, bar and heatmap.")
    assert f'version="{version}"' in plotly_js()
    assert "MIT License" in plotly_js()[:200]


def test_it_has_the_traces_of_our_charts_and_no_more():
    kinds = set(
        re.findall(
            r"go\.(Scatter|Bar|Heatmap|[A-Z][a-z]+)\(",
            "".join(
                path.read_text()
                for path in (BUILT_FROM.parents[1] / "src/thresher_lab/report").glob("*.py")
            ),
        )
    ) - {"Figure", "Layout"}
    entry = (BUILT_FROM / "entry.js").read_text()
    assert {kind.lower() for kind in kinds} == {
        "scatter",
        *re.findall(r"plotly\.js/lib/(\w+)", entry),
    } - {"core"}


def test_it_can_stand_within_a_script_element():
    assert "</script" not in plotly_js()
