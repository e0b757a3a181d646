"""What `make release-check` refuses; its installation is tested by itself."""

import re

import pytest
from tools.release_check import ROOT, ReleaseError, check_versions, main

from thresher import __version__


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [0.3.0] - 2027-01-31\n\n## [0.2.0] - 2026-12-01\n"
    )
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.3.0\n")
    return tmp_path


def test_the_files_of_this_repository_name_its_version():
    check_versions(__version__, None)


def test_a_release_with_its_tag(folder):
    check_versions("0.3.0", "v0.3.0", folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "CHANGELOG.md",
            ("[0.3.0]", "[0.3.1]"),
            "CHANGELOG.md has version 0.3.1, but the wheel has 0.3.0",
        ),
        ("CHANGELOG.md", ("2027-01-31", "unreleased"), "has the date 'unreleased': give the day"),
        ("CITATION.cff", ("version: 0.3", "version: 0.2"), "CITATION.cff has version"),
    ],
)
def test_a_file_that_was_forgotten(folder, file, change, message):
    path = folder / file
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ReleaseError, match=re.escape(message)):
        check_versions("0.3.0", "v0.3.0", folder)


def test_a_tag_of_another_version(folder):
    with pytest.raises(ReleaseError, match="the tag has version 0.4.0, but the wheel has 0.3.0"):
        check_versions("0.3.0", "v0.4.0", folder)


def test_a_folder_with_an_older_wheel(tmp_path, capsys):
    for name in (
        "thresher-0.2.0-py3-none-any.whl",
        "thresher-0.3.0-py3-none-any.whl",
        "thresher-0.3.0.tar.gz",
    ):
        (tmp_path / name).touch()
    assert main([str(tmp_path)]) == 1
    assert "has 2 wheels and 1 sdists: 1 of each is needed" in capsys.readouterr().err


def test_the_workflow_runs_the_check_for_tags():
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert 'tags: ["v*"]' in workflow and 'make release-check TAG="$GITHUB_REF_NAME"' in workflow
