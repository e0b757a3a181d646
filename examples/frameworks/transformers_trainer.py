"""Trainer.

Library: transformers
State: works

The loss is the cross-entropy of classes, of tokens or of the next word; Thresher compares it with that of the
model on the first batch. Accumulation, schedulers, evaluation and checkpoints work as in full training.
"""

from transformers import Trainer

import thresher


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def train(method, model, dataset, args):
    trainer = SelectingTrainer(model, args, train_dataset=dataset, selection=method)
    trainer.train()
    return trainer.run
