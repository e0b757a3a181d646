"""The examples of docs/loaders.md: each file of examples/loaders is trained with, as it stands."""

import copy
import functools
import importlib.util
import io
import multiprocessing
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import thresher
from depth import depth
from helpers import assert_same
from thresher_lab.tasks import vision

FOLDER = Path(__file__).parents[2] / "examples" / "loaders"
N, EPOCHS = 22, 3
ATTACH = thresher.attach
METHODS = {
    "infobatch": (thresher.InfoBatch(), {}),
    "kakurenbo": (
        thresher.Kakurenbo(max_fraction=0.3, tau=0.0, move_back=False, reduce_fraction=False),
        {},
    ),
    "once": (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "once"}),
    "twice": (thresher.SelectiveBackprop(keep=0.5), {"forward_passes": "twice"}),
}
OWN_PASSES = ("kakurenbo", "twice")
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*but before the end of the loop over run.loader:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


# Data and models


class Images(Dataset):
    """Images as timm reads them; the label is the number of the image."""

    transform: Any = None

    def __len__(self):
        return N

    def __getitem__(self, i):
        from PIL import Image

        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        return self.transform(Image.fromarray(pixels)), i


def tensors():
    return TensorDataset(
        torch.rand(N, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(N)
    )


def rows():
    x = torch.rand(N, 192, generator=torch.Generator().manual_seed(1))
    return pytest.importorskip("datasets").Dataset.from_dict({"x": x.tolist(), "y": [*range(N)]})


def stream_of_litdata():
    """Rows that litdata has written to a folder, and reads as a stream."""
    litdata = pytest.importorskip("litdata")
    x, folder = tensors().tensors[0].numpy(), tempfile.mkdtemp()
    samples = [{"x": row, "y": i} for i, row in enumerate(x)]
    litdata.optimize(copy.copy, samples, folder, num_workers=1, chunk_bytes="4KB", verbose=False)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # optimize sets another one, and the lines of a file have no module
    return litdata.StreamingDataset(folder)


def stream_of_mosaicml():
    """Rows that MosaicML's streaming has written to a folder, and reads as a stream."""
    streaming = pytest.importorskip("streaming")
    x, folder = tensors().tensors[0].numpy(), tempfile.mkdtemp()
    columns = {"x": f"ndarray:float32:{','.join(map(str, x.shape[1:]))}", "y": "int"}
    with streaming.MDSWriter(out=folder, columns=columns, size_limit=4096) as out:
        for i, row in enumerate(x):
            out.write({"x": row, "y": i})
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(local=folder, batch_size=4, shuffle=False)


def sentences():
    """Sentence i repeats its own word, with the token i + 5."""
    return [{"input_ids": [i + 5] * (9 + i % 3)} for i in range(N)]


@functools.cache
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: i for i, word in enumerate([*special, *(f"word{i}" for i in range(N))])}
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True
        )
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), **names
    )


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Dropout(0.2), nn.Linear(8, N))


