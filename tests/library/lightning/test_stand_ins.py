import copy

import pytest
from torch import nn

import lightning_cases  # noqa: F401  # prepares the import of lightning
from thresher.lightning.selection import CriterionInPlace, StandIns


class Owner(nn.Module):
    kind = "of the class"

    def __init__(self):
        super().__init__()
        self.net, self.number = nn.Linear(2, 2), 3

    def loss(self):
        return "own"


def test_everything_is_as_it_was():
    owner, stand_ins = Owner(), StandIns()
    before, net = dict(vars(owner)), owner.net
    for name in ("net", "number", "loss", "kind"):
        stand_ins.put(owner, name, lambda: "stand-in")
        assert getattr(owner, name)() == "stand-in"
    assert [name for name, _ in owner.named_parameters()] == ["net.weight", "net.bias"]
    stand_ins.take_away()
    assert vars(owner) == before
    assert owner.net is net
    assert (owner.number, owner.loss(), owner.kind) == (3, "own", "of the class")
    stand_ins.take_away()
    assert vars(owner) == before


def test_what_somebody_has_set_since_stays():
    owner, stand_ins, new = Owner(), StandIns(), nn.Linear(2, 3)
    stand_ins.put(owner, "net", "a stand-in")
    stand_ins.put(owner, "number", "another")
    owner.net, owner.number = new, 4
    stand_ins.take_away()
    assert owner.net is new
    assert owner.number == 4


def test_attributes_of_the_criterion():
    own = nn.CrossEntropyLoss(label_smoothing=0.25)
    place = CriterionInPlace(own, None)
    assert place.label_smoothing == 0.25
    with pytest.raises(AttributeError, match="nothing"):
        _ = place.nothing
    assert isinstance(copy.copy(place), CriterionInPlace)
