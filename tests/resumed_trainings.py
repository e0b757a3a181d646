"""Trainings that are interrupted and resumed with the samplers and methods of Thresher, in Lightning, Trainer and accelerate.

Each records the ids that it trains on. `run_table` compares a resumed training with one that was not interrupted.
"""

import copy
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

import lightning_cases
import thresher
import thresher.lightning
import thresher.transformers
import transformers_cases
from depth import depth
from thresher.samplers import (
    BalancedBatchSampler,
    Grouped,
    Mixture,
    Shuffle,
    StratifiedBatchSampler,
    WeightedSampler,
)

N, BATCH, EPOCHS, MIDDLE = 45, 4, 3, 2
"""45 samples in batches of 4 for 3 epochs; the middle of an epoch is after 2 batches of a process."""
PLACES = ("start", "middle", "end")
LENGTHS = 1 + np.arange(N)
WEIGHTS = np.random.default_rng(0).random(N)
SAMPLERS: dict[str, Callable[..., Any]] = {
    "Shuffle": lambda **ranks: Shuffle(N, **ranks),
    "WeightedSampler": lambda **ranks: WeightedSampler(WEIGHTS, **ranks),
    "WeightedSampler, replacement": lambda **ranks: WeightedSampler(
        WEIGHTS, replacement=True, **ranks
    ),
    "WeightedSampler, k": lambda **ranks: WeightedSampler(WEIGHTS, 30, replacement=False, **ranks),
    "Grouped": lambda **ranks: Grouped(LENGTHS, max_tokens=90, **ranks),
    "BalancedBatchSampler": lambda **ranks: BalancedBatchSampler(LENGTHS % 5, BATCH, **ranks),
    "Mixture": lambda **ranks: Mixture(
        LENGTHS % 5, BATCH, dict(enumerate([5, 2, 1, 1, 1])), **ranks
    ),
    "StratifiedBatchSampler": lambda **ranks: StratifiedBatchSampler(LENGTHS % 5, BATCH, **ranks),
}
ONCE = ("Shuffle", "Grouped", "StratifiedBatchSampler", None)
METHODS: dict[str, Callable[[], Any]] = {
    "full": thresher.FullData,
    "0.5": lambda: 0.5,
    "winnow": lambda: thresher.Winnow(0.5, least_agreement=-1),
    "kakurenbo": lambda: thresher.Kakurenbo(max_fraction=0.4, tau=0.5),
}
Epochs = list[list[list[int]]]
"""Ids of the batches of each epoch."""


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that have their id as the input."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(index % 2)}


class Net(nn.Module):
    """A classifier with the arguments that Trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(x / N)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def takes_batches(sampler: Any) -> bool:
    return hasattr(sampler, "compose") or isinstance(sampler, Grouped)


def loader_of(kind: Any, sampler: Any, **settings: Any) -> Any:
    if sampler is None:
        return kind(Numbers(), batch_size=BATCH, shuffle=True, **settings)
    if takes_batches(sampler):
        return kind(Numbers(), batch_sampler=sampler, **settings)
    return kind(Numbers(), batch_size=BATCH, sampler=sampler, **settings)


def ids_of(batch: Any) -> list[int]:
    return batch["x"].flatten().int().tolist()


# Lightning


class Module(lightning_cases.lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.criterion = nn.CrossEntropyLoss()
        self.epochs: Epochs = [[] for _ in range(EPOCHS)]

    def training_step(self, batch: Any) -> Any:
        self.epochs[self.current_epoch].append(ids_of(batch))
        return self.criterion(self.net(batch["x"])["logits"], batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Saves(lightning_cases.Saves):
    """Saves the checkpoints of epoch 1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, trainer: Any, what: str) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / what)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if args[-1] == MIDDLE - 1:
            self._save(trainer, "middle")
        if trainer.is_last_batch:
            self._save(trainer, "last")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "end")
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "start")


def lightning(
    folder: Path,
    sampler: Any,
    place: str | None,
    *,
    kind: Any = DataLoader,
    workers: int = 0,
    method: Any = None,
    positions: bool = False,
) -> Epochs:
    module = Module()
    callbacks: list[Any] = [] if place else [Saves(folder)]
    if method is not None:
        callbacks.insert(0, thresher.lightning.Selection(method))
    own = sampler is not None
    made = lightning_cases.trainer(
        *callbacks,
        max_epochs=EPOCHS,
        use_distributed_sampler=not own,
        devices=distributed.get_world_size(),
        strategy="ddp" if distributed.get_world_size() > 1 else "auto",
    )
    if positions and place:
        rows = 1 if takes_batches(sampler) else BATCH
        items = MIDDLE * distributed.get_world_size() * rows
        position = {"start": (1, 0), "middle": (1, items), "end": (2, 0), "last": (2, 0)}[place]
        sampler.set_epoch(*position)
    loader = loader_of(kind, sampler, num_workers=workers)
    made.fit(module, loader, ckpt_path=place and folder / place)
    return module.epochs


