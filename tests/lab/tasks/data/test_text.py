import pytest
import torch

from thresher_lab.tasks import text as data


def test_sequences_do_not_overlap_and_targets_are_moved_by_one(tmp_path):
    file = tmp_path / "my.txt"
    content = "".join(chr(97 + n % 26) for n in range(1000))
    file.write_text(content)
    found = data.byte_sequences(data.find_text(file))
    x, y = found.train.tensors
    assert x.shape == y.shape == (
        14,
        64,
    ) and found.test_inputs.shape == found.test_targets.shape == (1, 64)
    assert x.dtype == y.dtype == torch.int64
    assert bytes(x.flatten().tolist()).decode() == content[: 14 * 64]
    assert bytes(y.flatten().tolist()).decode() == content[1 : 14 * 64 + 1]
    assert bytes(found.test_inputs[0].tolist()).decode() == content[900:964]
    assert bytes(found.test_targets[0].tolist()).decode() == content[901:965]


def test_letters_of_several_bytes_are_bytes(tmp_path):
    file = tmp_path / "my.txt"
    file.write_text("é" * 400, encoding="utf-8")
    assert data.byte_sequences(file).train.tensors[0][0, :4].tolist() == [0xC3, 0xA9] * 2


def test_words_are_numbered_by_their_frequency_in_training(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "VOCABULARY", 4)
    file = tmp_path / "wiki.train.tokens"
    file.write_text("the cat the of the\n\n" * 200 + "dog dog the\n" * 40)
    found = data.word_sequences(file)
    x, y = found.train.tensors
    assert x[0, :9].tolist() == [1, 3, 1, 0, 1, 2, 2, 1, 3] and torch.equal(x[0, 1:], y[0, :-1])
    assert set(found.test_inputs.flatten().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("load", [data.byte_sequences, data.word_sequences])
def test_the_documentation_of_python_is_the_default(load):
    assert data.find_text() is None
    found, again = load(), load()
    assert len(found.train) > 700 and len(found.test_inputs) == pytest.approx(
        len(found.train) / 9, rel=0.02
    )
    assert torch.equal(found.train.tensors[0], again.train.tensors[0])
    assert found.train.tensors[0].min() >= 0 and found.train.tensors[0].max() < 8192


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(
            FileNotFoundError, match=f"--data {path}: no such file; give a text in UTF-8"
        ):
            data.find_text(path)
    monkeypatch.setattr(data, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match="this Python lacks its documentation.*--data FILE"):
        data.find_text()


@pytest.mark.parametrize(
    ("load", "content", "message"),
    [
        (
            data.byte_sequences,
            b"",
            "a text of 0 bytes is too short: the last tenth, to test on, must have 65 or more",
        ),
        (data.byte_sequences, b"x" * 640, "a text of 640 bytes is too short"),
        (data.word_sequences, b"", "a text of 0 words is too short"),
        (data.word_sequences, b"x " * 638 + b"y\n", "a text of 640 words is too short"),
        (data.byte_sequences, b"x" * 1000 + b"\xff", "not a text in UTF-8: .*0xff"),
        (data.word_sequences, b"x " * 1000 + b"\xff", "not a text in UTF-8: .*0xff"),
    ],
)
def test_texts_that_do_not_serve(tmp_path, load, content, message):
    file = tmp_path / "my.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"my.txt: {message}"):
        load(file)


def test_the_shortest_text(tmp_path):
    file = tmp_path / "my.txt"
    file.write_bytes(b"x" * 641)
    found = data.byte_sequences(file)
    assert (len(found.train), len(found.test_inputs)) == (8, 1)
