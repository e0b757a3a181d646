"""Several devices.

Library: lightning
State: works with `strategy="ddp"`
Refused: other strategies: "Use one device, or data parallelism"
"""

import lightning

import thresher


def train(method, module, loader, epochs, devices=2, **settings):
    selection = thresher.lightning.Selection(method)
    trainer = lightning.Trainer(
        max_epochs=epochs, devices=devices, strategy="ddp", callbacks=[selection], **settings
    )
    trainer.fit(module, loader)
    return selection.run
