"""A loss of your own.

Library: transformers
State: works with `per_position=`
Refused: without it: "computes another loss. Give per_position="; other losses: "would train another loss"

The loss has class weights; `per_position` returns it by position. Thresher uses the trainer's divisor.
"""

import torch
from transformers import Trainer

import thresher

class_weights = torch.tensor([1.0, 3.0])


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=class_weights)
        return (loss, outputs) if return_outputs else loss


class SelectingTrainer(thresher.transformers.Selection, WeightedTrainer):
    pass


def by_position(outputs, labels):  # (losses, weights or a mask), both of shape (rows, ...)
    return torch.nn.functional.cross_entropy(
        outputs.logits, labels, reduction="none"
    ), class_weights[labels]


def train(method, model, dataset, args):
    trainer = SelectingTrainer(
        model, args, train_dataset=dataset, selection=method, per_position=by_position
    )
    trainer.train()
    return trainer.run
