"""Two GRPO iterations in one process (trainer.controller=local): fake engine, hf engine, and hf engine with 0.5B."""

from __future__ import annotations

import math

from scripts.gpu_check.kit import Kit
from scripts.gpu_check.runs import train

RUNS = {"fake": "fake", "hf": "hf", "hf 0.5b": "hf"}  # name of a run -> engine
REPORTED = ("sync/probe_gap", "timing/step", "timing/generate", "timing/update")


def run(kit: Kit) -> None:
    for name, engine in RUNS.items():
        with kit.part(name):
            words = [f"actor_rollout_ref.rollout.name={engine}", "trainer.controller=local"]
            if name == "hf 0.5b":
                words.append(f"actor_rollout_ref.model.path={kit.model()}")
            metrics = train(kit, name.replace(" ", "_"), *words, "trainer.total_training_steps=2")
            norms = [line["actor/grad_norm"] for line in metrics]
            assert len(norms) == 2 and all(map(math.isfinite, norms)), f"{name}: {norms}"
            kit.record(f"{name} grad_norm", norms[-1])
            for key in REPORTED:
                if key in metrics[-1]:
                    kit.record(f"{name} {key}", metrics[-1][key])
