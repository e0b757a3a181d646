import torch

from thresher_lab.tasks import built_in


def test_learning_rate_grows_with_the_batch():
    base = built_in("fashion-mnist-small")
    for factor in (2, 4, 8):
        task = built_in(f"fashion-mnist-small-x{factor}@1000")
        assert (task.batch_size, task.lr) == (factor * base.batch_size, factor * base.lr)
        assert task.build(0)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
