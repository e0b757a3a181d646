import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thresher_lab.training.samples import RunHistory, class_name, read_history


def test_what_a_history_tells_of_its_samples():
    losses = np.array([[1, 3], [np.nan, 4], [np.nan, np.nan]], dtype=np.float32)
    of = RunHistory(np.arange(3), None, losses, np.array([[1, 0], [0, 2], [0, 0]], dtype=np.uint8))
    assert of.mean_loss.tolist() == [2, 4, np.inf]
    assert of.hidden.tolist() == [1, 1, 2]
    assert of.dropped.tolist() == [[False, True], [True, False], [True, True]]


def test_what_is_not_finite_was_not_seen(tmp_path):
    path = tmp_path / "run.parquet"
    columns = {
        "id": [0, 1],
        "target": [1, 0],
        "loss_by_epoch": [[1.0, np.inf], [np.nan, 2.0]],
        "trained_by_epoch": [[1, 0]] * 2,
    }
    pq.write_table(pa.table(columns), path)
    of = read_history(path)
    np.testing.assert_array_equal(of.losses, [[1, np.nan], [np.nan, 2]])
    assert of.targets.tolist() == [1, 0] and of.hidden.tolist() == [1, 1]


def test_a_history_without_its_columns_is_damaged(tmp_path):
    path = tmp_path / "run.parquet"
    pq.write_table(pa.table({"id": [0]}), path)
    with pytest.raises(ValueError, match=r"run.parquet is damaged .*; delete the run's files"):
        read_history(path)


def test_a_class_without_a_name_has_its_number():
    assert [class_name(number, ["cat", "dog"]) for number in range(3)] == ["cat", "dog", "2"]
