"""A training's parts, written to a file and put back."""

from pathlib import Path

import pytest
import torch
from torch import nn

from thresher_lab.training.store import Checkpoint


def parts(seed: int) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(3)}


def states(of: dict[str, nn.Module]) -> list[list[float]]:
    return [
        value.flatten().tolist() for part in of.values() for value in part.state_dict().values()
    ]


def test_parts_are_put_where_others_were(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "checkpoint.pt"
    written, others = parts(0), parts(1)
    assert Checkpoint(file, {"seed": 0}).load(others) == {}
    assert states(others) == states(parts(1)) != states(written)
    Checkpoint(file, {"seed": 0}).save(written, entries=[{"epoch": 0, "accuracy": 0.5}])
    assert Checkpoint(file, {"seed": 0}).load(others) == {
        "entries": [{"epoch": 0, "accuracy": 0.5}]
    }
    assert states(others) == states(written)
    Checkpoint(file, {"seed": 0}).save(parts(2))
    assert Checkpoint(file, {"seed": 0}).load(others) == {}
    assert states(others) == states(parts(2))
    for _ in range(2):
        Checkpoint(file, {}).delete()
        assert not file.exists()


def test_a_file_of_another_training_is_refused(tmp_path: Path) -> None:
    file, others = tmp_path / "checkpoint.pt", parts(1)
    identity = {"seed": 0, "settings": {"pool": ("a", "b"), "data": Path("x")}}
    Checkpoint(file, identity).save(parts(0))
    Checkpoint(file, identity).load(parts(0))
    for changed, message in (
        ({"seed": 1}, "its seed is 0, here it is 1; give another folder"),
        ({"k": 2}, "its k is None"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint.pt is of another training: {message}"):
            Checkpoint(file, identity | changed).load(others)
    assert states(others) == states(parts(1))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"checkpoint.pt is damaged \(\w+\); delete it, and the training starts anew",
    ):
        Checkpoint(file, {}).load(parts(0))


def test_a_file_cut_short_or_of_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    Checkpoint(file, {}).save(parts(0))
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match="is damaged"):
        Checkpoint(file, {}).load(parts(0))
    torch.save({"weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"is damaged \(KeyError\)"):
        Checkpoint(file, {}).load(parts(0))


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, others = tmp_path / "checkpoint.pt", parts(1)
    Checkpoint(file, {}).save(parts(0))

    def full(_: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as context, pytest.raises(OSError, match="no space"):
        context.setattr("os.fsync", full)
        Checkpoint(file, {}).save(others)
    Checkpoint(file, {}).load(others)
    assert states(others) == states(parts(0)) and [path.name for path in tmp_path.iterdir()] == [
        "checkpoint.pt"
    ]
