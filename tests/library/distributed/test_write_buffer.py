"""Rows that wait on the device: they come out in the order in which they were noted."""

import torch

from thresher.distributed.gathered_records import BLOCK, WriteBuffer


def test_rows_come_out_as_they_were_noted():
    buffer, n = WriteBuffer(), 0
    for size in (0, 3, 1, BLOCK - 4, BLOCK, 5, 2 * BLOCK + 1):
        buffer.add({"id": torch.arange(n, n + size), "loss": torch.arange(n, n + size).bfloat16()})
        n += size
        assert len(buffer) == n
    pieces = list(buffer.pieces())
    assert max(len(piece["id"]) for piece in pieces) == BLOCK
    assert torch.equal(torch.cat([piece["id"] for piece in pieces]), torch.arange(n))
    assert torch.equal(torch.cat([piece["loss"] for piece in pieces]), torch.arange(n).bfloat16())
    buffer.clear()
    assert len(buffer) == 0 and list(buffer.pieces()) == []


def test_what_is_noted_is_a_copy():
    buffer, ids = WriteBuffer(), torch.arange(3)
    buffer.add({"id": ids})
    ids.zero_()
    assert [piece["id"].tolist() for piece in buffer.pieces()] == [[0, 1, 2]]
