"""Trainings with Lightning and Transformers in two processes; one start of them is enough for all cases."""

import importlib.util
import itertools
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lightning_cases
import thresher
import thresher.lightning
import transformers_cases
from depth import depth
from helpers import assert_same
from lightning_cases import (
    BATCH,
    Classifier,
    Saves,
    dataset,
    fit,
    last_rate_of_full_training,
    trainer,
)
from subset_cases import trace_once_per_architecture
from thresher.attribution.accumulator import StepAccumulator
from thresher.run.history import COUNTED
from thresher.samplers import (
    BalancedBatchSampler,
    Grouped,
    Mixture,
    Shuffle,
    StratifiedBatchSampler,
    WeightedSampler,
)
from thresher.subset import SubsetBackward

WORLD, EPOCHS = 2, 3
METHODS = {
    "infobatch": thresher.InfoBatch(),
    "kakurenbo": thresher.Kakurenbo(max_fraction=0.4, tau=0.5),
    "selective_backprop": thresher.SelectiveBackprop(keep=0.4),
    "by chance": thresher.SelectiveBackprop(beta=1),
}


class Normalized(Classifier):
    """A module with a batch normalization, whose statistics differ from process to process after each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.net = network()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
        )


ON_TWO = {"devices": WORLD, "strategy": "ddp", "max_epochs": EPOCHS}


def lightning_changes_nothing(rank: int, folder: str) -> None:
    """FullData is the training without the callback, bit for bit."""
    for accumulate, workers in depth([(3, 0)], [(3, 0), (1, 2)]):
        found = []
        for callbacks in ([], [thresher.lightning.Selection(thresher.FullData())]):
            module = Normalized(draws=True)
            made = fit(
                module,
                *callbacks,
                validate=True,
                workers=workers,
                accumulate_grad_batches=accumulate,
                **ON_TWO,
            )
            steps = (made.global_step, module.validated, module.estimates)
            found.append((lightning_cases.outcome(module, made), steps))
        assert type(made.train_dataloader.sampler) is DistributedSampler
        assert_same(found[1], found[0])


def by_hand(method: Any, rank: int) -> Any:
    """The same training as a plain loop with DistributedDataParallel."""
    torch.manual_seed(0)
    net, data = network(), dataset()
    model, optimizer = (
        DistributedDataParallel(net),
        torch.optim.SGD(net.parameters(), 0.05, momentum=0.9),
    )
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, WORLD, rank))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    run = thresher.attach(
        method, loader=loader, criterion=criterion, model=model, optimizer=optimizer, epochs=EPOCHS
    )
    total = EPOCHS * len(loader)
    scheduler = run.pace(
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=total), total
    )
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with torch.no_grad():
            run.model.eval()(data.tensors[0])  # the validation of Lightning shares the buffers, too
            run.model.train()
    run.detach()
    return net, optimizer, run


def lightning_equals_a_plain_loop(rank: int, folder: str) -> None:
    for name in depth(["kakurenbo"], METHODS):
        net, optimizer, run = by_hand(METHODS[name], rank)
        module, selection = Normalized(), thresher.lightning.Selection(METHODS[name])
        made = fit(module, selection, validate=True, **ON_TWO)
        assert_same(module.net.state_dict(), net.state_dict(), name)
        assert_same(made.optimizers[0].state_dict()["state"], optimizer.state_dict()["state"], name)
        found = selection.run
        assert_same(
            [dict(entry) for entry in found.history], [dict(entry) for entry in run.history], name
        )
        assert [getattr(found.cost, one) for one in COUNTED] == [
            getattr(run.cost, one) for one in COUNTED
        ]
        assert (found.cost.refresh > 0) == (name == "kakurenbo")
        if rank == 0:
            assert_same(dict(found.records), dict(run.records), name)
        rates = [one.param_groups[0]["lr"] for one in (made.optimizers[0], optimizer)]
        assert rates == [last_rate_of_full_training(EPOCHS * 7)] * 2
        assert [epoch for epoch, _ in module.validated] == list(range(EPOCHS))


def lightning_goes_on(rank: int, folder: str) -> None:
    """From checkpoints after a step and after an epoch, with the same bits."""
    for name, workers in depth(
        [("kakurenbo", 0)], [(name, workers) for name in METHODS for workers in (0, 2)]
    ):
        saves, module = Saves(Path(folder, name, str(workers))), Normalized()
        settings = {"validate": True, "workers": workers, **ON_TWO}
        expected = lightning_cases.outcome(
            module, fit(module, thresher.lightning.Selection(METHODS[name]), saves, **settings)
        )
        for path in saves.of_epoch(1, *depth(["step"], ["step", "last", "validation", "epoch"])):
            resumed, selection = Normalized(), thresher.lightning.Selection(METHODS[name])
            made = fit(resumed, selection, seed=9, ckpt_path=path, **settings)
            found = lightning_cases.outcome(resumed, made)
            assert_same(found["rates"], expected["rates"][-len(found["rates"]) :], path.name)
            assert_same(found | {"rates": []}, expected | {"rates": []}, path.name)
            assert len(selection.run.history) == EPOCHS


class Fails(Normalized):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.batches == 3:
            raise KeyError("a failure")


def lightning_after_an_error(rank: int, folder: str) -> None:
    """A process that fails gives everything back, and brings no records home, for which it would wait for the others."""
    module, selection = Fails(), thresher.lightning.Selection(METHODS["kakurenbo"])
    with (
        pytest.raises(KeyError, match="a failure"),
        mock.patch.object(StepAccumulator, "sync", side_effect=AssertionError),
    ):
        fit(module, selection, **ON_TWO)
    assert isinstance(module.net, nn.Sequential)
    assert not hasattr(module, "thresher")


def lightning_refuses(rank: int, folder: str) -> None:
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(len(dataset())), len(dataset()))
    loader = DataLoader(dataset(), BATCH, sampler=sampler)
    with pytest.raises(
        ValueError,
        match="puts into a DistributedSamplerWrapper, is not supported. Use shuffle=True",
    ):
        trainer(thresher.lightning.Selection(thresher.InfoBatch()), **ON_TWO).fit(
            Classifier(), loader
        )


def transformers_changes_nothing(rank: int, folder: str) -> None:
    for order in ("random", "group_by_length"):
        settings = {"gradient_accumulation_steps": 3, "train_sampling_strategy": order}
        found = []
        for method in (None, thresher.FullData()):
            made = transformers_cases.trainer(f"{folder}/full", method, causal=True, **settings)
            made.train()
            found.append(transformers_cases.outcome(made))
        assert_same(found[1], found[0])


def transformers_goes_on(rank: int, folder: str) -> None:
    settings = {"gradient_accumulation_steps": 3}
    methods = {**transformers_cases.METHODS, "winnow": thresher.UniformSubset(keep=0.5)}
    for name in methods:
        made = transformers_cases.trainer(
            f"{folder}/{name}", methods[name], save_strategy="steps", save_steps=2, **settings
        )
        made.train()
        assert made.lr_scheduler.get_last_lr() == [0, 0]
        assert made.state.global_step == made.run.cost.steps
        weights: list[Any] = [None] * WORLD
        distributed.all_gather_object(
            weights, {key: value.tolist() for key, value in made.model.state_dict().items()}
        )
        assert weights[0] == weights[1]
        again = transformers_cases.trainer(f"{folder}/again", methods[name], **settings)
        again.train(f"{folder}/{name}/checkpoint-2")
        assert_same(transformers_cases.outcome(again), transformers_cases.outcome(made))
        distributed.barrier()


def fused_head_changes_nothing(rank: int, folder: str) -> None:
    import sft_cases

    for name in ("float32", "accumulation", "padding_free", "packing, accumulation", "experts"):
        found = []
        for method in (None, thresher.FullData(), thresher.UniformSubset(keep=0.5)):
            made = sft_cases.trainer(f"{folder}/full", method, name)
            made.train()
            found.append(made.model.state_dict())
        assert_same(found[1], found[0])
        weights: list[Any] = [None] * WORLD
        distributed.all_gather_object(
            weights, {key: value.tolist() for key, value in found[2].items()}
        )
        assert weights[0] == weights[1]


def pairs_change_nothing(rank: int, folder: str) -> None:
    import pair_cases

    observed = {"with_selection_settings": {"observe": True}}
    for name in ("reward, accumulation", "dpo, float32", "dpo, LoRA"):
        plain = pair_cases.trainer(f"{folder}/pairs", None, name)
        full = pair_cases.trainer(f"{folder}/pairs", thresher.FullData(), name, **observed)
        half = pair_cases.trainer(f"{folder}/pairs", 0.5, name)
        for made in (plain, full, half):
            made.train()
        assert_same(full.model.state_dict(), plain.model.state_dict())
        if rank == 0:
            assert full.run.data_map()["times_seen"].tolist() == [2] * 24
        weights: list[Any] = [None] * WORLD
        distributed.all_gather_object(
            weights, {key: value.tolist() for key, value in half.model.state_dict().items()}
        )
        assert weights[0] == weights[1]


LENGTHS = torch.arange(1, 46)
BATCH_SAMPLERS = {
    "Grouped": lambda **settings: Grouped(LENGTHS, max_tokens=90, **settings),
    "Balanced": lambda **settings: BalancedBatchSampler(LENGTHS % 5, 4, **settings),
    "P x K": lambda **settings: BalancedBatchSampler(
        LENGTHS % 5, classes_per_batch=2, samples_per_class=2, **settings
    ),
    "Mixture": lambda **settings: Mixture(LENGTHS % 2, 4, {0: 2, 1: 1}, **settings),
    "Stratified": lambda **settings: StratifiedBatchSampler(LENGTHS % 5, 4, **settings),
}
NUMBERS = [{"x": torch.tensor([float(i)])} for i in range(len(LENGTHS))]


def count_of_ranks(ids: Any) -> Counter[int]:
    """How often each sample came in all processes together."""
    gathered: list[Any] = [None] * WORLD
    distributed.all_gather_object(gathered, [int(i) for i in ids])
    return Counter(i for rank_ids in gathered for i in rank_ids)


def assert_as_in_one_process(found: Counter[int], make: Any, *, even: bool) -> None:
    """The batches of one process; of an odd number of them, the beginning may come again."""
    batches = list(make(num_replicas=1, rank=0))
    once = Counter(i for batch in batches for i in batch)
    assert once == found or (
        even and once <= found and (found - once).total() <= max(map(len, batches))
    )


class Records(nn.Module):
    """A model that records the samples that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.ids = nn.Linear(1, 1), []

    def forward(self, x: torch.Tensor) -> Any:
        self.ids += x.flatten().tolist()
        return {"loss": self.net(x).mean()}


