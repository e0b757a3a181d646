"""Trainer with a selection in two processes that torchrun would start."""

import os

import torch
import torch.multiprocessing as mp
from torch import distributed

import thresher
from depth import DEEP
from helpers import assert_same
from transformers_cases import METHODS, outcome, trainer

WORLD = 2


def train(rank, folder):
    """What one of the processes does."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "29500"  # looked for, and not used: there is a process group
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found, settings = [], {"gradient_accumulation_steps": 3}
    for method in (None, thresher.FullData()):
        made = trainer(f"{folder}/full", method, causal=True, **settings)
        made.train()
        found.append(outcome(made))
    assert_same(found[1], found[0])
    methods = {**METHODS, "winnow": thresher.UniformSubset(keep=0.5)} if DEEP else {"infobatch": METHODS["infobatch"]}
    for name, method in methods.items():
        made = trainer(f"{folder}/{name}", method, save_strategy="steps", save_steps=2, **settings)
        made.train()
        assert made.lr_scheduler.get_last_lr() == [0, 0]
        assert made.state.global_step == made.run.cost.steps
        weights = [None] * WORLD
        distributed.all_gather_object(weights, {key: value.tolist() for key, value in made.model.state_dict().items()})
        assert weights[0] == weights[1]
        again = trainer(f"{folder}/again", method, **settings)
        again.train(f"{folder}/{name}/checkpoint-2")
        assert_same(outcome(again), outcome(made))
        distributed.barrier()
    distributed.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(train, (str(tmp_path),), nprocs=WORLD)
