import base64
import io
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from thresher_lab.tasks import TASKS, pictures
from thresher_lab.tasks.base import Data


def test_images_come_from_tasks_of_this_package_only(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("raise AssertionError('was run')")
    assert pictures.training_images(f"{script}:build") is None
    digits = pictures.training_images("digits@100")
    assert digits.shape == (100, 8, 8) and digits.min() == 0 and digits.max() == 255


def test_images_in_color(monkeypatch):
    inputs = torch.stack(
        [torch.zeros(3, 2, 2), torch.tensor([1.0, 2.0, 4.0])[:, None, None].expand(3, 2, 2)]
    )
    data = Data(TensorDataset(inputs, torch.arange(2)), inputs, torch.arange(2))
    monkeypatch.setattr(
        pictures,
        "built_in",
        lambda _: replace(TASKS["cifar10"], find=lambda _: None, load=lambda _: data),
    )
    pixels = pictures.training_images("cifar10")
    assert pixels.shape == (2, 2, 2, 3) and pixels.dtype == np.uint8
    assert (pixels[0] == 0).all() and (pixels[1] == 255).all()
    image = Image.open(io.BytesIO(base64.b64decode(pictures.data_uri(pixels[1]).partition(",")[2])))
    assert (image.mode, image.size) == ("RGB", (2, 2))


def test_a_sheet_has_every_image_in_its_place():
    images = np.arange(1, 6, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(3, 2)
    sheet = pictures.contact_sheet(images, columns=2, zoom=2, gap=1)
    assert sheet.shape == (3 * 5 - 1, 2 * 7 - 1)
    assert (sheet[:4, :6] == 1).all() and (sheet[:4, 7:] == 2).all() and (sheet[10:, :6] == 5).all()
    assert (sheet[4] == 255).all() and (sheet[:, 6] == 255).all() and (sheet[10:, 7:] == 255).all()
    assert pictures.contact_sheet(images[:1, :, :, None].repeat(3, 3)).shape == (6, 9, 3)
