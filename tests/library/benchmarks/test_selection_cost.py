"""The benchmark of choosing rows: whom it measures, and that it judges."""

from benchmarks import selection_cost

from thresher import methods


def test_every_batch_method_is_measured():
    registered = {name for name, info in methods.infos().items() if info.stage == "batch"}
    assert {*selection_cost.candidates(), "big_loss"} == registered


def test_who_may_take_longer_says_why():
    for name in selection_cost.CARD_SAYS_WHY:
        card = methods.load(name).card
        assert "times" in f"{card.forwards} {card.caveat} {' '.join(card.differences)}"
