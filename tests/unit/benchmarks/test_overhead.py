"""The benchmark of the overhead: what is done by hand is what run.criterion does."""

import pytest
import torch
from benchmarks import overhead

N = 1000
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["Kakurenbo", "InfoBatch", "InfoBatch, weighted", "FullData"])
def test_by_hand_the_same_records_are_written(name, monkeypatch):
    made = dict(overhead.criterion_sides(N, CPU))[name]
    run = made.run
    x, y = next(overhead.batches(run.loader))
    ids = run.ids
    outputs = run.model(x)
    run.criterion(outputs, y).backward()
    made.optimizer.step()
    table = {key: column.clone() for key, column in run.records.items()}
    blank = {key: torch.zeros_like(column) for key, column in table.items()}
    written = {key: column.clone() for key, column in blank.items()}
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)  # the tables themselves are written
    hand = overhead.by_hand(name, written, CPU)
    hand.act((outputs.detach().requires_grad_(), y, ids, None))
    for key, column in table.items():
        torch.testing.assert_close(written[key][ids], column[ids])
        others = torch.ones(N, dtype=torch.bool).index_fill_(0, ids, False)
        assert torch.equal(written[key][others], blank[key][others])


def test_the_limit_is_on_what_is_done_by_hand(tmp_path, capsys):
    out = tmp_path / "found.json"
    overhead.main(["--quick", "--only", "by hand", "--n", str(N), "--out", str(out)])
    assert "run.criterion" in out.read_text() and "by hand" in capsys.readouterr().out
