import pytest

from lab.report.cases import comparison
from thresher_lab.report import chart_images


def test_without_a_browser_the_message_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(chart_images.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="none of chromium, .* is on PATH"):
        chart_images.write_chart_images(*comparison(), tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_a_browser_that_draws_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(chart_images.shutil, "which", lambda name: "true")
    with pytest.raises(ValueError, match="true drew 0 of .* charts; nothing was written"):
        chart_images.write_chart_images(*comparison(), tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("label", "suffix"),
    [("", ""), ("CPU time", "-2-CPU-time"), ("a/../b:keep=0.3", "-2-a-..-b-keep=0.3")],
)
def test_views_have_names_that_are_files(label, suffix):
    assert chart_images._suffix(2, label) == suffix
