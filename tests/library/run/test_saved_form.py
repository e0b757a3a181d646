"""A saved state is a copy."""

import torch

import thresher


def test_what_is_saved_is_a_copy():
    run = thresher.attach(
        thresher.FullData(),
        loader=torch.utils.data.DataLoader(list(range(8)), 2, shuffle=True),
        criterion=torch.nn.MSELoss(),
        epochs=2,
    )
    state = run.state_dict()
    state["plan"][0]["ids"].zero_()
    assert run.plan.ids.tolist() == [*range(8)]
    run.load_state_dict(saved := run.state_dict())
    saved["plan"][0]["ids"].zero_()
    assert run.plan.ids.tolist() == [*range(8)]
