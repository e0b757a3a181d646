"""Learn by rewards, with fewer prompts and fewer rollouts: `thresher.rl` in a policy gradient by groups, as in GRPO.

A prompt is an image of a digit, a rollout is an answer that is drawn from the network, and its reward is 1 where it is right.
Prompts whose answers are all right or all wrong teach nothing; the longer that has been so, the less often they are tried
(GRESO). Of 16 answers to a prompt, the 4 whose rewards vary most are trained on (PODS).
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from thresher import rl

STEPS, PROMPTS, ROLLOUTS, KEPT, VISITS = 300, 64, 16, 4, 8


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    x, y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]
    policy = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    visits = torch.full(
        (VISITS, len(x)), float("nan")
    )  # mean rewards of each prompt, the latest last
    bases, chances = rl.Exploration(), torch.ones(len(x))
    for _ in range(STEPS):
        tried = torch.randperm(len(x), generator=generator)[: PROMPTS * 3 // 2]
        chances = rl.rollout_chances(*rl.trailing_visits(visits), bases)
        prompts = rl.choose_prompts(tried, chances, PROMPTS, generator)
        log_probs = policy(x[prompts]).log_softmax(1)
        answers = torch.multinomial(
            log_probs.detach().exp(), ROLLOUTS, replacement=True, generator=generator
        )
        rewards = (answers == y[prompts, None]).float()
        means = rewards.mean(1)
        visits[:, prompts] = torch.cat((visits[1:, prompts], means[None]))
        bases = bases.adjusted(
            (means >= rl.EASY_REWARD).float().mean().item(), (means <= 0).float().mean().item()
        )
        kept = rl.choose_rollouts(rewards, KEPT)
        advantages = rl.group_advantages(rewards.gather(1, kept))
        loss = -(advantages * log_probs.gather(1, answers.gather(1, kept))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (policy(test_x).argmax(1) == test_y).float().mean().item()
    rarer = (chances < 1).float().mean()
    print(
        f"test accuracy {accuracy:.3f}; {rarer:.0%} of the prompts are tried less often; {KEPT} of {ROLLOUTS} rollouts count"
    )


if __name__ == "__main__":
    main()
