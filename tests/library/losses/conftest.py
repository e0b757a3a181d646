"""Each test of losses draws its inputs anew, whichever tests ran before it."""

import pytest


@pytest.fixture(autouse=True)
def _own_draws():
    import loss_cases

    loss_cases.GENERATOR.manual_seed(1)
