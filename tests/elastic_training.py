"""A training that torchrun starts again after one of its processes was killed; `integration/test_elastic.py` runs it.

torchrun --standalone --nproc_per_node=2 --max-restarts=1 tests/elastic_training.py FOLDER [STEP]

At this step of the whole training, process 1 kills itself; but not again after a restart.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thresher
from training_processes import OptimizerState

N, BATCH, EPOCHS = 2500, 50, 4


def main(folder: Path, killed_at: int | None) -> None:
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = thresher.Shuffle(data, num_replicas=size, rank=rank, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    run = thresher.attach(
        thresher.Kakurenbo(max_fraction=0.4),
        loader=loader,
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        epochs=EPOCHS,
    )
    parts: dict[str, Any] = {
        "run": run,
        "model": model,
        "optimizer": OptimizerState(model, optimizer),
        "step": 0,
    }
    last = max(
        (path for path in folder.glob("*-steps") if (path / ".metadata").exists()), default=None
    )
    if last is not None:
        checkpoint.load(parts, checkpoint_id=last)
    step, rows = parts["step"], []
    first = step
    while run.epoch < EPOCHS:
        for inputs, targets in run.loader:
            if step == killed_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            run.criterion(run.model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(run.ids.clone())
            step += 1
            if step % 5 == 0:
                checkpoint.save({**parts, "step": step}, checkpoint_id=folder / f"{step:04}-steps")
    torch.save(
        {"first": first, "rows": rows, "weights": list(model.parameters())},
        folder / f"found-{rank}",
    )
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
