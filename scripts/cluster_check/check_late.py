"""Error for a node that does not join within the time limit; notice while waiting for a late node."""

from __future__ import annotations

import time
from typing import Any

from scripts.cluster_check.kit import Kit, expect, join, start_head
from scripts.cluster_check.machines import machines, wait_until

FAKE = ("trainer.nnodes=2", "actor_rollout_ref.rollout.name=fake")
JOINED = "1 have joined: 10.77.0.1 (node1)"


def run(kit: Kit) -> dict[str, Any]:
    with machines(2, kit.folder / "logs", {}) as (head, other):
        start_head(head)
        start = time.monotonic()
        never = kit.train(head, "missing", *FAKE, "trainer.start_timeout=5")
        seconds = time.monotonic() - start
        expect(never, 2, f"{JOINED}. Waited 5 s (trainer.start_timeout).", "lower nnodes")
        late = kit.driver(head, "late", *FAKE)
        log = head.logs / f"{head.name}.late.log"
        wait_until(lambda: "waiting: " in log.read_text(), 120, f"the wait is not reported: {log}")
        join(other, head)
        expect(kit.done(head, "late", late.wait()), 0, "waiting: ", f"{JOINED} (0 of at most 600 s)")
    return {"seconds until a missing node was reported": seconds}
