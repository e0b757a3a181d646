"""Trainer.

Library: transformers
State: works

The loss is the cross-entropy of classes, of tokens or of the next word; with the first batch it is compared with that of the
model. Accumulation, schedulers, evaluation and checkpoints come as in full training.
"""

from transformers import Trainer

import thresher


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def train(method, model, dataset, args):
    trainer = SelectingTrainer(model, args, train_dataset=dataset, selection=method)
    trainer.train()
    return trainer.run