def batch_samplers_with_accelerate(rank: int, folder: str) -> None:
    for name, make in BATCH_SAMPLERS.items():
        for split, even in itertools.product([False, True], repeat=2):
            options = DataLoaderConfiguration(split_batches=split, even_batches=even)
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(cpu=True, dataloader_config=options)
            loader = DataLoader(NUMBERS, batch_sampler=make(num_replicas=1, rank=0))
            if split and name == "Grouped":
                with pytest.raises(ValueError, match="batch_size"):
                    accelerator.prepare(loader)
                continue
            found = count_of_ranks(i for batch in accelerator.prepare(loader) for i in batch["x"])
            assert_as_in_one_process(found, make, even=even)
            again = DataLoader(NUMBERS, batch_sampler=make(num_replicas=1, rank=0))
            settings = {"loader": accelerator.prepare(again), "criterion": None, "epochs": 1}
            if split or not even:
                with pytest.raises(ValueError, match="split_batches=False|even_batches=True"):
                    thresher.attach(thresher.FullData(), **settings)
            else:
                run = thresher.attach(thresher.FullData(), **settings)
                found = count_of_ranks(i for batch in run.loader for i in batch["x"])
                assert_as_in_one_process(found, make, even=True)
            with pytest.raises(RuntimeError, match="a part of a part"):
                list(accelerator.prepare(DataLoader(NUMBERS, batch_sampler=make())))
            other = accelerator.prepare(
                DataLoader(NUMBERS, batch_sampler=make(num_replicas=1, rank=0, seed=rank))
            )
            with pytest.raises(RuntimeError, match="rank 1 differs from rank 0 in seed"):
                list(other)
    AcceleratorState._reset_state(reset_partial_state=True)


