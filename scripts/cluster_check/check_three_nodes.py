"""Three nodes with a rank and an engine each; the engines serve LoRA adapters."""

from __future__ import annotations

from typing import Any

from scripts.cluster_check.kit import Kit, expect


def run(kit: Kit) -> dict[str, Any]:
    with kit.cluster(3) as (head, *_):
        done = kit.train(
            head,
            "three_nodes",
            "trainer.nnodes=3",
            "env.rollout.n=6",
            "actor_rollout_ref.actor.ppo_mini_batch_size=48",
            "actor_rollout_ref.rollout.num_engines=3",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.rollout.lora=adapter",
            "trainer.total_training_steps=2",
        )
    expect(done, 0)
    gap = max(line["sync/probe_gap"] for line in done.metrics)
    assert len(done.metrics) == 2 and gap < 5e-5, done.metrics
    graded = kit.graded_on()
    assert set(graded) == {"node1", "node2", "node3"}, f"graded only on {graded}"
    return {"probe_gap": gap, "graded": str(graded)}
