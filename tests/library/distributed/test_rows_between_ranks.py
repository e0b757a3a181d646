"""Rows sent between ranks: data types that all ranks agree about, bits that NumPy can hold, and the rank that gets a row."""

import numpy as np
import pytest
import torch

from thresher.distributed.layout import ShardLayout
from thresher.distributed.sharded_records import DTYPES, common_dtypes, from_bits, numpy_dtype, on_host_as_bits, send_home
from thresher.testing.threaded_world import on_ranks


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_kept(dtype):
    tensor = torch.tensor([0, 1, 0, 1]).to(dtype)
    bits = on_host_as_bits(tensor)
    assert bits.dtype == numpy_dtype(dtype)
    assert torch.equal(from_bits(bits, dtype), tensor) and from_bits(bits[::2], dtype).dtype == dtype


def test_special_values_of_bfloat16_are_kept():
    tensor = torch.tensor([float("nan"), -float("inf"), -0.0, 1e38]).bfloat16()
    assert from_bits(on_host_as_bits(tensor), torch.bfloat16).view(torch.int16).tolist() == tensor.view(torch.int16).tolist()


def test_only_ranks_with_rows_know_their_data_types():
    rows = [{}, {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1, dtype=torch.bool)}, {}]
    found = on_ranks(3, lambda world: common_dtypes(rows[world.rank], ["a", "b"], world))
    assert found == [{"a": torch.bfloat16, "b": torch.bool}] * 3
    other = [{"a": torch.zeros(1, dtype=dtype)} for dtype in (torch.float16, torch.bfloat16, torch.uint8)]
    assert on_ranks(3, lambda world: common_dtypes(other[world.rank], ["a"], world)) == [{"a": torch.float32}] * 3


def test_without_fields_nothing_travels():
    assert on_ranks(2, lambda world: (common_dtypes({}, [], world), world.bytes)) == [({}, 0)] * 2


def test_rows_go_to_their_owners_in_order():
    layout, dtypes = ShardLayout(20, 3, 8), {"loss": torch.float32, "right": torch.bool}
    ids = [np.array([19, 3, 19, 9]), np.empty(0, np.int64), np.array([3, 8])]

    def look(world):
        own = ids[world.rank]
        rows = {"loss": torch.from_numpy(own + 100.0 * world.rank), "right": torch.from_numpy(own % 2 == 0)} if len(own) else {}
        found = send_home(own, rows, dtypes, layout, world)
        return found.places.tolist(), found.ranks.tolist(), found.fields["loss"].tolist(), found.fields["right"].tolist()

    assert on_ranks(3, look) == [
        ([3, 3], [0, 2], [3.0, 203.0], [False, False]),
        ([1, 0], [0, 2], [9.0, 208.0], [False, True]),
        ([3, 3], [0, 0], [19.0, 19.0], [False, False]),
    ]


def test_a_row_costs_its_fields_and_four_bytes():
    layout, dtypes = ShardLayout(16, 2, 8), {"loss": torch.float32, "half": torch.bfloat16, "right": torch.bool}

    def look(world):
        rows = {name: torch.zeros(3, dtype=dtype) for name, dtype in dtypes.items()}
        send_home(np.array([0, 1, 9]), rows, dtypes, layout, world)
        return world.bytes

    assert on_ranks(2, look) == [4 * 11, 2 * 11]
