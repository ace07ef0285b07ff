"""What one call of an actor takes of the controller, and one group that comes back, in processor time.

    .venv/bin/python scripts/bench/ray_call.py

The calls go through the controller's own RayRanks on a Ray of this machine, many at once. scripts/simulate_cluster.py
takes these figures, for it has no Ray (`--ray-call`, `--ray-threads`). The last line is a JSON object; `ratio` is how
many thousand calls a second one core carries.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
from ray.util.placement_group import placement_group  # noqa: E402

from alphaapollo.controller.ray_crew import start_local_cluster  # noqa: E402
from alphaapollo.controller.ray_ranks import RayRanks, RolloutHost, Seat  # noqa: E402
from alphaapollo.types import GroupRequest, Prompt, Sampling  # noqa: E402
from scripts.bench._task import machine  # noqa: E402
from scripts.simulation.clock import Clock  # noqa: E402
from scripts.simulation.workers import FakeRollout, Latencies  # noqa: E402


async def measure(ranks: RayRanks[Any], function: Callable[[Any], Any], calls: int) -> dict[str, float]:
    """Microseconds a call: of the main thread, of all threads, and of the clock."""
    before = time.thread_time(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(ranks.call_one(index % ranks.size, function) for index in range(calls)))
    after = time.thread_time(), time.process_time(), time.perf_counter()
    own, every, wall = ((end - begin) / calls * 1e6 for begin, end in zip(before, after, strict=True))
    return {"main_thread_us": own, "other_threads_us": every - own, "wall_us": wall}


async def bench(calls: int) -> dict[str, Any]:
    actors = 2
    bundles = placement_group([{"CPU": 0.1}] * actors)
    await bundles.ready()
    ranks: RayRanks[Any] = RayRanks(RolloutHost, [Seat(bundles, index, 0.1) for index in range(actors)])
    request = GroupRequest(Prompt(0, "bench", "question"), 8, Sampling(2048), draw=0)
    group = await FakeRollout(Latencies(tokens_per_second=1e9, grading=0.0), Clock()).generate(request)
    await ranks.start([lambda: group] * actors, [])
    await measure(ranks, lambda worker: None, calls)  # warm up
    return {
        "call": await measure(ranks, lambda worker: None, calls),
        "group_of_8": await measure(ranks, lambda worker: worker, max(1, calls // 10)),
        "group_bytes": len(pickle.dumps(group, protocol=5)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    start_local_cluster()
    try:
        figures = asyncio.run(bench(args.calls))
    finally:
        ray.shutdown()
    ratio = round(1e3 / figures["call"]["main_thread_us"], 3)
    print(json.dumps({"benchmark": "ray_call", "ratio": ratio, **figures, **machine()}))


if __name__ == "__main__":
    main()
