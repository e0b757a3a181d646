"""Errors and edge cases of each score; their values are compared with transcriptions in tests/reference/test_scores.py."""

import json
import math
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from thresher.scores import (
    Scores,
    disagreement,
    el2n,
    forgetting,
    forgotten_in,
    from_run,
    grand,
    irreducible,
    memorisation,
    prototypes,
)

N = 12


def data(x=None, y=None, batch_size=5):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=g) if x is None else x
    return DataLoader(
        TensorDataset(x, torch.arange(len(x)) % 3 if y is None else y), batch_size=batch_size
    )


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def test_grand_refuses():
    with pytest.raises(ValueError, match="grand: `layer` must be 'last' or 'all', got 'first'"):
        grand(net(), data(), nn.CrossEntropyLoss(), layer="first")
    with pytest.raises(
        ValueError, match=r"of shape \(5, 3\), got \(5, 2\). For other models, use layer='all'"
    ):
        grand(
            nn.Sequential(net(), nn.AdaptiveAvgPool1d(2)),
            data(y=torch.arange(N) % 2),
            nn.CrossEntropyLoss(),
        )
    with pytest.raises(ValueError, match="Conv1d has no nn.Linear"):
        grand(nn.Conv1d(1, 1, 1), data(), nn.CrossEntropyLoss())
    frozen = net().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of Sequential has requires_grad=True"):
        grand(frozen, data(), nn.CrossEntropyLoss(), layer="all")
    assert grand(frozen, data(), nn.CrossEntropyLoss()).values.isfinite().all()


def test_grand_of_rows_that_are_not_samples_is_refused():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            return self.head(x.view(len(x), 2, 2)).mean(1)

    with pytest.raises(ValueError, match=r"last nn.Linear has shape \(5, 2, 2\) for 5 samples"):
        grand(Tokens(), data(), nn.CrossEntropyLoss())


def test_grand_of_other_losses():
    """In a regression, the gradient of the mean squared error is computed by hand."""
    x, y = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(N, 3)
    head = nn.Linear(4, 3)
    error = 2 * head(x).detach() / 3
    expected = error.norm(dim=1) * (1 + x.square().sum(1)).sqrt()
    for layer in ("last", "all"):
        found = grand(head, data(x, y), nn.MSELoss(), layer=layer)
        assert (
            found.values.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
            and found.labels is None
        )


def test_class_weights_do_not_count():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    for layer in ("last", "all"):
        plain = grand(net(), data(), nn.CrossEntropyLoss(), layer=layer)
        assert grand(net(), data(), weighted, layer=layer).values.tolist() == pytest.approx(
            plain.values.tolist(), rel=1e-5
        )
    assert torch.equal(
        irreducible(net(), data(), weighted).values,
        irreducible(net(), data(), nn.CrossEntropyLoss()).values,
    )


def test_outputs_that_are_not_finite_have_no_score():
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
    x[7, 0], x[2, 1] = math.nan, math.inf
    criterion = nn.CrossEntropyLoss()
    models = [net(), net()]
    found = [
        el2n(models, data(x)),
        grand(models, data(x), criterion),
        grand(models, data(x), criterion, layer="all"),
        irreducible(models, data(x), criterion),
        disagreement(models, data(x)),
    ]
    for table in found:
        assert table.values.isfinite().logical_not().nonzero().flatten().tolist() == [2, 7], table
    spread = prototypes(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), data(x), 2)
    assert spread.values.isnan().nonzero().flatten().tolist() == [2, 7]


def test_disagreement_refuses():
    with pytest.raises(
        ValueError, match="disagreement: `kind` must be one of .*'entropy'.*, got 'votes'"
    ):
        disagreement([net(), net()], data(), kind="votes")
    for kind in ("mutual_information", "variation_ratio"):
        with pytest.raises(ValueError, match=f"`models` must be two or more for '{kind}', got one"):
            disagreement(net(), data(), kind=kind)
    with pytest.raises(
        ValueError, match=r"outputs must score classes, shape \(n, classes\), got \(5, 3, 1\)"
    ):
        disagreement(nn.Sequential(net(), nn.Unflatten(1, (3, 1))), data())
    assert disagreement(net(), data()).name == "entropy"


