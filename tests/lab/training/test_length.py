import pytest

from thresher_lab.training.loop import Length


@pytest.mark.parametrize(
    ("share", "epochs", "steps", "samples"),
    [
        (1.0, 3, [None, None, None], 300),
        (0.5, 4, [None, None], 200),
        (0.7, 10, [None] * 7, 700),
        (0.6, 2, [None, 1], 132),
        (0.45, 2, [3], 96),
        (0.5, 3, [None, 2], 164),
        (0.97, 1, [3], 96),
        (0.997, 4, [None] * 4, 400),
        (0.01, 2, [1], 32),
        (0.503, 4, [None, None], 200),
    ],
)
def test_a_share_ends_after_the_nearest_step(share, epochs, steps, samples):
    """Epochs of 100 samples, in batches of 32, 32, 32 and 4."""
    length = Length(share, epochs, 100, 32)
    assert (length.steps, length.samples) == (steps, samples)
    assert length.progress(0) == 0 and length.progress(
        samples / (100 * len(steps))
    ) == pytest.approx(1)
    assert length.progress(1.0) == 1
