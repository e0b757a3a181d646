"""DataCollatorForLanguageModeling.

Library: transformers
State: works with `collate_keeps_rows=True`

It masks random tokens, so rows of a batch differ from their samples, and Thresher cannot check that
row i is sample i. Confirm this with `collate_keeps_rows=True`. Without it, training is the same, and
a warning says once that rows are assigned by position. Collate functions that change no values, such as
`DataCollatorWithPadding`, do not need it. With `forward_passes="twice"`, rows of several batches are joined, so all batches
must be padded to the same length.
"""

from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

import thresher


def forward(model, batch):
    outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return outputs.logits.mT, batch["labels"]


def train(method, dataset, tokenizer, model, optimizer, epochs, workers=0):
    collate = DataCollatorForLanguageModeling(tokenizer, pad_to_multiple_of=16)
    loader = DataLoader(dataset, 4, shuffle=True, collate_fn=collate, num_workers=workers)
    parts = {
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "model": model,
        "optimizer": optimizer,
    }
    run = thresher.attach(method, **parts, epochs=epochs, forward=forward, collate_keeps_rows=True)
    for _ in range(run.epoch, epochs):
        for batch in run.loader:
            loss = run.criterion(*forward(run.model, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
