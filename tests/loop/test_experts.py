"""main_ppo on a tiny Qwen3-MoE: verified weight sync, and the engine's expert routing replayed in training."""

from __future__ import annotations

from examples.quickstart.make_task import make_tokenizer
from tests.loop.conftest import Runner
from tests.loop.engine_kit import make_model
from tests.loop.replays import check_verified


def test_engine_routing_is_replayed_in_training(ppo: Runner) -> None:
    """Bfloat16 in the engine and float32 in the trainer choose different experts. The second step samples from synced
    weights. The warm process has imported vLLM without the Triton interpreter, which the routing needs."""
    mixture = ppo.out / "mixture"
    make_tokenizer(mixture)
    sizes = {"eos_token_id": 258, "num_experts": 8, "moe_intermediate_size": 32, "max_position_embeddings": 256}
    make_model("Qwen3Moe", 0, **sizes, tie_word_embeddings=True).save_pretrained(mixture)
    program = ppo.start(
        f"actor_rollout_ref.model.path={mixture}",
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
