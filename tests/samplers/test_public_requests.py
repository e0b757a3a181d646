"""Wishes from public trackers, each solved in at most three changed lines, in the framework that it was asked for.

The lines are run as they stand here, and the table of docs/samplers.md has the same ones.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from depth import in_verify
from thresher import samplers

N = 120
DATA = TensorDataset(torch.arange(N), torch.arange(N) % 10)
LABELS = (np.arange(N) % 10 == 0).astype(int)
"""Two classes, with 12 and 108 samples."""
WEIGHTS = np.random.default_rng(0).random(N)

WISHES = {
    "pytorch/pytorch#77154": (
        "weighted sampling in distributed training",
        "sampler = WeightedSampler(weights)",
        "loader = DataLoader(dataset, 8, sampler=sampler)",
    ),
    "pytorch/pytorch#150182": (
        "the same, with explicit ranks",
        "sampler = WeightedSampler(weights, num_samples=50, num_replicas=2, rank=rank)",
        "loader = DataLoader(dataset, 8, sampler=sampler)",
    ),
    "pytorch/pytorch#2576": (
        "more than 2^24 weights",
        "sampler = WeightedSampler(weights, num_samples=10, replacement=True)",
    ),
    "pytorch/pytorch#43115": (
        "exact probabilities for many weights",
        "sampler = WeightedSampler(weights, num_samples=100_000, replacement=True)",
    ),
    "pytorch/pytorch#7359": (
        "weights that follow the losses, with workers",
        "loader = DataLoader(dataset, 8, sampler=WeightedSampler(weights), num_workers=2)",
        "loader.sampler.set_weights(losses)  # after each epoch",
    ),
    "pytorch/pytorch#113748": (
        "a balanced sampler",
        "sampler = WeightedSampler(1 / np.bincount(labels)[labels])",
    ),
    "pytorch/pytorch#11813": (
        "a loader that can be saved in mid-epoch",
        "state = loader.sampler.state_dict()",
        "loader.sampler.load_state_dict(state)  # after the restart",
    ),
    "Lightning-AI/pytorch-lightning#10946": (
        "weighted sampling with DDP",
        "loader = DataLoader(dataset, 8, sampler=WeightedSampler(weights))",
        "trainer = Trainer(use_distributed_sampler=False, **settings)",
    ),
    "Lightning-AI/pytorch-lightning#12866": (
        "weights that are modified during the training",
        "trainer.train_dataloader.sampler.set_weights(weights)  # in on_train_epoch_end",
    ),
    "Lightning-AI/pytorch-lightning#13316": (
        "a batch sampler that changes its order without set_epoch",
        "loader = DataLoader(dataset, batch_sampler=BalancedBatchSampler(labels, 8))",
    ),
    "Lightning-AI/pytorch-lightning#3716": (
        "fewer steps with more devices",
        "loader = DataLoader(dataset, 8, sampler=WeightedSampler(weights))",
    ),
    "huggingface/accelerate#2865": (
        "a weighted sampler in a prepared loader",
        "sampler = WeightedSampler(weights, num_replicas=1, rank=0)",
        "loader = prepare(DataLoader(dataset, 8, sampler=sampler))",
    ),
    "huggingface/accelerate#1130": (
        "resume epoch 2 at step 5",
        "sampler.set_epoch(2, consumed=5 * 8)",
        "loader.iteration = 2",
    ),
    "meta-pytorch/data#1437": (
        "a state saved at the end of an epoch that does not lose one",
        "loader = StatefulDataLoader(dataset, 8, sampler=Shuffle(dataset))",
    ),
    "pytorch/ignite#3653": (
        "every group in every batch",
        "loader = DataLoader(dataset, batch_sampler=BalancedBatchSampler(labels, 8))",
    ),
    "KevinMusgrave/pytorch-metric-learning#612": (
        "batches of P classes with K samples",
        "batches = BalancedBatchSampler(labels, classes_per_batch=5, samples_per_class=4)",
        "loader = DataLoader(dataset, batch_sampler=batches)",
    ),
    "roboflow/rf-detr#1287": (
        "exact shares of sources in each batch",
        "mixture = Mixture(labels, 16, {0: 0.75, 1: 0.25})",
        "loader = DataLoader(dataset, batch_sampler=mixture)",
    ),
    "ray-project/ray#31127": (
        "weighted sampling with Ray Train",
        "loader = DataLoader(dataset, 8, sampler=WeightedSampler(weights))",
        "loader = prepare_data_loader(loader, add_dist_sampler=False)",
    ),
}
"""By thread: what was asked for, and the lines that solve it."""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "samplers.md"


def row(thread):
    wish, *code = WISHES[thread]
    repository, number = thread.split("#")
    shown = repository.split("/")[1].replace("pytorch-lightning", "lightning")
    link = f"[{shown}#{number}](https://github.com/{repository}/issues/{number})"
    return f"| {link} | {wish} | {'<br>'.join(f'`{line}`' for line in code)} |"


def solved(thread, *lines, **names):
    """The names after some of the lines of a thread, by default all of them."""
    code = WISHES[thread][1:]
    scope = {
        **vars(samplers),
        "DataLoader": DataLoader,
        "np": np,
        "dataset": DATA,
        "weights": WEIGHTS,
        "labels": LABELS,
    }
    scope |= names
    exec("\n".join(code[i] for i in lines) if lines else "\n".join(code), scope)
    return scope


def ids_of(loader):
    return torch.cat([x for x, _ in loader]).tolist()


def dealt(parts, k=None):
    """The order that several processes share."""
    return [i for ids in zip(*parts, strict=True) for i in ids][:k]


@pytest.fixture
def rank(monkeypatch):
    """Lets this process be one of two."""

    def become(number):
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(distributed, "get_rank", lambda: number)
        monkeypatch.setattr(
            distributed,
            "all_gather_object",
            lambda found, value: found.__setitem__(slice(None), [value] * 2),
        )

    return become


def trained(loader, *, epochs=2, at_end=lambda trainer: None, **settings):
    """The ids of each epoch of a training with Lightning."""
    lightning = pytest.importorskip("lightning_cases").lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.epochs = nn.Linear(1, 1), [[] for _ in range(epochs)]

        def training_step(self, batch):
            self.epochs[self.current_epoch].append(batch[0].tolist())
            return self.net(batch[0].float().unsqueeze(1)).mean()

        def on_train_epoch_end(self):
            at_end(self.trainer)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-9)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    module = Module()
    options = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "devices": 1,
        **dict.fromkeys(quiet, False),
    }
    scope = solved(
        "Lightning-AI/pytorch-lightning#10946",
        1,
        Trainer=lightning.Trainer,
        settings={**options, **settings},
    )
    scope["trainer"].fit(module, loader)
    return module.epochs


def flat(batches):
    return [i for batch in batches for i in batch]


def test_every_wish_takes_three_lines_at_most_and_is_in_the_table():
    assert len(WISHES) >= 14 and all(1 <= len(code) <= 3 for _, *code in WISHES.values())
    table = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| [")
    ]
    assert table == [row(thread) for thread in WISHES]


def test_pytorch_77154(rank):
    parts = []
    for number in range(2):
        rank(number)
        parts.append(ids_of(solved("pytorch/pytorch#77154")["loader"]))
    assert dealt(parts) == list(samplers.WeightedSampler(WEIGHTS, num_replicas=1, rank=0))


def test_pytorch_150182():
    parts = [solved("pytorch/pytorch#150182", rank=number) for number in range(2)]
    epochs = []
    for epoch in range(2):
        for part in parts:
            part["sampler"].set_epoch(epoch)
        epochs.append(dealt([ids_of(part["loader"]) for part in parts]))
    assert epochs[0] != epochs[1] and [len(epoch) for epoch in epochs] == [50, 50]


def test_pytorch_2576():
    weights = torch.ones(2**24 + 1)
    with pytest.raises(RuntimeError, match="number of categories cannot exceed"):
        torch.multinomial(weights, 10)
    assert len(list(solved("pytorch/pytorch#2576", weights=weights)["sampler"])) == 10


def test_pytorch_43115():
    half = 2**21
    weights = torch.ones(2 * half)
    weights[:half] = 2
    upper = sum(i >= half for i in solved("pytorch/pytorch#43115", weights=weights)["sampler"])
    assert abs(upper - 100_000 / 3) < 4 * (100_000 * 2 / 9) ** 0.5


def test_pytorch_7359():
    thread, losses = "pytorch/pytorch#7359", np.arange(N) % 3.0
    loader = solved(thread, 0)["loader"]
    assert any(losses[i] == 0 for i in ids_of(loader))
    solved(thread, 1, loader=loader, losses=losses)
    ids = ids_of(loader)
    assert {losses[i] for i in ids} == {1, 2} and sum(losses[i] == 2 for i in ids) == N * 2 // 3


def test_pytorch_113748():
    labels = LABELS[list(solved("pytorch/pytorch#113748")["sampler"])]
    assert abs(labels.sum() - N / 2) <= 1


def test_pytorch_11813():
    thread = "pytorch/pytorch#11813"
    loader, again = (DataLoader(DATA, 8, sampler=samplers.Shuffle(DATA)) for _ in range(2))
    batches = iter(loader)
    [next(batches) for _ in range(4)]
    state = solved(thread, 0, loader=loader)["state"]
    solved(thread, 1, loader=again, state=state)
    assert ids_of(again) == ids_of(batches) and ids_of(again) == ids_of(loader)


def test_lightning_10946():
    loader = solved("Lightning-AI/pytorch-lightning#10946", 0)["loader"]
    expected = samplers.WeightedSampler(WEIGHTS)
    assert [flat(epoch) for epoch in trained(loader)] == [list(expected), list(expected)]


def test_lightning_12866():
    loader, even = (
        DataLoader(DATA, 8, sampler=samplers.WeightedSampler(WEIGHTS)),
        np.arange(N) % 2.0,
    )

    def change(trainer):
        return solved("Lightning-AI/pytorch-lightning#12866", trainer=trainer, weights=even)

    first, second = (flat(epoch) for epoch in trained(loader, at_end=change))
    assert any(i % 2 == 0 for i in first) and all(i % 2 == 1 for i in second)


def test_lightning_13316():
    loader = solved("Lightning-AI/pytorch-lightning#13316")["loader"]
    expected = samplers.BalancedBatchSampler(LABELS, 8)
    first, second = trained(loader)
    assert first == list(expected) and second == list(expected) and first != second


def test_lightning_3716(rank):
    thread = "Lightning-AI/pytorch-lightning#3716"
    alone = len(solved(thread)["loader"])
    rank(1)
    assert len(solved(thread)["loader"]) == -(-alone // 2)


def test_rf_detr_1287():
    data = TensorDataset(DATA.tensors[0], torch.from_numpy(LABELS))
    for _, labels in solved("roboflow/rf-detr#1287", dataset=data)["loader"]:
        assert labels.bincount().tolist() == [12, 4]


def prepared(number):
    accelerate = pytest.importorskip("accelerate.data_loader")
    return lambda loader: accelerate.prepare_data_loader(
        loader, num_processes=2, process_index=number, put_on_device=False
    )


def test_accelerate_2865(rank):
    parts = []
    for number in range(2):
        rank(number)
        loader = solved("huggingface/accelerate#2865", prepare=prepared(number))["loader"]
        parts.append([x.tolist() for x, _ in loader])
    assert flat(dealt(parts))[:N] == list(samplers.WeightedSampler(WEIGHTS, num_replicas=1, rank=0))


def test_accelerate_1130():
    accelerate = pytest.importorskip("accelerate")
    sampler = samplers.Shuffle(DATA)
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(DATA, 8, sampler=sampler))
    whole = [ids_of(loader) for _ in range(4)]
    solved("huggingface/accelerate#1130", sampler=sampler, loader=loader)
    assert [ids_of(loader), ids_of(loader)] == [whole[2][40:], whole[3]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_1437():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def fresh():
        return solved("meta-pytorch/data#1437", StatefulDataLoader=stateful)["loader"]

    whole = [*samplers.Shuffle(DATA)], [*(epoch := samplers.Shuffle(DATA)), *epoch][N:]
    loader = fresh()
    assert ids_of(loader) == whole[0]
    again = fresh()
    again.load_state_dict(loader.state_dict())
    found = ids_of(again)
    assert found == whole[1]
    batches, middle = iter(fresh_middle := fresh()), fresh()
    [next(batches) for _ in range(4)]
    middle.load_state_dict(fresh_middle.state_dict())
    assert ids_of(middle) == whole[0][32:] and ids_of(middle) == whole[1]


def test_ignite_3653():
    engine = pytest.importorskip("ignite.engine")
    seen = []
    loader = solved("pytorch/ignite#3653")["loader"]
    engine.Engine(lambda _, batch: seen.append(LABELS[batch[0].numpy()].sum())).run(
        loader, max_epochs=2
    )
    assert len(seen) == 2 * N // 8 and {*seen} == {4}


def test_metric_learning_612():
    loader = solved("KevinMusgrave/pytorch-metric-learning#612", labels=DATA.tensors[1])["loader"]
    for _, labels in loader:
        assert (labels.reshape(5, 4) == labels[::4, None]).all() and len(labels.unique()) == 5


@in_verify
@pytest.mark.filterwarnings("ignore")
def test_ray_31127(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    torch_of_ray = pytest.importorskip("ray.train.torch")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.chdir(tmp_path)

    def loop():
        found = solved(
            "ray-project/ray#31127", prepare_data_loader=torch_of_ray.prepare_data_loader
        )
        torch.save(ids_of(found["loader"]), tmp_path / "ids.pt")

    paths = {
        "env_vars": {"PYTHONPATH": ":".join(filter(None, sys.path)), "RAY_TRAIN_V2_ENABLED": "1"}
    }
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    try:
        torch_of_ray.TorchTrainer(loop, scaling_config=ray.train.ScalingConfig(num_workers=1)).fit()
    finally:
        ray.shutdown()
    assert torch.load(tmp_path / "ids.pt") == list(samplers.WeightedSampler(WEIGHTS))


def test_a_trainer_of_transformers(tmp_path):
    """By an override of one method."""
    pytest.importorskip("lightning_cases")  # lets torchvision be imported
    transformers = pytest.importorskip("transformers")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.seen = nn.Linear(1, 1), []

        def forward(self, x):
            self.seen += x.tolist()
            return {"loss": self.net(x.float().unsqueeze(1)).mean()}

    class Weighted(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return samplers.WeightedSampler(WEIGHTS, num_replicas=1, rank=0)

    options = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), disable_tqdm=True, **options
    )
    trainer = Weighted(Net(), arguments, train_dataset=[{"x": i} for i in range(N)])
    trainer.train()
    expected = samplers.WeightedSampler(WEIGHTS)
    assert trainer.model.seen == [*expected, *expected]
