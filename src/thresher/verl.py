"""Selection with verl: a curriculum sampler whose prompts a policy of `thresher.rl` chooses. Does not import verl."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler


class PromptSampler(Sampler[int]):
    """Sampler of prompts for verl's trainers.

    Write a class that also has verl's base, in a file of your own, and start verl with
    `data.sampler.class_path=prompts.py data.sampler.class_name=Prompts data.dataloader_num_workers=0`:

        class Prompts(thresher.verl.PromptSampler, AbstractCurriculumSampler):
            outcome = "acc"

            def make_policy(self, data_source):
                return thresher.rl.Thompson(len(data_source), groups=data_source.dataframe["data_source"])

    verl calls `update` after each step, and finds prompts by `extra_info["index"]`, which must differ between all prompts. An
    epoch has as many prompts as fit into whole batches; a prompt may come more than once.

    Args:
        data_source: Dataset of verl, whose `dataframe` has the column `extra_info`.
        data_config: Section `data` of verl's configuration.

    Attributes:
        outcome: Name of an entry of `non_tensor_batch` with a value per rollout, which the policy sees in place of the reward.
            Default: None, the sum of `token_level_scores`.

    Raises:
        ValueError: Two prompts have the same index, the loader has workers, or `update` gets a prompt with another index.

    Example:
        >>> from types import SimpleNamespace
        >>> from thresher.rl import Uniform
        >>> class Prompts(PromptSampler):
        ...     def make_policy(self, data_source):
        ...         return Uniform(4)
        >>> data = SimpleNamespace(dataframe={"extra_info": [{"index": n} for n in range(4)]})
        >>> sorted(Prompts(data, {"train_batch_size": 2, "dataloader_num_workers": 0}))
        [0, 1, 2, 3]
    """

    outcome: str | None = None

    def __init__(self, data_source: Any, data_config: Mapping[str, Any]) -> None:
        keys = [info["index"] for info in data_source.dataframe["extra_info"]]
        self.ids = {key: number for number, key in enumerate(keys)}
        if len(self.ids) < len(keys):
            raise ValueError(
                f'PromptSampler: `extra_info["index"]` has {len(self.ids)} values for {len(keys)} prompts; number the prompts'
            )
        if data_config.get("dataloader_num_workers", 8):
            raise ValueError(
                "PromptSampler: workers read prompts before the rewards of earlier steps: set data.dataloader_num_workers=0"
            )
        self.size = int(data_config.get("gen_batch_size") or data_config["train_batch_size"])
        self.steps = len(keys) // self.size
        self.drawn = 0
        self.policy = self.make_policy(data_source)

    def make_policy(self, data_source: Any) -> Any:
        """Returns the policy that chooses the prompts.

        Args:
            data_source: Dataset of verl.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `make_policy`")

    def __len__(self) -> int:
        """Returns the number of prompts of an epoch."""
        return self.steps * self.size

    def __iter__(self) -> Iterator[int]:
        """Yields the prompts of an epoch; a batch is chosen when its first prompt is asked for."""
        for _ in range(self.drawn % max(1, self.steps), self.steps):
            self.drawn += 1
            yield from self.policy.propose(self.size)

    def update(self, batch: Any) -> None:
        """Updates the policy with a batch of rollouts.

        Args:
            batch: DataProto of verl.
        """
        scores: Sequence[float]
        if self.outcome is None:
            scores = batch.batch["token_level_scores"].sum(-1).tolist()
        else:
            scores = batch.non_tensor_batch[self.outcome]
        rewards: dict[int, list[float]] = {}
        for key, score in zip(batch.non_tensor_batch["index"], scores, strict=True):
            if key not in self.ids:
                raise ValueError(f"PromptSampler: the batch has a prompt of unknown index {key!r}")
            rewards.setdefault(self.ids[key], []).append(float(score))
        rows = [torch.tensor(values, dtype=torch.float64) for values in rewards.values()]
        padded = pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        self.policy.observe(list(rewards), padded)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the policy and the position."""
        return {"policy": self.policy.state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state.

        Args:
            state: State that `state_dict` returned.
        """
        self.policy.load_state_dict(state["policy"])
        self.drawn = state["drawn"]
