"""GRPO with four learning rates at once, as four LoRA adapters on one base model:
python -m examples.own_loop.learning_rates MODEL [KEY=VALUE ...]"""

from __future__ import annotations

import sys

import numpy as np

from alphaapollo import Trainer
from examples.own_loop.grpo import make_prompts
from examples.smollm2.reward import compute_score
from examples.smollm2.task import TRAIN_TOPICS

RATES = (1e-4, 4e-4, 1.6e-3, 6.4e-3)


def main(model: str, *overrides: str, steps: int = 20, size: int = 8, n: int = 8) -> None:
    prompts = make_prompts(400, TRAIN_TOPICS, "train")
    settings = {
        "model.path": model,
        "model.dtype": "fastest",
        "rollout.dtype": "fastest",
        "lora_rank": 16,
        "rollout.lora": "adapter",
        "rollout.max_loras": len(RATES),
        "ppo_max_token_len_per_gpu": 2048,
        "data.max_response_length": 64,
        "rollout.temperature": 0.7,
        "rollout.kv_cache_gib": 0.5,
        "trainer.resume_mode": "disable",
    }
    with Trainer(settings, *overrides) as t:
        for rate in RATES:
            t.add_adapter(f"lr_{rate:g}")
            t.publish(adapter=f"lr_{rate:g}")
        for step in range(1, steps + 1):
            batch = [prompts[i % len(prompts)] for i in range((step - 1) * size, step * size)]
            metrics = {}
            for rate in RATES:
                name = f"lr_{rate:g}"
                groups = t.sample(batch, n=n, reward=compute_score, adapter=name)
                rewards = np.array([[one.reward for one in group.trajectories] for group in groups])
                advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
                rows = [one.rows[0] for group in groups for one in group.trajectories]
                t.forward_backward(rows, loss="ppo", advantages=advantages.ravel(), adapter=name)
                t.optim_step(lr=rate, grad_clip=1.0, adapter=name)
                t.publish(adapter=name)
                metrics[f"reward/{name}"] = float(rewards.mean())
            t.log(step, metrics=metrics)
        t.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
