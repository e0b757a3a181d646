"""Trainer.

Library: transformers
State: works
"""

from transformers import Trainer

import thresher


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def train(method, model, dataset, args):
    trainer = SelectingTrainer(model, args, train_dataset=dataset, selection=method)
    trainer.train()
    return trainer.run
