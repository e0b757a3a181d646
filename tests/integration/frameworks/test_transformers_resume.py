"""A training with Trainer that goes on from a checkpoint has the bits of one that was not interrupted."""

import multiprocessing
import os
import signal
import warnings

import pytest
import torch
import transformers

import thresher
from depth import DEEP, depth, in_verify
from helpers import assert_same
from transformers_cases import METHODS, outcome, trainer

pytestmark = pytest.mark.usefixtures("shared_traces")


def saved(folder, method, causal, **settings):
    settings = {"save_strategy": "steps", "save_steps": 1} | settings
    made = trainer(folder, method, causal, **settings)
    made.train()
    return made, sorted(
        folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])
    )


@pytest.mark.parametrize(
    ("method", "causal", "accumulate"),
    depth(
        [("kakurenbo", True, 3)],
        [(name, causal, every) for name in METHODS for causal in (False, True) for every in (1, 3)],
    ),
)
def test_goes_on_after_any_step(method, causal, accumulate, tmp_path):
    method, settings = METHODS[method], {"gradient_accumulation_steps": accumulate}
    made, checkpoints = saved(tmp_path / "whole", method, causal, **settings)
    expected = outcome(made)
    assert all((path / "thresher.pt").is_file() for path in checkpoints)
    for path in checkpoints if DEEP else checkpoints[1 :: len(checkpoints) // 2]:
        torch.manual_seed(9)
        again = trainer(tmp_path / "again", method, causal, **settings)
        again.train(str(path))
        assert_same(outcome(again), expected, path.name)
        assert again.rates == made.rates[len(made.rates) - len(again.rates) :]
        assert [dict(entry) for entry in again.run.history] == [
            dict(entry) for entry in made.run.history
        ]


class Killed(transformers.TrainerCallback):
    """Kills the process in the midst of a step, after the checkpoint of an earlier one."""

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder, settings):
    warnings.simplefilter("ignore")
    trainer(folder, METHODS["kakurenbo"], with_callbacks=[Killed()], **settings).train()


@in_verify
def test_goes_on_after_a_kill(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path / "whole", METHODS["kakurenbo"], **settings)
    whole.train()
    process = multiprocessing.get_context("fork").Process(
        target=train_until_killed, args=(tmp_path / "killed", settings)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    torch.manual_seed(9)
    again = trainer(tmp_path / "killed", METHODS["kakurenbo"], **settings)
    again.train(resume_from_checkpoint=True)
    assert len(again.seen) == len(whole.seen) - 12
    assert_same(outcome(again), outcome(whole))


@in_verify
def test_goes_on_after_an_evaluation(tmp_path):
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "dataloader_num_workers": 1}
    made, checkpoints = saved(tmp_path, METHODS["infobatch"], causal=False, **settings)
    expected = outcome(made)
    again = trainer(tmp_path, METHODS["infobatch"], **settings)
    again.train(str(checkpoints[1]))
    assert again.evaluated == made.evaluated[2:]
    assert_same(outcome(again), expected)
    last = trainer(tmp_path, METHODS["infobatch"], **settings)
    last.train(resume_from_checkpoint=True)
    assert last.seen == []
    assert_same(last.model.state_dict(), made.model.state_dict())


@in_verify
def test_the_scheduler_file_is_that_of_trainer(tmp_path):
    made, checkpoints = saved(
        tmp_path, thresher.UniformSubset(keep=0.5), causal=False, save_steps=1000
    )
    state = torch.load(checkpoints[0] / "scheduler.pt", weights_only=True)
    assert state["last_epoch"] == 36
    plain = trainer(tmp_path / "plain", num_train_epochs=6)
    plain.train(str(checkpoints[0]))
    assert plain.lr_scheduler.last_epoch == 36 + len(plain.seen)


def test_refused_checkpoints(tmp_path):
    method = thresher.UniformSubset(keep=0.5)
    plain, with_run = tmp_path / "plain", tmp_path / "run"
    made = trainer(plain, save_strategy="epoch", num_train_epochs=1)
    made.train()
    _, checkpoints = saved(with_run, method, causal=False, save_strategy="epoch")
    _, weights = saved(
        tmp_path / "weights",
        method,
        causal=False,
        save_strategy="epoch",
        save_only_model=True,
        num_train_epochs=1,
    )
    for path in (plain / "checkpoint-12", weights[0]):
        again = trainer(tmp_path / "again", method)
        before = {name: value.clone() for name, value in again.model.state_dict().items()}
        with pytest.raises(ValueError, match="no file thresher.pt, the state of the run"):
            again.train(str(path))
        assert_same(again.model.state_dict(), before)
    settings = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    with pytest.raises(ValueError, match="another kind of scheduler than ReduceLROnPlateau"):
        trainer(tmp_path / "again", method, **settings).train(str(checkpoints[0]))
    with pytest.raises(
        ValueError, match="of 36 steps, and this one has 48. Go on with the same num_train_epochs"
    ):
        trainer(tmp_path / "again", method, num_train_epochs=4).train(str(checkpoints[0]))
    state = torch.load(checkpoints[0] / "thresher.pt", weights_only=True)
    torch.save(state | {"processes": 2}, checkpoints[0] / "thresher.pt")
    with pytest.raises(ValueError, match="saved by 2 processes, but now there are 1"):
        trainer(tmp_path / "again", method).train(str(checkpoints[0]))


def test_another_loss_is_noted(tmp_path):
    """A sample's mean loss would be one of two losses."""
    settings = {"with_selection_settings": {"observe": True}, "save_steps": 12}
    _, checkpoints = saved(tmp_path, thresher.FullData(), True, **settings)
    again = trainer(tmp_path, thresher.FullData(), True, label_smoothing_factor=0.3, **settings)
    with pytest.warns(UserWarning, match=r"saved with .*=0.0, .* has .*=0.3: .* mix both losses"):
        again.train(str(checkpoints[0]))


def test_a_checkpoint_of_a_run_that_did_not_observe_says_what_to_do(tmp_path):
    _, checkpoints = saved(tmp_path, thresher.FullData(), True, save_steps=12)
    again = trainer(tmp_path, thresher.FullData(), True, with_selection_settings={"observe": True})
    with pytest.raises(ValueError, match="but this run has .*Use the model, .*`observe`"):
        again.train(str(checkpoints[0]))
