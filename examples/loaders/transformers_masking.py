"""DataCollatorForLanguageModeling.

Library: transformers
State: works with `collate_keeps_rows=True`
Refused: the lines without the declaration: "declare it: thresher.attach(collate_keeps_rows=True)"

It masks tokens by chance. Batches are compared with batches of the same samples in another order, and what is drawn for a row
differs there, as if rows were mixed. Only you know that each row is its sample: `collate_keeps_rows=True` declares it. What is
not drawn, such as the attention mask, is compared all the same, so that a sorting collate function is still refused. Collate
functions that draw nothing, such as `DataCollatorWithPadding`, need no declaration. With `forward_passes="twice"`, rows of
several batches make one, and all batches must be padded to one length.
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
