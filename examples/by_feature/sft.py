"""Fine-tune a tiny GPT-2 with SFTTrainer of trl and LoRA of peft: a mixin chooses the samples.

It needs `pip install 'thresher[transformers]' trl peft`.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

import thresher

EPOCHS = 10
WORDS = [f"{kind}{number}" for kind in ("row", "column") for number in range(256)] + [
    f"digit{n}" for n in range(10)
]


def data():
    pixels, labels = load_digits(return_X_y=True)
    ink = (torch.tensor(pixels).view(-1, 8, 8) > 7).long()
    x = torch.cat(
        [ink @ 2 ** torch.arange(8), ink.mT @ 2 ** torch.arange(8) + 256], 1
    )  # each row and column is a word
    y = torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def tokenizer():
    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*WORDS, "<end>"])}, unk_token="<end>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<end>", eos_token="<end>")


def network():
    sizes: dict[str, Any] = {"n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 4}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(WORDS) + 1, bos_token_id=522, eos_token_id=522, **sizes)
    )


def accuracy(model, dataset):
    x, y = dataset.tensors
    model.eval()
    with torch.no_grad():
        right = (model(x).logits[:, -1].argmax(1) == y + 512).float().mean().item()
    model.train()
    return right


class SelectingTrainer(thresher.transformers.Selection, SFTTrainer):
    pass


def main():
    torch.manual_seed(0)
    train, test = data()
    prompts = [" ".join(WORDS[word] for word in words) for words in train.tensors[0]]
    samples = Dataset.from_dict(
        {"prompt": prompts, "completion": [f" digit{n}" for n in train.tensors[1]]}
    )
    lora = LoraConfig(
        r=8, target_modules=["c_attn", "c_fc"], modules_to_save=["wte", "wpe"], fan_in_fan_out=True
    )
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-2,
        "bf16": False,
    }
    settings |= {
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer = SelectingTrainer(
        network(),
        args=SFTConfig(tempfile.mkdtemp(), num_train_epochs=EPOCHS, **settings),
        train_dataset=samples, processing_class=tokenizer(), peft_config=lora,
        selection=thresher.InfoBatch(),
    )  # fmt: skip
    trainer.train()
    print(f"test accuracy {accuracy(trainer.model, test):.3f}")
    print(trainer.run.cost)


if __name__ == "__main__":
    main()
