"""Verification of an exported folder: transformers loads it and computes the same outputs as the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from alphaapollo.config.schema import Model
from alphaapollo.data.images import EXCLUDED_LOGIT, find_placeholder_ids, reads_pictures
from alphaapollo.models.load import has_custom_code, load_config
from alphaapollo.utils.seeds import derive_seed

ModelKind = Literal["policy", "reward model", "critic"]
AUTO_CLASSES: dict[ModelKind, str] = {
    "policy": "AutoModelForCausalLM",
    "reward model": "AutoModelForSequenceClassification",
    "critic": "AutoModelForTokenClassification",
}
OUTPUT_NAMES: dict[ModelKind, str] = {"policy": "log-probs", "reward model": "scores", "critic": "values"}
PROBE_TOKENS = 64
TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 0.2}
"""Allowed mean |difference| from rounding the weights, relative to 1 + the mean absolute value."""


def make_probe_tokens(vocab_size: int, pad_token_id: int | None) -> list[int]:
    """Return fixed random token ids for comparing an exported model with its checkpoint. The last is not padding."""
    generator = torch.Generator().manual_seed(derive_seed(0, "export_probe"))
    tokens = [int(token) for token in torch.randint(vocab_size, (PROBE_TOKENS,), generator=generator)]
    if tokens[-1] == pad_token_id:  # classifiers would ignore it
        tokens[-1] = (pad_token_id + 1) % vocab_size
    return tokens


@torch.no_grad()
def compute_transformers_outputs(folder: Path, kind: ModelKind, token_ids: list[int], source: Model) -> list[float]:
    """Compute the outputs of an exported model on `token_ids` with transformers only, in float32.

    Returns a policy's T - 1 log-probs of token_ids[1:], a critic's T - 1 values at token_ids[:-1], or a reward model's
    score as a list of one number. Adapters are loaded on their base model.
    """
    import transformers

    config = load_config(source)
    vision = reads_pictures(config) and not has_custom_code(source, config)
    auto = getattr(transformers, "AutoModelForImageTextToText" if vision else AUTO_CLASSES[kind])
    loaded = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=source.trust_remote_code).eval()
    logits = loaded(input_ids=torch.tensor([token_ids])).logits[0].float()
    if kind == "policy":
        logits[:, list(find_placeholder_ids(loaded.config))] = EXCLUDED_LOGIT
        logits = logits[:-1].log_softmax(-1).gather(1, torch.tensor(token_ids[1:]).unsqueeze(1))
    elif kind == "critic":
        logits = logits[:-1]
    return [float(value) for value in logits.flatten()]


def check_exported_outputs(expected: list[float], exported: list[float], dtype: torch.dtype) -> float:
    """Return the mean |difference| between the outputs of a checkpoint and of the model exported from it. Raises
    ValueError if it is larger than the rounding of weights to `dtype` explains."""
    reference = torch.tensor(expected)
    difference = float((reference - torch.tensor(exported)).abs().mean())
    allowed = TOLERANCES[dtype] * (1 + float(reference.abs().mean()))
    if not difference <= allowed:  # also true for NaN
        raise ValueError(
            f"the outputs of the exported model differ from those of the checkpoint by {difference:.1e} on average, "
            f"but rounding explains only {allowed:.0e}. The export is discarded. Please report this model as a bug."
        )
    return difference
