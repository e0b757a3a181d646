import json
import math

import pytest

from thresher.experiments.training.store import Store, write_json

IDENTITY = {"task": "digits", "epochs": 3, "recipe": {"lr": 0.1}, "versions": {"torch": "2.13.0"}}
COST = {"forward": 9, "backward": 6, "full_forward": 9, "full_backward": 9, "ratio": 0.8, "backward_to_forward": None}
RUN = {"method": "full", "settings": {}, "seed": 0, "control_of": None, "device": "cpu", "cost": COST, "history": []}
RUN |= {"metric": {"name": "accuracy", "value": 0.9}, "cpu_s": 1.5, "wall_s": 1.5}


def test_runs_come_back_and_nothing_else_is_left(tmp_path):
    store = Store(tmp_path / "new" / "folder", IDENTITY)
    assert store.run("a") is None
    store.save_run("a", RUN)
    assert Store(store.folder, IDENTITY).run("a") == RUN
    assert sorted(path.name for path in store.folder.rglob("*")) == ["a.json", "comparison.json", "runs"]


def test_a_folder_of_former_times_is_of_one_process(tmp_path):
    Store(tmp_path, IDENTITY)
    Store(tmp_path, IDENTITY | {"processes": 1})
    with pytest.raises(ValueError, match="its processes is 1, here it is 2"):
        Store(tmp_path, IDENTITY | {"processes": 2})


def test_the_common_ratio_stays(tmp_path):
    Store(tmp_path, IDENTITY).backward_to_forward = 1.75
    assert Store(tmp_path, IDENTITY).backward_to_forward == 1.75


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "mnist-5k"}, "its task is digits, here it is mnist-5k"),
        ({"epochs": 4}, "its epochs is 3, here it is 4"),
        ({"recipe": {"lr": 0.2}}, "its recipe is lr 0.1, here it is lr 0.2"),
        ({"versions": {"torch": "2.14.0"}}, "its versions is torch 2.13.0, here it is torch 2.14.0"),
    ],
)
def test_another_comparison_is_refused_and_left_alone(tmp_path, change, message):
    Store(tmp_path, IDENTITY)
    before = (tmp_path / "comparison.json").read_text()
    with pytest.raises(ValueError, match=f"holds another comparison: {message}; give another folder"):
        Store(tmp_path, IDENTITY | change)
    assert (tmp_path / "comparison.json").read_text() == before


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        Store(path, IDENTITY)


def test_a_damaged_run_is_named(tmp_path):
    store = Store(tmp_path, IDENTITY)
    store.save_run("a", {})
    (tmp_path / "runs" / "a.json").write_text('{"value": ')
    with pytest.raises(ValueError, match=r"a\.json is damaged .*; delete it, and the same command makes it again"):
        store.run("a")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"old": True})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"value": math.nan})

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"old": False})
    assert json.loads(path.read_text()) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
