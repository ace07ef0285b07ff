"""On-policy distillation (arXiv 2306.13649): python -m examples.own_loop.distill STUDENT TEACHER [KEY=VALUE ...]"""

import sys

from alphaapollo import Trainer

CHATS = [[{"role": "user", "content": f"{a} + {b} = ?"}] for a in range(10) for b in range(10)]


def main(student: str, teacher: str, *overrides: str, steps: int = 20, size: int = 10, n: int = 4) -> None:
    models = {"model.path": student, "teacher.model.path": teacher, "teacher.divergence": "sampled"}
    with Trainer({**models, "data.max_response_length": 32}, *overrides) as t:
        for step in range(1, steps + 1):
            groups = t.sample([CHATS[(step * size + i) % len(CHATS)] for i in range(size)], n=n)
            rows = [one.rows[0] for group in groups for one in group.trajectories]
            own, other = t.log_probs(rows), t.log_probs(rows, model="teacher")
            reverse_kl = [a - b for a, b in zip(own, other, strict=True)]  # sampled estimate at each token
            result = t.forward_backward(rows, loss="ppo", old_logprobs=own, advantages=[-one for one in reverse_kl])
            t.optim_step(lr=1e-3, grad_clip=1.0)
            t.publish()
            t.log(step, groups, {"distill/reverse_kl": sum(one.sum() for one in reverse_kl) / result.num_tokens})


if __name__ == "__main__":
    main(*sys.argv[1:])
