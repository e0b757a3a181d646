"""Ultralytics: the example of object detection, whose rows are checked by the names of their files."""

import importlib.util
from pathlib import Path

import pytest
import torch

from depth import in_verify

EXAMPLE = Path(__file__).parents[3] / "examples" / "loops" / "yolo.py"


@pytest.fixture
def example():
    pytest.importorskip(
        "ultralytics",
        reason="pip install ultralytics, with a torchvision of the same build as torch",
    )
    spec = importlib.util.spec_from_file_location("yolo_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@in_verify
@pytest.mark.filterwarnings("ignore")
def test_the_example_counts_its_passes_and_credits_each_image(example, capsys):
    trainer = example.main(images=72, epochs=3)
    printed = capsys.readouterr().out
    assert printed.count("s in all, mAP50") == 2
    run = trainer.run
    assert torch.isfinite(run.records["loss"]).all() and len(run.records["loss"]) == 72
    # The trainer makes no step after the last batches of the last epoch, whose backward passes are not counted therefore.
    assert (
        run.cost.unknown is None
        and run.cost.forward <= 3 * 72
        and 2 * 72 < run.cost.backward < 3 * 72 - 8
    )


@in_verify
@pytest.mark.filterwarnings("ignore")
def test_the_recorded_loss_is_that_of_the_image_alone(example):
    recorded = []

    class Trainer(example.SelectiveTrainer):
        def losses(self, outputs, batch):
            losses = super().losses(outputs, batch)
            if len(losses) == 1:  # the criterion of a batch of one image is that of the image
                recorded.append((losses[0], self.plain_criterion(outputs, batch)[0].sum().detach()))
            return losses

    example.SelectiveTrainer = Trainer
    example.main(images=9, epochs=1)
    assert recorded and all(torch.equal(*pair) for pair in recorded)


@in_verify
@pytest.mark.filterwarnings("ignore")
def test_rows_of_several_images_are_refused(example):
    with pytest.raises(ValueError, match="mosaic: a row would show several images"):
        example.main(images=8, epochs=1, mosaic=0.5)
