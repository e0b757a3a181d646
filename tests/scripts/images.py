"""The loops of scripts with images."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.kit import B, Kit, N, normal, script, whole

IMAGES, LABELS = normal(N, 3, 8, 8), whole(5, N)
MASKS = (normal(N, 8, 8, seed=1) > 0).long()
NOISY = IMAGES + 0.1 * normal(N, 3, 8, 8, seed=2)


class ConvNet(nn.Module):
    """As in pytorch/examples mnist: two convolutions, two linear layers, log_softmax."""

    def __init__(self, log_probs: bool = False, outputs: int = 5, channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.fc = nn.Linear(8 * 16, outputs)
        self.log_probs = log_probs

    def forward(self, x):
        logits = self.fc(torch.flatten(self.features(x), 1))
        return F.log_softmax(logits, 1) if self.log_probs else logits


@script(
    "pytorch/examples: mnist/main.py",
    lambda model: F.nll_loss(model(IMAGES), LABELS, reduction="none"),
)
def mnist(kit: Kit) -> None:
    model = ConvNet(log_probs=True)
    optimizer = kit.sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=F.nll_loss, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        model.train()
        for _, (data, target) in enumerate(run.loader):
            data, target = data.to("cpu"), target.to("cpu")
            optimizer.zero_grad()
            output = run.model(data)
            loss = run.criterion(output, target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for data, target in loader:
                F.nll_loss(model(data), target, reduction="sum").item()
        scheduler.step()


@script(
    "pytorch/examples: imagenet/main.py",
    lambda model: F.cross_entropy(model(IMAGES), LABELS, reduction="none"),
)
def imagenet(kit: Kit) -> None:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), kit.rate, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(IMAGES, LABELS), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=criterion, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for images, target in run.loader:
            images, target = (
                images.to("cpu", non_blocking=True),
                target.to("cpu", non_blocking=True),
            )
            output = run.model(images)
            loss = run.criterion(output, target)
            (output.argmax(1) == target).float().sum().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@script(
    "timm: train.py with accumulation, autocast, clipping and a second look at the loss",
    lambda model: F.cross_entropy(model(IMAGES), LABELS, reduction="none", label_smoothing=0.1),
)
def timm_train(kit: Kit) -> None:
    model = ConvNet()
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), B, shuffle=True, drop_last=False)
    run = kit.attach(
        loader=loader,
        criterion=nn.CrossEntropyLoss(label_smoothing=0.1),
        model=model,
        optimizer=optimizer,
    )
    accumulation = 2
    for _ in range(kit.epochs):
        optimizer.zero_grad()
        last = len(run.loader) - 1
        for i, (images, target) in enumerate(run.loader):
            need_update = i == last or (i + 1) % accumulation == 0
            output = run.model(images)
            loss = run.criterion(output, target) / accumulation
            loss.backward()
            if need_update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


class LabelSmoothing(nn.Module):
    """As timm's LabelSmoothingCrossEntropy: a scalar, and no `reduction`."""

    def forward(self, x, target):
        log_probs = F.log_softmax(x, dim=-1)
        nll = -log_probs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
        return (0.9 * nll + 0.1 * -log_probs.mean(dim=-1)).mean()


@script(
    "timm: LabelSmoothingCrossEntropy",
    lambda model: F.cross_entropy(model(IMAGES), LABELS, reduction="none", label_smoothing=0.1),
)
def timm_loss(kit: Kit) -> None:
    model = ConvNet()
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=LabelSmoothing(), model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for images, target in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(images), target).backward()
            optimizer.step()


def dice(probs, target, epsilon=1e-6):
    """As `dice_coeff` of milesial's UNet: over the whole batch."""
    return 1 - (2 * (probs * target).sum() + epsilon) / (probs.sum() + target.sum() + epsilon)


@script(
    "milesial/Pytorch-UNet: train.py, cross entropy and a Dice loss of the whole batch",
    lambda model: F.cross_entropy(model(IMAGES), MASKS, reduction="none").mean((1, 2)),
    note="the Dice loss stays on all rows",
)
def unet(kit: Kit) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(IMAGES, MASKS), B, shuffle=True)
    run = kit.attach(
        loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer
    )
    for _ in range(kit.epochs):
        for images, masks in run.loader:
            pred = run.model(images)
            loss = run.criterion(pred, masks)
            loss += dice(F.softmax(pred, dim=1).float()[:, 1], masks.float())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


