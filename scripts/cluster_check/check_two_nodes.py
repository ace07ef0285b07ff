"""Two nodes with a training rank and a vLLM engine each: the policy learns to write digits, responses of both engines
are graded, and weights are verified on both."""

from __future__ import annotations

from typing import Any

from scripts.cluster_check.kit import Kit, expect

STEPS = 16


def run(kit: Kit) -> dict[str, Any]:
    with kit.cluster(2) as nodes:
        head = nodes[0]
        done = kit.train(
            head,
            "two_nodes",
            "trainer.nnodes=2",
            "actor_rollout_ref.rollout.num_engines=2",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=8",
            "trainer.export_hf=true",
        )
        left = [one.name for one in nodes if "alphaapollo" in one.say("ls", "/dev/shm")]
        assert not left, f"shared memory was not removed: {left}"
    expect(done, 0, "2 x process of 1 thread(s) on 2 node(s)")
    rewards = [line["critic/score/mean"] for line in done.metrics]
    assert len(rewards) == STEPS, rewards
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.1, f"the reward did not rise: {rewards}"
    gap = max(line["sync/probe_gap"] for line in done.metrics)
    assert gap < 5e-5, f"the engine's log-probs differ from the trainer's by {gap}"
    graded = kit.graded_on()
    assert min(graded["node1"], graded["node2"]) > 0.2 * STEPS * 32, f"an engine was idle: {graded}"
    return {"reward at first": first, "at last": last, "probe_gap": gap, "graded": str(graded)}
