"""GRPO in TRL without the groups that teach nothing: `thresher.trl.attach`, on a language model of 100,000 parameters.

The task: name the digit that comes after the one in the prompt. The reward is 1 for the right digit and 0 for another, so that
a group of eight rollouts with equal rewards has no gradient: many groups at first, when all are wrong, and most at the end,
when all are right. They are skipped, and the training is the same. It takes some seconds on a CPU, and needs the extra `trl`:
`pip install 'thresher[trl]'`.
"""

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

import thresher.trl

STEPS, PROMPTS, ROLLOUTS = 60, 16, 8


def digits() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the ten digits and a colon."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"0123456789:"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model() -> Qwen2ForCausalLM:
    """Returns a small language model with random weights."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_key_value_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=13, max_position_embeddings=16, **sizes, **ends))


def reward(completions: list[str], answer: list[str], **_) -> list[float]:
    """Returns 1 for each completion that begins with the answer."""
    return [
        float(completion[:1] == right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def main(folder: str = "runs/grpo", steps: int = STEPS) -> thresher.trl.Picks:
    prompts = Dataset.from_list(
        [{"prompt": f"{one}:", "answer": str((one + 1) % 10)} for one in range(10)] * 10
    )
    config = GRPOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        seed=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(model(), reward, config, prompts, processing_class=digits())
    picks = thresher.trl.attach(trainer)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"mean reward {rewards[0]:.2f} at the begin, {rewards[-1]:.2f} at the end")
    print(picks.summary())
    return picks


if __name__ == "__main__":
    main()