@pytest.mark.parametrize(
    ("trained_on", "error", "message"),
    [
        (
            [torch.arange(3)],
            ValueError,
            "`trained_on` must have the ids of each of the 2 models, got 1",
        ),
        (
            [torch.arange(3), torch.tensor([0.0])],
            TypeError,
            "`trained_on` must be int64 tensors of ids, got torch.float32",
        ),
        ([torch.arange(3), [0]], TypeError, "got list"),
        (
            [torch.arange(3), torch.tensor([N])],
            ValueError,
            rf"`trained_on` must be ids within \[0, {N}\), got 12 to 12",
        ),
    ],
)
def test_who_trained_on_what(trained_on, error, message):
    for call in (
        lambda: memorisation([net(), net()], trained_on, data()),
        lambda: irreducible([net(), net()], data(), nn.CrossEntropyLoss(), trained_on=trained_on),
    ):
        with pytest.raises(error, match=message):
            call()


def test_irreducible_needs_a_model_that_did_not_train_on_the_sample():
    with pytest.raises(ValueError, match="2 have none, such as 4"):
        irreducible(
            [net(), net()],
            data(),
            nn.CrossEntropyLoss(),
            trained_on=[torch.arange(6), torch.arange(4, 9)],
        )


def test_a_loss_that_is_not_finite_under_a_model_that_trained_on_the_sample_does_not_matter():
    broken = net()
    broken[2].bias.data.fill_(math.nan)
    half, rest = torch.arange(6), torch.arange(6, N)
    found = irreducible(
        [net(), broken], data(), nn.CrossEntropyLoss(), trained_on=[rest, half]
    ).values
    assert found[:6].isfinite().all() and found[6:].isnan().all()


@pytest.mark.parametrize(
    ("correct", "settings", "error", "message"),
    [
        (
            torch.ones(2, 3),
            {},
            TypeError,
            "forgetting: `correctness` must be bool, got torch.float32",
        ),
        (
            torch.ones(3, dtype=torch.bool),
            {},
            ValueError,
            r"must have shape \(presentations, samples\), got \(3,\)",
        ),
        (torch.ones(0, 3, dtype=torch.bool), {}, ValueError, "must have shape"),
        (
            torch.ones(2, 3, dtype=torch.bool),
            {"never_learned": "most"},
            ValueError,
            "`never_learned` must be one of",
        ),
    ],
)
def test_forgetting_refuses(correct, settings, error, message):
    with pytest.raises(error, match=message):
        forgetting(correct, **settings)


def test_forgetting_costs_the_training():
    found = forgetting(
        torch.ones(2, 3, dtype=torch.bool),
        trained=(6, 5),
        labels=torch.arange(3),
        provenance={"epochs": 2},
    )
    assert (found.forward, found.backward) == (6, 5) and found.labels.tolist() == [0, 1, 2]
    assert found.provenance == {"presentations": 2, "never_learned": "presentations", "epochs": 2}


def test_prototypes_refuse(monkeypatch):
    with pytest.raises(ValueError, match="prototypes: `clusters` must be 1 or more, got 0"):
        prototypes(net(), data(), 0)
    with pytest.raises(
        ValueError, match="13 `clusters` need as many samples with finite features, got 12"
    ):
        prototypes(net(), data(), 13)
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        prototypes(net(), data(), 2)


