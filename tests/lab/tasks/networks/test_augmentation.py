import pytest
import torch
from torch.nn import functional as F

from thresher_lab.tasks import built_in
from thresher_lab.tasks.networks import RandomTurn, RandomView


def images(n=200):
    return torch.arange(n * 28 * 28.0).reshape(n, 1, 28, 28) + 1


def test_images_pass_unchanged_where_nothing_is_trained():
    assert torch.equal(RandomView().eval()(images()), images())


@pytest.mark.parametrize("margin", ["replicate", "constant"])
def test_a_view_is_the_image_mirrored_and_shifted(margin):
    torch.manual_seed(0)
    views = RandomView(shift=1, erase=0.0, margin=margin)(images())
    whole = F.pad(images(), [1] * 4, margin)
    found = set()
    for view, image in zip(views[:, 0], whole[:, 0], strict=True):
        for mirrored in (False, True):
            for down in (-1, 0, 1):
                for right in (-1, 0, 1):
                    rows, columns = (torch.arange(28) + by for by in (1 + down, 1 + right))
                    expected = image[rows][:, 29 - columns if mirrored else columns]
                    if torch.equal(view, expected):
                        found.add((mirrored, down, right))
    assert len(found) == 18


def test_a_square_is_erased_in_some_images():
    torch.manual_seed(0)
    zeros = (RandomView(shift=0, erase=0.25, side=5)(images()) == 0).sum((1, 2, 3))
    assert set(zeros.tolist()) == {0, 25} and 30 < int((zeros == 25).sum()) < 75
    one = (RandomView(shift=0, erase=1.0, side=5)(images(1))[0, 0] == 0).nonzero()
    assert (one.amax(0) - one.amin(0)).tolist() == [4, 4]


def test_the_second_recipe_trains_on_views():
    task = built_in("fashion-mnist-small-b")
    model = task.build(0)
    x = images(4)
    assert not torch.equal(model(x), model(x)) and torch.equal(model.eval()(x), model(x))
    assert task.recipe != built_in("fashion-mnist-small").recipe


def test_a_turned_image_is_the_image_by_a_right_angle_and_a_whole_shift(monkeypatch):
    """The angle and the shifts are those of the draws, in degrees and pixels; eval mode passes images on."""
    whole = images(1)
    assert torch.equal(RandomTurn(45, 4).eval()(whole), whole)
    draws = {
        "turn": (1.0, 0.5, 0.5),
        "shift": (0.5, 1.0, 0.25),
    }  # 0 is the lowest end, 1 the highest
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(draws["turn"]).reshape(3, 1))
    assert torch.allclose(RandomTurn(90, 4)(whole)[0, 0], torch.rot90(whole[0, 0]), atol=0.01)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(draws["shift"]).reshape(3, 1))
    view = RandomTurn(90, 4)(whole)[0, 0]
    assert torch.allclose(view[2:, :24], whole[0, 0, :26, 4:], atol=0.01)


@pytest.mark.parametrize(("degrees", "shift"), [(0, 0), (30, 0), (0, 3)])
def test_turned_images_differ_from_each_other(degrees, shift):
    torch.manual_seed(0)
    same = images(1).expand(20, 1, 28, 28)
    views = RandomTurn(degrees, shift)(same)
    assert (
        views.shape == same.shape
        and views.amin() >= same.amin() - 0.01
        and views.amax() <= same.amax() + 0.01
    )
    assert torch.allclose(views[0], views[1], atol=0.01) == (degrees == shift == 0)
