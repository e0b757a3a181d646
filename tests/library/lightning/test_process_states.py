import pytest
import torch

import lightning_cases  # noqa: F401  # prepares the import of lightning
from thresher.lightning.selection import gathered, own_state


def test_one_process_has_its_state_as_it_is():
    state = {"epoch": 3}
    assert gathered(state) is state
    assert own_state(state) is state
    with pytest.raises(ValueError, match="by 2 processes with a strategy.*runs without a process group"):
        own_state([torch.zeros(3, dtype=torch.uint8)] * 2)


@pytest.mark.usefixtures("group_of_one")
def test_a_group_has_the_states_of_all():
    (saved,) = gathered({"epoch": 3, "ids": torch.arange(4)})
    assert saved.dtype == torch.uint8
    found = own_state([saved])
    assert found["epoch"] == 3 and torch.equal(found["ids"], torch.arange(4))
    with pytest.raises(ValueError, match="saved without a process group, and this training runs by 1 processes"):
        own_state({"epoch": 3})
