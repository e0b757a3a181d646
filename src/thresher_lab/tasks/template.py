"""Your own training, in the form that `thresher advise` and `thresher compare` need.

    thresher advise {path}:build --budget 0.5

This command shows where the time goes, how much of it half of the cost could save, and the comparison to run. The commands
call build(seed) again for every run and have the loop themselves: forward pass, criterion, backward pass, optimizer step.
Replace the code below by yours. It runs as it is, on 1,797 small images of digits.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build(seed: int) -> dict[str, Any]:
    """Returns new objects for one run; the same seed must give the same weights and the same order of samples."""
    torch.manual_seed(seed)

    # Data: any map-style dataset of pairs (input, target) in a DataLoader. Shuffle with a separate generator, so that every
    # method gets the same order. A dataset of your own tells its classes by an attribute `targets`, one number per sample.
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    train = TensorDataset(x[:1400], y[:1400])
    test = (x[1400:], y[1400:])
    data = DataLoader(
        train, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )

    # Model, loss function and optimizer. The loss function takes outputs and targets and returns the mean over the batch, as
    # those of PyTorch do.
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # What the network says of the test samples, and what is right. Reports show each class where "predict" is returned.
    def predict(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        device = next(model.parameters()).device
        model.eval()
        with torch.inference_mode():
            predicted = model(test[0].to(device)).argmax(1)
        model.train()
        return predicted.cpu(), test[1]

    # The metric that is compared: a number after each epoch, larger is better (return a loss with a minus sign). Values from
    # 0 to 1 are shown in percent. The time of the evaluation is not counted.
    def evaluate(model: nn.Module) -> float:
        predicted, right = predict(model)
        return (predicted == right).float().mean().item()

    # Optional: a function from the share of training that is done (0 to 1) to a factor on the rate; the momentum stays.
    # Do not use a scheduler of your own: in runs with fewer epochs the learning rate must decay within them.
    def schedule(done: float) -> float:
        return 1 - done

    # Optional, where a batch is not a pair (input, target), or the model takes more than the input:
    #     def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    #         return model(batch["input_ids"], batch["mask"]), batch["label"]
    # returned as "forward".

    # Optional, for the report: what sample i of the dataset looks like, as a PIL image, a tensor or an array of shape (H, W),
    # (H, W, 3) or (3, H, W), or a text. It is called for the few samples that stand out, once a run has been trained.
    def show(i: int) -> Any:
        return train[i][0].reshape(8, 8)

    return {
        "model": model,
        "data": data,
        "criterion": criterion,
        "optimizer": optimizer,
        "evaluate": evaluate,
        # The rest is optional: also the name of what `evaluate` returns, and the names of the classes in order.
        "schedule": schedule,
        "metric": "accuracy",
        "classes": [str(digit) for digit in range(10)],
        "show": show,
        "predict": predict,
    }
