"""A loss that is no cross-entropy.

Library: transformers
State: works with `per_position=`
Refused: without it: "would train another loss. Give per_position="
"""

import torch
from transformers import Trainer

import thresher


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def smoothed(outputs, labels):  # (losses, which of them count), both of shape (rows, ...)
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1, reduction="none")
    return losses, labels != -100


def train(method, model, dataset, args):
    trainer = SelectingTrainer(model, args, train_dataset=dataset, selection=method, per_position=smoothed)
    trainer.train()
    return trainer.run