class Words(nn.Module):
    """A model of words with an output as Transformers has it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(N + 5, 8), nn.Linear(8, N + 5)

    def forward(self, input_ids, attention_mask=None):
        from transformers.modeling_outputs import MaskedLMOutput

        return MaskedLMOutput(
            logits=self.head(self.embedding(input_ids) * attention_mask.unsqueeze(-1))
        )


@dataclass
class Case:
    """What an example is tried with.

    Attributes:
        package: Package that it needs beside torch.
        dataset, model, arguments: Functions that return what its lines are called with.
        methods: Methods of `METHODS` that it can have; the first one is tried most.
        first_label: Label of sample 0.
        mixes: Whether each row is of two samples.
        runs_ahead: Whether the loop gets a batch before the loss of the last one.
        draws_in_workers: Whether workers draw random numbers, so that a resumed epoch has others.
        workers_stay: Whether they stay from epoch to epoch, so that a run that is resumed between epochs has others, too.
    """

    package: str | None = None
    dataset: Callable[[], Any] = tensors
    model: Callable[[], nn.Module] = network
    arguments: tuple[Callable[[], Any], ...] = ()
    methods: tuple[str, ...] = tuple(METHODS)
    first_label: int = 0
    mixes: bool = False
    runs_ahead: bool = False
    draws_in_workers: bool = False
    workers_stay: bool = False


STAY = {"draws_in_workers": True, "workers_stay": True}
CASES = {
    "timm_loader": Case("timm", Images, **STAY),
    "timm_prefetch": Case("timm", Images, runs_ahead=True, **STAY),
    "timm_multi_epochs": Case("timm", Images, **STAY),
    "timm_mixup": Case("timm", arguments=(lambda: N,), methods=("infobatch", "once"), mixes=True),
    "timm_fast_collate_mixup": Case(
        "timm",
        Images,
        arguments=(lambda: N,),
        methods=("infobatch", "once"),
        mixes=True,
        runs_ahead=True,
        **STAY,
    ),
    "torchdata_stateful": Case("torchdata.stateful_dataloader"),
    "datasets_map": Case("datasets", rows),
    "litdata_map": Case("litdata", stream_of_litdata),
    "streaming_map": Case("streaming", stream_of_mosaicml),
    "datasets_stream": Case("datasets", rows, methods=("once", "twice")),
    "transformers_masking": Case(
        "transformers",
        sentences,
        Words,
        arguments=(tokenizer,),
        first_label=5,
        draws_in_workers=True,
    ),
    "torch_batches_ahead": Case(methods=("infobatch",)),
}


# The harness: the lines call `thresher.attach`, in whose place tests put their own


class Unattached:
    """What the same lines train without a run."""

    epoch = 0

    def __init__(self, _, *, loader, criterion, model, **arguments):
        self.loader, self.model, self._criterion = loader, model, criterion

    def criterion(self, outputs, targets, ids=None):
        return self._criterion(outputs, targets)

    def reduce(self, losses, ids=None):
        return losses.mean()

    def ids_of(self, tensor):
        return None


class StoppedError(Exception):
    """The training was interrupted."""


class Training:
    """One training with the lines of an example, and all that a checkpoint must restore."""

    def __init__(self, name, monkeypatch, *, workers=0, rate=0.05):
        self.name, self.case, self.workers = name, CASES[name], workers
        if self.case.package == "timm":
            vision.optional("timm.data")
        elif self.case.package:
            vision.prepare()
            pytest.importorskip(self.case.package)
        spec = importlib.util.spec_from_file_location(f"loaders_{name}", FOLDER / f"{name}.py")
        self.lines = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.lines)
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        self.monkeypatch, self.model, self.dataset = (
            monkeypatch,
            self.case.model(),
            self.case.dataset(),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate, momentum=0.9)
        self.saved = None

    def train(self, method="infobatch", *, attach=ATTACH, stop=None, saved=None, epochs=EPOCHS):
        """Trains; `stop` is the number of steps after which the state is saved, and the training interrupted."""
        chosen, settings = METHODS.get(method, (method, {}))

        def attach_and_load(given, **arguments):
            run = attach(given, **arguments | settings)
            if saved is not None:
                state = torch.load(io.BytesIO(saved))
                run.load_state_dict(state["run"])
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
            if stop is not None:
                self.optimizer.register_step_post_hook(functools.partial(self._stop, run, [stop]))
            return run

        self.monkeypatch.setattr(thresher, "attach", attach_and_load)
        arguments = [made() for made in self.case.arguments]
        return self.lines.train(
            chosen, self.dataset, *arguments, self.model, self.optimizer, epochs, self.workers
        )

    def _stop(self, run, left, *_):
        left[0] -= 1
        if left[0] == 0:
            self.saved, file = run.state_dict(), io.BytesIO()
            state = {
                "run": self.saved,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, file)
            self.saved = file.getvalue()
            raise StoppedError

    def state(self):
        rngs = (torch.get_rng_state(), np.random.get_state()[1:3], random.getstate())
        return self.model.state_dict(), self.optimizer.state_dict(), rngs


TRIED = [(name, method) for name, case in CASES.items() for method in case.methods]
WORKERS = [(name, workers) for name in CASES for workers in (0, 2)]
QUICK = [(name, 0) for name in CASES] + [("timm_prefetch", 2), ("datasets_stream", 2)]


def test_every_file_is_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*CASES}


@pytest.mark.parametrize(("name", "workers"), depth(QUICK, WORKERS))
def test_all_data_is_the_unattached_loop(name, workers, monkeypatch):
    own, other = Training(name, monkeypatch, workers=workers), None
    own.train(attach=Unattached)
    expected = own.state()
    other = Training(name, monkeypatch, workers=workers)
    run = other.train(
        thresher.RandomBackprop(keep=1.0) if name == "datasets_stream" else thresher.FullData()
    )
    assert_same(other.state(), expected)
    assert len(run.history) == EPOCHS and all(epoch["complete"] for epoch in run.history)


def values(case):
    """A loss for each label, all of them and their mixtures different."""
    return 20 * torch.rand(N + case.first_label, generator=torch.Generator().manual_seed(7))


def fixed_beta(*_, size=None):
    return 0.75 if size is None else np.full(size, 0.75)


def freeze(training):
    """The loss of a row says which label it has: rate 0, and outputs that depend on nothing."""
    *_, head = training.model.children()
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(-values(training.case))
    training.monkeypatch.setattr(np.random, "beta", fixed_beta)


def wrong_losses(run, case):
    """Ids of recorded losses that are of another sample."""
    v = values(case)
    losses = v + torch.logsumexp(-v, 0)
    found, seen = run.records["loss"], run.records["loss"].isfinite()
    labels = torch.arange(N) + case.first_label
    expected = losses[labels].unsqueeze(1)
    if case.mixes:
        losses = 0.9 * losses + 0.1 * losses.mean()  # timm smooths labels by 0.1
        expected = 0.75 * losses[labels].unsqueeze(1) + 0.25 * losses[labels]
    near = (found.unsqueeze(1) - expected).abs().amin(1) < 1e-4
    others = (
        found[seen].unsqueeze(1) - losses[labels]
    ).abs() < 1e-4  # the test can tell them apart
    assert case.mixes or (others.sum(1) <= 1).all()
    return (seen & ~near).nonzero().flatten().tolist(), int(seen.sum())


CREDITED = [(name, method) for name, method in TRIED if name != "datasets_stream"]
CREDITED_QUICK = [
    *dict(CREDITED).items(),
    ("timm_prefetch", "infobatch"),
    ("datasets_map", "kakurenbo"),
    ("timm_mixup", "infobatch"),
]


@pytest.mark.parametrize("workers", depth([0], [0, 2]))
@pytest.mark.parametrize(("name", "method"), depth(CREDITED_QUICK, CREDITED))
def test_no_loss_is_recorded_for_another_sample(name, method, workers, monkeypatch):
    training = Training(name, monkeypatch, workers=workers, rate=0.0)
    freeze(training)
    run = training.train(method)
    wrong, seen = wrong_losses(run, training.case)
    assert wrong == [] and seen > N // 2  # a sample of which no word is masked has no loss
    assert run.cost.backward < run.cost.full_backward


@pytest.mark.parametrize(
    ("method", "workers"), depth([("once", 0), ("twice", 2)], [*product(("once", "twice"), (0, 2))])
)
def test_a_stream_is_chosen_from_and_records_nothing(method, workers, monkeypatch):
    run = Training("datasets_stream", monkeypatch, workers=workers).train(method)
    assert (
        not dict(run.records)
        and run.cost.full_backward == EPOCHS * N
        and run.cost.backward < 0.6 * EPOCHS * N
    )


def resumed(name, method, workers, monkeypatch, *, in_mid_epoch):
    """A training, and one that was interrupted and resumed: their states."""
    whole = Training(name, monkeypatch, workers=workers)
    run = whole.train(method)
    steps = [epoch["steps"] for epoch in run.history]
    assert steps[1] > 1
    first = Training(name, monkeypatch, workers=workers)
    with pytest.raises(StoppedError):
        first.train(method, stop=steps[0] + in_mid_epoch)
    other = Training(name, monkeypatch, workers=workers)
    again = other.train(method, saved=first.saved)
    return [
        (one.state(), dict(own.records), own.history) for one, own in ((whole, run), (other, again))
    ]


OTHER_NUMBERS = "draws random numbers in worker processes"
NOT_TRAINED = "the loop has not computed the loss of a batch"
TRIED_QUICK = [(name, CASES[name].methods[0]) for name in CASES]
BETWEEN_QUICK = [
    one for one in TRIED_QUICK if CASES[one[0]].runs_ahead or one[0] == "transformers_masking"
]


@pytest.mark.parametrize("workers", depth([0], [0, 2]))
@pytest.mark.parametrize(("name", "method"), depth(BETWEEN_QUICK, TRIED))
def test_resumed_between_epochs(name, method, workers, monkeypatch):
    if workers and CASES[name].workers_stay:
        with pytest.warns(UserWarning, match=OTHER_NUMBERS):
            resumed(name, method, workers, monkeypatch, in_mid_epoch=False)
    else:
        assert_same(*resumed(name, method, workers, monkeypatch, in_mid_epoch=False))


@pytest.mark.parametrize("workers", depth([0], [0, 2]))
@pytest.mark.parametrize(("name", "method"), depth(TRIED_QUICK, TRIED))
def test_resumed_in_mid_epoch(name, method, workers, monkeypatch):
    """The same numbers, or a warning that says why not."""
    case, others = CASES[name], workers and CASES[name].draws_in_workers
    if not case.runs_ahead and not others:
        assert_same(*resumed(name, method, workers, monkeypatch, in_mid_epoch=True))
        return
    with pytest.warns(UserWarning, match=f"{OTHER_NUMBERS}|{NOT_TRAINED}") as told:
        resumed(name, method, workers, monkeypatch, in_mid_epoch=True)
    told = " ".join(str(one.message) for one in told)
    assert (NOT_TRAINED in told) == case.runs_ahead
    assert (OTHER_NUMBERS in told) == bool(others)


# What is refused: the message has the words that the page quotes


def with_loader(training, make):
    """Attaches to another loader than that of the lines."""
    model, optimizer = training.model, training.optimizer
    criterion, method = nn.CrossEntropyLoss(), thresher.SelectiveBackprop(keep=0.5)
    ATTACH(
        method,
        loader=make(training.dataset),
        criterion=criterion,
        model=model,
        optimizer=optimizer,
        epochs=EPOCHS,
    )


def of_timm(**settings):
    from timm.data import create_loader

    return lambda dataset: create_loader(dataset, (3, 8, 8), 4, is_training=True, **settings)


def stateful(dataset):
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(dataset, 4)


def stateful_in_mid_epoch(dataset):
    loader = stateful(dataset)
    next(batches := iter(loader))
    loader.load_state_dict(loader.state_dict())
    del batches
    return loader


def without_ids(method, **arguments):
    run = ATTACH(method, **arguments)
    run.ids_of = lambda tensor: None
    return run


def with_ids_of_last(method, **arguments):
    run = ATTACH(method, **arguments)
    run.ids_of = lambda tensor: run.ids
    return run


REFUSED = {
    "timm_prefetch": (TypeError, lambda one: with_loader(one, of_timm(device=torch.device("cpu")))),
    "timm_multi_epochs": (
        ValueError,
        lambda one: with_loader(one, of_timm(use_prefetcher=False, use_multi_epochs_loader=True)),
    ),
    "torchdata_stateful": (ValueError, lambda one: with_loader(one, stateful_in_mid_epoch)),
    "datasets_stream": (TypeError, lambda one: one.train("infobatch")),
    "timm_mixup": (thresher.AttributionError, lambda one: one.train(attach=without_ids)),
    "timm_fast_collate_mixup": (
        thresher.AttributionError,
        lambda one: one.train(attach=without_ids),
    ),
    "torch_batches_ahead": (
        thresher.AttributionError,
        lambda one: one.train(attach=with_ids_of_last),
    ),
}


def test_what_is_refused_is_quoted():
    """Each example that quotes a message has a test of it below."""
    assert {path.stem for path in FOLDER.glob("*.py") if "\nRefused: " in path.read_text()} == {
        *REFUSED
    }


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, monkeypatch):
    kind, refuse = REFUSED[name]
    line = next(
        line
        for line in (FOLDER / f"{name}.py").read_text().splitlines()
        if line.startswith("Refused: ")
    )
    training = Training(name, monkeypatch)
    with pytest.raises(kind) as caught:
        refuse(training)
    assert line.split('"')[1] in str(caught.value)


def test_a_stream_in_a_loader_with_a_position_of_its_own_is_refused(monkeypatch):
    training = Training("torchdata_stateful", monkeypatch)
    with pytest.raises(
        ValueError, match="class StatefulDataLoader, whose own `__iter__`.*Pass a plain DataLoader"
    ):
        with_loader(training, lambda _: stateful(rows().to_iterable_dataset()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "method", [thresher.InfoBatch(), thresher.Winnow(0.5), thresher.SelectiveBackprop(keep=0.5)]
)
def test_the_state_of_the_loader_is_that_of_the_run(method, workers):
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def train(stop=None, saved=None):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        loader = kind(tensors(), 4, shuffle=True, num_workers=workers)
        settings = {"forward_passes": "twice"} if method.stage == "batch" else {}
        run = thresher.attach(
            method,
            loader=loader,
            criterion=nn.CrossEntropyLoss(),
            model=model,
            optimizer=optimizer,
            epochs=4,
            **settings,
        )
        if saved is not None:
            for part, state in zip(
                (run.loader, model, optimizer), torch.load(io.BytesIO(saved)), strict=True
            ):
                part.load_state_dict(state)
        for _ in range(run.epoch, 4):
            for x, y in run.loader:
                run.criterion(run.model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.cost.steps == stop:
                    torch.save(
                        [part.state_dict() for part in (run.loader, model, optimizer)],
                        file := io.BytesIO(),
                    )
                    return file.getvalue()
        return model.state_dict()

    whole = train()
    steps = 2 * -(-N // 4) - 1
    assert_same(train(saved=train(stop=steps)), whole)


def test_a_stream_with_a_position_of_its_own_is_refused_in_mid_epoch(monkeypatch):
    first, other = (Training("datasets_stream", monkeypatch) for _ in range(2))
    with pytest.raises(StoppedError):
        first.train("once", stop=2)

    def attach(method, *, loader, **arguments):
        next(iter(loader.dataset))
        loader.dataset.load_state_dict(loader.dataset.state_dict())
        return ATTACH(method, loader=loader, **arguments)

    with pytest.raises(
        ValueError, match="samples would be skipped twice. Load only the state of the run"
    ):
        other.train("once", attach=attach, saved=first.saved)


@pytest.mark.filterwarnings(
    "ignore:The losses that the run computes in its own forward passes:UserWarning"
)
@pytest.mark.parametrize("method", OWN_PASSES)
def test_no_pass_of_the_run_itself_is_made_with_rows_that_a_collate_function_has_mixed(
    method, monkeypatch
):
    def attach(given, **arguments):
        return ATTACH(
            given, forward=lambda model, batch: (model(batch[0].float()), batch[1]), **arguments
        )

    with pytest.raises(
        thresher.AttributionError, match="the rows of a batch do not match its samples: collate_fn"
    ):
        Training("timm_fast_collate_mixup", monkeypatch).train(method, attach=attach)


def test_half_as_many_rows_as_samples_are_refused(monkeypatch):
    def attach(method, *, loader, **arguments):
        loader.collate_fn.mode = "half"
        return ATTACH(method, loader=loader, **arguments)

    with pytest.raises(
        thresher.AttributionError,
        match="run.ids_of: `tensor` is a tensor that this run did not yield",
    ):
        Training("timm_fast_collate_mixup", monkeypatch).train(attach=attach)


def test_passes_of_the_run_itself_do_not_mix(monkeypatch):
    with pytest.warns(
        UserWarning, match="changes its batches in place .*as mixup does, a difference is expected"
    ):
        Training("timm_mixup", monkeypatch).train("kakurenbo")


class Share:
    """A stream of 10 samples, of which this process of two has 5, as both libraries show it."""

    size, region_of_interest = 10, [(0, 6), (2, 6)]

    def __len__(self):
        return 5


@pytest.mark.parametrize("name", ["streaming_map", "litdata_map"])
def test_a_wrapped_stream_has_the_samples_of_all_processes(name):
    spec = importlib.util.spec_from_file_location(f"wrapped_{name}", FOLDER / f"{name}.py")
    lines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lines)
    assert len(lines.MapStyle(Share())) == 10
