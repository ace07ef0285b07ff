"""Publishing weights into a running engine, and that each of the two proofs can fail.

digest   over all parameters, of what the engine computes with       probe   log-probs, engine against transformers
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.rollout.engine import EngineError
from alphaapollo.types import Sampling
from tests.loop.engine_kit import PROBE, Session, checkpoint, engine_on, logprobs_of, make_model, mean_gap

pytestmark = pytest.mark.timeout(240)


def gap(session: Session, model: Any) -> float:
    return mean_gap(session.run(session.engine.score(PROBE)), logprobs_of(model, PROBE))


@pytest.mark.parametrize(
    ("kind", "sizes", "rollout"),
    [
        ("Qwen3", {"tie_word_embeddings": True}, {}),
        ("Llama", {"vocab_size": 300, "tie_word_embeddings": False}, {}),  # the engine pads 300 to 320
        ("Qwen3Moe", {"tie_word_embeddings": True, "moe_intermediate_size": 48}, {}),  # padded to 64 for its kernel
        # Two ranks: biases that only one of them adds, a key head that both hold.
        (
            "Llama",
            {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
            {"tensor_model_parallel_size": 2},
        ),
    ],
)
def test_published_weights_are_held_and_computed_with(
    kind: str, sizes: dict[str, Any], rollout: dict[str, Any], tmp_path: Path
) -> None:
    old, new = (make_model(kind, seed, **sizes) for seed in (0, 1))
    perturb(old, new)
    with engine_on(old, tmp_path, **rollout) as session:
        assert gap(session, old) < 1e-5
        assert gap(session, new) > 0.1
        for version, model in enumerate((new, old, new), start=1):
            with session.sent(model, version) as update:
                receipt = session.run(session.engine.receive_weights(update))
            assert (receipt.version, receipt.digest) == (update.version, update.digest)
            assert gap(session, model) < 1e-5
        (answer,) = session.generate((PROBE, Sampling(4)))
        assert answer.weight_version == 3
        assert not list(Path("/dev/shm").glob("vllm_dist_*")), "vLLM's own shared memory is left"


def perturb(*models: Any) -> None:
    """Norms and biases start as ones and zeros in every model: make them differ."""
    for seed, model in enumerate(models):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_both_proofs_can_fail(tmp_path: Path) -> None:
    """Tied embeddings, and the output head's packed copy not renewed: parameters are right, and computed with are the
    old ones."""
    old, new = (make_model("Qwen3", seed, tie_word_embeddings=True) for seed in (0, 1))
    with engine_on(old, tmp_path) as session, session.sent(new, 1) as update:
        stale = session.run(session.engine._on_workers("alphaapollo_receive", update.path, False))
        assert gap(session, new) > 1e-2  # the probe sees it
        assert f"{stale[0]:016x}" != update.digest  # and the digest, for it is of what is computed with

        receipt = session.run(session.engine.receive_weights(update))
        assert receipt.digest == update.digest and gap(session, new) < 1e-5

        one_bit = checkpoint(new)
        name = "model.layers.1.mlp.down_proj.weight"
        one_bit[name] = one_bit[name].clone()
        one_bit[name].view(torch.int32)[0, 0] ^= 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.loop.engine_kit.checkpoint", lambda model: one_bit)
            with session.sent(new, 2) as wrong:
                receipt = session.run(session.engine.receive_weights(wrong))
        assert receipt.digest == wrong.digest != update.digest  # one bit of one parameter
        assert gap(session, new) < 1e-5  # which no probe would see


def test_bfloat16(tmp_path: Path) -> None:
    old, new = (make_model("Qwen3", seed, tie_word_embeddings=True) for seed in (0, 1))
    with engine_on(old, tmp_path, dtype="bfloat16") as session, session.sent(new, 1, torch.bfloat16) as update:
        receipt = session.run(session.engine.receive_weights(update))
        assert receipt.digest == update.digest
        assert gap(session, new) < 0.1 < gap(session, old)


def test_weights_while_requests_run_are_refused(tmp_path: Path) -> None:

    model = make_model("Qwen3", 0)
    with engine_on(model, tmp_path) as session, session.sent(model, 1) as update:

        async def too_early() -> None:
            request = asyncio.ensure_future(session.engine.generate(PROBE, Sampling(200), "long"))
            while not session.engine._llm.get_num_unfinished_requests():
                await asyncio.sleep(0)
            await session.engine.receive_weights(replace(update))
            await request

        with pytest.raises(EngineError, match="while requests were running"):
            session.run(too_early())


def test_a_folder_that_lacks_weights_is_seen(tmp_path: Path) -> None:
    old, new = (make_model("Qwen3", seed, tie_word_embeddings=False) for seed in (0, 1))
    part = {name: tensor for name, tensor in checkpoint(new).items() if "layers.1" not in name}
    with engine_on(old, tmp_path) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.loop.engine_kit.checkpoint", lambda model: part)
        with session.sent(new, 1) as update:
            receipt = session.run(session.engine.receive_weights(update))
    assert receipt.digest != update.digest
