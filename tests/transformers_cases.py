"""Trainings with transformers for tests: tiny models from configurations, their data, and a quiet Trainer."""

from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

import lightning_cases  # noqa: F401  # prepares the import of torchvision, which transformers looks for
import thresher
from thresher.transformers import Selection

N, BATCH, EPOCHS, LENGTH, WORDS = 45, 4, 3, 7, 23
"""45 samples in batches of 4: 12 batches per epoch, the last one with 1 sample."""
FULL = -(-N // BATCH)


class Sentences(Dataset):
    """Sentences of 3 to 7 words: classified by their words, or followed word by word, with the label -100 beyond the end."""

    def __init__(self, causal: bool, n: int = N) -> None:
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (n,), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.words *= self.mask
        of_words = self.words.where(self.mask == 1, -100)
        self.labels = of_words if causal else ((self.words > 12).sum(1) > 2).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input_ids": self.words[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def model(causal: bool, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if causal:
            sizes = {
                "vocab_size": WORDS,
                "n_positions": LENGTH,
                "n_embd": 8,
                "n_layer": 1,
                "n_head": 2,
            }
            ends = {"bos_token_id": 1, "eos_token_id": 2}
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | ends | settings))
        sizes = {
            "vocab_size": WORDS,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
        }
        config = transformers.BertConfig(**sizes | {"max_position_embeddings": LENGTH} | settings)
        return transformers.BertForSequenceClassification(config)


class EpochEnd(transformers.TrainerCallback):
    """Notes whether an epoch leaves a gradient."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.left.append(
            any(one.grad is not None for one in self.trainer.model.parameters())
        )


class Noted(transformers.Trainer):
    """Notes what happens in a training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates, self.evaluated, self.seen, self.left = [], [], [], []
        self.add_callback(EpochEnd(self))

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        self.seen.append(len(inputs["input_ids"]))
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluated.append((self.state.epoch, self.state.global_step))
        return super().evaluate(*args, **kwargs)

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        if "learning_rate" in logs:
            self.rates.append(logs["learning_rate"])
        super().log(logs, *args, **kwargs)


class Selected(Selection, Noted):
    pass


def arguments(folder: Any, **settings: Any) -> transformers.TrainingArguments:
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
    }
    sizes = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }
    return transformers.TrainingArguments(
        output_dir=str(folder), log_level="error", **quiet | sizes | settings
    )


def trainer(
    folder: Any,
    method: Any = None,
    causal: bool = False,
    *,
    of: Any = None,
    net: Any = None,
    **settings: Any,
) -> Any:
    """A trainer, with a selection where there is a method.

    Args:
        folder: Folder of its files.
        method: Method of the selection; None for a plain Trainer.
        causal: Whether a causal language model is trained, else a classification.
        of: Class of the trainer.
        net: Model.
        settings: Arguments of `TrainingArguments`, and those of the trainer that begin with "with_".
    """
    own = {
        name.removeprefix("with_"): settings.pop(name)
        for name in list(settings)
        if name.startswith("with_")
    }
    own = {"train_dataset": Sentences(causal), "eval_dataset": Sentences(causal, 6)} | own
    own |= {} if method is None else {"selection": method}
    kind = of or (Noted if method is None else Selected)
    return kind(model(causal) if net is None else net, arguments(folder, **settings), **own)


def outcome(trained: Any) -> dict[str, Any]:
    """Everything that a training leaves behind."""
    return {
        "parameters": trained.model.state_dict(),
        "optimizer": trained.optimizer.state_dict()["state"],
        "random": torch.get_rng_state(),
        "scheduler": trained.lr_scheduler.last_epoch,
        "step": trained.state.global_step,
        "epoch": trained.state.epoch,
    }


def texts() -> Any:
    """The sentences as a dataset of texts, and their tokenizer; they need the package datasets."""
    import datasets
    import tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, WORDS))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    lines = [
        " ".join(words[word] for word in row[row > 0][:5]) for row in Sentences(causal=True).words
    ]
    return datasets.Dataset.from_dict({"text": lines}), transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **names
    )


METHODS = {
    "infobatch": thresher.InfoBatch(),
    "kakurenbo": thresher.Kakurenbo(max_fraction=0.4, tau=0.5),
    "selective_backprop": thresher.SelectiveBackprop(keep=0.4),
    "winnow": thresher.Winnow(0.5, least_agreement=-1),
}
