import random

import numpy as np
import pytest
import torch
from PIL import Image

from subset_cases import optional
from thresher_lab.recipes import datasets as transforms
from thresher_lab.recipes.datasets import Cutout, PaddedCrop, SeededTransform
from thresher_lab.recipes.schema import ImageSection

ALL = {"train_crop": 16, "flip": 0.5, "vertical_flip": 0.5, "erasing": 0.5, "cutout": 4}


@pytest.fixture(autouse=True)
def vision():
    optional("timm")


@pytest.fixture
def image():
    draw = np.random.default_rng(0)
    return Image.fromarray(draw.integers(256, size=(24, 20, 3), dtype=np.uint8))


@pytest.mark.parametrize("policy", [None, "ta_wide", "rand-m9-mstd0.5-inc1"])
@pytest.mark.parametrize("erase_with", ["mean", "noise"])
def test_torchs_seed_decides_all(image, policy, erase_with):
    change = transforms.train_transform(
        ImageSection(**ALL, auto_augment=policy, erase_with=erase_with, interpolation="bicubic")
    )
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(torch.stack([change(image) for _ in range(8)]))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert seen[0].shape == (8, 3, 16, 16) and seen[0].dtype == torch.float32
    assert len({tuple(one.flatten().tolist()) for one in seen[0]}) == 8


def test_randaugment_goes_through_at_every_strength(image):
    change = transforms.train_transform(ImageSection(auto_augment="rand-m9-mstd5-inc1"))
    torch.manual_seed(0)
    assert all(change(image).isfinite().all() for _ in range(200))


def test_testing_takes_the_middle(image):
    shown = transforms.test_transform(
        ImageSection(test_resize=10, test_crop=8, mean=(0, 0, 0), std=(1, 1, 1))
    )(image)
    wanted = image.resize((10, 12), Image.Resampling.BILINEAR).crop((1, 2, 9, 10))
    assert np.array_equal((shown * 255).round().byte().permute(1, 2, 0).numpy(), np.asarray(wanted))


def test_normalising_is_by_mean_and_deviation():
    white = Image.new("RGB", (2, 2), (255, 255, 255))
    shown = transforms.test_transform(ImageSection(mean=(0.5, 0.25, 0), std=(0.5, 0.25, 1)))(white)
    assert shown[:, 0, 0].tolist() == [1, 3, 1]


def test_a_padded_crop_moves_the_image_by_chance():
    image = Image.new("L", (3, 3))
    image.putpixel((1, 1), 255)
    torch.manual_seed(0)
    seen = {np.argwhere(np.asarray(PaddedCrop(1)(image))).tobytes() for _ in range(100)}
    assert len(seen) == 9
    assert any(np.asarray(PaddedCrop(2)(image)).sum() == 0 for _ in range(100))


def test_cutout_is_of_the_side_and_cut_off_at_the_edge():
    torch.manual_seed(0)
    erased = [int((Cutout(4)(torch.ones(2, 8, 8))[0] == 0).sum()) for _ in range(100)]
    assert max(erased) == 16 and 0 < min(erased) < 16


def test_other_random_states_are_left_alone():
    random.seed(3)
    np.random.seed(3)
    wanted = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    drawn = []
    change = SeededTransform(
        lambda given: drawn.append((random.random(), np.random.random())) or given
    )
    torch.manual_seed(0)
    change("a")
    torch.manual_seed(0)
    change("b")
    assert drawn[0] == drawn[1] and (random.random(), np.random.random()) == wanted
