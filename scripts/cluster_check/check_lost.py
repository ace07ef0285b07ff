"""Run that loses a node: it ends with an error that names the node."""

from __future__ import annotations

import time
from typing import Any

from scripts.cluster_check.kit import Kit, expect
from scripts.cluster_check.machines import wait_until


def run(kit: Kit) -> dict[str, Any]:
    with kit.cluster(2) as (head, other):
        endless = ("trainer.total_training_steps=100000", "trainer.max_restarts=0")  # otherwise it waits for the node
        driver = kit.driver(head, "lost", "trainer.nnodes=2", "actor_rollout_ref.rollout.name=fake", *endless)

        def trains() -> bool:
            assert driver.poll() is None, f"the run ended early: {head.logs}"
            return len(kit.metrics("lost")) > 1

        wait_until(trains, 300, f"the run does not train: {head.logs}")
        start = time.monotonic()
        other.end()
        done = kit.done(head, "lost", driver.wait())
        seconds = time.monotonic() - start
    expect(done, 1, "on node 10.77.0.2) died")
    return {"seconds until it was reported": seconds}
