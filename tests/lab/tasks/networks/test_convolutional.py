import pytest
import torch

from thresher_lab.tasks.networks import resnet8, resnet18, resnet20


def weights(model):
    return sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize(
    ("build", "layers", "shortcuts", "count"),
    [(resnet8, 8, 2, 77_754), (resnet18, 18, 3, 11_173_962), (resnet20, 20, 2, 272_474)],
)
def test_residual_networks_have_their_layers_and_weights(build, layers, shortcuts, count):
    model = build()
    kinds = [type(part).__name__ for part in model.modules()]
    assert kinds.count("Conv2d") - shortcuts + kinds.count("Linear") == layers
    assert weights(model) == count


@pytest.mark.parametrize(("build", "last"), [(resnet18, (512, 4)), (resnet20, (64, 8))])
def test_stages_halve_the_image_and_double_the_channels(build, last):
    model = build(classes=100).eval()
    images = torch.zeros(2, 3, 32, 32)
    with torch.inference_mode():
        assert model(images).shape == (2, 100)
        channels, side = last
        assert model[:-3](images).shape == (2, channels, side, side)


def test_resnet8_keeps_the_names_of_its_weights():
    names = [name for name, _ in resnet8(width=2).named_children()]
    assert names == [str(number) for number in range(9)]
