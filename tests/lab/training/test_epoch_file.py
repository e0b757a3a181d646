"""The epochs of a run on the disk, and which states they belong to."""

from pathlib import Path

import numpy as np
import pytest

from thresher_lab.training.samples import EpochFile


def epoch(number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(4, number, np.float32) + np.arange(4, dtype=np.float32) / 8, np.full(
        4, number, np.uint8
    )


def written(path: Path, epochs: int) -> EpochFile:
    file = EpochFile(path, 4)
    for number in range(epochs):
        file.append(*epoch(number))
    return file


def losses(file: EpochFile) -> list[list[float]]:
    return [row for rows in file.rows() for row in rows.losses.tolist()]


def test_epochs_after_a_state_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "epochs"
    file = written(path, 2)
    state = file.state_dict()
    file.append(*epoch(7))
    resumed = EpochFile(path, 4)
    resumed.load_state_dict(state)
    assert losses(resumed) == [[i / 8, 1 + i / 8] for i in range(4)]
    resumed.append(*epoch(2))
    assert losses(resumed) == [[i / 8, 1 + i / 8, 2 + i / 8] for i in range(4)]
    assert path.stat().st_size == 16 + 3 * 4 * 5


def test_a_state_before_the_first_epoch_needs_no_file(tmp_path: Path) -> None:
    path = tmp_path / "epochs"
    state = EpochFile(path, 4).state_dict()
    path.write_bytes(b"of another training")
    file = EpochFile(path, 4)
    file.load_state_dict(state)
    file.append(*epoch(5))
    assert losses(file) == [[5 + i / 8] for i in range(4)]
    for _ in range(2):
        file.delete()
        assert not path.exists()


def test_a_file_that_does_not_belong_to_the_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "epochs"
    state = written(path, 2).state_dict()
    whole = path.read_bytes()
    for wrong in (None, b"", whole[:-1], b"x" * len(whole)):
        path.unlink()
        if wrong is not None:
            path.write_bytes(wrong)
        file = EpochFile(path, 4)
        with pytest.raises(
            ValueError, match="epochs does not hold the 2 epochs .* Delete the checkpoint, and"
        ):
            file.load_state_dict(state)
        assert file.epochs == 0
        path.write_bytes(whole)
    written(path, 2)  # another training
    with pytest.raises(ValueError, match="written by another training"):
        EpochFile(path, 4).load_state_dict(state)
