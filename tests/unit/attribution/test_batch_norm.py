"""BatchNorm with weighted rows, against NumPy, against torch where all weights are equal, and what is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from depth import depth
from helpers import over_instances
from thresher.attribution.batch_norm import WeightedNorms, normalisations_of, weighted_norm
from thresher.attribution.tracker import NOT_YIELDED
from thresher.subset import subset_backward

KINDS = [
    (lambda: nn.BatchNorm1d(3), (6, 3)),
    (lambda: nn.BatchNorm1d(3, momentum=None), (5, 3, 4)),
    (lambda: nn.BatchNorm2d(3, affine=False, momentum=0.3), (4, 3, 5, 2)),
    (lambda: nn.BatchNorm2d(3, bias=False, eps=0.1), (1, 3, 2, 2)),
    (lambda: nn.BatchNorm3d(3, track_running_stats=False), (3, 3, 2, 1, 2)),
]


def transcribed(values, weights, gain, shift, eps):
    """Outputs, weighted mean, and variance corrected for the weights, of one batch; channel by channel."""
    outputs, means, variances = np.empty_like(values), [], []
    for channel in range(values.shape[1]):
        own = values[:, channel].reshape(len(values), -1)
        count = np.repeat(weights[:, None], own.shape[1], axis=1)
        mean = (count * own).sum() / count.sum()
        squares = (count * (own - mean) ** 2).sum()
        scale = gain[channel] / np.sqrt(squares / count.sum() + eps)
        outputs[:, channel] = (values[:, channel] - mean) * scale + shift[channel]
        means.append(mean)
        variances.append(squares / (count.sum() - (count**2).sum() / count.sum()))
    return outputs, np.array(means), np.array(variances)


@pytest.mark.parametrize(("make", "shape"), KINDS)
@over_instances(range(depth(3, 30)))
def test_statistics_and_outputs_are_those_of_numpy(number, make, shape):
    torch.manual_seed(number)
    layer = make()
    for parameter in layer.parameters():
        parameter.data.uniform_(-2, 2)
    mean, variance = np.zeros(3), np.ones(3)
    gain = np.ones(3) if layer.weight is None else layer.weight.detach().numpy()
    shift = np.zeros(3) if layer.bias is None else layer.bias.detach().numpy()
    for step in range(1, 5):
        rows = shape[0] - (step == 4 and shape[0] > 2)  # the last batch is smaller
        values, weights = 3 * torch.randn(rows, *shape[1:]) + 5, torch.rand(rows) * 19 + 1
        outputs = weighted_norm(layer, values, weights)
        found, new_mean, new_variance = transcribed(values.double().numpy(), weights.double().numpy(), gain, shift, layer.eps)
        momentum = 1 / step if layer.momentum is None else layer.momentum
        mean, variance = (1 - momentum) * mean + momentum * new_mean, (1 - momentum) * variance + momentum * new_variance
        np.testing.assert_allclose(outputs.detach().numpy(), found, atol=1e-5)
    if layer.track_running_stats:
        np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-5)
        np.testing.assert_allclose(layer.running_var.numpy(), variance, rtol=1e-5)
        assert int(layer.num_batches_tracked) == 4


@pytest.mark.parametrize(("make", "shape"), KINDS)
def test_equal_weights_are_torch(make, shape):
    torch.manual_seed(0)
    layer = make()
    own = copy.deepcopy(layer)
    for _ in range(3):
        values = torch.randn(shape)
        pairs = [(one, values.clone().requires_grad_()) for one in (layer, own)]
        outputs = layer(pairs[0][1]), weighted_norm(own, pairs[1][1], torch.full((shape[0],), 2.5))
        weight = torch.randn(shape)
        for found in outputs:
            (found * weight).sum().backward()
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(pairs[1][1].grad, pairs[0][1].grad)
    torch.testing.assert_close([*own.buffers()], [*layer.buffers()])
    torch.testing.assert_close([p.grad for p in own.parameters()], [p.grad for p in layer.parameters()], atol=1e-4, rtol=1e-4)


def test_gradients_pass_through_mean_and_variance():
    layer = nn.BatchNorm1d(2).double()
    weights = torch.tensor([1.0, 4, 2, 20])
    values = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: weighted_norm(layer, x, weights), values)


def test_weights_have_no_unit():
    """Twice the weight is the same, and a row of weight 2 is two rows."""
    values, weights = torch.randn(5, 3), torch.tensor([1.0, 2, 1, 1, 1])
    twice = torch.cat([values, values[1:2]])
    torch.testing.assert_close(weighted_norm(nn.BatchNorm1d(3), values, 7 * weights), nn.BatchNorm1d(3)(twice)[:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_computed_in_single(dtype):
    layer = nn.BatchNorm2d(3)
    values, weights = torch.randn(8, 3, 4, 4) + 100, torch.rand(8) + 1
    with torch.autocast("cpu", torch.bfloat16):
        outputs = weighted_norm(layer if dtype != torch.float64 else layer.double(), values.to(dtype), weights)
    assert outputs.dtype == dtype
    own = weighted_norm(nn.BatchNorm2d(3), values.to(dtype).float(), weights)
    torch.testing.assert_close(outputs.float(), own, atol=0.02, rtol=0.02)


def test_a_layer_that_does_not_track_its_statistics_any_more():
    layer = nn.BatchNorm1d(2)
    layer.track_running_stats = False
    weighted_norm(layer, torch.randn(4, 2), torch.ones(4))
    assert layer.running_mean is not None and layer.running_mean.tolist() == [0, 0] and not int(layer.num_batches_tracked)
    counts_not = nn.BatchNorm1d(2)
    counts_not.num_batches_tracked = None
    weighted_norm(counts_not, torch.ones(4, 2) + torch.randn(4, 2), torch.ones(4))
    assert counts_not.running_mean is not None and counts_not.running_mean.abs().min() > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_layers_that_cannot_be_weighted_are_refused_with_their_names():
    class Own(nn.BatchNorm1d):
        def forward(self, input):  # noqa: A002
            return super().forward(input)

    patched = nn.BatchNorm1d(2)
    patched.forward = lambda x: x
    compiled = nn.Sequential(nn.BatchNorm1d(2))
    compiled.compile(backend="eager")
    for part, why in (
        (Own(2), "1 (Own) has a forward of its own"),
        (nn.SyncBatchNorm(2), "1 (SyncBatchNorm) has a forward of its own"),
        (patched, "1 (BatchNorm1d) has a forward of its own"),
        (torch.jit.script(nn.BatchNorm1d(2)), "was made by torch.jit; give attach the Python module"),
        (compiled, "1 (Sequential) is traced or compiled"),
        (torch.compile(nn.Sequential(nn.BatchNorm1d(2)), backend="eager"), "1 (OptimizedModule) is traced or compiled"),
        (subset_backward(nn.Sequential(nn.BatchNorm1d(2))), "1 (SubsetContainer) is traced or compiled"),
    ):
        with pytest.raises(ValueError, match="The rows of BatchNorm layers are to be weighted") as caught:
            WeightedNorms(nn.Sequential(nn.Linear(2, 2), part), ", or do without")
        assert why in str(caught.value) and str(caught.value).endswith(", or do without.")


def test_layers_are_found_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.GroupNorm(1, 2)), nn.BatchNorm2d(3))
    assert list(normalisations_of(model, "")) == ["1.0", "2"]


def test_layers_rest_while_no_epoch_asks_for_weights():
    model = nn.Sequential(nn.BatchNorm1d(2))
    norms = WeightedNorms(model, "")
    with norms.weighing(NOT_YIELDED):
        assert not norms.in_use() and "forward" not in vars(model[0])
    norms.active = True
    assert list(norms.in_use()) == ["0"]
    model.eval()
    assert not norms.in_use()
    model[0].running_mean = model[0].running_var = None
    assert list(norms.in_use()) == ["0"]
