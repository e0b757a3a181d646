"""Classification of images."""

from functools import partial

from thresher.experiments.tasks.base import Task, without_folder
from thresher.experiments.tasks.data import images
from thresher.experiments.tasks.data.cifar import CIFAR10, CIFAR10_CLASSES, CIFAR100, CIFAR100_CLASSES
from thresher.experiments.tasks.data.svhn import find_svhn, svhn
from thresher.experiments.tasks.networks.convolutional import perceptron, resnet8, resnet18, small_cnn

IMAGE_TASKS = (
    Task("digits", partial(without_folder, "digits", lambda: None), images.digits, partial(small_cnn, 8), lr=0.05),
    Task(
        "mnist-5k",
        partial(without_folder, "mnist-5k", images.find_mnist_5k),
        images.mnist_5k,
        partial(small_cnn, 28, width=8),
        lr=0.05,
    ),
    Task(
        "mnist-5k-noisy",
        partial(without_folder, "mnist-5k-noisy", images.find_mnist_5k),
        images.mnist_5k_noisy,
        partial(small_cnn, 28, width=8),
        lr=0.05,
    ),
    Task(
        "mnist-5k-mlp",
        partial(without_folder, "mnist-5k-mlp", images.find_mnist_5k),
        images.mnist_5k,
        partial(perceptron, 28 * 28),
        lr=0.05,
    ),
    Task(
        "fashion-mnist",
        images.find_fashion_mnist,
        images.fashion_mnist,
        partial(small_cnn, 28, width=32),
        lr=0.1,
        batch_size=128,
        classes=images.FASHION_CLASSES,
    ),
    Task(
        "fashion-mnist-resnet8",
        images.find_fashion_mnist,
        images.fashion_mnist,
        resnet8,
        lr=0.2,
        batch_size=128,
        classes=images.FASHION_CLASSES,
    ),
    Task("cifar10", CIFAR10.find, CIFAR10.load, resnet18, lr=0.01, batch_size=128, classes=CIFAR10_CLASSES),
    Task(
        "cifar100",
        CIFAR100.find,
        CIFAR100.load,
        partial(resnet18, classes=100),
        lr=0.01,
        batch_size=128,
        classes=CIFAR100_CLASSES,
    ),
    Task("svhn", find_svhn, svhn, resnet18, lr=0.01, batch_size=128),
)
