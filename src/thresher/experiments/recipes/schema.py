"""What a recipe says: the settings of one experiment of a paper, as its file has them."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Part(BaseModel):
    """A part of a recipe; a field that it does not have is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Paper(Part):
    """Where the settings are published.

    Args:
        title: Of the paper.
        arxiv: Its number there; None where it is not.
        where: Table, figure or section.
    """

    title: str
    arxiv: str | None = None
    where: str


class Data(Part):
    """What is trained on.

    Args:
        name: Of the data set.
        kind: "folder": pictures in train/ and val/, a folder a class; "arrays": train/ and val/ with data-NAME.npy and
            label-NAME.npy; "task": a task of `thresher compare`, which knows its files.
        task: Its name.
        samples: To train on.
        shape: Of a sample in the files: (channels, height, width), (features,) or (tokens,); None for pictures of any size.
        classes: That are told apart; None where values are predicted.
        test_every: Test on every so-manieth training sample, where there is no val/. Default: there is one.
    """

    name: str
    kind: Literal["folder", "arrays", "task"]
    task: str | None = None
    samples: int = Field(ge=1)
    shape: tuple[int, ...] | None = None
    classes: int | None = Field(default=None, ge=2)
    test_every: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.kind == "task") != (self.task is not None):
            raise ValueError("`task` is the name of a task with kind: task, and is left out otherwise")
        if (self.kind == "folder") != (self.shape is None):
            raise ValueError("`shape` is that of a sample; it is left out with kind: folder, where pictures have any size")
        return self


class Model(Part):
    """The network.

    Args:
        source: "timm"; "thresher": one of `networks.NETWORKS`; "task": that of the task in `data`.
        name: As the source calls it.
        arguments: Of the source's function, beside the number of classes.
        pretrained: The recipe whose weights it starts from, all but the last layer.
    """

    source: Literal["timm", "thresher", "task"]
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    pretrained: str | None = None


class Batch(Part):
    """Of a step, over all workers; one process trains on all of it.

    Args:
        workers: GPUs of the source.
        per_worker: Samples on each.
    """

    workers: int = Field(default=1, ge=1)
    per_worker: int = Field(ge=1)

    @property
    def size(self) -> int:
        """Samples of a step."""
        return self.workers * self.per_worker


class Optimizer(Part):
    """How weights move.

    Args:
        name: "sgd"; "adamw"; of timm "rmsprop" in TensorFlow's form, which starts from ones, and "lamb".
        lr: The largest learning rate, of each worker or of the batch.
        lr_per: "worker": it is multiplied by their number, the linear scaling rule.
        momentum: Of sgd and rmsprop.
        nesterov: Of sgd.
        weight_decay: 0 for none.
        decay_norms: Whether it goes for biases and the weights of normalisation, too.
        arguments: Others of the optimizer's class.
    """

    name: Literal["sgd", "rmsprop", "adamw", "lamb"]
    lr: float = Field(gt=0)
    lr_per: Literal["worker", "batch"] = "batch"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    decay_norms: bool = True
    arguments: dict[str, Any] = Field(default_factory=dict)


class Schedule(Part):
    """The learning rate over the epochs.

    Args:
        warmup_epochs: In which it rises, linearly with every step.
        warmup_from: Share of the learning rate at which it starts.
        decay: "none"; "step": times `rate` at each of `epochs`, or after `every` so many; "cosine": to `floor` by epochs,
            counted from the first as timm does; "cosine_after_warmup": counted from the end of the warm-up as torchvision
            does; "cosine_iter": from the first, by steps.
        rate: Of "step".
        epochs: Of "step".
        every: Of "step".
        floor: Share of the learning rate at which a cosine ends.
    """

    warmup_epochs: float = Field(default=0.0, ge=0)
    warmup_from: float = Field(default=0.0, ge=0, le=1)
    decay: Literal["none", "step", "cosine", "cosine_after_warmup", "cosine_iter"] = "none"
    rate: float | None = Field(default=None, gt=0, lt=1)
    epochs: tuple[int, ...] = ()
    every: float | None = Field(default=None, gt=0)
    floor: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _stepped(self) -> Self:
        told = (self.rate is not None, bool(self.epochs) != (self.every is not None))
        if told != (self.decay == "step",) * 2:
            raise ValueError("decay: step takes `rate` and either `epochs` or `every`; other decays take none of them")
        return self


