"""A LightningModule as it is.

Library: lightning
State: works
"""

import lightning

import thresher


def train(method, module, loader, epochs, **settings):
    selection = thresher.lightning.Selection(method, criterion="criterion", model="net")
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[selection], **settings)
    trainer.fit(module, loader)
    return selection.run
