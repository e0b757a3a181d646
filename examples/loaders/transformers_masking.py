"""DataCollatorForLanguageModeling.

Library: transformers
State: works with `collate_keeps_rows=True`

It masks tokens by chance. The rows of a batch are then not equal to the samples that went in, and Thresher cannot see that
row i is sample i. Only you know it: `collate_keeps_rows=True` declares it. Without it the training is the same, and
a warning says once that rows are taken by their position. Collate functions that change no value, such as
`DataCollatorWithPadding`, need no declaration. With `forward_passes="twice"`, rows of several batches make one, and all batches
must be padded to one length.
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
    parts = {"loader": loader, "criterion": nn.CrossEntropyLoss(), "model": model, "optimizer": optimizer}
    run = thresher.attach(method, **parts, epochs=epochs, forward=forward, collate_keeps_rows=True)
    for _ in range(run.epoch, epochs):
        for batch in run.loader:
            loss = run.criterion(*forward(run.model, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run
