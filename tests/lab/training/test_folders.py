import subprocess
import sys

import pytest

from thresher_lab.training import folders
from thresher_lab.training.folders import sole_use

HOLDER = """
import sys, time
from pathlib import Path
from thresher_lab.training.folders import sole_use
with sole_use(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_has_one_user_at_a_time(tmp_path):
    out = tmp_path / "new" / "folder"
    said = (
        f"^the folder {out} is in use by another comparison: wait until .* or give another folder$"
    )
    with (
        sole_use(out),
        sole_use(tmp_path / "another"),
        pytest.raises(ValueError, match=said),
        sole_use(out),
    ):
        pass
    with sole_use(out):
        pass


def test_an_error_leaves_the_folder_free(tmp_path):
    with pytest.raises(KeyError), sole_use(tmp_path):
        raise KeyError
    with sole_use(tmp_path):
        pass


def test_a_killed_process_leaves_the_folder_free(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in use"), sole_use(tmp_path):
            pass
    finally:
        process.kill()
        process.communicate()
    with sole_use(tmp_path):
        pass


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folders, "_lock", refuse)
    with sole_use(tmp_path):
        pass


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="is a file; give a folder"), sole_use(path):
        pass
