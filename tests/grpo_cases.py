"""A tiny language model, prompts and rewards for GRPOTrainer: no download, and groups with and without a signal."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import lightning_cases  # noqa: F401  # prepares the import of torchvision, which transformers looks for

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

CHARACTERS = "0123456789+=r:"
VOCABULARY = {one: number for number, one in enumerate(["<pad>", "<eos>", *CHARACTERS])}
PROMPTS, GROUP, LONGEST = 40, 4, 5


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(dtype: torch.dtype = torch.float64) -> transformers.Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.Qwen2Config(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=32,
        attention_dropout=0.0,
        **sizes,
        **ends,
    )
    return transformers.Qwen2ForCausalLM(config).to(dtype)


def rows() -> list[dict[str, Any]]:
    """Prompts "r0:" to "r9:", of which the first three are never answered rightly."""
    return [
        {"prompt": f"r{number % 10}{number // 10}:", "level": number % 10}
        for number in range(PROMPTS)
    ]


def passes(completions: list[str], level: list[int], **_: Any) -> list[float]:
    """1 where the first character is a digit below the level of the prompt less 3: pass rates from 0 to about 0.4."""
    return [
        float(text[:1].isdigit() and int(text[0]) < one - 2)
        for text, one in zip(completions, level, strict=True)
    ]


class Gradients(transformers.TrainerCallback):
    """Notes the gradients of every update."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        found = [
            torch.zeros(one.numel()) if one.grad is None else one.grad.flatten()
            for one in model.parameters()
        ]
        self.seen.append(torch.cat([one.double() for one in found]).clone())


def trainer(
    folder: Any,
    *,
    reward: Any = passes,
    dtype: torch.dtype = torch.float64,
    of: Any = None,
    **settings: Any,
) -> Any:
    sizes = {
        "per_device_train_batch_size": 8,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "max_steps": 4,
    }
    quiet = {
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "logging_steps": 1,
    }
    own = {
        "gradient_checkpointing": False,
        "temperature": 1.0,
        "seed": 3,
        "max_grad_norm": 1e9,
        "learning_rate": 1e-3,
    }
    config = trl.GRPOConfig(
        output_dir=str(folder), log_level="error", **(sizes | quiet | own | settings)
    )
    made = (of or trl.GRPOTrainer)(
        model=model(dtype),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows()),
        processing_class=tokenizer(),
    )
    made.gradients = Gradients()
    made.add_callback(made.gradients)
    return made


def trained(made: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    made.train(**more)
    return made


def weights(made: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in made.model.parameters()])


def on_ranks(folder: Path) -> None:
    """What each of two ranks finds; written to a file of its own."""
    import thresher.trl
    from thresher import rl

    settings = {"dtype": torch.float64, "learning_rate": 1e-4}
    plain, skipping = (trainer(folder / "out", **settings) for _ in range(2))
    picks = thresher.trl.attach(skipping)
    found: dict[str, Any] = {
        "plain - skipping": float(
            (weights(trained(plain)) - weights(trained(skipping))).abs().max()
        ),
        "rows": [picks.rows_trained, picks.rows],
        "policies": [],
    }
    choices = {
        "greso": (rl.Greso(PROMPTS), {}),
        "greso refill": (rl.Greso(PROMPTS), {"refill": True}),
        "rollouts": (None, {"rollouts": 2}),
        "refill": (None, {"refill": True}),
    }
    for name, (policy, more) in choices.items():
        thresher.trl.attach(made := trainer(folder / "out", **settings), policy, **more)
        own = weights(trained(made))
        other = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(other, own)
        found[f"{name}, ranks differ"] = float((other[0] - other[1]).abs().max())
        if policy is not None:
            found["policies"].append(
                [
                    float(one.double().sum())
                    for one in vars(policy).values()
                    if isinstance(one, torch.Tensor)
                ]
            )
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    on_ranks(Path(sys.argv[1]))
