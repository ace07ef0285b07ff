"""A policy gradient with a loss of one's own: python -m examples.own_loop.own_loss MODEL [KEY=VALUE ...]"""

import sys

import torch

from alphaapollo import Trainer
from alphaapollo.types import Prompt

CHATS = [[{"role": "user", "content": f"Write digits, case {number}."}] for number in range(8)]


def count_digits(prompt: Prompt, completion: str) -> float:
    return sum(letter.isdigit() for letter in completion) / 10


def truncated_gradient(logp: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """REINFORCE with a truncated importance weight, and a penalty on confident tokens."""
    weight = (logp - columns["engine"]).exp().clamp(max=2.0).detach()
    return -weight * columns["advantage"][:, None] * logp + 0.001 * logp.exp()


def main(model: str, *overrides: str, steps: int = 20, n: int = 8) -> None:
    with Trainer({"model.path": model, "data.max_response_length": 16}, *overrides) as t:
        for step in range(1, steps + 1):
            groups = t.sample(CHATS, n=n, reward=count_digits)
            samples = [one for group in groups for one in group.trajectories]
            mean, rows = sum(one.reward for one in samples) / len(samples), [one.rows[0] for one in samples]
            columns = {"advantage": [one.reward - mean for one in samples], "engine": [row.logprobs for row in rows]}
            for part in (slice(0, None, 2), slice(1, None, 2)):  # two calls, one step: the sum over all tokens
                half = {name: column[part] for name, column in columns.items()}
                tokens = sum(sum(row.action_mask) for row in rows)
                t.forward_backward(rows[part], truncated_gradient, denominator=tokens, **half)
            t.optim_step(lr=1e-3, grad_clip=1.0)
            t.publish()
            t.log(step, groups)


if __name__ == "__main__":
    main(*sys.argv[1:])
