"""The lines of examples/frameworks: each file is trained with, as it stands."""

import gc
import importlib.util
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import lightning_cases
import thresher
import transformers_cases
from depth import depth

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
EPOCHS = 2
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings(
        "ignore:You defined a `validation_step`", "ignore:.*gradient_checkpointing:FutureWarning"
    ),
]


def train_of(name):
    """The function `train` of an example; the test skips where its library is not there."""
    library = name.partition("_")[0]
    pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def arguments_of(name, folder):
    """What its lines are called with beside the method, and the number of samples."""
    if name.startswith("lightning"):
        one = (
            {"devices": 1} if name == "lightning_several_devices" else {}
        )  # test_two_processes has two
        module, settings = lightning_cases.Classifier(None), QUIET | one | {"accelerator": "cpu"}
        return (module, lightning_cases.train_loader(), EPOCHS), settings, lightning_cases.N
    if name == "trl_sft":
        from trl import SFTConfig

        data, tokenizer = transformers_cases.texts()
        quiet = {
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        sizes = {
            "per_device_train_batch_size": 4,
            "num_train_epochs": EPOCHS,
            "max_length": transformers_cases.LENGTH,
        }
        args = SFTConfig(
            str(folder), loss_type="nll", dataloader_pin_memory=False, **quiet, **sizes
        )
        return (
            (transformers_cases.model(causal=True), data, args, tokenizer),
            {},
            transformers_cases.N,
        )
    causal = name == "transformers_tokens"
    args = transformers_cases.arguments(folder, num_train_epochs=EPOCHS)
    parts = transformers_cases.model(causal), transformers_cases.Sentences(causal), args
    return (
        (*parts, *([transformers_cases.model(causal)] if causal else [])),
        {},
        transformers_cases.N,
    )


@pytest.fixture
def own_environment():
    """What a trainer that joins processes writes into the environment: the next one in this process would join them, too."""
    with patch.dict(os.environ):
        yield


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "ray_train"]
)  # integration/frameworks/test_ray.py
def test_it_trains_on_what_the_method_chooses(name, tmp_path):
    train = train_of(name)
    if name == "lightning_several_devices":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
    try:
        for method, share in depth(
            [(thresher.UniformSubset(keep=0.5), 0.5)],
            [(thresher.UniformSubset(keep=0.5), 0.5), (thresher.FullData(), 1)],
        ):
            given, settings, n = arguments_of(name, tmp_path)
            run = train(method, *given, **settings)
            assert run.cost.backward == EPOCHS * int(share * n)
            assert len(run.history) == EPOCHS
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            gc.collect()  # not in a forked worker of a later test, which would wait for threads of the group
