"""Object detection with Ultralytics: KAKURENBO skips the images that the detector finds easy by now.

Trains YOLO11n on drawn images, in full and with KAKURENBO, and prints the whole time of each. Needs `pip install ultralytics`.

What is certain: a row shows one image, whose file the script compares with the id that Thresher has for the row; its loss is
what the detector's criterion returns for this image alone. What is not: with mosaic, mixup, cutmix or copy-paste a row shows
parts of several images (in a mosaic, a quarter of the boxes is of the image that names the row). The script refuses these.
"""

import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer

import thresher


class SelectiveTrainer(DetectionTrainer):
    method = thresher.Kakurenbo(max_fraction=0.3, move_back=False)

    def _build_train_pipeline(self):
        super()._build_train_pipeline()
        if mixing := [
            name for name in ("mosaic", "mixup", "cutmix", "copy_paste") if getattr(self.args, name)
        ]:
            raise ValueError(
                f"{mixing[0]}: a row would show several images, and its loss belongs to none; set it to 0"
            )
        loader = self.train_loader
        # The trainer's loader repeats its sampler for ever, and would draw an epoch before it is planned.
        plain = DataLoader(
            loader.dataset, loader.batch_size, shuffle=True, collate_fn=loader.collate_fn
        )
        self.run = thresher.attach(
            self.method, loader=plain, criterion=lambda losses, _: losses, model=self.model, forward=self.forward_only,
            optimizer=self.optimizer, epochs=self.epochs, collate_keeps_rows=True,  # as `preprocess_batch` checks
        )  # fmt: skip
        self.train_loader, self.plain_criterion = (
            PlannedLoader(self.run.loader),
            self.model.init_criterion(),
        )
        self.model.criterion = RecordingCriterion(self)

    def preprocess_batch(self, batch):
        self.ids = self.run.ids_of(batch["img"])
        if [self.train_loader.dataset.im_files[number] for number in self.ids.tolist()] != list(
            batch["im_file"]
        ):
            raise RuntimeError("a row of the batch does not show the image of its id")
        return super().preprocess_batch(
            dict(batch)
        )  # a copy: Thresher may need the batch as it was loaded

    @torch.no_grad()
    def losses(self, outputs, batch):
        """Returns the loss of each image, shape (B,)."""
        outputs, losses = self.plain_criterion.parse_output(outputs), []
        for row in range(len(outputs["boxes"])):
            alone = {name: outputs[name][row : row + 1] for name in ("boxes", "scores")}
            alone["feats"] = [feature[row : row + 1] for feature in outputs["feats"]]
            labels = {
                name: batch[name][batch["batch_idx"] == row]
                for name in ("batch_idx", "cls", "bboxes")
            }
            labels["batch_idx"] = torch.zeros_like(labels["batch_idx"])
            losses.append(self.plain_criterion(alone, labels)[0].sum())
        return torch.stack(losses)

    def forward_only(self, model, batch):
        """Computes losses of skipped images for Thresher, which passes the two results to the criterion."""
        batch = super().preprocess_batch(dict(batch))
        return (losses := self.losses(model(batch["img"]), batch)), losses


class RecordingCriterion:
    def __init__(self, trainer):
        self.trainer = trainer

    def __call__(self, outputs, batch):
        trainer, (loss, items) = self.trainer, self.trainer.plain_criterion(outputs, batch)
        if not trainer.model.training:  # a validation
            return loss, items
        # Both zeros leave the loss as it is, and put the recorded losses into its graph: the run counts its backward pass.
        return loss + 0 * trainer.run.reduce(
            trainer.losses(outputs, batch) + 0 * loss.sum(), ids=trainer.ids
        ), items

    def __reduce__(self):
        return type(
            None
        ), ()  # copies of the model, as in checkpoints, make a criterion of their own


class PlannedLoader:
    reset = close = lambda self: None  # the trainer calls them

    def __init__(self, loader):
        self.loader, self.dataset, self.num_workers = loader, loader.dataset, loader.num_workers

    def __len__(self):
        return len(self.loader)

    def __iter__(
        self,
    ):  # a generator, because the trainer makes two iterators an epoch and begins one
        yield from self.loader


def draw(folder, count, generator):
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for number in range(count):
        image, lines = generator.integers(0, 60, (64, 64, 3), dtype=np.uint8), []
        for color in generator.integers(3, size=generator.integers(1, 4)):
            w, h, x, y = generator.integers(10, 30, 4)
            image[y : y + h, x : x + w] = np.eye(3, dtype=np.uint8)[color] * 230
            lines.append(f"{color} {(x + w / 2) / 64} {(y + h / 2) / 64} {w / 64} {h / 64}")
        cv2.imwrite(str(folder / "images" / f"{number:03d}.png"), image)
        (folder / "labels" / f"{number:03d}.txt").write_text("\n".join(lines))


def main(images=160, epochs=10, **settings):
    settings = {
        "imgsz": 64,
        "batch": 8,
        "mosaic": 0,
        "warmup_epochs": 1,
        "workers": 0,
        "epochs": epochs,
    } | settings
    with tempfile.TemporaryDirectory() as folder:
        data, generator = Path(folder, "data.yaml"), np.random.default_rng(0)
        data.write_text(
            f"path: {folder}\ntrain: train/images\nval: val/images\nnames: {{0: blue, 1: green, 2: red}}\n"
        )
        draw(Path(folder, "train"), images, generator)
        draw(Path(folder, "val"), images // 4, generator)
        for trainer in (DetectionTrainer, SelectiveTrainer):
            model, begin = YOLO("yolo11n.yaml"), time.perf_counter()
            model.train(
                trainer=trainer,
                data=data,
                project=folder,
                device="cpu",
                plots=False,
                amp=False,
                **settings,
            )
            accuracy = model.trainer.metrics["metrics/mAP50(B)"]
            print(
                f"{trainer.__name__}: {time.perf_counter() - begin:.1f} s in all, mAP50 {accuracy:.3f}"
            )
        print(model.trainer.run.summary())
        return model.trainer


if __name__ == "__main__":
    main()
