"""scripts/cluster/ray_job.sh on a Ray head: sequence parallelism, replicas, and the exit status of the run."""

from __future__ import annotations

from typing import Any

from scripts.checks import ROOT
from scripts.cluster_check.kit import SETTINGS, FinishedRun, Kit, expect
from scripts.cluster_check.machines import Machine


def run(kit: Kit) -> dict[str, Any]:
    with kit.cluster(2) as (head, _):
        two = ("trainer.nnodes=2", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.num_engines=2")
        done = submit(
            kit,
            head,
            "ray_job",
            *two,
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        )
        expect(done, 0, "4 x process of 1 thread(s) on 2 node(s), FSDP2, sequence parallel 2")
        assert len(done.metrics) == 1 and done.metrics[0]["sync/probe_gap"] < 5e-5, done.metrics
        refused = submit(kit, head, "refused", *two, "actor_rollout_ref.actor.fsdp_config.fsdp_size=3")
        expect(refused, 2, "fsdp_size=3, trainer.n_gpus_per_node=2, trainer.nnodes=2: it must divide")
    return {"exit statuses": "0, 2", "probe_gap": done.metrics[0]["sync/probe_gap"]}


def submit(kit: Kit, head: Machine, name: str, *words: str) -> FinishedRun:
    """Submit a job, which runs on the head."""
    script = ROOT / "scripts" / "cluster" / "ray_job.sh"
    address = f"http://{head.address}:8265"
    process = head.start("bash", str(script), address, "rl", *kit.words(name, *words), log=name, **SETTINGS)
    return kit.done(head, name, process.wait())
