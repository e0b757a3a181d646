"""Trainings on a cluster of Ray, as an executor that `run_missing` submits them to."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from thresher_lab.comparison.ray_workers import Cluster, connected

ROOT = Path(__file__).resolve().parents[2]


class RayPool:
    """Executor on a cluster. Every machine needs this clone and the file of the method at the same paths.

    Args:
        cluster: The cluster.

    Raises:
        ValueError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        ray = connected(cluster.address)
        paths = f"{ROOT}:{ROOT / 'src'}"
        environment = {"env_vars": {"PYTHONPATH": paths, "ACCELERATE_TORCH_DEVICE": "cpu"}}
        options = {"num_cpus": cluster.cpus, "runtime_env": environment}
        self._remote = ray.remote(**options)(train_alone)

    def submit(self, function: Callable[[Any], Any], job: Any) -> "Future[Any]":
        """Submits a training, and returns its future."""
        return self._remote.remote(function, job).future()

    def __enter__(self) -> "RayPool":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the cluster as it is."""


def train_alone(function: Callable[[Any], Any], job: Any) -> Any:
    """Calls a function with one thread.

    Args:
        function: Function that trains.
        job: Its argument.
    """
    torch.set_num_threads(1)
    return function(job)
