import math

import torch

from thresher import FullData
from thresher.records import Records


def test_everything_in_every_epoch() -> None:
    method = FullData()
    records = Records(method.columns(), 7, torch.device("cpu"))
    for losses in ([-math.inf] * 7, [1.0] * 7, [math.nan, math.inf, 0, 1, 2, 3, 4]):
        records["loss"].copy_(torch.tensor(losses))
        for epoch in (0, 1, 9):
            generator = torch.Generator().manual_seed(1)
            state = generator.get_state()
            plan = method.plan_epoch(records, epoch=epoch, epochs=10, generator=generator)
            assert plan.ids.tolist() == list(range(7)) and plan.ids.dtype == torch.int64
            assert (
                plan.weights is None
                and plan.refresh is None
                and plan.lr_scale == 1
                and not plan.drawn
            )
            assert dict(plan.facts) == {"scheduled_fraction": 0.0, "actual_fraction": 0.0}
            assert torch.equal(generator.get_state(), state)
