"""The loops of scripts with tables, graphs and actions."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scripts.kit import B, Kit, N, normal, script, whole

X, Y = normal(N, 6), normal(N, seed=1)


@script(
    "pytorch/examples: regression, a loss of one column",
    lambda model: (model(X).squeeze(1) - Y) ** 2,
    refused={"kakurenbo": "confidence"},
)
def regression(kit: Kit) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(X, Y), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=F.mse_loss, model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for x, y in run.loader:
            loss = run.criterion(run.model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@script(
    "pytorch tutorials: LBFGS with a closure",
    lambda model: (model(X).squeeze(1) - Y) ** 2,
    refused={"kakurenbo": "confidence"},
)
def lbfgs(kit: Kit) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), kit.rate, max_iter=2)
    loader = DataLoader(TensorDataset(X, Y), B, shuffle=True)
    run = kit.attach(loader=loader, criterion=nn.MSELoss(), model=model, optimizer=optimizer)
    for _ in range(kit.epochs):
        for x, y in run.loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = run.criterion(run.model(x).squeeze(1), y)
                loss.backward()
                return loss

            optimizer.step(closure)


class Factors(nn.Module):
    """Neural collaborative filtering."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.out = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(8, 1)

    def forward(self, user, item):
        return self.out(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)


USERS, ITEMS, CLICKS = whole(9, N, seed=2), whole(9, N, seed=3), whole(2, N, seed=4).float()


@script(
    "guoyang9/NCF: main.py",
    lambda model: F.binary_cross_entropy_with_logits(model(USERS, ITEMS), CLICKS, reduction="none"),
    note="`forward=` for passes that Thresher adds: the model takes two inputs",
)
def recommender(kit: Kit) -> None:
    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), kit.rate)
    loader = DataLoader(TensorDataset(USERS, ITEMS, CLICKS), B, shuffle=True)
    run = kit.attach(
        loader=loader,
        criterion=nn.BCEWithLogitsLoss(),
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0], batch[1]), batch[2]),
    )
    for _ in range(kit.epochs):
        model.train()
        for user, item, label in run.loader:
            model.zero_grad()
            prediction = run.model(user, item)
            loss = run.criterion(prediction, label)
            loss.backward()
            optimizer.step()


class GraphNet(nn.Module):
    """As PyG's graph classifiers: nodes of all graphs in one matrix, and the graph of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, nodes, graph, graphs: int):
        pooled = torch.zeros(graphs, 8).index_add(0, graph, torch.relu(self.node(nodes)))
        return self.out(pooled)


SIZES, CLASSES = whole(4, N, seed=5) + 2, whole(3, N, seed=6)
NODES = list(normal(int(SIZES.sum()), 6, seed=7).split(SIZES.tolist()))


def _graphs(samples):
    nodes, labels = zip(*samples, strict=True)
    graph = torch.repeat_interleave(
        torch.arange(len(nodes)), torch.tensor([len(one) for one in nodes])
    )
    return torch.cat(nodes), graph, torch.stack(labels)


@script(
    "PyG: graph classification (mutag_gin.py)",
    lambda model: F.cross_entropy(
        model(*_graphs(list(zip(NODES, CLASSES, strict=True)))[:2], N), CLASSES, reduction="none"
    ),
    note="`forward=` for passes that Thresher adds",
)
def graphs(kit: Kit) -> None:
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), kit.rate)
    loader = DataLoader(list(zip(NODES, CLASSES, strict=True)), B, shuffle=True, collate_fn=_graphs)
    run = kit.attach(
        loader=loader,
        criterion=F.cross_entropy,
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0], batch[1], len(batch[2])), batch[2]),
    )
    for _ in range(kit.epochs):
        for nodes, graph, labels in run.loader:
            optimizer.zero_grad()
            out = run.model(nodes, graph, len(labels))
            loss = run.criterion(out, labels)
            loss.backward()
            optimizer.step()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.kind(hidden), self.value(hidden).squeeze(1)


def _both(outputs, targets):
    return F.cross_entropy(outputs[0], targets[0], reduction="none") + F.mse_loss(
        outputs[1], targets[1], reduction="none"
    )


@script(
    "multi-task models: two heads, the sum of two losses",
    lambda model: _both(model(X), (CLASSES, Y)),
    note="`criterion=` a function of the tuples that returns a loss per sample",
    refused={"kakurenbo": "confidence"},
)
def two_heads(kit: Kit) -> None:
    model = TwoHeads()
    optimizer = kit.sgd(model)
    loader = DataLoader(TensorDataset(X, CLASSES, Y), B, shuffle=True)
    run = kit.attach(
        loader=loader,
        criterion=(lambda o, t: _both(o, t).mean()) if kit.method is None else _both,
        model=model,
        optimizer=optimizer,
        forward=lambda model, batch: (model(batch[0]), (batch[1], batch[2])),
    )
    for _ in range(kit.epochs):
        for x, kind, value in run.loader:
            optimizer.zero_grad()
            loss = run.criterion(run.model(x), (kind, value))
            loss.backward()
            optimizer.step()