def gathered_rows_with_accelerate(rank: int, folder: str) -> None:
    """No row counts twice, and none is cut off, where the last step repeats rows to be full."""
    for n, method in (
        (37, thresher.FullData()),
        (44, thresher.UniformSubset(keep=24 / 44)),
        (44, thresher.UniformSubset(keep=22 / 44)),
        (44, thresher.UniformSubset(keep=3 / 44)),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(n), 4, shuffle=True))
        run = thresher.attach(method, loader=loader, criterion=None, epochs=1)
        rows = [i for batch in run.loader for i in accelerator.gather_for_metrics(batch).tolist()]
        assert sorted(rows) == sorted(run.plan.ids.tolist())
    AcceleratorState._reset_state(reset_partial_state=True)


def batch_samplers_with_transformers(rank: int, folder: str) -> None:
    for make in BATCH_SAMPLERS.values():

        class WithBatches(transformers_cases.transformers.Trainer):
            def get_train_dataloader(self, make: Any = make) -> Any:
                return self.accelerator.prepare(
                    DataLoader(self.train_dataset, batch_sampler=make(num_replicas=1, rank=0))
                )

        settings = {"num_train_epochs": 1, "with_train_dataset": NUMBERS, "with_eval_dataset": None}
        trained = transformers_cases.trainer(
            f"{folder}/batches", of=WithBatches, net=Records(), **settings
        )
        trained.train()
        assert_as_in_one_process(count_of_ranks(trained.model.ids), make, even=True)


