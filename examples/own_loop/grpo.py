"""GRPO (arXiv 2402.03300) in a loop of one's own: python -m examples.own_loop.grpo MODEL [KEY=VALUE ...]"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from alphaapollo import Trainer
from alphaapollo.types import Prompt
from examples.smollm2.reward import compute_score
from examples.smollm2.task import HELD_OUT_TOPICS, TRAIN_TOPICS, make_instructions


def make_prompts(count: int, topics: Sequence[str], seed: str) -> list[Prompt]:
    made = enumerate(make_instructions(count, topics, seed))
    return [Prompt(i, one.kind, [{"role": "user", "content": one.text}], one.as_dict()) for i, one in made]


def main(model: str, *overrides: str, steps: int = 50, size: int = 16, n: int = 8, num_val: int = 100) -> None:
    prompts, held_out = make_prompts(400, TRAIN_TOPICS, "train"), make_prompts(num_val, HELD_OUT_TOPICS, "val")
    settings = {
        "model.path": model,
        "model.dtype": "fastest",
        "rollout.dtype": "fastest",
        "ppo_max_token_len_per_gpu": 2048,
        "data.max_response_length": 64,
        "rollout.temperature": 0.7,
        "rollout.kv_cache_gib": 0.5,
    }
    with Trainer(settings, *overrides) as t:
        for step in range(t.step + 1, steps + 1):
            batch = [prompts[i % len(prompts)] for i in range((step - 1) * size, step * size)]
            groups = t.sample(batch, n=n, reward=compute_score)
            rewards = np.array([[one.reward for one in group.trajectories] for group in groups])
            advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
            rows = [one.rows[0] for group in groups for one in group.trajectories]
            result = t.forward_backward(rows, loss="ppo", advantages=advantages.ravel())
            t.optim_step(lr=4e-5, grad_clip=1.0)
            metrics = {"train/loss": result.loss} | t.publish()
            if step in (1, steps) or step % 10 == 0:
                metrics |= t.evaluate(held_out, compute_score, temperature=0.7)
            t.log(step, groups, metrics)
        t.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
