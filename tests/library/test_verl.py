"""The prompt sampler against the protocol of verl's curriculum samplers, in the loader that verl uses."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler

import thresher
from thresher import rl
from thresher.verl import PromptSampler

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torchdata with this torch
CONFIG = {"train_batch_size": 4, "dataloader_num_workers": 0}
SOURCES = ["code", "math", "math", "math"] * 3
ROLLOUTS = 2


class AbstractSampler(Sampler[int]):
    """As in verl/experimental/dataset/sampler.py."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        pass


class AbstractCurriculumSampler(AbstractSampler):
    """As in verl/experimental/dataset/sampler.py."""

    def update(self, batch: Any) -> None:
        pass


class Prompts(PromptSampler, AbstractCurriculumSampler):
    """A sampler as a user writes it."""

    def make_policy(self, data_source: Any) -> Any:
        return rl.Thompson(len(data_source), groups=data_source.dataframe["data_source"], floor=0.2)


class Gated(Prompts):
    """Sees outcomes."""

    outcome = "acc"


class Rows(Dataset[dict[str, Any]]):
    """Rows as verl's dataset gives them; their indices are those of a file of which some rows were filtered out."""

    def __init__(self) -> None:
        info = [{"index": 100 + 3 * number} for number in range(len(SOURCES))]
        self.dataframe = {"extra_info": info, "data_source": SOURCES}

    def __len__(self) -> int:
        return len(SOURCES)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"index": self.dataframe["extra_info"][item]["index"]}


def loader(make: Any = Prompts) -> Any:
    data = Rows()
    sampler = make(data_source=data, data_config=CONFIG)
    assert isinstance(sampler, AbstractCurriculumSampler)
    return stateful.StatefulDataLoader(
        data, batch_size=4, num_workers=0, drop_last=True, sampler=sampler
    )


def rollouts(indices: list[int], seed: int = 0) -> Any:
    """A batch of rollouts in shuffled order, as after balancing; only "math" passes at times."""
    rows = np.repeat(indices, ROLLOUTS)
    np.random.default_rng(seed).shuffle(rows)
    passed = np.array(
        [float(SOURCES[(row - 100) // 3] == "math" and (row + n) % 2) for n, row in enumerate(rows)]
    )
    scores = torch.zeros(len(rows), 5)
    scores[:, -1] = torch.from_numpy(passed)
    return SimpleNamespace(
        batch={"token_level_scores": scores},
        non_tensor_batch={"index": rows.astype(object), "acc": passed},
    )


def steps(loading: Any, count: int, state_after: int | None = None) -> tuple[list[Any], Any]:
    """Returns the indices of each step, and the state after a step and its update."""
    seen = list[Any]()
    state = None
    while len(seen) < count:
        for batch in loading:
            seen.append(batch["index"].tolist())
            loading.sampler.update(batch=rollouts(seen[-1], sum(seen[-1])))
            if len(seen) == state_after:
                state = loading.state_dict()
            if len(seen) == count:
                break
    return seen, state


def test_an_epoch_has_whole_batches_and_each_follows_the_rewards_before_it() -> None:
    loading = loader()
    assert len(loading) == 3 and len(loading.sampler) == 12
    calls = list[str]()
    policy = loading.sampler.policy
    propose, observe = policy.propose, policy.observe
    policy.propose = lambda k: calls.append("propose") or propose(k)
    policy.observe = lambda ids, rewards: calls.append("observe") or observe(ids, rewards)
    seen, _ = steps(loading, 7)
    assert calls == ["propose", "observe"] * 7
    assert {index for step in seen for index in step} <= {100 + 3 * n for n in range(12)}


def test_the_policy_sees_the_rewards_of_each_prompt_in_any_order() -> None:
    observed = list[Any]()
    for make in (Prompts, Gated):
        sampler = loader(make).sampler
        sampler.policy.observe = lambda ids, rewards: observed.append((ids, rewards))
        batch = rollouts([103, 100, 133])
        if make is Gated:
            batch.batch["token_level_scores"] += 0.01 * torch.rand(6, 5)
        sampler.update(batch)
        ids, rewards = observed[-1]
        assert sorted(ids) == [0, 1, 11] and rewards.shape == (3, ROLLOUTS)
        assert rewards.sum() == batch.non_tensor_batch["acc"].sum()
        assert rewards[ids.index(0)].tolist() == [0.0, 0.0]
    assert observed[0][0] == observed[1][0] and torch.equal(observed[0][1], observed[1][1])


def test_prompts_with_fewer_rollouts_have_none_for_the_others() -> None:
    sampler = loader().sampler
    observed = list[Any]()
    sampler.policy.observe = lambda ids, rewards: observed.append((ids, rewards))
    batch = rollouts([103])
    batch.non_tensor_batch["index"] = np.array([103, 106], dtype=object)
    sampler.update(batch)
    batch.non_tensor_batch["index"] = np.array([103, 103, 106], dtype=object)
    batch.batch["token_level_scores"] = torch.ones(3, 1)
    sampler.update(batch)
    assert observed[1][0] == [1, 2] and observed[1][1].isnan().tolist() == [
        [False, False],
        [False, True],
    ]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_loader_goes_on_with_its_state(after: int) -> None:
    whole, state = steps(loader(), 8, after)
    again = loader()
    again.load_state_dict(state)
    rest, _ = steps(again, 8 - after)
    assert rest == whole[after:]


def test_refusals() -> None:
    data = Rows()
    with pytest.raises(NotImplementedError, match="PromptSampler must define `make_policy`"):
        PromptSampler(data, CONFIG)
    for config in ({"train_batch_size": 4}, CONFIG | {"dataloader_num_workers": 2}):
        with pytest.raises(ValueError, match="set data.dataloader_num_workers=0"):
            Prompts(data, config)
    with pytest.raises(ValueError, match="a prompt of unknown index 101"):
        Prompts(data, CONFIG).update(
            SimpleNamespace(
                batch={"token_level_scores": torch.ones(1, 2)}, non_tensor_batch={"index": [101]}
            )
        )
    data.dataframe["extra_info"] = [{"index": 0} for _ in SOURCES]
    with pytest.raises(ValueError, match=r"has 1 values for 12 prompts; number the prompts"):
        Prompts(data, CONFIG)
    assert thresher.verl.PromptSampler is PromptSampler
