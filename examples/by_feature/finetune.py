"""Train a tiny BERT with transformers.Trainer: a mixin chooses the samples. It needs `pip install 'thresher[transformers]'`."""

import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import thresher

EPOCHS = 10


def data():
    pixels, labels = load_digits(return_X_y=True)
    ink = (torch.tensor(pixels).view(-1, 8, 8) > 7).long()
    x = torch.cat([ink @ 2 ** torch.arange(8), ink.mT @ 2 ** torch.arange(8) + 256], 1)  # each row and column is a word
    y = torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def network():
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=512, **sizes, num_labels=10))  # pyright: ignore[reportCallIssue]


def accuracy(model, dataset):
    x, y = dataset.tensors
    model.eval()
    with torch.no_grad():
        right = (model(x).logits.argmax(1) == y).float().mean().item()
    model.train()
    return right


class SelectingTrainer(thresher.transformers.Selection, Trainer):
    pass


def main():
    torch.manual_seed(0)
    train, test = data()
    model = network()
    samples = [{"input_ids": x, "labels": y} for x, y in train]
    settings = {"per_device_train_batch_size": 64, "learning_rate": 5e-3, "report_to": [], "dataloader_pin_memory": False}
    args = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=EPOCHS, save_strategy="no", use_cpu=True, **settings)
    trainer = SelectingTrainer(model, args, train_dataset=samples, selection=thresher.Kakurenbo(max_fraction=0.4))
    trainer.train()
    print(f"test accuracy {accuracy(model, test):.3f}")
    print(trainer.run.cost)


if __name__ == "__main__":
    main()
