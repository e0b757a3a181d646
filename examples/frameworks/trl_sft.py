"""SFTTrainer.

Library: trl
State: works with every `loss_type` (TRL 1.16)
Refused: `forward_passes="once"`: "cannot be traced"
"""

from trl import SFTTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

import thresher


class SelectingTrainer(thresher.transformers.Selection, SFTTrainer):
    pass


def train(method, model, dataset, args, tokenizer):
    trainer = SelectingTrainer(
        model, args=args, train_dataset=dataset, processing_class=tokenizer, selection=method
    )
    trainer.train()
    return trainer.run
