"""Frozen modules whose outputs are computed once: right, refused or noticed, never wrong."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thresher
from depth import depth
from thresher.frozen import Cached
from thresher.frozen.keys import row_keys
from thresher.frozen.store import FileRows, MemoryRows

N = 24
# These modules are tiny; one test is about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:cached. looking up")


def frozen(*layers: nn.Module, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = nn.Sequential(*(layers or (nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))))
    return module.requires_grad_(False).eval()


def rows(n: int = N, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


class Parts(nn.Module):
    """A module with several inputs and outputs of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 4)

    def forward(self, x, *, scale=1.0, table=None):
        y = self.inside(x) * scale
        if table is not None:
            y = y + table
        return {"values": y, "more": (y.argmax(1), y.double().unsqueeze(2))}


# Keys


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64, torch.complex64),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_rows_have_equal_keys_if_and_only_if_they_are_equal(dtype, width):
    x = torch.randint(2, (60, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = row_keys([x])
    for a in range(60):
        for b in range(60):
            assert (keys[a] == keys[b]) == torch.equal(x[a], x[b])


@pytest.mark.parametrize("value", [-0.0, 1e-40, 2.0**63, float("inf")])
def test_changes_of_any_two_values_change_the_key(value):
    """Sums of 64-bit words would not see that the highest bits of two words change."""
    x = torch.zeros(1, 8, dtype=torch.float64)
    x = x.repeat(29, 1)
    pairs = [(a, b) for a in range(8) for b in range(a)]
    for row, pair in enumerate(pairs):
        x[row, list(pair)] = value
    assert len({*row_keys([x])}) == 29


def test_keys_do_not_depend_on_the_batch():
    x = torch.randn(50, 5000)
    keys = row_keys([x, x[:, :7]])
    assert row_keys([x[13:14], x[13:14, :7]]) == keys[13:14]
    assert row_keys([x[::3], x[::3, :7]]) == keys[::3]
    assert row_keys([x.t().contiguous().t(), x[:, :7]]) == keys


# Values


def test_outputs_are_those_of_the_first_call():
    module = frozen()
    cached = thresher.cached(module)
    x = rows()
    expected = module(x)
    assert torch.equal(cached(x), expected)
    order = torch.randperm(N)
    assert torch.equal(cached(x[order]), expected[order])
    assert (cached.hits, cached.misses, cached.stored_bytes) == (N, N, N * 3 * 4)


def test_only_rows_that_are_missing_are_computed():
    module = frozen()
    sizes = []
    cached = thresher.cached(other(lambda x: sizes.append(len(x)) or module(x)))
    x = rows()
    cached(x[:10])
    assert sizes == [10, 5]  # the batch, and a part of it to compare
    y = cached(torch.cat([x[4:16], x[4:6]]))
    assert sizes == [10, 5, 6]
    torch.testing.assert_close(y, module(torch.cat([x[4:16], x[4:6]])))
    cached(x[:16])
    assert sizes == [10, 5, 6]


def test_structures_keywords_and_plain_values():
    module = Parts().requires_grad_(False).eval()
    cached = thresher.cached(module)
    x = rows()
    table = torch.randn(4)
    calls = [{}, {"scale": 2.0}, {"table": table}, {"table": table + 1}]
    for _ in range(2):
        for given_ in calls:
            expected = module(x, **given_)
            found = cached(x, **given_)
            assert torch.equal(found["values"], expected["values"])
            assert torch.equal(found["more"][0], expected["more"][0])
            assert torch.equal(found["more"][1], expected["more"][1])
    assert (cached.hits, cached.misses) == (4 * N, 4 * N)


def test_fewer_bytes():
    module = frozen()
    cached = thresher.cached(module, dtype=torch.bfloat16)
    x = rows()
    first = cached(x)
    assert torch.equal(first, module(x).bfloat16().float()) and torch.equal(cached(x), first)
    assert cached.stored_bytes == N * 3 * 2 and "stored as bfloat16" in repr(cached)
    for _ in range(20):  # the rows that are computed again differ by rounding
        cached(x)


def test_values_too_large_for_fewer_bytes_are_refused():
    cached = thresher.cached(other(lambda x: x * 1e6), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"too large for torch.float16.*torch.bfloat16"):
        cached(rows())
    # An infinity of the module's own is no overflow.
    infinite = thresher.cached(other(lambda x: x / 0), dtype=torch.float16)
    assert infinite(rows()).isinf().all()


def test_attributes_copies_and_compiled_models():
    module = frozen()
    module.config = "as the module has it"
    cached = thresher.cached(module)
    assert cached.config == "as the module has it"
    with pytest.raises(AttributeError, match="missing"):
        _ = cached.missing
    x = rows()
    compiled = torch.compile(nn.Sequential(cached, nn.Linear(3, 2)), backend="eager")
    first = compiled(x)
    assert torch.equal(compiled(x), first) and cached.hits == N


# Refused


def trainable() -> nn.Module:
    module = frozen()
    module[2].weight.requires_grad_(True)
    return module


def in_training() -> nn.Module:
    module = frozen(nn.Linear(6, 3), nn.Dropout(0.5))
    module[1].train()
    return module


class Other(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def other(function) -> nn.Module:
    return Other(function).eval()


CALLS = {"n": 0}


def counting(x):
    CALLS["n"] += 1
    return x + CALLS["n"]


class Remembering(nn.Module):
    """A module whose forward keeps a tensor, which a loop may read."""

    def forward(self, x):
        self.features = x * 2
        return self.features + 1


def hooked() -> Any:
    module = frozen()
    module[0].register_forward_hook(lambda *_: None)
    return module


REFUSED = {
    "a forward hook": (
        hooked,
        ValueError,
        "forward hook, which is not called for rows that are read",
    ),
    "an attribute": (lambda: Remembering().eval(), ValueError, "sets attributes in its forward"),
    "trainable": (
        trainable,
        ValueError,
        r"`2.weight` of Sequential requires gradients.*requires_grad_\(False\)",
    ),
    "training": (
        in_training,
        ValueError,
        r"training mode.*module.eval\(\), and again after model.train",
    ),
    "batch statistics": (
        lambda: other(lambda x: x - x.mean(0)),
        ValueError,
        "depend on the other rows",
    ),
    "sorted": (lambda: other(lambda x: x.sort(0).values), ValueError, "depend on the other rows"),
    "random": (lambda: other(lambda x: F.dropout(x)), ValueError, "random numbers"),
    "a counter": (lambda: other(counting), ValueError, "or on a state"),
    "changed inputs": (lambda: other(torch.relu_), ValueError, "changes its inputs in place"),
    "one number": (
        lambda: other(lambda x: x.sum()),
        ValueError,
        r"24 rows in its first dimension, got \(\)",
    ),
    "no tensor": (lambda: other(lambda x: "text"), ValueError, "got str"),
    "tokens first": (lambda: other(lambda x: x.t()), ValueError, r"got \(6, 24\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cached_is_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        thresher.cached(make())(rows())


def test_arguments_that_are_refused():
    cached = thresher.cached(frozen())
    with pytest.raises(TypeError, match="tensors or plain values, got object"):
        cached(rows(), object())
    with pytest.raises(ValueError, match="an input requires gradients.*no_grad"):
        cached(rows().requires_grad_())
    with pytest.raises(ValueError, match="a tensor with the rows in its first dimension"):
        cached(torch.tensor(1.0))


def test_a_state_that_changes_later_is_found():
    """One of 200 rows that are read is computed again."""
    state = torch.zeros(())
    cached = thresher.cached(other(lambda x: x * 2 + state))
    x = rows()
    cached(x)
    state += 1
    with pytest.raises(
        RuntimeError, match=r"Other computes .* for row \d+ .* was stored.*forget\(\)"
    ):
        for _ in range(10):
            cached(x)
    cached.forget()
    assert torch.equal(cached(x), x * 2 + 1)


# Noticed


def changed_in_place(module):
    module[0].weight.mul_(2)


def replaced(module):
    module[0].weight = nn.Parameter(module[0].weight * 2, requires_grad=False)


def loaded(module):
    module.load_state_dict(frozen(seed=5).state_dict())


@pytest.mark.parametrize("change", [changed_in_place, replaced, loaded])
def test_changed_weights_are_noticed(change):
    module = frozen()
    cached = thresher.cached(module)
    x = rows()
    cached(x)
    change(module)
    with pytest.warns(UserWarning, match="parameters or buffers of Sequential were changed"):
        y = cached(x)
    assert torch.equal(y, module(x))
    assert torch.equal(cached(x), y) and cached.hits == N


def test_weights_that_lie_where_others_lay_are_noticed():
    module = frozen()
    cached = thresher.cached(module)
    x = rows()
    memory = torch.zeros(5, 6).numpy()
    for seed in range(3):
        # A new tensor at the address of the one before, as the allocator of a device may give it.
        memory[:] = seed
        module[0].weight = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(cached(x), module(x))


def test_changes_without_a_version_are_found():
    """As teachers are updated that are a moving average of the model."""
    module = frozen()
    cached = thresher.cached(module)
    x = rows()
    cached(x)
    module[0].weight.data.mul_(0.5)
    with pytest.raises(RuntimeError, match="was stored"):
        for _ in range(10):
            cached(x)


def test_a_limit_of_memory_is_noticed_once():
    module = frozen()
    cached = thresher.cached(module, memory=10 * 12)
    x = rows()
    with pytest.warns(UserWarning, match="memory limit.*Raise `memory`, pass `path`") as said:
        for _ in range(3):
            torch.testing.assert_close(cached(x), module(x))
    assert len(said) == 1 and cached.stored_bytes == 120 and cached.hits == 20


def test_a_module_that_is_faster_than_looking_up():
    cached = thresher.cached(other(lambda x: x + 1))
    with pytest.warns(
        UserWarning, match="looking up a row takes .* us, and computing it with Other"
    ):
        for seed in range(10):
            cached(rows(seed=seed))


# Files


def test_files_are_read_by_the_next_process(tmp_path):
    x = rows()
    first = thresher.cached(frozen(), path=tmp_path)
    y = first(x)
    del first
    second = thresher.cached(frozen(), path=tmp_path)
    assert torch.equal(second(x), y) and (second.hits, second.misses) == (N, 0)


def test_files_of_other_weights_are_removed(tmp_path):
    x = rows()
    first = thresher.cached(frozen(), path=tmp_path)
    first(x)
    del first
    module = frozen(seed=3)
    second = thresher.cached(module, path=tmp_path)
    with pytest.warns(UserWarning, match="outputs of another module than this Sequential"):
        y = second(x)
    assert torch.equal(y, module(x)) and second.misses == N


def test_files_in_use(tmp_path):
    first = thresher.cached(frozen(), path=tmp_path)
    first(rows())
    with pytest.raises(RuntimeError, match="in use by another process or another cached module"):
        thresher.cached(frozen(), path=tmp_path)(rows())


def test_files_in_use_are_not_removed_for_another_module(tmp_path):
    x = rows()
    module = frozen()
    first = thresher.cached(module, path=tmp_path)
    y = first(x)
    with pytest.raises(RuntimeError, match="in use by another process or another cached module"):
        thresher.cached(frozen(seed=3), path=tmp_path)(x.flip(0))
    assert torch.equal(first(x), y) and first.hits == N


class Temperature(nn.Module):
    """A module with a factor that its state_dict does not have."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(temperature), persistent=False)

    def forward(self, x):
        return x / self.temperature


def test_files_of_other_buffers_are_removed(tmp_path):
    x = rows()
    first = thresher.cached(Temperature(1.0).eval(), path=tmp_path)
    first(x)
    del first
    second = thresher.cached(Temperature(3.0).eval(), path=tmp_path)
    with pytest.warns(UserWarning, match="outputs of another module"):
        y = second(x)
    assert torch.equal(y, x / 3)


def test_files_of_a_module_that_computes_other_values(tmp_path):
    """Neither the weights nor the name of the module show it."""
    x = rows()
    first = thresher.cached(other(lambda x: x * 2), path=tmp_path)
    first(x)
    del first
    with pytest.raises(RuntimeError, match=r"was stored.*forget\(\)"):
        thresher.cached(other(lambda x: x * 3), path=tmp_path)(x)


@pytest.mark.parametrize("function", [lambda x: x[:, :2], lambda x: (x * 9).long()[:, :3]])
def test_files_of_outputs_with_another_layout_are_not_read(tmp_path, function):
    x = rows()
    first = thresher.cached(other(lambda x: x), path=tmp_path)
    first(x)
    del first
    second = thresher.cached(other(function), path=tmp_path)
    assert torch.equal(second(x), function(x)) and second.misses == N


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 16), st.integers(0, 9))
def test_a_kill_leaves_whole_rows_only(tmp_path_factory, sizes, keys_lost, bytes_lost):
    path = tmp_path_factory.mktemp("rows") / "group"
    files = FileRows(path, 3)
    memory = MemoryRows(3)
    count = 0
    for size in sizes:
        keys = [bytes([count + k] * 16) for k in range(size)]
        content = torch.arange(3 * size, dtype=torch.uint8).reshape(size, 3).numpy() + count
        for store in (files, memory):
            store.add(keys, content)
        count += size
    files.close()
    for suffix, lost in ((".keys", keys_lost), (".rows", bytes_lost)):
        file = path.with_suffix(suffix)
        os.truncate(file, max(0, file.stat().st_size - lost))
    again = FileRows(path, 3)
    assert len(again.places) >= count - 4
    for key, place in again.places.items():
        assert (again.read([place]) == memory.read([memory.places[key]])).all()
    new = bytes([255] * 16)
    again.add([new], torch.full((1, 3), 9, dtype=torch.uint8).numpy())
    assert again.read([again.places[new]]).tolist() == [[9, 9, 9]]
    again.close()


# In a run


def train(
    method: Any,
    *,
    caches: bool,
    epochs: int = 3,
    augment: bool = False,
    path: Path | None = None,
    killed_after: int | None = None,
):
    x = rows(64)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(0))
    backbone = frozen()
    torch.manual_seed(2)
    head = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    run = thresher.attach(
        method,
        loader=loader,
        criterion=nn.CrossEntropyLoss(),
        model=head,
        optimizer=optimizer,
        epochs=epochs,
        forward=lambda model, batch: (model(backbone(batch[0])), batch[1]),
    )
    called: Any = run.cached(backbone, path=path) if caches else backbone
    losses = []
    for _ in range(epochs):
        for inputs, targets in run.loader:
            inputs = inputs + torch.randn_like(inputs) if augment else inputs
            optimizer.zero_grad()
            loss = run.criterion(run.model(called(inputs)), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses, head.state_dict(), run, called


@pytest.mark.parametrize("method", ["full", "kakurenbo", "uniform_rows:keep=0.5", 0.5, "infobatch"])
def test_a_head_on_a_cached_backbone_trains_as_on_a_plain_one(method):
    losses, parameters, _, _ = train(method, caches=False)
    found, cached_parameters, run, cached = train(method, caches=True)
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(cached_parameters[name], value, rtol=1e-6, atol=1e-6)
    assert cached.hits > 0
    assert re.search(rf"^cached +Sequential: {cached.hits} rows read", run.summary(), re.MULTILINE)


KILLED = """
    import sys
    from pathlib import Path
    sys.path[:0] = {paths!r}
    from library.frozen.test_cached import train
    train("full", caches=True, path=Path({path!r}), killed_after=3)
"""


def test_a_training_that_is_killed_in_mid_epoch(tmp_path):
    tests = Path(__file__).parents[2]
    code = textwrap.dedent(KILLED).format(paths=[str(tests)], path=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    losses, parameters, _, _ = train("full", caches=False)
    found, cached_parameters, _, cached = train("full", caches=True, path=tmp_path)
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(cached_parameters[name], value, rtol=1e-6, atol=1e-6)
    assert (cached.hits, cached.misses) == (3 * 64 - 16, 16)


def test_augmentation_is_never_a_hit_and_is_named():
    with pytest.warns(UserWarning, match="0 of 64 rows of epoch 1 were read.*augmentation"):
        _, _, _, cached = train("full", caches=True, augment=True, epochs=4)
    assert cached.hits == 0


# Drawn

MODULES = {
    "perceptron": lambda: frozen(),
    "two outputs": lambda: Parts().requires_grad_(False).eval(),
    "normalized": lambda: frozen(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)),
    "hidden counter": lambda: other(counting),
    "of the batch": lambda: other(lambda x: x - x.mean(0)),
}
FAULTS = ["none", "augmentation", "weights", "permuted", "second module", "evaluation"]


@settings(max_examples=depth(25, 300))
@given(
    st.sampled_from([*MODULES]), st.lists(st.sampled_from(FAULTS), max_size=8), st.integers(0, 99)
)
def test_right_refused_or_noticed_never_wrong(name, faults, seed):
    torch.manual_seed(seed)
    module = MODULES[name]()
    cached = thresher.cached(module)
    second = thresher.cached(frozen(seed=9))
    x = rows(40)
    generator = torch.Generator().manual_seed(seed)
    for fault in ["none", *faults]:
        chosen = torch.randperm(40, generator=generator)[: 2 + seed % 20]
        batch = x[chosen]
        if fault == "augmentation":
            batch = batch * 1.5
        if fault == "permuted":
            batch = batch[:, torch.randperm(6, generator=generator)]
        if fault == "second module":
            second(batch)
        if fault == "weights":
            for parameter in module.parameters():
                parameter.mul_(1.25)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with torch.inference_mode(fault == "evaluation"):
                    found = cached(batch)
            except (ValueError, RuntimeError):
                assert name in ("hidden counter", "of the batch")
                return
        assert name not in ("hidden counter", "of the batch")
        noticed = any("were changed" in str(one.message) for one in said)
        assert noticed == (fault == "weights" and any(True for _ in module.parameters()))
        expected = module(batch)
        pairs = [(found, expected)]
        if isinstance(expected, dict):
            pairs = [(found["values"], expected["values"]), (found["more"][1], expected["more"][1])]
        for one, value in pairs:
            torch.testing.assert_close(one, value, rtol=1e-6, atol=1e-6)


def test_it_is_a_module():
    assert isinstance(thresher.cached(frozen()), Cached)
