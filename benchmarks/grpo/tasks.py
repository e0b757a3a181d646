"""Two tasks for GRPO whose rewards are known exactly: to reverse digits, by a language model that is often wrong.

The base model is taught with mistakes, so that its pass rates go from 0 to 1 as those of a pretrained model do. How likely a
right answer is follows from one forward pass: it is the expected reward of a prompt, without a sample.
"""

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ("<pad>", "<eos>", *"0123456789r:")
VOCABULARY = {word: number for number, word in enumerate(WORDS)}
LEVELS = {"wrong digits": range(1, 7), "copies": range(2, 7)}
"""Numbers of digits of the prompts of each task."""
WRONG = (0.0, 0.0, 0.02, 0.05, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9)
"""How often the base model of "wrong digits" is taught another digit instead of each digit."""
RIGHT = (0.99, 0.98, 0.95, 0.8, 0.5, 0.25, 0.1, 0.05, 0.03, 0.01)
"""How often the base model of "copies" is taught to reverse, by the first digit; else it is taught to copy."""
LONGEST = max(max(levels) for levels in LEVELS.values()) + 1
"""Number of tokens of the longest answer, with its end."""
TAUGHT = {"wrong digits": 3000, "copies": 2000}
"""Number of steps that the base models are taught."""
KEPT = Path("runs") / "grpo"
"""Folder of the base models, which are taught once."""
DEAD = 0.01, 0.97
"""Pass rates below and above which nearly all groups of eight have equal rewards."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single characters."""
    raw = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Returns 1 for each completion that is the answer."""
    return [float(one == right) for one, right in zip(completions, answer, strict=True)]


def problems(task: str, count: int, seed: str) -> list[dict[str, str]]:
    """Returns different prompts and answers, of all levels in turn.

    Args:
        task: One of `LEVELS`.
        count: Number of prompts.
        seed: Name of the set.
    """
    rng, seen, found, tries = random.Random(f"{task}, {seed}"), set(), list[dict[str, str]](), 0
    while len(found) < count:
        digits = _digits(rng, LEVELS[task][len(found) % len(LEVELS[task])])
        tries += 1
        if digits in seen and tries < 20:  # there are few prompts of one digit
            continue
        tries = 0
        seen.add(digits)
        found.append({"prompt": f"r{digits}:", "answer": digits[::-1]})
    return found


def prompts(task: str, count: int, seed: str, dead: float) -> list[dict[str, str]]:
    """Returns prompts of which a share teaches the base model nothing, in random order.

    Args:
        task: One of `LEVELS`.
        count: Number of prompts.
        seed: Name of the set.
        dead: Share of the prompts whose pass rate is outside `DEAD`, [0, 1].
    """
    among = problems(task, 10 * count, seed)
    rates = pass_rates(base(task), among).tolist()
    teaches = [DEAD[0] <= rate <= DEAD[1] for rate in rates]
    without = [one for one, live in zip(among, teaches, strict=True) if not live][
        : round(count * dead)
    ]
    found = (
        without
        + [one for one, live in zip(among, teaches, strict=True) if live][: count - len(without)]
    )
    if len(found) < count:
        raise RuntimeError(
            f"{task}: only {len(found)} of {count} prompts are found at a share of {dead}"
        )
    return random.Random(seed).sample(found, count)


def base(task: str) -> Qwen2ForCausalLM:
    """Returns a new base model of 133,000 parameters."""
    model = _untaught()
    model.load_state_dict(_taught(task))
    return model


def _untaught() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_key_value_heads": 4}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(WORDS), max_position_embeddings=32, **sizes, **ends)
    )


@cache
def _taught(task: str, batch: int = 128, lr: float = 2e-3) -> dict[str, Tensor]:
    file = KEPT / f"{task.replace(' ', '-')}-{TAUGHT[task]}.pt"
    if file.exists():
        return torch.load(file, weights_only=True)
    model, rng, steps = _untaught(), random.Random(0), TAUGHT[task]
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50) * (1 - step / steps)
        texts = [_digits(rng, rng.choice(LEVELS[task])) for _ in range(batch)]
        inputs, targets = _encoded([(digits, _mistaken(task, digits, rng)) for digits in texts])
        model(input_ids=inputs, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    KEPT.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), part := file.with_suffix(f".{os.getpid()}"))
    part.replace(file)  # two processes may teach the same model
    return torch.load(file, weights_only=True)


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _mistaken(task: str, digits: str, rng: random.Random) -> str:
    if task == "copies":
        return digits[::-1] if rng.random() < RIGHT[int(digits[0])] else digits
    others = {digit: str((int(digit) + rng.randrange(1, 10)) % 10) for digit in digits}
    return "".join(
        others[digit] if rng.random() < WRONG[int(digit)] else digit for digit in reversed(digits)
    )


def _encoded(pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Returns tokens, and those of the answers with their ends as targets, each of shape (N, L), int64."""
    width = 3 + 2 * max(len(digits) for digits, _ in pairs)
    tokens, targets = (
        torch.zeros(len(pairs), width, dtype=torch.int64),
        torch.full((len(pairs), width), -100),
    )
    for row, (digits, answer) in enumerate(pairs):
        found = [VOCABULARY[word] for word in (*f"r{digits}:{answer}", "<eos>")]
        tokens[row, : len(found)] = torch.tensor(found)
        targets[row, len(digits) + 2 : len(found)] = tokens[row, len(digits) + 2 : len(found)]
    return tokens, targets


@torch.no_grad()
def pass_rates(model: Any, rows: list[dict[str, str]]) -> Tensor:
    """Returns the probability of the right answer at temperature 1, shape (N,).

    Args:
        model: The language model.
        rows: Prompts with their answers.
    """
    mode = model.training
    model.eval()
    tokens, targets = _encoded([(row["answer"][::-1], row["answer"]) for row in rows])
    logits = model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits[:, :-1]
    model.train(mode)
    wanted = targets[:, 1:]
    chosen = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(wanted < 0, 0.0).sum(1).exp()
