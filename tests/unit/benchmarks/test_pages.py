"""What README.md and docs/results.md quote from the comparisons is what the committed results say."""

import copy
import re

import pytest
from benchmarks import pages


@pytest.fixture
def found():
    return pages.load()


def test_the_pages_are_those_of_the_results(found):
    readme, page = pages.README.read_text(), pages.PAGE.read_text()
    assert pages.with_results(readme, page, found) == (readme, page), "run python -m benchmarks.pages"


def test_the_pages_follow_the_results(found, tmp_path, monkeypatch):
    changed = copy.deepcopy(found)
    row = next(row for row in changed["fashion-cnn"]["summary"] if row["method"] == "kakurenbo")
    row |= {"finding": "no loss", "difference": 0.0123, "ci95": [0.001, 0.02], "verdict": "no loss; better than everything"}
    row["against"] = {kind: {"finding": "better"} for kind in ("uniform", "shorter", "smaller", "placebo")}
    changed["fashion-cnn"]["left_out"] = [{"method": "random_backprop", "control": "placebo", "why": "Nothing to permute"}]
    monkeypatch.setattr(pages, "load", lambda: changed)
    files = [tmp_path / "readme.md", tmp_path / "page.md"]
    for file, original in zip(files, (pages.README, pages.PAGE), strict=True):
        file.write_text(original.read_text())
    pages.main(["--readme", str(files[0]), "--page", str(files[1])])
    readme, page = (file.read_text() for file in files)
    words = {line.partition(":**")[0]: line for line in readme.splitlines() if line.startswith("- **")}
    own = "small CNN on Fashion-MNIST: +1.23 at cost 0.89"
    assert own in words["- **No loss of 0.5 points"] and own in words["- **Better than all of its controls of the same cost"]
    assert "KAKURENBO" not in words["- **Worse than full training"]
    of_four = "random, fewer epochs, smaller batches and permuted signals"
    assert re.search(rf"- \*\*Controls:\*\* .*{of_four} \([^)]*small CNN on Fashion-MNIST", readme)
    assert "+1.23 [+0.10, +2.00] | 0.892 | no loss; better than everything |" in page
    assert "Left out is the control placebo of random_backprop. Nothing to permute." in page


def test_those_that_fell_short_come_first(found):
    findings = [one.row["finding"] for one in pages.entries(found)]
    assert findings == sorted(findings, key=pages.FINDINGS.index) and {"loses", "no loss"} <= set(findings)
    losing = [one.row["difference"] for one in pages.entries(found) if one.row["finding"] == "loses"]
    assert losing == sorted(losing)


def test_better_than_some_of_the_controls_is_not_better_than_its_controls(found):
    row = next(row for row in found["fashion-cnn"]["summary"] if row["method"].endswith(" once"))
    assert {one["finding"] for one in row["against"].values()} == {"better"}
    row["against"]["smaller"] = {"finding": "unclear"}
    words = pages.overview_in_words(found).splitlines()
    assert "- **Better than all of its controls of the same cost:** none." in words
