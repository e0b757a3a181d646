"""A LightningModule that computes its losses itself.

Library: lightning
State: works with `self.thresher.reduce`
"""

import lightning
from torch import nn

import thresher


def train(method, module, loader, epochs, **settings):
    class WithLosses(type(module)):
        def training_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            losses = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
            return self.thresher.reduce(losses, outputs=outputs, targets=batch[1])

    module.__class__ = WithLosses
    selection = thresher.lightning.Selection(method, criterion=None, model="net")
    lightning.Trainer(max_epochs=epochs, callbacks=[selection], **settings).fit(module, loader)
    return selection.run