class NumbersModule(lightning_cases.lightning.LightningModule):
    """A module that records the samples that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Records()

    def training_step(self, batch: Any) -> Any:
        return self.net(batch["x"])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def batch_samplers_with_lightning(rank: int, folder: str) -> None:
    for make in BATCH_SAMPLERS.values():
        for settings in ({}, {"num_replicas": 1, "rank": 0}):
            with pytest.raises(TypeError, match="use_distributed_sampler=False"):
                trainer(**ON_TWO).fit(
                    NumbersModule(), DataLoader(NUMBERS, batch_sampler=make(**settings))
                )
        module, options = (
            NumbersModule(),
            ON_TWO | {"max_epochs": 1, "use_distributed_sampler": False},
        )
        trainer(**options).fit(module, DataLoader(NUMBERS, batch_sampler=make()))
        assert_as_in_one_process(count_of_ranks(module.net.ids), make, even=True)


def samplers_in_a_plain_loop(rank: int, folder: str) -> None:
    """Each process loads its part, and a process with another sampler is named in all of them."""
    for make in BATCH_SAMPLERS.values():
        ids = count_of_ranks(
            i for batch in DataLoader(NUMBERS, batch_sampler=make()) for i in batch["x"]
        )
        assert_as_in_one_process(ids, make, even=True)
    differing = (
        ("weights", WeightedSampler(1 + LENGTHS * rank)),
        ("samples", Shuffle(45 + rank)),
        ("lengths", Grouped(1 + LENGTHS * rank, 8)),
    )
    for name, sampler in differing:
        with pytest.raises(RuntimeError, match=f"rank 1 differs from rank 0 in (.*, )?{name}"):
            next(iter(sampler))


QUICK = (
    batch_samplers_with_accelerate,
    gathered_rows_with_accelerate,
    batch_samplers_with_transformers,
    batch_samplers_with_lightning,
    samplers_in_a_plain_loop,
    lightning_changes_nothing,
    lightning_equals_a_plain_loop,
    lightning_goes_on,
    lightning_after_an_error,
    lightning_refuses,
    transformers_changes_nothing,
)
if importlib.util.find_spec("trl") and importlib.util.find_spec("peft"):
    QUICK += (fused_head_changes_nothing, pairs_change_nothing)
CASES = depth(QUICK, (*QUICK, transformers_goes_on))


def run_cases(rank: int, folder: str) -> None:
    """Runs the cases in this process, which is forked and looks as if torchrun had started it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    SubsetBackward._trace = trace_once_per_architecture(SubsetBackward._trace)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "localhost",
    }
    os.environ["MASTER_PORT"] = "29500"  # looked for, and not used: there is a process group
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    for case in CASES:
        case(rank, f"{folder}/{case.__name__}")
        distributed.barrier()
        Path(folder, f"{case.__name__}.over").touch()
    distributed.destroy_process_group()
