"""One training node and two nodes for engines only, which copy the weights of the training node; then the same with
LoRA adapters, and with weights in bfloat16 of which few change."""

from __future__ import annotations

from typing import Any

from scripts.cluster_check.kit import Kit, expect

TRIAL_ANSWERS = 10  # at most this many answers are graded on the driver's node before the start
FEW_CHANGES = ("actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.actor.optim.lr=1e-6")
ADAPTERS = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.lora=adapter")


def run(kit: Kit) -> dict[str, Any]:
    kit.task()
    gaps, graded, copied = {}, {}, {}
    with kit.cluster(3) as (head, *_):
        for name, settings in (("weights", ()), ("adapters", ADAPTERS), ("changes", FEW_CHANGES)):
            before = kit.graded_on()
            steps = "trainer.total_training_steps=2"
            done = kit.train(head, name, "actor_rollout_ref.rollout.nnodes=2", steps, *settings)
            expect(done, 0, "1 x process of 1 thread(s) on 1 node(s)", "2 x cpu of 1 thread(s) on 2 node(s)")
            gaps[name] = max(line["sync/probe_gap"] for line in done.metrics)
            copied[name] = max(line["sync/copied_gib"] for line in done.metrics)
            limit = 5e-5 if name != "changes" else 0.1  # bfloat16
            assert len(done.metrics) == 2 and gaps[name] < limit, done.metrics
            graded[name] = {node: count - before.get(node, 0) for node, count in kit.graded_on().items()}
            engines = [node for node, count in graded[name].items() if count > TRIAL_ANSWERS]
            assert len(engines) == 2, f"{name}: graded on {graded[name]}, not on two nodes"
    assert copied["changes"] < copied["weights"] / 10, copied
    return {
        "copied GiB": str(copied),
        "probe_gap": gaps["weights"],
        "probe_gap of adapters": gaps["adapters"],
        "graded": str(graded),
    }
