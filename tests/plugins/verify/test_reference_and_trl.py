"""The reference of `alphaapollo verify` and TRL's GRPOTrainer: equal losses and gradients of a batch, in float64.

Run with TRL 1.16 installed, or unpacked in a folder:

    PYTHONPATH=/folder/with/trl python -m pytest tests/plugins/verify/test_reference_and_trl.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.verify.reference_batches import ACTOR, AGGREGATION, CORRECTION, LOSS, compute_loss, make_config

trl = pytest.importorskip("trl", minversion="1.16", reason="install trl>=1.16, or add its folder to PYTHONPATH")

ROWS, WIDTH = 12, 9
LOW, HIGH, CAP = (f"{ACTOR}{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
KL = {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.1, f"{ACTOR}kl_loss_type": "k3"}
TOKEN_MEAN, SEQUENCE_MEAN = {AGGREGATION: "token-mean"}, {AGGREGATION: "seq-mean-token-mean"}
TOKEN_SUM, CONSTANT = {AGGREGATION: "seq-mean-token-sum"}, {AGGREGATION: "seq-mean-token-sum-norm"}
VESPO = {LOSS: "vespo", **TOKEN_MEAN}
PER_SEQUENCE = {"importance_sampling_level": "sequence"}
WITH_VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}


def list_cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, attributes of TRL's trainer (or of its arguments), and configuration."""
    of_types = {"grpo": SEQUENCE_MEAN, "bnpo": TOKEN_MEAN, "dr_grpo": CONSTANT, "dapo": TOKEN_MEAN}
    for name, mode in of_types.items():
        yield name, {"loss_type": name}, mode
        yield f"{name}, epsilon_high", {"loss_type": name, "epsilon_high": 0.28}, {**mode, HIGH: 0.28}
        yield f"{name}, beta", {"loss_type": name, "beta": 0.1}, {**mode, **KL}
    unbiased = {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True}
    yield "bias-corrected KL", unbiased, {**TOKEN_MEAN, **KL, f"{ACTOR}kl_loss_type": "unbiased"}
    yield "delta", {"loss_type": "dapo", "delta": 1.3}, {**TOKEN_MEAN, CAP: 1.3}
    yield "cispo", {"loss_type": "cispo", "epsilon_high": 1.28}, {LOSS: "cispo", HIGH: 0.28, **TOKEN_MEAN}
    yield "sapo", {"loss_type": "sapo"}, {LOSS: "sapo", **SEQUENCE_MEAN}
    yield "vespo", {"loss_type": "vespo"}, VESPO
    bounds = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    yield "gspo", {"loss_type": "grpo", **PER_SEQUENCE, **bounds}, {LOSS: "gspo", LOW: 3e-4, HIGH: 4e-4}
    yield "luspo", {"loss_type": "luspo", **PER_SEQUENCE}, {LOSS: "gspo_token", LOW: 0.2, HIGH: 0.2, **TOKEN_SUM}
    yield "luspo of tokens", {"loss_type": "luspo"}, TOKEN_SUM
    masked = {**TOKEN_MEAN, f"{CORRECTION}off_policy_mask_threshold": 0.05}
    yield "off-policy mask", {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}, masked
    yield "truncated weights", {"loss_type": "dapo", **WITH_VLLM}, {**TOKEN_MEAN, **correct("tis", "token", 1.2)}
    yield "masked sequences", {"loss_type": "dapo", **WITH_VLLM}, {**TOKEN_MEAN, **correct("mask", "sequence", 1.5)}
    yield "vespo with vLLM", {"loss_type": "vespo", **WITH_VLLM}, VESPO


def correct(method: str, level: str, high: float) -> dict[str, Any]:
    return {f"{CORRECTION}{name}": value for name, value in (("method", method), ("level", level), ("high", high))}


CASES = {name: (settings, config) for name, settings, config in list_cases()}


def make_columns() -> tuple[Tensor, dict[str, Tensor]]:
    """Mask with gaps, and log-probs and advantages of rows of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.75).double()
    lengths = torch.randint(3, WIDTH + 1, (ROWS, 1), generator=generator)
    mask = mask.masked_fill(torch.arange(WIDTH) >= lengths, 0.0)
    mask[:, 0] = 1.0
    old = -normal(ROWS, WIDTH).abs()
    logp = old + 0.4 * normal(ROWS, WIDTH)
    others = {"ref": logp + 0.3 * normal(ROWS, WIDTH), "engine": old + 0.3 * normal(ROWS, WIDTH)}
    return mask, {"logp": logp, "old": old, **others, "advantages": normal(ROWS)}


class Accelerator(SimpleNamespace):
    """One process without gradient accumulation."""

    num_processes, sync_gradients = 1, True

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def loss_of_trl(mask: Tensor, columns: dict[str, Tensor], weights: Tensor | None, settings: dict[str, Any]) -> Tensor:
    """Call GRPOTrainer's loss on tensors. weights: its importance sampling ratio."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    arguments = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    attributes = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}
    attributes |= {"use_vllm": False, "vllm_importance_sampling_correction": False, "aux_loss_enabled": False}
    attributes |= {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "max_completion_length": WIDTH}
    attributes |= {"_entropy_bonus_enabled": False, "current_gradient_accumulation_steps": 1}
    args = SimpleNamespace(**arguments | {name: value for name, value in settings.items() if name in arguments})
    trainer: Any = SimpleNamespace(**attributes | settings, args=args, accelerator=Accelerator())
    trainer.model, trainer._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
    trainer.get_gamma_weights, trainer.get_off_policy_mask = (
        GRPOTrainer.get_gamma_weights,
        GRPOTrainer.get_off_policy_mask,
    )
    logp = columns["logp"]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
    tokens = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    inputs = {"prompt_ids": tokens[:, :1], "prompt_mask": tokens[:, :1], "completion_ids": tokens}
    inputs |= {"completion_mask": mask, "advantages": columns["advantages"], "num_items_in_batch": mask.sum()}
    inputs |= {"old_per_token_logps": columns["old"], "ref_per_token_logps": columns["ref"]}
    inputs |= {"sampling_per_token_logps": columns["engine"], "importance_sampling_ratio": weights}
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, values = CASES[name]
    mask, columns = make_columns()
    ratio = (columns["old"] - columns["engine"]).exp()
    product = ((columns["old"] - columns["engine"]) * mask).sum(1, keepdim=True).exp()
    weights = {"truncated weights": ratio.clamp(max=1.2), "masked sequences": product * (product <= 1.5)}.get(name)
    weights = (ratio * mask + 1 - mask) if name == "vespo with vLLM" else weights
    results = []
    try:
        torch.set_default_dtype(torch.float64)  # of TRL's temperatures
        for is_reference in (True, False):
            logp = columns["logp"].clone().requires_grad_()
            given = {**columns, "logp": logp}
            if is_reference:
                given["engine"] = given["old"] if name == "bias-corrected KL" else given["engine"]
                given["old"] = given["engine"] if name == "vespo with vLLM" else given["old"]
                config = make_config(
                    {LOSS: "ppo", AGGREGATION: "token-mean", "data.max_response_length": WIDTH, **values}
                )
                loss, _ = compute_loss(mask, config, given)
            else:
                loss = loss_of_trl(mask, given, weights, settings)
            loss.backward()
            results.append((loss.detach(), logp.grad * mask))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)
