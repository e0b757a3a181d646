"""`check_policy` checks a policy for `thresher.rl`; authors of policies call it in a test."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thresher import rng
from thresher.testing.check import CPU, ContractError

ROUNDS = 8
ROLLOUTS = 4
"""Number of times that a policy proposes prompts, and number of rollouts of each prompt."""


def check_policy(make: Callable[[int], Any], *, prompts: int = 12) -> None:
    """Checks that a policy keeps the promises that `thresher.trl.attach` needs.

    The policy proposes as many prompts as asked for, even more than there are. Two instances that get the same rewards propose
    the same prompts, because each rank creates its own instance. The policy draws from its own random generator, and accepts
    rewards that are NaN. After loading a saved state it proposes the same prompts as without the interruption, and further
    proposals do not change the saved state.

    Args:
        make: Function of the number of prompts that returns a new policy, such as the class.
        prompts: Number of prompts among which the policy chooses, 1 or more. Default: 12.

    Raises:
        TypeError: `make` is a policy.
        ContractError: A promise is broken; the message names it.

    Example:
        >>> from thresher.rl import Greso, Uniform
        >>> check_policy(Greso)
        >>> class First(Uniform):
        ...     def propose(self, k):
        ...         return list(range(k))
        >>> check_policy(First, prompts=1)
        Traceback (most recent call last):
        ...
        thresher.testing.check.ContractError: First: propose(4) must return 4 ids, whole numbers in [0, 1), got [0, 1, 2, 3]
    """
    if hasattr(make, "propose") and not isinstance(make, type):
        raise TypeError(
            f"check_policy: `make` must create new policies; pass the class {type(make).__name__}, not an instance"
        )
    with rng.undisturbed(CPU):
        first = make(prompts)
        other = make(prompts)
        name = type(first).__name__
        for number in range(ROUNDS):
            torch.manual_seed(number)
            before = torch.get_rng_state()
            ids = _asked(first, (1, prompts // 2 or 1, prompts + 3)[number % 3], name, prompts)
            if not torch.equal(before, torch.get_rng_state()):
                raise ContractError(
                    f"{name}: propose draws from torch's global generator; use a separate torch.Generator"
                )
            torch.manual_seed(number + 1000)  # ranks have other global random states
            _same(
                name,
                "a policy made anew, as on another rank,",
                _asked(other, len(ids), name, prompts),
                ids,
            )
            rewards = _rewards(len(ids), number)
            for policy in (first, other):
                policy.observe(list(ids), rewards.clone())
        state = first.state_dict()
        kept = copy.deepcopy(state)
        again = make(prompts)
        expected = [_asked(first, 3, name, prompts) for _ in range(ROUNDS)]
        again.load_state_dict(kept)
        _same(
            name,
            "a policy that goes on with its state_dict",
            [_asked(again, 3, name, prompts) for _ in range(ROUNDS)],
            expected,
        )
        again.load_state_dict(state)
        at_hand = [_asked(again, 3, name, prompts) for _ in range(ROUNDS)]
        _same(
            name,
            "state_dict must return copies: one that was saved before further proposals",
            at_hand,
            expected,
        )


def _asked(policy: Any, k: int, name: str, prompts: int) -> list[int]:
    ids = policy.propose(k)
    if (
        not isinstance(ids, list)
        or len(ids) != k
        or not all(type(one) is int and 0 <= one < prompts for one in ids)
    ):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        raise ContractError(
            f"{name}: propose({k}) must return {k} ids, whole numbers in [0, {prompts}), got {ids!r:.300}"
        )
    return ids  # pyright: ignore[reportUnknownVariableType]


def _same(name: str, proposer: str, ids: Any, expected: Any) -> None:
    if ids != expected:
        raise ContractError(
            f"{name}: {proposer} proposes {ids!r:.100} instead of {expected!r:.100}"
        )


def _rewards(k: int, number: int) -> Tensor:
    """Returns rewards of k prompts: mixed values, one group all equal, one with a NaN, and in odd rounds one with NaN only."""
    rewards = (
        torch.rand(
            k, ROLLOUTS, generator=torch.Generator().manual_seed(number), dtype=torch.float64
        )
        .mul(3)
        .floor()
        / 2
    )
    rewards[0] = 1.0
    rewards[k // 2, -1] = torch.nan
    rewards[-1] = torch.nan if number % 2 else rewards[-1]
    return rewards
