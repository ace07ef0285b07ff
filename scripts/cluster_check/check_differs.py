"""Errors that name a node with a different torch, without model files, or with its own outputs, at the start."""

from __future__ import annotations

from typing import Any

from scripts.checks import ROOT
from scripts.cluster_check.kit import Kit, expect, join, start_head
from scripts.cluster_check.machines import machines


def run(kit: Kit) -> dict[str, Any]:
    task, runs = kit.task(), kit.folder / "runs"
    runs.mkdir()
    installed = kit.folder / "other" / "torch-1.2.3.dist-info"  # precedes the real one on the path
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    with machines(2, kit.folder / "logs", {2: (task, runs)}) as (head, other):
        start_head(head)
        join(other, head, PYTHONPATH=f"{installed.parent}:{ROOT}").wait()
        done = kit.train(head, "differs", "trainer.nnodes=2", "actor_rollout_ref.rollout.name=hf")
    files = (f"actor_rollout_ref.model.path={task / 'model'}", f"custom_reward_function.path={task / 'reward.py'}")
    outputs = f"trainer.output_dir={runs}/alphaapollo/differs/config.yaml"
    named = [f"{name} is missing, not" for name in (*files, outputs)]
    expect(done, 1, "node 10.77.0.2:", "torch is 1.2.3, not 2.", *named)
    return {"named": "torch, actor_rollout_ref.model.path, custom_reward_function.path, trainer.output_dir"}
