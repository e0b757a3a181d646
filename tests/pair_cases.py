"""Trainings with RewardTrainer and DPOTrainer for tests: pairs of answers, and a tiny language model, in several settings."""

from typing import Any

import datasets
import peft
import torch
import torch.nn.functional as F
import transformers
import trl

import sft_cases
from thresher.transformers import Selection
from transformers_cases import WORDS, texts

PLAIN: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
REWARD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reward, defaults": ({}, {}),
    "reward, float32": (PLAIN, {}),
    "reward, accumulation": (PLAIN | {"gradient_accumulation_steps": 3}, {}),
    "reward, LoRA": (PLAIN, {"lora": "SEQ_CLS"}),
    "reward, margins": (PLAIN, {"margin": True}),
    "reward, centered": (PLAIN | {"center_rewards_coefficient": 0.1}, {}),
}
DPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo, defaults": ({}, {}),
    "dpo, float32": (PLAIN, {}),
    "dpo, accumulation": (PLAIN | {"gradient_accumulation_steps": 3}, {}),
    "dpo, precomputed": (PLAIN | {"precompute_ref_log_probs": True}, {}),
    "dpo, LoRA": (PLAIN, {"lora": "CAUSAL_LM"}),
    "dpo, JS divergence": (PLAIN | {"f_divergence_type": "js_divergence"}, {}),
    "dpo, shared length": (PLAIN | {"ld_alpha": 0.5}, {}),
    "dpo, sigmoid_norm": (PLAIN | {"loss_type": ["sigmoid_norm"]}, {}),
}
SETTINGS = REWARD | DPO
"""Arguments of RewardConfig or DPOConfig, and what is trained."""


class Reward(Selection, trl.RewardTrainer):
    """RewardTrainer with a selection."""


class Preferring(Selection, trl.DPOTrainer):
    """DPOTrainer with a selection."""


def data(*, margin: bool = False) -> Any:
    """24 pairs, the longer answer chosen in some; with the margins that their rewards should have."""
    columns = {"prompt": sft_cases.lines(0)}
    columns |= {
        name: [f" {line}" for line in sft_cases.lines(seed)]
        for name, seed in (("chosen", 1), ("rejected", 2))
    }
    if margin:
        columns["margin"] = [0.1 * number for number in range(24)]
    return datasets.Dataset.from_dict(columns)


def scorer() -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "num_labels": 1,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**sizes))


def reference() -> Any:
    """Another model than the one that is trained, so that margins are not 0."""
    net = sft_cases.model()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return net


def trainer(folder: Any, method: Any, name: str, kind: Any = None, **settings: Any) -> Any:
    """A trainer in one of the settings; without a selection if the method is None."""
    given, extra = SETTINGS[name]
    own = {
        key.removeprefix("with_"): settings.pop(key)
        for key in list(settings)
        if key.startswith("with_")
    }
    reward = name in REWARD
    quiet = {
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "logging_strategy": "no",
    }
    sizes = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "max_length": 64,
        "learning_rate": 1e-2,
        "seed": 3,
    }
    config = trl.RewardConfig if reward else trl.DPOConfig
    if method is None:
        made = trl.RewardTrainer if reward else trl.DPOTrainer
    else:
        made = Reward if reward else Preferring
        own["selection"] = method
    if extra.get("lora"):
        own["peft_config"] = peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj"],
            task_type=extra["lora"],
            init_lora_weights=False,
        )
    elif not reward:
        own["ref_model"] = reference()
    torch.manual_seed(0)
    return (kind or made)(
        scorer() if reward else sft_cases.model(),
        args=config(str(folder), **quiet | sizes | given | settings),
        train_dataset=data(margin=extra.get("margin", False)),
        processing_class=texts()[1],
        **own,
    )


def by_hand(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and margin of each pair, by the logits of the models as they are, one pair after another."""
    net = made.model.eval()
    reward = isinstance(made, trl.RewardTrainer)
    losses, margins = [], []
    with torch.no_grad():
        for row in made.train_dataset:
            if reward:
                chosen, rejected = (
                    net(torch.tensor([row[f"{side}_ids"]])).logits.float().item()
                    for side in ("chosen", "rejected")
                )
                margin = torch.tensor(chosen - rejected)
                loss = -F.logsigmoid(margin - row.get("margin", 0))
                loss += (made.args.center_rewards_coefficient or 0) * (chosen + rejected) ** 2
            else:
                margin = made.beta * torch.tensor(
                    _score(made, row, "chosen") - _score(made, row, "rejected")
                )
                loss = -F.logsigmoid(margin)
            losses.append(loss)
            margins.append(margin)
    net.train()
    return torch.stack(losses), torch.stack(margins)


def _score(made: Any, row: Any, side: str) -> float:
    prompt, answer = row["prompt_ids"], row[f"{side}_ids"]
    other = row["rejected_ids" if side == "chosen" else "chosen_ids"]

    def log_probability(net: Any) -> float:
        ids = torch.tensor([prompt + answer])
        tokens = net(ids).logits.float()[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        tokens = tokens[len(prompt) - 1 :]
        if made.ld_alpha is None:
            return tokens.sum().item()
        shared = min(len(answer), len(other))
        return (tokens[:shared].sum() + made.ld_alpha * tokens[shared:].sum()).item()

    policy = log_probability(made.model)
    if made.ref_model is not None:
        ratio = policy - log_probability(made.ref_model.eval())
    else:
        with made.model.disable_adapter():
            ratio = policy - log_probability(made.model)
    if made.f_divergence_type == "js_divergence":
        return F.logsigmoid(torch.tensor(ratio)).item()
    return ratio / len(answer) if made.loss_types == ["sigmoid_norm"] else ratio