def test_features_from_a_function_of_the_user():
    class Embedder(nn.Module):
        def features(self, x):
            return x.view(len(x), 2, 2)

    found = prototypes(Embedder(), data(), 3, embed=lambda model, batch: model.features(batch[0]))
    same = prototypes(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), data(), 3)
    assert torch.equal(found.values, same.values) and torch.equal(found.labels, same.labels)
    assert found.provenance["clusters"] == 3 and found.provenance["seed"] == 0
    alike = prototypes(nn.Sequential(nn.Linear(4, 1)), data(torch.ones(N, 4)), 3)
    assert alike.values.tolist() == pytest.approx([0.0] * N, abs=1e-6)


def write_run(folder, columns=None, cost=True):
    columns = columns or {
        "id": [0, 1, 2],
        "target": [4, 4, 5],
        "loss": [0.1, 0.2, 0.3],
        "trained": [3, 1, 2],
    }
    pq.write_table(pa.table(columns), folder / "run.parquet")
    if cost:
        told = {
            "method": "kakurenbo",
            "settings": {"tau": 0.7},
            "seed": 3,
            "cost": {"forward": 9, "backward": 6},
            "wall_s": 1.0,
        }
        (folder / "run.json").write_text(json.dumps(told))
    return folder / "run.parquet"


def test_a_finished_run(tmp_path):
    path = write_run(tmp_path)
    table = from_run(path)
    assert table == from_run(tmp_path / "run") == from_run(str(path))
    assert (
        table.values.tolist() == [3, 1, 2]
        and table.labels.tolist() == [4, 4, 5]
        and table.name == "trained"
    )
    assert (table.forward, table.backward) == (9, 6)
    assert table.provenance == {
        "run": "run.parquet",
        "method": "kakurenbo",
        "settings": {"tau": 0.7},
        "seed": 3,
    }
    assert thresher.Prune(table, keep=0.67).kept(3).tolist() == [0, 2]


def test_a_finished_run_without_classes_or_costs(tmp_path):
    table = from_run(write_run(tmp_path, {"id": [0, 1], "trained": [3, 1]}, cost=False))
    assert table.labels is None and (table.forward, table.backward) == (4, 4)


def test_a_run_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.parquet"):
        from_run(tmp_path / "none")
    path = write_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        from_run(path)
    write_run(tmp_path, {"id": [0], "score": [1.0]})
    with pytest.raises(
        ValueError,
        match=r"run\.parquet: the file of a run must have the columns .* trained; this file has id$",
    ):
        from_run(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"run\.parquet: damaged"):
        from_run(path)


def test_events_of_a_run():
    """Forgetting is simulated: the model is set in each epoch so that it is right about the given samples only."""
    x, y = torch.eye(4), torch.tensor([0, 0, 0, 1])
    model = nn.Linear(4, 2)
    model.weight.data.zero_(), model.bias.data.zero_()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    run = thresher.attach(
        thresher.Forgetting(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=4
    )
    says = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]  # right or not, by epoch
    for right in says:
        for inputs, targets in run.loader:
            answer = torch.where(torch.tensor(right, dtype=torch.bool), y, 1 - y)
            model.weight.data = nn.functional.one_hot(answer, 2).T.float()
            run.criterion(run.model(inputs), targets)
    table = forgotten_in(run, labels=y)
    assert table.values.tolist() == [2, 0, 4, 4] and torch.equal(table.labels, y)
    assert table.values.tolist() == forgetting(torch.tensor(says, dtype=torch.bool)).values.tolist()
    assert forgotten_in(run, never_learned="infinite").values.tolist() == [2, 0, math.inf, math.inf]
    assert forgotten_in(run, never_learned="zero").values.tolist() == [2, 0, 0, 0]
    assert table.forward == 16 and isinstance(table, Scores)
    with pytest.raises(ValueError, match="forgotten_in: `never_learned` must be one of"):
        forgotten_in(run, never_learned="most")
    run.detach()
    other = thresher.attach(
        thresher.FullData(), loader=loader, criterion=nn.CrossEntropyLoss(), model=model, epochs=4
    )
    with pytest.raises(
        ValueError, match=r"the run of FullData\(\) does not count forgetting events"
    ):
        forgotten_in(other)
