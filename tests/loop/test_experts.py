"""main_ppo on a tiny Qwen3-MoE: verified weight sync, and the engine's expert routing replayed in training."""

from __future__ import annotations

from pathlib import Path

from tests.loop.conftest import Runner
from tests.loop.replays import check_verified


def save_moe_model(dense: Path, folder: Path) -> Path:
    """Save a tiny Qwen3-MoE with the tokenizer of the task's model."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    base = AutoConfig.from_pretrained(dense)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=base.vocab_size,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
        bos_token_id=None,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_engine_routing_is_replayed_in_training(ppo: Runner) -> None:
    """Bfloat16 in the engine and float32 in the trainer choose different experts. The second step samples from synced
    weights. The warm process has imported vLLM without the Triton interpreter, which the routing needs."""
    program = ppo.start(
        f"actor_rollout_ref.model.path={save_moe_model(ppo.task.model, ppo.out / 'mixture')}",
        "actor_rollout_ref.rollout.router_replay=True",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.model.router_aux_loss_coef=0.01",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "data.val_files=",
        "data.max_response_length=8",
        "trainer.controller=local",
        "trainer.record_steps=[2]",
        name="experts",
        warm=False,
    )
    done = ppo.finish(program, name="experts")
    assert done.code == 0, done.output[-6000:]
    assert len(done.metrics) == 3
    for line in done.metrics[1:]:
        assert 0 < line["actor/router_differs"] < 0.2
        assert 1.0 < line["actor/expert_load_max"] < 8 and 0 <= line["actor/expert_dead"] < 1
        assert 1.9 < line["actor/router_aux_loss"] < 4
        assert line["actor/grad_norm"] > 0 and line["mismatch/k3"] < 0.01
    check_verified(done, 2, {"gradient"})  # of the load-balancing loss
    assert 1e-6 < done.metrics[1]["actor/ref_kl"] < 0.01  # the reference chooses its own experts
    from transformers import AutoModelForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(done.folder / "model")).__name__ == "Qwen3MoeForCausalLM"
