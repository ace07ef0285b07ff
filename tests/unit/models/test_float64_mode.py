"""float64 throughout a model, although its code casts to float32 in norms and rotary embeddings."""

from __future__ import annotations

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from tests.unit.models.test_policy_model import some_rows

CPU = torch.device("cpu")


def computed(folder, layouts: list[list[int]], padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of three rows in order, and all gradients, in one or several forward passes."""
    attention = "padded" if padded else "sdpa"
    loaded = load_causal_lm(Model(path=str(folder), enable_gradient_checkpointing=False), attention).double()
    if loaded.config.model_type.endswith("moe"):
        loaded.set_experts_implementation("eager")  # as load_causal_lm does for float64
    policy = PolicyModel(loaded)
    passes = [policy(MicroBatchBuilder(padded, CPU).build(some_rows(), rows), 0.8).logprobs for rows in layouts]
    logprobs = torch.cat(passes)
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([one.grad.flatten() for one in policy.parameters() if one.grad is not None])


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_another_layout_differs_in_the_sixteenth_digit(model_folder, name: str):
    folder = model_folder(name)
    with Float64Mode():
        together, alone = computed(folder, [[0, 1, 2]], True), computed(folder, [[0], [1, 2]], False)
    without = computed(folder, [[0, 1, 2]], True)
    for one, other, third in zip(together, alone, without, strict=True):
        assert one.dtype == other.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
        assert (one - third).abs().max() > 1e-9  # the dtype alone leaves float32 in between


def test_new_tensors_keep_their_dtype():
    with Float64Mode():
        ones = torch.ones(2, dtype=torch.float32)
        assert ones.dtype == torch.float32
        assert ones.float().dtype == ones.to(torch.float32).dtype == ones.softmax(0, dtype=torch.float32).dtype
        assert ones.float().dtype == torch.float64
        assert torch.zeros(8, dtype=torch.uint8).view(torch.float32).shape == (2,)
    assert ones.float().dtype == torch.float32
