"""`check_policy`: it lets the policies of this package through, and names each broken promise."""

from typing import Any

import pytest
import torch

from thresher import rl
from thresher.testing import ContractError, check_policy


@pytest.mark.parametrize("prompts", [1, 2, 12])
@pytest.mark.parametrize("make", [rl.Uniform, rl.Greso])
def test_policies_of_this_package_pass_and_leave_the_random_state(make: Any, prompts: int) -> None:
    before = torch.get_rng_state()
    check_policy(make, prompts=prompts)
    assert torch.equal(torch.get_rng_state(), before)


class Few(rl.Uniform):
    """Proposes each prompt once at most."""

    def propose(self, k: int) -> list[int]:
        return super().propose(min(k, self.prompts))


class Tensors(rl.Uniform):
    """Proposes a tensor."""

    def propose(self, k: int) -> Any:
        return torch.tensor(super().propose(k))


class Global(rl.Uniform):
    """Draws from torch's own generator."""

    def propose(self, k: int) -> list[int]:
        return torch.randint(self.prompts, (k,)).tolist()


class Forgetful(rl.Greso):
    """Saves a state without what it has learned."""

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "easy": torch.zeros_like(self.easy),
            "hard": torch.zeros_like(self.hard),
        }


class Shared(rl.Uniform):
    """Saves its queue itself, which later proposals change."""

    def __init__(self, prompts: int, *, seed: int = 0) -> None:
        super().__init__(prompts, seed=seed)
        self.counts = torch.zeros(prompts)

    def propose(self, k: int) -> list[int]:
        ids = [int(self.counts.argmin()) for _ in range(k)]
        self.counts[ids[0]] += 1
        return ids

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: Any) -> None:
        self.counts = state["counts"]


class OfRank(rl.Uniform):
    """Is another one each time that it is made."""

    made = 0

    def __init__(self, prompts: int, *, seed: int = 0) -> None:
        OfRank.made += 1
        super().__init__(prompts, seed=OfRank.made)


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (Few, r"Few: propose\(15\) must return 15 ids"),
        (
            Tensors,
            r"Tensors: propose\(1\) must return 1 ids, whole numbers in \[0, 12\), got tensor",
        ),
        (
            Global,
            "Global: propose draws from torch's global generator; use a separate torch.Generator",
        ),
        (Forgetful, "Forgetful: a policy that goes on with its state_dict proposes"),
        (Shared, "Shared: state_dict must return copies"),
        (OfRank, "OfRank: a policy made anew, as on another rank, proposes"),
    ],
)
def test_a_broken_promise_is_named(make: Any, broken: str) -> None:
    with pytest.raises(ContractError, match=broken):
        check_policy(make)


def test_a_policy_in_place_of_its_class_is_refused() -> None:
    policy: Any = rl.Greso(4)
    with pytest.raises(TypeError, match="pass the class Greso, not an instance"):
        check_policy(policy)
