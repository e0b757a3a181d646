import torch

from thresher_lab.tasks import built_in
from thresher_lab.tasks.networks import RandomView


def images(n=200):
    return torch.arange(n * 28 * 28.0).reshape(n, 1, 28, 28) + 1


def test_images_pass_unchanged_where_nothing_is_trained():
    assert torch.equal(RandomView().eval()(images()), images())


def test_a_view_is_the_image_mirrored_and_shifted():
    torch.manual_seed(0)
    views, whole = RandomView(shift=1, erase=0.0)(images()), images()
    found = set()
    for view, image in zip(views[:, 0], whole[:, 0], strict=True):
        for mirrored in (False, True):
            for down in (-1, 0, 1):
                for right in (-1, 0, 1):
                    rows, columns = ((torch.arange(28) + by).clamp(0, 27) for by in (down, right))
                    expected = image[rows][:, 27 - columns if mirrored else columns]
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
