"""LoRA of peft, and the SFTTrainer of trl, where these packages are installed."""

import pytest
import torch

import thresher
from helpers import assert_same
from transformers_cases import EPOCHS, LENGTH, METHODS, Selection, model, texts, trainer

pytestmark = [pytest.mark.usefixtures("shared_traces"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("causal", [False, True])
def test_lora(causal, tmp_path):
    peft = pytest.importorskip("peft")
    modules, task = (["c_attn"], "CAUSAL_LM") if causal else (["query", "value"], "SEQ_CLS")
    found = []
    for method in (None, thresher.FullData(), METHODS["selective_backprop"]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=modules, task_type=task, fan_in_fan_out=causal)
        made = trainer(tmp_path, method, causal, net=peft.get_peft_model(model(causal), config), gradient_accumulation_steps=3)
        made.train()
        found.append(made.model.state_dict())
    assert_same(found[1], found[0])
    assert made.run.cost.backward < made.run.cost.full_backward / 3
    assert made.lr_scheduler.get_last_lr() == [0, 0]


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_supervised_fine_tuning(loss, tmp_path):
    trl = pytest.importorskip("trl")
    data, tokenizer = texts()
    kind = type("SFT", (Selection, trl.SFTTrainer), {})
    quiet = {"report_to": [], "use_cpu": True, "dataloader_pin_memory": False, "save_strategy": "no", "disable_tqdm": True}
    sizes = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": EPOCHS,
        "gradient_accumulation_steps": 3,
        "max_length": LENGTH,
    }
    found = []
    for method in (None, thresher.FullData(), METHODS["infobatch"]):
        args = trl.SFTConfig(str(tmp_path), bf16=False, gradient_checkpointing=False, loss_type=loss, **quiet, **sizes)
        own = {} if method is None else {"selection": method}
        net = model(causal=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        made = (trl.SFTTrainer if method is None else kind)(
            net, args=args, train_dataset=data, processing_class=tokenizer, **own
        )
        if method is not None and loss == "dft":
            with pytest.raises(ValueError, match="would train another loss"):
                made.train()
            return
        made.train()
        found.append(made.model.state_dict())
    assert all(torch.allclose(found[1][name], value, atol=1e-5) for name, value in found[0].items())
    assert made.lr_scheduler.get_last_lr() == [0, 0]
