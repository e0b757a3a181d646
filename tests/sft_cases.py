"""Trainings with SFTTrainer for tests: texts, prompts and chats in a tiny language model, in the settings that people use."""

from typing import Any

import datasets
import peft
import torch
import transformers
import trl

from thresher.transformers import Selection
from transformers_cases import WORDS, texts

LENGTHS = [3 + (7 * number) % 9 for number in range(24)]
"""Number of words of each of the 24 texts."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %} {% endfor %}"
)


class SFT(Selection, trl.SFTTrainer):
    """SFTTrainer with a selection."""


PLAIN: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "float32": (PLAIN, {}),
    "chunked": (PLAIN | {"loss_type": "chunked_nll"}, {}),
    "reentrant checkpointing": ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}),
    "other checkpointing": ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, {}),
    "accumulation": (PLAIN | {"gradient_accumulation_steps": 3}, {}),
    "completions": (PLAIN, {"data": "prompt"}),
    "assistant": (PLAIN | {"assistant_only_loss": True}, {"data": "chat"}),
    "LoRA": (PLAIN, {"lora": True}),
    "LoRA, defaults": ({}, {"lora": True}),
    "packing": (PLAIN | {"packing": True, "max_length": 32}, {}),
    "packing, eager": (PLAIN | {"packing": True, "max_length": 32}, {"attention": "eager"}),
    "packing, batches of 1": (
        PLAIN | {"packing": True, "max_length": 32, "per_device_train_batch_size": 1},
        {},
    ),
    "packing, accumulation": (
        PLAIN | {"packing": True, "max_length": 16, "gradient_accumulation_steps": 3},
        {},
    ),
    "packing, wrapped": (
        PLAIN | {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
        {},
    ),
    "padding_free": (PLAIN | {"padding_free": True, "max_length": None}, {}),
    "dft": (PLAIN | {"loss_type": "dft"}, {}),
    "experts": (PLAIN | {"gradient_accumulation_steps": 2}, {"experts": True}),
}
"""Arguments of SFTConfig, and what is trained."""


def lines(seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(f"w{word}" for word in torch.randint(3, WORDS, (n,), generator=generator).tolist())
        for n in LENGTHS
    ]


def data(kind: str) -> Any:
    if kind == "text":
        return datasets.Dataset.from_dict({"text": lines(0)})
    if kind == "prompt":
        return datasets.Dataset.from_dict(
            {"prompt": lines(0), "completion": [f" {line}" for line in lines(1)]}
        )
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(lines(0), lines(1), strict=True)
    ]
    return datasets.Dataset.from_dict({"messages": chats})


def model(attention: str = "sdpa", experts: bool = False) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "attn_implementation": attention,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if not experts:
            return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        routes = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes | routes))


def trainer(folder: Any, method: Any, name: str, **settings: Any) -> Any:
    """A trainer in one of the settings; without a selection if the method is None."""
    given, kind = SETTINGS[name]
    own = {
        key.removeprefix("with_"): settings.pop(key)
        for key in list(settings)
        if key.startswith("with_")
    }
    quiet = {
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    sizes = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "max_length": 64,
        "learning_rate": 1e-2,
        "seed": 3,
    }
    args = trl.SFTConfig(
        str(folder), log_level="error", logging_strategy="no", **quiet | sizes | given | settings
    )
    tokenizer = texts()[1]
    tokenizer.chat_template = TEMPLATE
    own |= {} if method is None else {"selection": method}
    if kind.get("lora"):
        own["peft_config"] = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
    torch.manual_seed(0)
    net = model(kind.get("attention", "sdpa"), kind.get("experts", False))
    made = trl.SFTTrainer if method is None else SFT
    return made(
        net,
        args=args,
        train_dataset=data(kind.get("data", "text")),
        processing_class=tokenizer,
        **own,
    )


def losses_by_hand(made: Any) -> torch.Tensor:
    """Loss of each row of the prepared data set, by the logits of the model as it is, one row after another."""
    net, found = made.model.eval(), []
    with torch.no_grad():
        for row in made.train_dataset:
            batch = made.data_collator([row])
            names = ("input_ids", "attention_mask", "position_ids")
            logits = net(**{name: batch[name] for name in names if name in batch}).logits.float()
            labels = batch["labels"][0, 1:]
            losses = torch.nn.functional.cross_entropy(
                logits[0, :-1], labels, reduction="none", ignore_index=-100
            )
            if made.args.loss_type == "dft":
                losses = losses * (-losses).exp()
            found.append((losses.sum() / (labels != -100).sum()).item())
    net.train()
    return torch.tensor(found)


def tokens_by_hand(made: Any) -> list[int]:
    """Number of labels of each row of the prepared data set, without the first token, which nothing predicts."""
    return [
        int((made.data_collator([row])["labels"][0, 1:] != -100).sum())
        for row in made.train_dataset
    ]
