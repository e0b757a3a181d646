import io
import random

import numpy as np
import pytest
import torch

from thresher import rng

CPU = torch.device("cpu")


def draw(*generators: torch.Generator) -> list[float]:
    """One number from every source; NumPy's normal draws come in pairs, of which the second is kept."""
    own = [torch.rand((), generator=generator).item() for generator in generators]
    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        *own,
    ]


def test_what_was_captured_comes_back() -> None:
    generator = torch.Generator().manual_seed(3)
    draw(generator)
    state = rng.capture(CPU, [generator])
    first = draw(generator)
    assert draw(generator) != first
    rng.restore(state, CPU, [generator])
    assert draw(generator) == first


def test_a_saved_state_loads_as_weights_only() -> None:
    generator = torch.Generator().manual_seed(3)
    draw(generator)
    buffer = io.BytesIO()
    torch.save(rng.capture(CPU, [generator]), buffer)
    first = draw(generator)
    buffer.seek(0)
    rng.restore(torch.load(buffer, weights_only=True), CPU, [generator])
    assert draw(generator) == first


def test_as_many_generators_as_were_saved() -> None:
    with pytest.raises(ValueError, match="zip"):
        rng.restore(rng.capture(CPU), CPU, [torch.Generator()])


def test_undisturbed_also_when_it_raises() -> None:
    generator = torch.Generator().manual_seed(3)
    state = rng.capture(CPU, [generator])
    expected = draw(generator)
    rng.restore(state, CPU, [generator])
    with pytest.raises(KeyError), rng.undisturbed(CPU, iter([generator])):
        draw(generator)
        np.random.seed(0)
        raise KeyError
    assert draw(generator) == expected


def test_seeded_depends_on_its_key_alone() -> None:
    torch.manual_seed(1)
    before = rng.capture(CPU)
    first = torch.rand(4, generator=rng.seeded(5, 7))
    assert torch.equal(torch.get_rng_state(), before["torch"])
    torch.manual_seed(2)
    assert torch.equal(torch.rand(4, generator=rng.seeded(5, 7)), first)


def test_seeded_tells_keys_apart() -> None:
    keys = [(seed, epoch) for seed in (-1, 0, 1, 2, 2**31, 2**40 + 1) for epoch in range(50)]
    numbers = {
        torch.rand((), generator=rng.seeded(*key), dtype=torch.float64).item() for key in keys
    }
    assert len(numbers) == len(keys)
    assert rng.seeded(1, 2).initial_seed() != rng.seeded(2, 1).initial_seed()


def test_seeds_depend_on_the_key_alone_and_the_first_is_that_of_seeded():
    many = rng.seeds(5, 3, -1)
    assert (
        many == rng.seeds(5, 3, -1)
        and len(set(many)) == 5
        and all(0 <= seed < 2**63 for seed in many)
    )
    assert rng.seeds(1, 3, -1) == many[:1] and rng.seeded(3, -1).initial_seed() == many[0]
    assert rng.seeds(5, 3, 0) != many


def transcribed_lot(base: int, i: int) -> int:
    """SplitMix64 of the counter `base`, at its (i + 1)-th step; the upper half of its bits."""
    bits = ((i + 1) * 0x9E3779B97F4A7C15 + base) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return (bits ^ (bits >> 31)) >> 32


def test_lots_are_those_of_the_transcription_whatever_is_asked_with_them():
    for base in (0, 7, 2**63 - 1):
        ids = np.array([0, 1, 2**31, 2**40, 5])
        expected = [transcribed_lot(base, i) for i in ids.tolist()]
        assert (
            rng.lots(base, ids).tolist() == expected
            and rng.lots(base, range(5, 6)).tolist() == expected[-1:]
        )
        many = rng.lots(base, range(rng.CHUNK - 2, 2 * rng.CHUNK + 2))
        assert many.dtype == np.uint32 and len(many) == rng.CHUNK + 4
        for place in (0, 1, 2, rng.CHUNK + 3):
            assert many[place] == transcribed_lot(base, rng.CHUNK - 2 + place)
        assert len(rng.lots(base, range(0))) == 0


def test_lots_are_uniform_and_independent_of_their_neighbours_and_of_the_base():
    one, other = (rng.lots(base, range(200_000)) / 2**32 for base in (3, 4))
    counts = np.histogram(one, 64, (0, 1))[0]
    assert (
        (counts - 3125) ** 2 / 3125
    ).sum() < 130  # of 63 degrees of freedom: 130 is exceeded once in a million
    for a, b in ((one[1:], one[:-1]), (one, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 200_000**0.5
