"""LoRA of peft, if it is installed."""

import pytest
import torch

import thresher
from helpers import assert_same
from transformers_cases import METHODS, model, trainer

pytestmark = [
    pytest.mark.usefixtures("shared_traces"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("causal", [False, True])
def test_lora(causal, tmp_path):
    peft = pytest.importorskip("peft")
    modules, task = (["c_attn"], "CAUSAL_LM") if causal else (["query", "value"], "SEQ_CLS")
    found = []
    for method in (None, thresher.FullData(), METHODS["selective_backprop"]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=modules, task_type=task, fan_in_fan_out=causal)
        net = peft.get_peft_model(model(causal), config)
        made = trainer(
            tmp_path, method, causal, net=net, gradient_accumulation_steps=1 if causal else 3
        )
        made.train()
        found.append(made.model.state_dict())
    assert_same(found[1], found[0])
    assert made.run.cost.backward < made.run.cost.full_backward / 3
    assert made.lr_scheduler.get_last_lr() == [0, 0]
