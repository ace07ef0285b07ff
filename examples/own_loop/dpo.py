"""DPO (arXiv 2305.18290) in a loop of one's own: python -m examples.own_loop.dpo MODEL [KEY=VALUE ...]"""

import sys

import torch
from transformers import AutoTokenizer

from alphaapollo import Trainer, make_row

PAIRS = [(f"{a} + {b} = ", f"{a + b}", f"{a - b}") for a in range(8) for b in range(1, 9)]


def dpo(logp: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    margins = ((logp - columns["reference"]) * columns["mask"]).sum(1)  # [chosen, rejected, chosen, ...]
    return -torch.nn.functional.logsigmoid(0.1 * (margins[0::2] - margins[1::2])).repeat_interleave(2) / 2


def main(model: str, *overrides: str, steps: int = 8) -> None:
    encode = AutoTokenizer.from_pretrained(model).encode
    texts = [(encode(prompt), encode(answer)) for prompt, *answers in PAIRS for answer in answers]
    rows = [make_row(one + other, [0.0] * len(one) + [1.0] * len(other)) for one, other in texts]
    pairs = [index // 2 for index in range(len(rows))]
    with Trainer({"model.path": model, "lora_rank": 8}, *overrides, engines=0) as t:
        reference = t.log_probs(rows)
        for step in range(1, steps + 1):
            result = t.forward_backward(rows, dpo, denominator=len(PAIRS), groups=pairs, reference=reference)
            t.optim_step(lr=1e-3)
            t.log(step, metrics={"train/loss": result.loss})


if __name__ == "__main__":
    main(*sys.argv[1:])
