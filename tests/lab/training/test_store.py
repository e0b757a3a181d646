import json
import math

import pytest

from thresher_lab.training.folders import sole_use
from thresher_lab.training.store import ReadOnlyStore, Store, restart, write_json

IDENTITY = {"task": "digits", "epochs": 3, "recipe": {"lr": 0.1}, "versions": {"torch": "2.13.0"}}
COST = {
    "forward": 9,
    "backward": 6,
    "full_forward": 9,
    "full_backward": 9,
    "ratio": 0.8,
    "backward_to_forward": None,
}
RUN = {
    "method": "full",
    "settings": {},
    "seed": 0,
    "control_of": None,
    "device": "cpu",
    "cost": COST,
    "history": [],
}
RUN |= {"metric": {"name": "accuracy", "value": 0.9}, "cpu_s": 1.5, "wall_s": 1.5}


def test_runs_come_back_and_nothing_else_is_left(tmp_path):
    store = Store(tmp_path / "new" / "folder", IDENTITY)
    assert store.run("a") is None
    store.save_run("a", RUN)
    assert Store(store.folder, IDENTITY).run("a") == RUN
    assert sorted(path.name for path in store.folder.rglob("*")) == [
        "a.json",
        "comparison.json",
        "runs",
    ]


def test_a_folder_of_former_times_is_of_one_process(tmp_path):
    Store(tmp_path, IDENTITY).save_run("a", RUN)
    Store(tmp_path, IDENTITY | {"processes": 1})
    with pytest.raises(ValueError, match="its processes is 1, here it is 2"):
        Store(tmp_path, IDENTITY | {"processes": 2})


def test_the_common_ratio_stays(tmp_path):
    Store(tmp_path, IDENTITY).remember(backward_to_forward=1.75)
    assert Store(tmp_path, IDENTITY).backward_to_forward == 1.75


def test_looks_are_not_forgotten(tmp_path):
    sizes = ([3], [3], [3, 5, 8, 12], [12], [16])
    assert [Store(tmp_path, IDENTITY).looks_with(one) for one in sizes] == [1, 1, 4, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "mnist-5k"}, "its task is digits, here it is mnist-5k"),
        ({"epochs": 4}, "its epochs is 3, here it is 4"),
        ({"recipe": {"lr": 0.2}}, "its recipe is lr 0.1, here it is lr 0.2"),
        (
            {"versions": {"torch": "2.14.0"}},
            "its versions is torch 2.13.0, here it is torch 2.14.0",
        ),
    ],
)
def test_another_comparison_is_refused_and_left_alone(tmp_path, change, message):
    Store(tmp_path, IDENTITY).save_run("a", RUN)
    before = (tmp_path / "comparison.json").read_text()
    with pytest.raises(
        ValueError, match=f"holds another comparison: {message}; give another folder"
    ):
        Store(tmp_path, IDENTITY | change)
    assert (tmp_path / "comparison.json").read_text() == before


def test_a_folder_without_finished_runs_is_free(tmp_path):
    Store(tmp_path, IDENTITY).remember(backward_to_forward=1.75)
    again = Store(tmp_path, IDENTITY | {"epochs": 4})
    assert again.backward_to_forward is None
    assert json.loads((tmp_path / "comparison.json").read_text())["epochs"] == 4


SCRIPT = IDENTITY | {"task": "my_training.py:build", "recipe": {"script": "0123456789ab"}}


@pytest.mark.parametrize(
    "path",
    ["./my_training.py:build", "/home/me/my_training.py:build", r"C:\me\my_training.py:build"],
)
def test_a_script_is_the_same_by_every_path(tmp_path, path):
    Store(tmp_path, SCRIPT).save_run("a", RUN)
    assert Store(tmp_path, SCRIPT | {"task": path}).run("a") == RUN
    with pytest.raises(
        ValueError, match="its task is .*my_training.py:build, here it is my_training.py:other"
    ):
        Store(tmp_path, SCRIPT | {"task": "my_training.py:other"})


