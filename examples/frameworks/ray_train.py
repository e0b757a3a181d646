"""TorchTrainer of Ray Train.

Library: ray
State: works, with one worker or several

Pass `attach` the loader inside the one that `prepare_data_loader` returns. With several workers, `prepare_data_loader`
divides the samples with a DistributedSampler.
"""

import ray.train  # pyright: ignore[reportMissingImports]
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.utils.data import DataLoader

import thresher


def train(method, make_model, dataset, epochs, folder, workers=2):
    def loop():
        torch.manual_seed(0)
        model = prepare_model(make_model(), move_to_device=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loader = prepare_data_loader(DataLoader(dataset, 4, shuffle=True), move_to_device=False)
        run = thresher.attach(
            method,
            loader=loader,
            criterion=nn.CrossEntropyLoss(),
            model=model,
            optimizer=optimizer,
            epochs=epochs,
        )
        for _ in range(epochs):
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        rank = ray.train.get_context().get_world_rank()
        torch.save(
            {"model": model.state_dict(), "run": run.state_dict(), "backward": run.cost.backward},
            f"{folder}/{rank}.pt",
        )

    TorchTrainer(loop, scaling_config=ray.train.ScalingConfig(num_workers=workers)).fit()
