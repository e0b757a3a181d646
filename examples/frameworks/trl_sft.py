"""SFTTrainer.

Library: trl
State: works with `loss_type="nll"`
Refused: other losses: "would train another loss"

It makes a second forward pass for its metrics, which `run.cost` does not count.
"""

from trl import SFTTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

import thresher


class SelectingTrainer(thresher.transformers.Selection, SFTTrainer):
    pass


def train(method, model, dataset, args, tokenizer):
    trainer = SelectingTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer, selection=method)
    trainer.train()
    return trainer.run
