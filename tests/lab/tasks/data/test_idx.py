import gzip
import struct

import numpy as np
import pytest

from thresher_lab.tasks.base import read_idx

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
CONTENT = bytes((0, 0, 8, 3)) + struct.pack(">3I", 2, 3, 4) + IMAGES.tobytes()


@pytest.mark.parametrize(
    "content", [CONTENT, gzip.compress(CONTENT, mtime=0)], ids=["plain", "gzip"]
)
def test_reads_plain_and_gzipped(tmp_path, content):
    path = tmp_path / "images"
    path.write_bytes(content)
    assert np.array_equal(read_idx(path, 3), IMAGES)


def test_reads_labels(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(bytes((0, 0, 8, 1)) + struct.pack(">I", 3) + b"\x01\x02\x09")
    assert read_idx(path, 1).tolist() == [1, 2, 9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (
            b"\x89PNG" + CONTENT[4:],
            "not an IDX file of 3-D bytes: begins with 89504e47, not 00000803",
        ),
        (bytes((0, 0, 8, 1)) + CONTENT[4:], "not an IDX file of 3-D bytes"),
        (bytes((0, 0, 13, 3)) + CONTENT[4:], "not an IDX file of 3-D bytes"),
        (CONTENT[:10], "truncated: the header has 10 of 16 bytes"),
        (CONTENT[:-1], "truncated: 23 bytes of data for 2 x 3 x 4"),
        (CONTENT + b"x", "damaged: 25 bytes of data for 2 x 3 x 4"),
        (CONTENT[:4] + b"\xff" * 12 + CONTENT[16:], "truncated: 24 bytes of data for 4294967295 x"),
        (gzip.compress(CONTENT, mtime=0)[:-12], "truncated or damaged gzip file"),
        (gzip.compress(CONTENT, mtime=0)[:-8] + bytes(8), "truncated or damaged gzip file"),
        (
            gzip.compress(CONTENT, mtime=0)[:12]
            + b"\xff\xff\xff\xff"
            + gzip.compress(CONTENT, mtime=0)[16:],
            "truncated or damaged gzip file",
        ),
        (gzip.compress(CONTENT[:-1], mtime=0), "truncated: 23 bytes"),
    ],
)
def test_refuses_what_is_not_whole_and_names_the_file(tmp_path, content, message):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte.gz") as caught:
        read_idx(path, 3)
    assert message in str(caught.value)
