"""Selection of tokens.

Library: transformers
State: works, also with a method that chooses samples
"""

from transformers import Trainer

import thresher


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def train(method, model, dataset, args, reference):
    tokens = thresher.TokenSelection(keep=0.6, reference=reference)
    trainer = SelectingTrainer(model, args, train_dataset=dataset, selection=[method, tokens])
    trainer.train()
    return trainer.run
