"""Documents that are packed in the collate function, as docs/composition.md shows it: each document is a sample."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import thresher
from helpers import assert_same

N, BATCH, EPOCHS = 24, 5, 3
RECIPE: dict = {}
PAGE = Path(__file__).parents[2] / "docs/composition.md"
exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0], RECIPE)
pack, by_document = RECIPE["pack"], RECIPE["by_document"]


def documents():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 80, (N,), generator=generator).tolist()
    return [F.pad(torch.randint(1, 12, (n,), generator=generator), (0, 1)) for n in lengths]


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(1).tanh())


class Training:
    """A packed loop, plain if no method is given."""

    def __init__(self, method=None, seed=0, **options):
        torch.manual_seed(seed)
        self.model = NextToken()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5)
        self.loader = DataLoader(documents(), BATCH, shuffle=True, collate_fn=pack)
        self.run = method and thresher.attach(
            method,
            loader=self.loader,
            criterion=None,
            model=self.model,
            optimizer=self.optimizer,
            epochs=EPOCHS,
            **options,
        )

    def losses(self, inputs, targets, lengths):
        model = self.run.model if self.run else self.model
        losses = F.cross_entropy(model(inputs).mT, targets, reduction="none")
        return by_document(losses, lengths)

    def step(self, batch):
        self.optimizer.zero_grad()
        losses, valid = self.losses(*batch)
        if self.run:
            loss = self.run.reduce(losses, ids=self.run.ids, valid=valid)
        else:
            loss = losses.sum(1).sum() / valid.sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def epochs(self, count=EPOCHS):
        """Returns the loss of each step."""
        return [
            self.step(batch)
            for _ in range(count)
            for batch in (self.run.loader if self.run else self.loader)
        ]

    def state(self):
        parts = (self.model, self.optimizer, self.run)
        return copy.deepcopy([part.state_dict() for part in parts])


def test_each_token_is_a_target_once_after_the_token_before_it():
    parts = documents()[:3]
    inputs, targets, lengths = pack(parts)
    stream = torch.cat(parts)
    assert inputs.shape == targets.shape and inputs.shape[1] == RECIPE["BLOCK"]
    assert torch.equal(targets[targets != -100], stream)
    assert torch.equal(inputs.flatten()[1 : len(stream)], stream[:-1])
    values, valid = by_document(targets, lengths)
    assert all(
        map(torch.equal, (row[mask] for row, mask in zip(values, valid, strict=True)), parts)
    )


def test_full_data_is_the_plain_loop_and_its_loss_the_mean_over_tokens():
    plain = Training()
    losses = plain.epochs()
    full = Training(thresher.FullData())
    assert_same(losses, full.epochs())
    assert_same(plain.model.state_dict(), full.model.state_dict())
    inputs, targets, lengths = next(iter(plain.loader))
    losses, valid = plain.losses(inputs, targets, lengths)
    wanted = F.cross_entropy(plain.model(inputs).mT, targets)
    torch.testing.assert_close(losses.sum() / valid.sum(), wanted)


def test_the_recorded_loss_of_a_document_is_the_mean_over_its_tokens():
    training = Training(thresher.FullData(), observe=True)
    wanted = torch.full((N,), torch.nan)
    for batch in training.run.loader:
        inputs, targets, lengths = batch
        with torch.no_grad():
            losses = F.cross_entropy(training.model(inputs).mT, targets, reduction="none").flatten()
        ends = lengths.cumsum(0)
        for i, end, n in zip(training.run.ids.tolist(), ends, lengths, strict=True):
            wanted[i] = losses[end - n : end].mean()
        training.step(batch)
    torch.testing.assert_close(training.run.records["loss"], wanted)
    assert training.run.data_map()["times_seen"].tolist() == [1] * N


@pytest.mark.filterwarnings("ignore:Winnow has no `uncertainty`")
@pytest.mark.parametrize("method", [0.5, thresher.Winnow(share=0.5, score="loss")])
def test_half_of_the_documents_and_a_resume_in_mid_epoch(method):
    whole = Training(method)
    whole.epochs(1)
    for i, batch in enumerate(whole.run.loader):
        whole.step(batch)
        if i == 1:
            saved = whole.state()
    whole.epochs(1)
    assert [entry["kept"] for entry in whole.run.history] == [N // 2] * EPOCHS
    assert whole.run.trained.sum() == EPOCHS * (N // 2)
    assert "packed samples" in whole.run.cost.unknown

    resumed = Training(method, seed=1)
    parts = (resumed.model, resumed.optimizer, resumed.run)
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    resumed.epochs(2)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert torch.equal(whole.run.trained, resumed.run.trained)


def test_methods_that_cut_batches_before_the_forward_pass_are_refused():
    with pytest.raises(ValueError, match="one entry (for each|per) sample"):
        Training(thresher.UniformRows(0.5)).epochs(1)


def test_a_method_in_the_forward_pass_chooses_documents():
    """The gradient is that of the kept documents, though rows have parts of others."""
    training = Training(thresher.BigLoss(keep=0.5))
    before = training.run.trained.clone()
    for batch in training.run.loader:
        parameters = copy.deepcopy(training.model)
        training.step(batch)
        kept = ((training.run.trained - before) > 0)[training.run.ids]
        before = training.run.trained.clone()
        inputs, targets, lengths = batch
        losses, valid = by_document(
            F.cross_entropy(parameters(inputs).mT, targets, reduction="none"), lengths
        )
        assert 0 < kept.sum() < len(kept)
        (losses[kept].sum() / valid[kept].sum()).backward()
        for one, other in zip(training.model.parameters(), parameters.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
