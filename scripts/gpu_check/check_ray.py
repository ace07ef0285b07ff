"""An iteration on Ray with vLLM, then a second one resumed from its checkpoint, and the log-prob mismatch."""

from __future__ import annotations

import math

from scripts.gpu_check.kit import Kit, need
from scripts.gpu_check.runs import train


def run(kit: Kit) -> None:
    need("vllm", "ray")
    train(kit, "ray", "trainer.total_training_steps=1", "trainer.save_freq=1")
    metrics = train(kit, "ray", "trainer.total_training_steps=2", "trainer.save_freq=1")
    assert [line["step"] for line in metrics] == [1, 2], "the second run resumed after the first"
    gaps = [line["sync/probe_gap"] for line in metrics]
    assert all(map(math.isfinite, gaps))
    kit.record("probe_gap", max(gaps))
    kit.record("step_seconds", metrics[-1]["timing/step"])