# Trainer


class Trainer(transformers.Trainer):
    sampler: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epochs: Epochs = [[] for _ in range(EPOCHS)]

    def get_train_dataloader(self) -> Any:
        if self.sampler is None:
            return super().get_train_dataloader()
        workers = self.args.dataloader_num_workers
        return self.accelerator.prepare(loader_of(DataLoader, self.sampler, num_workers=workers))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.epochs[int(self.state.epoch + 1e-6)].append(ids_of(inputs))
        return super().training_step(model, inputs, *args, **kwargs)


class Selected(thresher.transformers.Selection, Trainer):
    pass


def trainer(
    folder: Path, sampler: Any, place: str | None, *, method: Any = None, workers: int = 0
) -> Epochs:
    AcceleratorState._reset_state(reset_partial_state=True)
    of = Trainer if method is None else Selected
    made = transformers_cases.trainer(
        folder / ("resumed" if place else "whole"),
        method,
        of=of,
        net=Net(),
        with_train_dataset=Numbers(),
        with_eval_dataset=None,
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        dataloader_num_workers=workers,
        save_strategy="no" if place else "steps",
        save_steps=1,
        logging_strategy="no",
    )
    made.sampler = sampler
    checkpoint = None
    if place:
        steps = json.loads((folder / "steps.json").read_text())
        done = {"start": steps[0], "middle": steps[0] + MIDDLE, "end": steps[0] + steps[1]}[place]
        checkpoint = str(folder / "whole" / f"checkpoint-{done}")
    made.train(checkpoint)
    if not place:
        (folder / "steps.json").write_text(json.dumps([len(one) for one in made.epochs]))
    distributed.barrier()
    return made.epochs


# accelerate


