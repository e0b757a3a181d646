"""`thresher.trl`: rows without a gradient are left out exactly, policies choose prompts; what cannot be exact is refused."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.utils.data import WeightedRandomSampler

import grpo_cases
import thresher.trl
from depth import depth
from grpo_cases import GROUP, PROMPTS, passes, trained, trainer, trl, weights
from thresher import rl

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo", "luspo")
CASES = [{"loss_type": one} for one in LOSSES]
CASES += [{"loss_type": one, "num_iterations": 2} for one in ("dapo", "grpo", "dr_grpo", "bnpo")]
CASES += [
    {"loss_type": one, "num_iterations": 2, "steps_per_generation": 4}
    for one in ("dapo", "grpo", "dr_grpo", "bnpo")
]
CASES += [
    {"loss_type": "dapo", "scale_rewards": "batch"},
    {"loss_type": "grpo", "gradient_accumulation_steps": 2},
]
CASES += [
    {"loss_type": "dapo", "mask_truncated_completions": True, "gradient_accumulation_steps": 2}
]


def largest_difference(plain, other):
    pairs = zip(plain.gradients.seen, other.gradients.seen, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


@pytest.mark.parametrize("settings", depth(CASES[:4], CASES), ids=str)
def test_what_is_left_out_has_no_gradient(settings, tmp_path):
    if settings["loss_type"] == "luspo":
        settings = settings | {"importance_sampling_level": "sequence"}
    plain = trained(trainer(tmp_path, **settings))
    skipping = trainer(tmp_path, **settings)
    picks = thresher.trl.attach(skipping)
    trained(skipping)
    assert 0 < picks.rows_trained < picks.rows and 0 < picks.groups_with_signal < picks.groups
    assert largest_difference(plain, skipping) < 2e-5
    assert "thresher/rows_trained" in skipping.state.log_history[0]


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo"])
def test_without_its_scale_the_gradient_is_another(loss, tmp_path, monkeypatch):
    plain = trained(trainer(tmp_path, loss_type=loss))
    whole = thresher.trl.without_other_rows

    def unscaled(inputs, keep, loss_type):
        return whole(inputs, keep, "dapo")

    monkeypatch.setattr(thresher.trl, "without_other_rows", unscaled)
    skipping = trainer(tmp_path, loss_type=loss)
    thresher.trl.attach(skipping)
    trained(skipping)
    assert largest_difference(plain, skipping) > 0.1


@pytest.mark.parametrize("make", [rl.Uniform, rl.Greso])
def test_a_policy_chooses_the_prompts_and_sees_their_rewards(make, tmp_path):
    policy, made = make(PROMPTS), trainer(tmp_path)
    proposed, observed = [], []
    propose, observe = policy.propose, policy.observe
    policy.propose = lambda k: proposed.append(propose(k)) or proposed[-1]
    policy.observe = lambda ids, rewards: observed.append((ids, rewards)) or observe(ids, rewards)
    picks = thresher.trl.attach(made, policy)
    trained(made)
    assert [ids for ids, _ in observed] == proposed and len(proposed) == 4
    assert all(
        rewards.shape == (2, GROUP) and rewards.dtype == torch.float64 for _, rewards in observed
    )
    assert picks.groups == 8 and picks.tokens_generated > 0
    levels = [number % 10 for ids in proposed for number in ids]
    means = torch.cat([rewards.mean(1) for _, rewards in observed])
    assert all(mean == 0 for level, mean in zip(levels, means, strict=True) if level <= 2)


def test_some_rollouts_of_each_group(tmp_path):
    made = trainer(tmp_path)
    picks = thresher.trl.attach(made, rollouts=2)
    trained(made)
    assert picks.rows == 4 * 4 and picks.rows_trained <= picks.rows
    assert weights(made).isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [{}, {"rollouts": 2}, {"policy": rl.Greso(PROMPTS)}],
    ids=lambda one: next(iter(one), ""),
)
def test_a_batch_is_refilled_with_groups_that_have_a_signal(settings, tmp_path):
    plain, made = trainer(tmp_path), trainer(tmp_path)
    without, picks = (
        thresher.trl.attach(plain),
        thresher.trl.attach(made, refill=True, cap=20, **settings),
    )
    batches, prepare = [], made._prepare_inputs
    made._prepare_inputs = lambda given: batches.append(prepare(given)) or batches[-1]
    trained(plain)
    trained(made)
    size = settings.get("rollouts", GROUP)
    assert picks.rows_trained == picks.rows == 4 * 2 * size and picks.groups > without.groups == 8
    assert picks.tokens_generated > without.tokens_generated and without.rows_trained < without.rows
    for batch in batches:
        assert (batch["advantages"].view(2, size).abs().amax(1) > 0).all() or len(
            batch["advantages"]
        ) == 2 * size
        assert (batch["completion_mask"].sum(1) > 0).all() and int(
            batch["num_items_in_batch"]
        ) == int(batch["completion_mask"].sum())
        # Padded at the left: the last token of each prompt is its colon.
        assert (batch["prompt_ids"][:, -1] == batch["prompt_ids"][0, -1]).all() and (
            batch["prompt_mask"][:, -1] == 1
        ).all()


def test_a_policy_sees_the_rewards_before_it_chooses_further_prompts(tmp_path):
    made = trainer(tmp_path)
    policy = rl.Greso(PROMPTS)
    calls = []
    propose, observe = policy.propose, policy.observe
    policy.propose = lambda k: calls.append("propose") or propose(k)
    policy.observe = lambda ids, rewards: calls.append("observe") or observe(ids, rewards)
    picks = thresher.trl.attach(made, policy, refill=True, cap=20)
    trained(made)
    assert calls == ["propose", "observe"] * (len(calls) // 2) and len(calls) > 8
    assert picks.groups > picks.groups_with_signal >= 8 and picks.rows_trained == 32


def test_what_no_prompt_fills_stays_smaller(tmp_path):
    made = trainer(tmp_path, reward=lambda completions, **_: [0.0] * len(completions))
    picks = thresher.trl.attach(made, refill=True, cap=2)
    trained(made)
    assert (picks.groups, picks.groups_with_signal, picks.rows, picks.rows_trained) == (
        16,
        0,
        32,
        4,
    )


def test_a_training_that_goes_on_is_the_whole_one(tmp_path):
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "constant",
        "dtype": torch.float32,
    }
    whole = trainer(tmp_path, **settings)
    thresher.trl.attach(whole, first := rl.Greso(PROMPTS))
    trained(whole)
    again = trainer(tmp_path, **settings)
    thresher.trl.attach(again, second := rl.Greso(PROMPTS, seed=7))
    trained(again, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again))
    for name, value in first.state_dict().items():
        assert (
            torch.equal(value, second.state_dict()[name])
            if isinstance(value, torch.Tensor)
            else value == second.state_dict()[name]
        )


def sometimes(completions, level, **given):
    """No reward for some rollouts, and for all of some prompts."""
    known = passes(completions, level)
    return [
        None if one == 9 or place % 5 == 0 else reward
        for place, (reward, one) in enumerate(zip(known, level, strict=True))
    ]


@pytest.mark.parametrize("make", [None, rl.Greso])
def test_rewards_that_are_not_given(make, tmp_path):
    made = trainer(tmp_path, reward=sometimes)
    picks = thresher.trl.attach(made, None if make is None else (policy := make(PROMPTS)))
    trained(made)
    assert weights(made).isfinite().all() and picks.groups == 8
    if make is not None:
        assert all(
            one.isfinite().all() for one in vars(policy).values() if isinstance(one, torch.Tensor)
        )


def test_two_ranks_train_as_without_a_selection(tmp_path):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        grpo_cases.__file__,
    ]
    done = subprocess.run(
        [*launch, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for one in found:
        assert one["plain - skipping"] < 1e-6 and one["rows"][0] < one["rows"][1]
        for name in ("greso", "greso refill", "rollouts", "refill"):
            assert one[f"{name}, ranks differ"] == 0
        assert one["policies"] == found[0]["policies"]


class Weighted(trl.GRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return WeightedRandomSampler(torch.ones(PROMPTS), 400)


def test_a_group_of_different_prompts_is_an_error(tmp_path):
    made = trainer(tmp_path, of=Weighted)
    thresher.trl.attach(made)
    with pytest.raises(
        RuntimeError, match="have different prompts.*The sampler is WeightedRandomSampler"
    ):
        trained(made)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("beta", 0.1, "beta != 0"),
        ("loss_type", "new", "loss_type='new'"),
        ("_entropy_bonus_enabled", True, "an entropy bonus"),
        ("top_entropy_quantile", 0.5, "top_entropy_quantile < 1"),
        ("aux_loss_enabled", True, "load-balancing loss"),
        ("multi_objective_aggregation", "normalize_then_sum", "relative to the batch"),
        ("rollout_func", print, "rollout_func, tools or environments"),
        ("_is_vlm", True, "images"),
        ("train_dataset", iter(()), "an iterable dataset"),
    ],
)
def test_what_cannot_be_exact_is_refused(name, value, match, tmp_path):
    made = trainer(tmp_path)
    setattr(made, name, value)
    with pytest.raises(
        ValueError, match=f"skipping rows would change gradients. Not supported: .*{match}"
    ):
        thresher.trl.attach(made)
    assert type(made) is trl.GRPOTrainer


class WithEntropy(trl.GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + 1


class WithOtherLoss(trl.GRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) + 1


@pytest.mark.parametrize(
    ("of", "name"), [(WithEntropy, "_compute_loss"), (WithOtherLoss, "compute_loss")]
)
def test_a_trainer_with_another_loss_is_refused(of, name, tmp_path):
    made = trainer(tmp_path, of=of)
    match = f"{of.__name__} replaces {name} of GRPOTrainer.*Train it without attach, or use GRPO"
    with pytest.raises(ValueError, match=match):
        thresher.trl.attach(made)
    assert type(made) is of


def test_a_loss_assigned_to_the_trainer_is_refused(tmp_path):
    made = trainer(tmp_path)
    made._compute_loss = lambda model, inputs: 0
    with pytest.raises(ValueError, match="GRPOTrainer replaces _compute_loss"):
        thresher.trl.attach(made)


def test_other_trainers_of_trl_are_refused():
    made = object.__new__(trl.RLOOTrainer)
    with pytest.raises(
        TypeError, match="got RLOOTrainer, whose loss is not supported. Train it without attach"
    ):
        thresher.trl.attach(made)


def test_a_step_without_signal_logs_metrics_of_rows_with_tokens(tmp_path):
    """Completions that were cut off are masked, so that they have no tokens."""
    settings = {"mask_truncated_completions": True}
    made = trainer(tmp_path, reward=lambda completions, **_: [0.0] * len(completions), **settings)
    counts = []
    picks = thresher.trl.attach(made)
    prepare = made._prepare_inputs
    made._prepare_inputs = lambda given: counts.append(prepare(given)) or counts[-1]
    trained(made)
    assert picks.rows_trained == 4 and picks.groups_with_signal == 0
    assert all(int(batch["completion_mask"].sum()) > 0 for batch in counts)
    assert all(log["entropy"] > 0 for log in made.state.log_history if "entropy" in log)


def test_rows_without_tokens_have_no_gradient():
    """Every kept row has tokens, if any has, also if a row without tokens has an advantage."""
    mask = torch.tensor([[0, 0], [1, 1], [1, 0], [0, 0]])
    batch = {"advantages": torch.tensor([1.0, 0.0, 0.0, 0.0]), "completion_mask": mask}
    alone = SimpleNamespace(gather=lambda value: value)
    assert thresher.trl._rows_to_keep(batch, alone).tolist() == [2]


def test_checkpoints_inside_of_a_generation_are_told(tmp_path):
    made = trainer(tmp_path, save_strategy="steps", save_steps=1, steps_per_generation=2)
    with pytest.warns(
        UserWarning,
        match="resumes exactly only from a checkpoint between two generations: save_steps=1",
    ):
        thresher.trl.attach(made)


def test_entries_that_are_not_known_are_an_error():
    batch = {
        "advantages": torch.tensor([0.0, 1.0]),
        "completion_mask": torch.ones(2, 3),
        "mystery": torch.zeros(2),
    }
    with pytest.raises(RuntimeError, match="unknown entries in the batch: mystery"):
        thresher.trl.without_other_rows(batch, torch.tensor([1]), "dapo")


def test_a_checkpoint_without_the_policy_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "dtype": torch.float32}
    plain = trainer(tmp_path, **settings)
    trained(plain)
    again = trainer(tmp_path, **settings)
    thresher.trl.attach(again, rl.Uniform(PROMPTS))
    with pytest.raises(
        ValueError, match="has no thresher_prompts.pt: it was saved without this policy"
    ):
        trained(again, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_other_refusals(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(TypeError, match="must be a GRPOTrainer of TRL, got object"):
        thresher.trl.attach(object())
    with pytest.raises(
        TypeError, match=r"`policy` must be an instance, got a class: pass Greso\(len\(prompts\)\)"
    ):
        thresher.trl.attach(made, rl.Greso)
    with pytest.raises(TypeError, match="the policy object lacks propose, observe"):
        thresher.trl.attach(made, object())
    with pytest.raises(ValueError, match="the policy has 3 prompts, but the dataset has 40"):
        thresher.trl.attach(made, rl.Uniform(3))
    with pytest.raises(ValueError, match="`cap` must be 1 or more, got 0.5"):
        thresher.trl.attach(made, refill=True, cap=0.5)
    uneven = trainer(tmp_path)
    uneven.args.per_device_train_batch_size = (
        6  # as two ranks may have it, whose 12 rows are three groups
    )
    with pytest.raises(
        ValueError, match="6 rows of a generation .* are not a multiple of num_generations=4"
    ):
        thresher.trl.attach(uneven, refill=True)
    with pytest.raises(ValueError, match=r"`rollouts` must be within \[2, 4\], got 1"):
        thresher.trl.attach(made, rollouts=1)
    with pytest.raises(ValueError, match="does not support scale_rewards='batch'"):
        thresher.trl.attach(trainer(tmp_path, scale_rewards="batch"), rollouts=2)

    thresher.trl.attach(made)
    with pytest.raises(ValueError, match="the trainer has a selection already"):
        thresher.trl.attach(made)


def test_an_evaluation_is_that_of_the_trainer(tmp_path):
    made = trainer(tmp_path, per_device_eval_batch_size=8, eval_steps=2)
    made.args.eval_strategy = transformers.trainer_utils.IntervalStrategy.STEPS
    made.eval_dataset = made.train_dataset.select(range(4))
    picks = thresher.trl.attach(made, policy := rl.Greso(PROMPTS))
    trained(made)
    assert picks.groups == 8 and int((policy.easy + policy.hard > 0).sum()) <= 8


@pytest.mark.parametrize("masked", [False, True])
def test_generated_tokens_are_those_of_all_completions(tmp_path, masked):
    """Also of those that were cut off, which `mask_truncated_completions` masks."""
    made, seen = trainer(tmp_path, mask_truncated_completions=masked), []
    picks = thresher.trl.attach(made)
    score = made._calculate_rewards

    def counted(inputs, prompts, completions, ids):
        seen.extend(ids)
        return score(inputs, prompts, completions, ids)

    made._calculate_rewards = counted
    trained(made)
    assert picks.tokens_generated == sum(map(len, seen)) > 0