def test_a_script_that_was_changed_says_how_to_begin_anew(tmp_path):
    Store(tmp_path, SCRIPT).save_run("a", RUN)
    changed = SCRIPT | {"recipe": {"script": "ba9876543210"}}
    with pytest.raises(
        ValueError,
        match="runs of another version of my_training.py: it, or a file beside it that it imports, was .* --restart",
    ):
        Store(tmp_path, changed)
    (tmp_path / "notes.txt").write_text("mine")
    restart(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "notes.txt"]
    assert Store(tmp_path, changed).run("a") is None


def test_restart_deletes_what_is_its_own_and_follows_no_link(tmp_path):
    out = tmp_path / "out"
    Store(out, IDENTITY).save_run("a", RUN)
    (out / "runs" / "mine.txt").write_text("mine")
    restart(out)
    assert sorted(path.name for path in out.rglob("*")) == [".lock", "mine.txt", "runs"]
    Store(out, IDENTITY).save_run("a", RUN)
    (out / "runs").rename(tmp_path / "elsewhere")
    (out / "runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="runs is a link; delete what it leads to yourself"):
        restart(out)
    with pytest.raises(ValueError, match="holds another comparison"):
        Store(out, IDENTITY | {"epochs": 9})
    assert (tmp_path / "elsewhere" / "a.json").is_file()


def test_restart_deletes_nothing_in_a_folder_in_use(tmp_path):
    for folder in (tmp_path, tmp_path / "rates"):
        Store(folder, IDENTITY).save_run("a", RUN)
    for folder in (tmp_path, tmp_path / "rates"):
        with sole_use(folder), pytest.raises(ValueError, match=f"the folder {folder} is in use"):
            restart(tmp_path)
        assert (
            Store(tmp_path, IDENTITY).run("a")
            == Store(tmp_path / "rates", IDENTITY).run("a")
            == RUN
        )
    restart(tmp_path)
    assert not list(tmp_path.rglob("a.json"))


def test_runs_of_an_unknown_comparison_are_not_taken(tmp_path):
    Store(tmp_path, IDENTITY).save_run("a", RUN)
    (tmp_path / "comparison.json").unlink()
    with pytest.raises(ValueError, match=r"contains runs but no comparison.json"):
        Store(tmp_path, IDENTITY)


def test_nothing_is_deleted_where_there_is_no_comparison(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine.json").write_text("{}")
    restart(tmp_path)
    restart(tmp_path / "not there")
    assert (tmp_path / "runs" / "mine.json").is_file()


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        Store(path, IDENTITY)


def test_a_damaged_run_is_named(tmp_path):
    store = Store(tmp_path, IDENTITY)
    store.save_run("a", {})
    (tmp_path / "runs" / "a.json").write_text('{"value": ')
    with pytest.raises(
        ValueError, match=r"a\.json is damaged .*; delete it, and the same command makes it again"
    ):
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


def test_what_is_only_read_stays_as_it_is(tmp_path):
    Store(tmp_path, IDENTITY).save_run("a", RUN)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    store = ReadOnlyStore(tmp_path, IDENTITY)
    store.remember(backward_to_forward=1.5)
    assert (store.run("a"), store.run("c")) == (RUN, None)
    assert store.backward_to_forward == 1.5
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    ReadOnlyStore(tmp_path / "new", IDENTITY).remember(backward_to_forward=1.5)
    assert not (tmp_path / "new").exists()


def test_runs_of_another_comparison_are_not_read(tmp_path):
    Store(tmp_path, IDENTITY).save_run("a", RUN)
    with pytest.raises(ValueError, match="holds another comparison"):
        ReadOnlyStore(tmp_path, IDENTITY | {"epochs": 99})


def test_what_lies_beside_a_run(tmp_path):
    store = Store(tmp_path, IDENTITY)
    assert store.beside("a") == {}
    store.save_run("a", RUN)
    (tmp_path / "runs" / "a.shown").touch()
    (tmp_path / "runs" / "b.parquet").touch()
    assert store.beside("a") == {"shown": "runs/a.shown"} and store.beside("b") == {
        "samples": "runs/b.parquet"
    }
