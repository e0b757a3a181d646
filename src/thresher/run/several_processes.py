"""Checks for several processes that train together."""

from typing import Any

from torch import distributed
from torch.utils.data import IterableDataset

from thresher.distributed.world import ALONE, ProcessWorld, World, agree, sampler_facts
from thresher.distributed.wrappers import in_several_processes
from thresher.loading.samplers import check_shared, inner_sampler
from thresher.methods.contract import title_given
from thresher.run.batch_stage import by_chance
from thresher.run.parts import RunConfig, SelectionMode

NO_FURTHER_PLAN = (
    "The samples of epoch {} are not chosen yet: attach got epochs={}, so all processes choose them together when they iterate "
    "over run.loader. Read run.plan and len(run.loader) before the last epoch ends."
)
NOT_SHARED = "sampler.generator"
"""Fact about a sampler in which processes may differ: accelerate gives all of them the same state before each epoch."""


def world_of(process_group: Any) -> World:
    """Returns the processes that train together; `ALONE` if there is one.

    Args:
        process_group: Argument of `attach`; None for the default group, if there is one.

    Raises:
        ValueError: `process_group` is not a group of torch.distributed that this process is in.
    """
    if process_group is None and not in_several_processes():
        return ALONE
    try:
        world = ProcessWorld(process_group)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"`process_group`: {error}") from error
    # A group of one process needs no communication, and has the same results.
    return ALONE if world.size == 1 else world


def has_group() -> bool:
    """Returns whether this process is in a process group of torch.distributed, even a group of one process."""
    return distributed.is_available() and distributed.is_initialized()


def check_attached_late_enough(had_group: bool) -> None:
    """Checks that a run was not attached before the process group was created.

    Args:
        had_group: Whether there was a process group when the run was attached.

    Raises:
        RuntimeError: There is a process group of several processes now, and there was none then.
    """
    # Without this check, each process would silently train by itself.
    if not had_group and in_several_processes():
        raise RuntimeError(
            f"attach was called before torch.distributed.init_process_group, so each of the {distributed.get_world_size()} "
            "processes would train on all samples. Call attach after it."
        )


def check_alike(world: World, settings: dict[str, Any], loader: Any) -> None:
    """Checks that all processes call `attach` with the same settings. Every process must call it.

    Args:
        world: The processes.
        settings: Arguments of `attach` by name.
        loader: The user's loader.

    Raises:
        DisagreementError: The settings differ; all processes raise it.
    """
    if world.size == 1:
        return
    batches = loader.batch_sampler
    sampler = None if batches is None else inner_sampler(batches)
    # What decides which samples come, and how many in a batch: processes that differ in it would wait for each other.
    facts = {name: fact for name, fact in sampler_facts(sampler).items() if name != NOT_SHARED}
    sizes = {name: getattr(batches, name, None) for name in ("batch_size", "drop_last")}
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    agree(world, {**settings, "samples": samples, **sizes, **facts})


def check_several(config: RunConfig) -> None:
    """Checks that loader and method work with several processes.

    Raises:
        ValueError: The loader or a method does not work with several processes.
    """
    loader = config.given.loader
    scoring = config.given.scoring
    world = config.world
    batch = config.batch_method
    if world.size == 1:
        return
    # Before `check_shared`, which reads the batch sampler that a stream does not have.
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"`loader` iterates over {type(loader.dataset).__name__}, an IterableDataset: {world.size} processes could have "
            "different numbers of batches. Use a map-style dataset, or one process."
        )
    check_shared(loader, world)
    if scoring is not None and scoring.every_epochs > 1:
        raise ValueError(
            "`forward_passes`: several processes cannot use losses of earlier epochs: process 0 stores them, and other "
            "processes do not. Use every_epochs=1."
        )
    if batch is not None and config.mode is SelectionMode.WITHOUT_LOSSES and by_chance(batch):
        raise ValueError(
            f"{title_given(batch)} keeps a random number of rows, so processes would have batches of different sizes. Use "
            "forward_passes='twice', which fills batches up."
        )
