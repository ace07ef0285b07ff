"""The proof of an exported folder: plain transformers loads it, and computes what the checkpoint computes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from alphaapollo.config.schema import Model
from alphaapollo.utils.seeds import derive_seed

Kind = Literal["policy", "reward model", "critic"]
AUTO: dict[Kind, str] = {
    "policy": "AutoModelForCausalLM",
    "reward model": "AutoModelForSequenceClassification",
    "critic": "AutoModelForTokenClassification",
}
OUTPUTS: dict[Kind, str] = {"policy": "log-probs", "reward model": "scores", "critic": "values"}
PROBE_TOKENS = 64
GAPS = {torch.float32: 5e-5, torch.bfloat16: 0.2}
"""Mean |difference| that the rounding of the weights may make, relative to 1 + the mean size of what is compared."""


def probe_tokens(vocabulary: int, pad: int | None) -> list[int]:
    """The same for every model of this vocabulary; the last one is no padding, which a classifier would pass over."""
    generator = torch.Generator().manual_seed(derive_seed(0, "export_probe"))
    tokens = [int(token) for token in torch.randint(vocabulary, (PROBE_TOKENS,), generator=generator)]
    if tokens[-1] == pad:
        tokens[-1] = (pad + 1) % vocabulary
    return tokens


@torch.no_grad()
def plain_outputs(folder: Path, kind: Kind, token_ids: list[int], source: Model) -> list[float]:
    """What transformers alone computes with the folder, in float32. Of a policy the log-prob of each token after the
    first, of a critic a value at each but the last [T - 1]; of a reward model the score [1]. Adapters are put on the
    model that they name."""
    import transformers

    auto = getattr(transformers, AUTO[kind])
    loaded = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=source.trust_remote_code).eval()
    logits = loaded(input_ids=torch.tensor([token_ids])).logits[0].float()
    if kind == "policy":
        logits = logits[:-1].log_softmax(-1).gather(1, torch.tensor(token_ids[1:]).unsqueeze(1))
    elif kind == "critic":
        logits = logits[:-1]
    return [float(value) for value in logits.flatten()]


def check_gap(expected: list[float], found: list[float], dtype: torch.dtype) -> float:
    """The mean |difference|. ValueError: it is more than rounding makes."""
    ours, theirs = torch.tensor(expected), torch.tensor(found)
    gap = float((ours - theirs).abs().mean())
    allowed = GAPS[dtype] * (1 + float(ours.abs().mean()))
    if not gap <= allowed:  # also catches nan
        raise ValueError(
            f"the exported model differs from the checkpoint by {gap:.1e} on average over {len(expected)} number(s) of "
            f"a probe, where rounding makes {allowed:.0e} at most: nothing is written. Please report it, with the "
            "model's config.json."
        )
    return gap
