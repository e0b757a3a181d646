"""A training with Lightning that goes on from a checkpoint has the bits of one that was not interrupted."""

import pytest
import torch

import thresher
from depth import depth
from helpers import assert_same
from lightning_cases import EPOCHS, Classifier, Saves, fit, lightning, outcome, train_loader
from thresher.lightning import Selection

pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step`",
        "ignore:.*was called without a model",
        "ignore:.*no last checkpoint",
    ),
]


METHODS = {
    "full": thresher.FullData(),
    "infobatch": thresher.InfoBatch(),
    "kakurenbo": thresher.Kakurenbo(max_fraction=0.5, tau=0.5),
    "selective_backprop": thresher.SelectiveBackprop(keep=0.4),
}


EPOCHS_SAVED = depth([1], range(EPOCHS - 1))


@pytest.mark.parametrize(
    ("method", "interval"),
    depth(
        [("kakurenbo", 0.5), ("selective_backprop", 1.0)],
        [(name, share) for name in METHODS for share in (1.0, 0.5)],
    ),
)
def test_goes_on_with_the_same_bits(method, interval, tmp_path):
    method = METHODS[method]
    saves, module = Saves(tmp_path), Classifier()
    settings = {"validate": True, "val_check_interval": interval}
    expected = outcome(module, fit(module, Selection(method), saves, **settings))
    for path in (
        path
        for epoch in EPOCHS_SAVED
        for path in saves.of_epoch(epoch, "step", "last", "validation", "epoch")
    ):
        resumed, selection = Classifier(), Selection(method)
        found = outcome(resumed, fit(resumed, selection, seed=9, ckpt_path=path, **settings))
        assert len(selection.run.history) == EPOCHS, path.name
        assert_same(found["rates"], expected["rates"][-len(found["rates"]) :], path.name)
        assert_same(found | {"rates": []}, expected | {"rates": []}, path.name)
        assert set(resumed.estimates) <= {EPOCHS * 14}
        validated = module.validated[len(module.validated) - len(resumed.validated) :]
        assert [epoch for epoch, _ in resumed.validated] == [epoch for epoch, _ in validated], (
            path.name
        )


class WithState(Classifier):
    """Draws random numbers in its hooks at the beginning of an epoch, too."""

    def on_train_start(self):
        pass

    def on_fit_start(self):
        pass


@pytest.mark.parametrize(
    "method", depth(["kakurenbo"], ["infobatch", "kakurenbo", "selective_backprop"])
)
def test_with_workers_and_draws(method, tmp_path):
    def parts():
        loader = train_loader(
            2, generator=torch.Generator().manual_seed(4), persistent_workers=True
        )
        return WithState("late", draws=True), Selection(METHODS[method]), loader

    module, selection, loader = parts()
    saves = Saves(tmp_path)
    expected = outcome(
        module, fit(module, selection, saves, loader=loader, accumulate_grad_batches=2)
    )
    for path in saves.of_epoch(EPOCHS_SAVED[-1], "step", "epoch"):
        resumed, selection, loader = parts()
        found = outcome(
            resumed,
            fit(
                resumed, selection, seed=9, loader=loader, ckpt_path=path, accumulate_grad_batches=2
            ),
        )
        assert_same(found["rates"], expected["rates"][-len(found["rates"]) :], path.name)
        assert_same(found | {"rates": []}, expected | {"rates": []}, path.name)


class Fails(Classifier):
    fails = True

    def on_train_batch_start(self, batch, batch_idx):
        if self.fails and self.batches == 20:
            raise KeyError("a failure")


def test_after_an_error(tmp_path):
    """The callback that saves after an error gets the state of the run, although the module is as it was by then."""
    expected, failed, resumed = Fails(), Fails(), Fails()
    expected.fails = resumed.fails = False
    fit(expected, Selection(METHODS["kakurenbo"]))
    last = lightning.pytorch.callbacks.OnExceptionCheckpoint(tmp_path)
    with (
        pytest.raises(KeyError, match="a failure"),
        pytest.warns(UserWarning, match="has not computed the loss of a batch"),
    ):
        fit(failed, Selection(METHODS["kakurenbo"]), last)
    fit(resumed, Selection(METHODS["kakurenbo"]), ckpt_path=last.ckpt_path)
    assert expected.batches - failed.batches - resumed.batches == 1  # the batch that failed


def test_after_the_end(tmp_path):
    module, again = Classifier(), Classifier()
    fit(module, Selection(METHODS["infobatch"])).save_checkpoint(tmp_path / "end")
    fit(again, Selection(METHODS["infobatch"]), ckpt_path=tmp_path / "end")
    assert_same(again.state_dict(), module.state_dict())
    assert again.batches == 0