class Loss(Part):
    """What is minimised.

    Args:
        name: "cross_entropy"; "mse".
        label_smoothing: Share of a target that all classes have alike.
        soft_targets: Whether targets are given to the loss as probabilities, smoothed beforehand.
        class_weights: Of each class.
    """

    name: Literal["cross_entropy", "mse"] = "cross_entropy"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    soft_targets: bool = False
    class_weights: tuple[float, ...] | None = None


class Pictures(Part):
    """What is done to pictures before the network sees them.

    Args:
        train_crop: Side of the random part, of any size and shape within limits, that is scaled to it. Default: none is taken.
        pad: Pixels of black around the picture, of which a part of its own size is taken.
        test_resize: The shorter side of a picture that is tested.
        test_crop: Side of the middle that is tested.
        interpolation: Of scaling.
        flip: Chance to be mirrored.
        vertical_flip: Chance to be turned upside down.
        auto_augment: "ta_wide", TrivialAugment of torchvision; or RandAugment as timm writes it: "rand-m9-mstd0.5-inc1".
        erasing: Chance that a random rectangle is erased.
        erase_with: What it is filled with: "mean", or "noise" in every pixel.
        cutout: Side of a square that is erased, in every picture.
        mean: Of the channels, subtracted. Default: that of the training pictures.
        std: Of the channels, divided by. Default: that of the training pictures.
    """

    train_crop: int | None = Field(default=None, ge=1)
    pad: int = Field(default=0, ge=0)
    test_resize: int | None = Field(default=None, ge=1)
    test_crop: int | None = Field(default=None, ge=1)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    flip: float = Field(default=0.0, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    auto_augment: str | None = Field(default=None, pattern=r"^(ta_wide|rand-m\d.*)$")
    erasing: float = Field(default=0.0, ge=0, le=1)
    erase_with: Literal["mean", "noise"] = "mean"
    cutout: int = Field(default=0, ge=0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class Ema(Part):
    """The average of the weights that is tested in their place.

    Args:
        decay: As torchvision's script takes it, for one update a step of one sample and epoch: see `averaging.decay_of`.
        steps: Between updates.
    """

    decay: float = Field(gt=0, lt=1)
    steps: int = Field(ge=1)


class Published(Part):
    """A number of the source.

    Args:
        what: It is.
        value: As printed.
        where: Table, figure or section.
    """

    what: str
    value: float | str
    where: str


class Recipe(Part):
    """One experiment.

    Args:
        paper: Where it is published.
        title: For people.
        data: What is trained on.
        model: The network.
        method: How samples are selected, as on the command line.
        epochs: Of the training.
        batch: Of a step.
        optimizer: How weights move.
        schedule: The learning rate over the epochs.
        loss: What is minimised.
        pictures: What is done to pictures; None for other data, and for pictures that are taken as they are.
        ema: The average that is tested; None for none.
        metric: "accuracy", "mean IoU", or "-loss", so that larger is better.
        published: Numbers of the source.
        notes: Where the source contradicts itself or its code, and what was chosen.
        not_given: What the source does not say, and what was chosen.
        smoke: Fields as of a recipe that are others in a smoke test, beside those of `smoke.reduced`.
    """

    paper: Paper
    title: str
    data: Data
    model: Model
    method: str
    epochs: int = Field(ge=1)
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    pictures: Pictures | None = None
    ema: Ema | None = None
    metric: Literal["accuracy", "mean IoU", "-loss"] = "accuracy"
    published: tuple[Published, ...]
    notes: tuple[str, ...] = ()
    not_given: dict[str, str] = Field(default_factory=dict)
    smoke: dict[str, Any] = Field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides about a training, as plain values."""
        return self.model_dump(mode="json", exclude={"paper", "title", "published", "notes", "not_given", "smoke"})
