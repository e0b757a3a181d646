"""Rows that wait on the device: they come out in the order in which they were noted."""

import torch

from thresher.distributed.sharded_records import BLOCK, WriteBuffer


def test_rows_come_out_as_they_were_noted():
    buffer, n = WriteBuffer(), 0
    for size in (0, 3, 1, BLOCK - 4, BLOCK, 5, 2 * BLOCK + 1):
        buffer.add({"id": torch.arange(n, n + size), "loss": torch.arange(n, n + size).bfloat16()})
        n += size
        assert len(buffer) == n
    rows = buffer.rows()
    assert torch.equal(rows["id"], torch.arange(n)) and rows["loss"].dtype == torch.bfloat16
    assert torch.equal(rows["loss"], torch.arange(n).bfloat16())
    buffer.clear()
    assert len(buffer) == 0 and buffer.rows() == {}


def test_what_is_noted_is_a_copy():
    buffer, ids = WriteBuffer(), torch.arange(3)
    buffer.add({"id": ids})
    ids.zero_()
    assert buffer.rows()["id"].tolist() == [0, 1, 2]
