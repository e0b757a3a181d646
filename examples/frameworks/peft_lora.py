"""LoRA.

Library: peft
State: works
"""

from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from transformers import Trainer

import thresher


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def train(method, model, dataset, args):
    lora = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    trainer = SelectingTrainer(
        get_peft_model(model, lora), args, train_dataset=dataset, selection=method
    )
    trainer.train()
    return trainer.run
