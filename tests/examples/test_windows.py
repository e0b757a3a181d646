"""Windows of documents that begin at a random place, as docs/composition.md shows them."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import thresher
from helpers import assert_same

EPOCHS, BLOCK = 3, 8
RECIPE: dict = {}
PAGE = Path(__file__).parents[2] / "docs/composition.md"
exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0], RECIPE)


def windows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (20,), generator=generator).tolist()
    documents = [torch.randint(1, 12, (n,), generator=generator) for n in lengths]
    return RECIPE["Windows"](documents, BLOCK)


class Training:
    """A loop over windows, plain if no method is given."""

    def __init__(self, method=None):
        torch.manual_seed(0)
        self.model = nn.Embedding(12, 12)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5)
        self.loader = DataLoader(windows(), 5, shuffle=True)
        self.criterion = nn.CrossEntropyLoss()
        self.run = method and thresher.attach(
            method,
            loader=self.loader,
            criterion=self.criterion,
            model=self.model,
            optimizer=self.optimizer,
            epochs=EPOCHS,
        )

    def step(self, batch):
        at = self.run or self
        self.optimizer.zero_grad()
        at.criterion(at.model(batch[0]).mT, batch[1]).backward()
        self.optimizer.step()

    def epochs(self, count=EPOCHS):
        for _ in range(count):
            for batch in (self.run or self).loader:
                self.step(batch)

    def state(self):
        parts = (self.model, self.optimizer, self.run)
        return copy.deepcopy([part.state_dict() for part in parts])


def test_a_window_begins_in_its_block_and_holds_the_place_that_names_its_document():
    dataset = windows()
    assert len(dataset) == len(dataset.text) // BLOCK
    starts = set()
    for _ in range(60):
        inputs, targets = dataset[2]
        places = dataset.text.unfold(0, BLOCK, 1)
        found = [s for s in range(2 * BLOCK, 3 * BLOCK) if torch.equal(places[s], inputs)]
        assert found
        starts |= {*found}
        assert torch.equal(inputs[1:], targets[:-1])
    assert starts == {*range(2 * BLOCK, 3 * BLOCK)}


def test_full_data_is_the_plain_loop():
    plain, full = Training(), Training(thresher.FullData())
    state = torch.get_rng_state()
    plain.epochs()
    torch.set_rng_state(state)
    full.epochs()
    assert_same(plain.model.state_dict(), full.model.state_dict())


@pytest.mark.parametrize("method", [thresher.FullData(), 0.5])
def test_a_resumed_training_draws_the_same_windows(method):
    whole = Training(method)
    whole.epochs(1)
    for i, batch in enumerate(whole.run.loader):
        whole.step(batch)
        if i == 1:
            saved = whole.state()
    whole.epochs(1)

    resumed = Training(method)
    torch.manual_seed(5)
    for part, state in zip((resumed.model, resumed.optimizer, resumed.run), saved, strict=True):
        part.load_state_dict(state)
    resumed.epochs(2)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert torch.equal(whole.run.trained, resumed.run.trained)
