"""Two iterations in one process (trainer.controller=local), with the fake and the hf engine."""

from __future__ import annotations

import math
from typing import Any

from scripts.gpu_check.kit import Kit
from scripts.gpu_check.runs import train


def run(kit: Kit) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for engine in ("fake", "hf"):
        metrics = train(
            kit,
            engine,
            f"actor_rollout_ref.rollout.name={engine}",
            "trainer.controller=local",
            "trainer.total_training_steps=2",
        )
        norms = [line["actor/grad_norm"] for line in metrics]
        assert len(norms) == 2 and all(map(math.isfinite, norms)), f"{engine}: {norms}"
        figures[f"{engine} grad_norm"] = norms[-1]
        figures |= {f"{engine} {key}": metrics[-1][key] for key in ("sync/probe_gap",) if key in metrics[-1]}
    return figures
