"""What skipping groups without a signal saves in GRPOTrainer: the time of its training steps, beside plain TRL.

`python -m benchmarks.grpo --time [--page docs/evidence/grpo.md]` trains a small model with `thresher.trl.attach` and without,
in turns. In it none, a third and two thirds of the groups have equal rewards. Rewards do not depend on the model, so that the
share is exact. The time of a step is measured with and without the generation of the rollouts. Needs trl.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.marks import between_marks
from thresher_lab.training.files import markdown_table

MARKS = "<!-- table of benchmarks.grpo -->", "<!-- end of the table of grpo -->"
DEAD = {"0": 0, "1/3": 1, "2/3": 2}
"""Number of prompts with equal rewards among three."""
LIMITS = {"0": 1.03, "1/3": 0.70, "2/3": 0.40}
"""Largest time of a training step over that of plain TRL."""
GROUP, PROMPTS, STEPS, TURNS = 8, 24, 4, 5
"""Rollouts of a prompt; prompts; steps of a training, of which the first warms up; trainings of each kind."""


def model() -> Any:
    """Returns a Qwen2 of two million parameters with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_key_value_heads": 4}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=64, max_position_embeddings=128, **sizes, **ends)
    )


def tokenizer() -> Any:
    """Returns a tokenizer of 62 characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *map(chr, range(48, 110))]
    raw = Tokenizer(
        models.WordLevel({one: number for number, one in enumerate(names)}, unk_token="<pad>")
    )
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def seconds(dead: int, *, skips: bool, folder: str) -> tuple[float, float]:
    """Trains, and returns the CPU seconds of a step without and with the generation of its rollouts.

    Args:
        dead: Number of prompts with equal rewards among three.
        skips: Whether groups without a signal are skipped.
        folder: Folder for the files of the trainer.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    import thresher.trl

    spent: dict[str, list[float]] = {"step": [], "generation": []}

    class Timed(GRPOTrainer):
        def training_step(self, *given: Any, **more: Any) -> Any:
            began, before = time.process_time(), sum(spent["generation"])
            found = super().training_step(*given, **more)
            spent["step"].append(time.process_time() - began - (sum(spent["generation"]) - before))
            return found

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.process_time()
            found = super()._generate_and_score_completions(inputs)
            spent["generation"].append(time.process_time() - began)
            return found

    def rewards(completions: list[str], kind: list[int], **_: Any) -> list[float]:
        return [0.0 if one < dead else float(place % 2) for place, one in enumerate(kind)]

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=6 * GROUP,
        num_generations=GROUP,
        max_completion_length=48,
        max_steps=STEPS,
        shuffle_dataset=False,  # so that each batch has as many prompts of each kind
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        seed=0,
    )
    prompts = Dataset.from_list(
        [
            {"prompt": f"{number % 10}{number // 10}=", "kind": number % 3}
            for number in range(PROMPTS)
        ]
    )
    trainer = Timed(
        model=model(),
        reward_funcs=rewards,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
    if skips:
        thresher.trl.attach(trainer)
    trainer.train()
    steps, made = spent["step"][1:], spent["generation"][1:]
    return sum(steps) / len(steps), (sum(steps) + sum(made)) / len(steps)


def measured() -> dict[str, Any]:
    """Returns the times of all kinds of trainings, one after the other in turns."""
    found: dict[str, Any] = {name: {"plain": [], "skips": []} for name in DEAD}
    with TemporaryDirectory() as folder:
        for _ in range(TURNS):
            for name, dead in DEAD.items():
                for kind in ("plain", "skips"):
                    found[name][kind].append(seconds(dead, skips=kind == "skips", folder=folder))
    return found


def ratios(found: Mapping[str, Sequence[tuple[float, float]]], place: int) -> list[float]:
    """Returns the times of skipping over those of plain TRL, of each turn: 0 is without, 1 with the generation."""
    return [
        own[place] / plain[place] for own, plain in zip(found["skips"], found["plain"], strict=True)
    ]


def text(found: Mapping[str, Any]) -> str:
    """Returns the table in Markdown."""
    rows = [
        (
            name,
            *(
                f"{median(ratios(of, place)):.2f} ({min(ratios(of, place)):.2f} to {max(ratios(of, place)):.2f})"
                for place in (0, 1)
            ),
            f"at most {LIMITS[name]:.2f}",
            "met" if median(ratios(of, 0)) <= LIMITS[name] else "missed",
        )
        for name, of in found.items()
    ]
    header = (
        "groups without a signal",
        "training step",
        "with generation",
        "limit of the training step",
        "",
    )
    return markdown_table(header, rows)


def with_table(page: str, text: str) -> str:
    """Returns a page with the table between its marks."""
    return between_marks(page, *MARKS, text)