class DiceLoss(nn.Module):
    """As MONAI's DiceLoss: `reduction="none"` gives one loss per sample and channel, shape (rows, channels, 1, 1)."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, input, target):  # noqa: A002
        probs = torch.sigmoid(input)
        overlap, total = (
            (probs * target).sum((2, 3), keepdim=True),
            (probs + target).sum((2, 3), keepdim=True),
        )
        losses = 1 - (2 * overlap + 1e-5) / (total + 1e-5)
        return losses if self.reduction == "none" else losses.mean()


@script(
    "MONAI: spleen segmentation, DiceLoss",
    lambda model: DiceLoss("none")(model(IMAGES), MASKS[:, None]).flatten(1).mean(1),
    refused={"kakurenbo": "confidence"},
)
def monai(kit: Kit) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(IMAGES, MASKS[:, None]), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=DiceLoss(), model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for images, masks in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(images), masks).backward()
            optimizer.step()


def focal(inputs, targets, reduction="none"):
    """As torchvision.ops.sigmoid_focal_loss."""
    p = torch.sigmoid(inputs)
    p_t = p * targets + (1 - p) * (1 - targets)
    loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none") * (1 - p_t) ** 2
    return loss.mean() if reduction == "mean" else loss


@script(
    "torchvision: sigmoid_focal_loss(reduction='mean') in a lambda",
    lambda model: focal(model(IMAGES), F.one_hot(LABELS, 5).float()).mean(1),
    refused={"kakurenbo": "confidence"},
)
def focal_lambda(kit: Kit) -> None:
    model = ConvNet()
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(IMAGES, F.one_hot(LABELS, 5).float()), B, shuffle=True)
    criterion = lambda outputs, targets: focal(outputs, targets, reduction="mean")  # noqa: E731
    run = kit.attach(loader=loader, criterion=criterion, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for images, target in run.loader:
            optimizer.zero_grad()
            run.criterion(run.model(images), target).backward()
            optimizer.step()


@script(
    "pytorch/examples: super_resolution/main.py",
    lambda model: ((model(NOISY) - IMAGES) ** 2).mean((1, 2, 3)),
    refused={"kakurenbo": "confidence"},
)
def super_resolution(kit: Kit) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(NOISY, IMAGES), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=nn.MSELoss(), model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for batch in run.loader:
            inputs, target = batch[0].to("cpu"), batch[1].to("cpu")
            optimizer.zero_grad()
            loss = run.criterion(run.model(inputs), target)
            loss.backward()
            optimizer.step()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.fc = ConvNet(outputs=8), nn.Linear(16, 1)

    def forward(self, first, second):
        return torch.sigmoid(self.fc(torch.cat([self.net(first), self.net(second)], 1)))


@script(
    "pytorch/examples: siamese_network/main.py",
    lambda model: F.binary_cross_entropy(
        model(IMAGES, NOISY).squeeze(1), (LABELS > 2).float(), reduction="none"
    ),
    note="`forward=` for methods with passes of their own: the model takes two inputs",
)
def siamese(kit: Kit) -> None:
    model = Siamese()
    optimizer = torch.optim.Adadelta(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(IMAGES, NOISY, (LABELS > 2).float()), B, shuffle=True)
    run = kit.attach(
        loader=loader,
        criterion=nn.BCELoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0], batch[1]).squeeze(1), batch[2]),
    )
    for _ in range(kit.epochs):
        for first, second, targets in run.loader:
            optimizer.zero_grad()
            outputs = run.model(first, second).squeeze(1)
            loss = run.criterion(outputs, targets)
            loss.backward()
            optimizer.step()


@script(
    "CheXpert classifiers: several labels per image, BCEWithLogitsLoss",
    lambda model: F.binary_cross_entropy_with_logits(
        model(IMAGES), F.one_hot(LABELS, 5).float(), reduction="none"
    ).mean(1),
    note="`forward=` for passes that Thresher adds: the loop converts the labels",
)
def several_labels(kit: Kit) -> None:
    model = ConvNet()
    optimizer = kit.sgd(model)
    loader = DataLoader(
        TensorDataset(IMAGES, F.one_hot(LABELS, 5)), B, shuffle=True, drop_last=True
    )
    run = kit.attach(
        loader=loader,
        criterion=nn.BCEWithLogitsLoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0]), batch[1].float()),
    )
    for _ in range(kit.epochs):
        for images, labels in run.loader:
            loss = run.criterion(run.model(images), labels.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@script(
    "pytorch tutorials: knowledge distillation",
    lambda model: F.cross_entropy(model(IMAGES), LABELS, reduction="none"),
    note="the teacher's loss stays on all rows",
)
def distillation(kit: Kit) -> None:
    model, teacher = ConvNet(), ConvNet().eval()
    optimizer = torch.optim.Adam(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(IMAGES, LABELS), B, shuffle=True)
    run = kit.attach(
        loader=loader, criterion=nn.CrossEntropyLoss(), model=model, optimizer=optimizer
    )
    for _ in range(kit.epochs):
        for inputs, labels in run.loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = run.model(inputs)
            soft = F.kl_div(
                F.log_softmax(student_logits / 2, 1),
                F.softmax(teacher_logits / 2, 1),
                reduction="batchmean",
            )
            loss = 0.25 * soft * 4 + 0.75 * run.criterion(student_logits, labels)
            loss.backward()
            optimizer.step()
