"""Publishing weights into a running engine, and that each of the two verifications can fail.

digest: over all parameters that the engine computes with. probe: log-probs of the engine and of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.types import Sampling
from tests.loop.engine_kit import ENGINES_AT_NIGHT, PLUGIN_ENGINES, PROBE, Session, checkpoint, make_model, start_engine

ONE_KEY_HEAD = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
UNTIED = {"vocab_size": 300, "attention_bias": True, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("kind", "sizes", "rollout"),
    [
        ("Qwen3", {"tie_word_embeddings": True}, {}),
        ("Llama", {"vocab_size": 300, "tie_word_embeddings": False}, {}),  # the engine pads 300 to 320
        ("Qwen3Moe", {"tie_word_embeddings": True, "moe_intermediate_size": 48}, {}),  # padded to 64 for its kernel
        ("Llama", ONE_KEY_HEAD, {"tensor_model_parallel_size": 2}),  # only one of two ranks adds the biases
        *(("Qwen3Moe", UNTIED, {"name": name}) for name in PLUGIN_ENGINES),
    ],
)
def test_published_weights_are_loaded_and_used(
    kind: str, sizes: dict[str, Any], rollout: dict[str, Any], tmp_path: Path
) -> None:
    old, new = (make_model(kind, seed, **sizes) for seed in (0, 1))
    perturb(old, new)
    with start_engine(old, tmp_path, **rollout) as session:
        assert session.gap(old) < 1e-5 and session.gap(new) > 0.1
        for version, model in enumerate((new, old, new), start=1):
            with session.sent(model, version) as update:
                session.publish_verified(update)
            assert session.gap(model) < 1e-5
        (answer,) = session.generate((PROBE, Sampling(4)))
        assert answer.weight_version == 3


def test_published_experts_are_verified_on_two_ranks_with_complete_experts(tmp_path: Path) -> None:
    """Without a forward pass, for which vLLM's CPU kernel needs all experts."""
    old, new = (make_model("Qwen3Moe", seed, tie_word_embeddings=True) for seed in (0, 1))
    arguments = {"tensor_model_parallel_size": 2, "engine_kwargs": {"vllm": {"enable_expert_parallel": True}}}
    with start_engine(old, tmp_path, **arguments) as session, session.sent(new, 1) as update:
        session.publish_verified(update)


def perturb(*models: Any) -> None:
    """Make norms and biases differ, which start as ones and zeros in every model."""
    for seed, model in enumerate(models):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


OLD, NEW = (make_model("Qwen3", seed, tie_word_embeddings=True) for seed in (0, 1))


@pytest.fixture(scope="module", params=ENGINES_AT_NIGHT)
def tied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with start_engine(OLD, tmp_path_factory.mktemp("tied"), name=request.param) as session:
        yield session


@pytest.mark.parametrize("tied", ["vllm"], indirect=True)
def test_stale_output_head_fails_both_verifications(tied: Session) -> None:
    """With tied embeddings, the output head's packed copy is stale: the parameters are right but are not used."""
    with tied.sent(NEW, 1) as update:
        tied.run(tied.receive(update))
        (stale,) = tied.run(tied.engine._call_workers("alphaapollo_compute_weight_digest", False))
        assert tied.gap(NEW) > 1e-2
        assert f"{stale:016x}" != update.digest
        receipt = tied.publish(update)
    assert receipt.digest == update.digest and tied.gap(NEW) < 1e-5


def test_one_wrong_bit_fails_the_digest(tied: Session) -> None:
    wrong = checkpoint(NEW)
    name = "model.layers.1.mlp.down_proj.weight"
    wrong[name] = wrong[name].clone()
    wrong[name].view(torch.int32)[0, 0] ^= 1
    with tied.sent(NEW, 1) as right:
        pass
    with tied.sent(wrong, 1) as update:
        receipt = tied.publish(update)
    assert receipt.digest == update.digest != right.digest
    assert tied.gap(NEW) < 1e-5  # too small for the probe


def test_missing_weights_fail_the_digest(tied: Session) -> None:
    part = {name: tensor + 1 for name, tensor in checkpoint(NEW).items() if "layers.1" not in name}
    with tied.sent(part, 1) as update:
        assert tied.publish(update).digest != update.digest


def test_bfloat16(tmp_path: Path) -> None:
    with start_engine(OLD, tmp_path, dtype="bfloat16") as session, session.sent(NEW, 1, torch.bfloat16) as update:
        session.publish_verified(update)
        assert session.gap(NEW) < 0.1 < session.gap(OLD)