def accelerated(
    folder: Path,
    sampler: Any,
    place: str | None,
    *,
    stateful: bool = False,
    workers: int = 0,
    method: Any = None,
    sets_epoch: bool = True,
) -> Epochs:
    AcceleratorState._reset_state(reset_partial_state=True)
    options = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=sampler is None
    )
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    # The sampler of accelerate takes this seed.
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader_of(DataLoader, sampler, num_workers=workers)
    )
    criterion = nn.CrossEntropyLoss()
    run: Any = None
    first = 0
    skipped = 0
    batches: Any = loader
    if method is not None:
        run = thresher.attach(
            method,
            loader=loader,
            criterion=criterion,
            model=model,
            optimizer=optimizer,
            epochs=EPOCHS,
        )
        batches = run.loader
    if place:
        first = 1 + (place == "end")
        skipped = MIDDLE * (place == "middle")
        if run is not None:
            rank = distributed.get_rank()
            state = torch.load(folder / f"{place}-run-{rank}.pt", weights_only=True)
            run.load_state_dict(state["run"])
            # Methods choose by the losses of the model.
            model.load_state_dict(state["model"])
        else:
            accelerator.load_state(str(folder / place))
    epochs: Epochs = [[] for _ in range(EPOCHS)]

    def save(at: str) -> None:
        if place:
            return
        if run is None:
            accelerator.save_state(str(folder / at), safe_serialization=False)
            return
        # All processes call it together.
        state = {"run": run.state_dict(), "model": model.state_dict()}
        torch.save(state, folder / f"{at}-run-{distributed.get_rank()}.pt")

    for epoch in range(first, EPOCHS):
        if epoch == 1:
            save("start")
        if sets_epoch:
            loader.set_epoch(epoch)
        current = batches
        if run is None and not stateful and skipped and epoch == first:
            current = skip_first_batches(loader, skipped)
        for batch in current:
            epochs[epoch].append(ids_of(batch))
            logits = (run.model if run else model)(batch["x"])["logits"]
            (run.criterion if run else criterion)(logits, batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 1 and len(epochs[1]) == MIDDLE:
                save("middle")
        if epoch == 1:
            save("end")
    if run is not None:
        run.detach()
    return epochs


def lightning_stateful(*args: Any, **settings: Any) -> Epochs:
    """Runs a training of Lightning with torchdata's loader, which only `make verify` installs."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return lightning(*args, kind=StatefulDataLoader, **settings)


FRAMEWORKS: dict[str, Callable[..., Epochs]] = {
    "Lightning": lightning,
    "Lightning, position set": lambda *args, **kw: lightning(*args, positions=True, **kw),
    "Lightning, StatefulDataLoader": lightning_stateful,
    "Trainer": trainer,
    "accelerate, skip_first_batches": accelerated,
    "accelerate, stateful": lambda *args, **kw: accelerated(*args, stateful=True, **kw),
}


def gathered(epochs: Epochs) -> list[list[Any]]:
    """Returns the batches of all processes, for each epoch."""
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, epochs)
    return [[rank[epoch] for rank in ranks] for epoch in range(EPOCHS)]


def rest_of(whole: list[list[Any]], place: str) -> list[list[Any]]:
    """Returns what a training that was resumed at a place should train on."""
    rest = copy.deepcopy(whole)
    rest[0] = [[] for _ in rest[0]]
    if place == "middle":
        rest[1] = [rank[MIDDLE:] for rank in rest[1]]
    if place in ("end", "last"):
        rest[1] = [[] for _ in rest[1]]
    return rest


def compared(found: list[list[Any]], expected: list[list[Any]]) -> str:
    if found == expected:
        return "ok"
    parts = []
    for epoch in range(EPOCHS):
        counts = [
            Counter(i for rank in of[epoch] for batch in rank for i in batch)
            for of in (found, expected)
        ]
        repeated = (counts[0] - counts[1]).total()
        missed = (counts[1] - counts[0]).total()
        if repeated or missed:
            parts.append(f"epoch {epoch}: repeats {repeated}, misses {missed}")
        elif found[epoch] != expected[epoch]:
            parts.append(f"epoch {epoch}: other order")
    return "; ".join(parts)


def outcome_of(
    framework: str, sampler: str | None, place: str | None, folder: Path, **settings: Any
) -> Any:
    """Returns the batches of all processes, or the message of an error."""
    ranks = {}
    if "Lightning" not in framework:
        ranks = {"num_replicas": 1, "rank": 0}
    made = None if sampler is None else SAMPLERS[sampler](**ranks)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = gathered(FRAMEWORKS[framework](folder, made, place, **settings))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    warned = any("your dataloader is not resumable" in str(one.message) for one in caught)
    return found, warned


def run_case(folder: Path, framework: str, sampler: str | None, **settings: Any) -> dict[str, str]:
    """Returns, for each place of a resume, what the resumed training repeats or misses."""
    folder.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    whole = outcome_of(framework, sampler, None, folder, **settings)
    if isinstance(whole, str):
        return {"whole": whole}
    results = {}
    if sampler in ONCE and settings.get("method") is None:
        for epoch in range(EPOCHS):
            rows = Counter(i for rank in whole[0][epoch] for batch in rank for i in batch)
            missing = [i for i in range(N) if not rows[i]]
            if missing:
                results["whole"] = f"epoch {epoch}: misses {len(missing)}"
    # Lightning loses the epoch after the last batch of any StatefulDataLoader.
    places = (*PLACES, "last") if framework.startswith("Lightning") else PLACES
    if framework == "Lightning, StatefulDataLoader":
        places = PLACES
    for place in places:
        again = outcome_of(framework, sampler, place, folder, **settings)
        if isinstance(again, str):
            results[place] = again
        else:
            results[place] = compared(again[0], rest_of(whole[0], place))
            if again[1]:
                results[place] += "; warned"
    return results


BY_BATCH = ("Shuffle", "Grouped")
CASES: list[tuple[str, str | None, dict[str, Any]]] = depth(
    [
        ("Lightning", "Shuffle", {"workers": 2}),
        ("Lightning", "Grouped", {"workers": 2}),
        ("Trainer", "Shuffle", {}),
        ("accelerate, skip_first_batches", "Grouped", {}),
        ("accelerate, skip_first_batches", "StratifiedBatchSampler", {}),
        ("accelerate, skip_first_batches", "Shuffle", {"method": "full", "sets_epoch": False}),
    ],
    [
        *(("Lightning", name, {"workers": 2}) for name in SAMPLERS),
        *(("Trainer", name, {}) for name in SAMPLERS),
        *(("accelerate, skip_first_batches", name, {}) for name in SAMPLERS),
        *(("Lightning, position set", name, {"workers": 2}) for name in BY_BATCH),
        *(("Lightning, StatefulDataLoader", name, {"workers": 2}) for name in BY_BATCH),
        *(("accelerate, stateful", name, {"workers": 2}) for name in BY_BATCH),
        *(("Lightning", None, {"method": name}) for name in ("full", "0.5", "winnow")),
        *(("Trainer", None, {"method": name}) for name in METHODS),
        ("accelerate, skip_first_batches", "Shuffle", {"method": "full"}),
        ("accelerate, skip_first_batches", "Grouped", {"method": "full"}),
        *(
            ("accelerate, skip_first_batches", name, {"method": method, "sets_epoch": False})
            for name in (None, "Shuffle", "Grouped")
            for method in ("full", "0.5")
        ),
    ],
)


def run_table(rank: int, world: int, folder: str, cases: Any = CASES) -> None:
    """Runs cases in this process, which is forked, and writes the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    for number, (framework, sampler, settings) in enumerate(cases):
        made = {**settings}
        if "method" in made:
            made["method"] = METHODS[made["method"]]()
        found = run_case(Path(folder, str(number)), framework, sampler, **made)
        if rank == 0:
            Path(folder, f"{number}.json").write_text(json.dumps(found))
        distributed.barrier()
    distributed.destroy_process_group()
