"""Measure the controller's processor time for one actor call and for one returned group.

    .venv/bin/python scripts/bench/ray_call.py

Many concurrent calls go through the controller's RayRanks on a local Ray: single calls, as in generation, or one call
of all ranks. scripts/simulate_cluster.py runs without Ray and adds its time (`--ray-call`, `--ray-call-of-all`,
`--ray-threads`): the time of a call here minus that of the same call there (`charge_us`). The last line is a JSON
object with medians of the rounds; `ratio` is the number of ranks, in thousands, that one core calls per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
from ray.util.placement_group import placement_group  # noqa: E402

from alphaapollo.controller.ray_cluster import start_local_cluster  # noqa: E402
from alphaapollo.controller.ray_ranks import ActorSlot, RayRanks  # noqa: E402
from alphaapollo.types import GroupRequest, Prompt, Sampling  # noqa: E402
from scripts.bench._task import machine  # noqa: E402
from scripts.simulation.clock import Clock, Loop  # noqa: E402
from scripts.simulation.workers import FakeRollout, Latencies, Network, SimulatedRanks  # noqa: E402

Calls = Callable[[RayRanks[Any], Callable[[Any], Any]], Awaitable[Any]]


async def one_by_one(ranks: RayRanks[Any], function: Callable[[Any], Any]) -> None:
    await asyncio.gather(*(ranks.call_rank(rank, function) for rank in range(ranks.size)))


async def of_all(ranks: RayRanks[Any], function: Callable[[Any], Any]) -> None:
    await ranks.call(function)


async def measure(ranks: RayRanks[Any], calls: Calls, function: Callable[[Any], Any]) -> dict[str, float]:
    """Microseconds per call: of the main thread, of all other threads, and elapsed."""
    before = time.thread_time(), time.process_time(), time.perf_counter()
    await calls(ranks, function)
    after = time.thread_time(), time.process_time(), time.perf_counter()
    own, every, wall = ((end - begin) / ranks.size * 1e6 for begin, end in zip(before, after, strict=True))
    return {"main_thread_us": own, "other_threads_us": every - own, "wall_us": wall}


def simulated(size: int, calls: Calls) -> float:
    """Microseconds of the same call in the simulation, without the time added for Ray."""
    clock = Clock()
    latencies = Latencies(ray_call=0.0, ray_call_of_all=0.0)
    ranks = SimulatedRanks("rollout", Network(clock, latencies), [FakeRollout(latencies, clock)] * size)
    loop = Loop(clock)
    begin = clock.work()
    loop.run_until_complete(calls(ranks, lambda worker: None))
    taken = clock.work() - begin
    loop.close()
    return taken / size * 1e6


async def real(size: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Measurements of each round by kind of call. The ranks are two actors, repeated."""
    actors = 2
    bundles = placement_group([{"CPU": 0.1}] * actors)
    await bundles.ready()
    ranks: RayRanks[Any] = RayRanks("rollout", [ActorSlot(bundles, index) for index in range(actors)])
    request = GroupRequest(Prompt(0, "bench", "question"), 8, Sampling(2048), stream_position=0)
    group = await FakeRollout(Latencies(tokens_per_second=1e9, grading=0.0), Clock()).generate(request)
    await ranks.locate_actors()
    await ranks.start([lambda: group] * actors, [{}] * actors)
    own = ranks.actors
    figures: dict[str, list[dict[str, float]]] = {"call": [], "call_of_all": [], "group_of_8": []}
    for _ in range(1 + rounds):
        ranks.actors, ranks.size = own * (size // actors), size
        ranks.process_names = ranks.process_names[:1] * size
        figures["call"].append(await measure(ranks, one_by_one, lambda worker: None))
        figures["call_of_all"].append(await measure(ranks, of_all, lambda worker: None))
        ranks.size = size // 10
        figures["group_of_8"].append(await measure(ranks, one_by_one, lambda worker: worker))
    return {kind: every[1:] for kind, every in figures.items()}  # the first round warms up


def summary(figures: dict[str, list[dict[str, float]]], size: int) -> dict[str, Any]:
    """Medians of the rounds, and the time that the simulation adds per call."""
    kinds = {
        kind: {name: round(median(one[name] for one in rounds), 1) for name in rounds[0]}
        for kind, rounds in figures.items()
    }
    charged: dict[str, Calls] = {"call": one_by_one, "call_of_all": of_all}
    there = {kind: median([simulated(size, calls) for _ in figures[kind]]) for kind, calls in charged.items()}
    charges = {kind: round(kinds[kind]["main_thread_us"] - there[kind], 1) for kind in charged}
    return {**kinds, "charge_us": charges, "simulated_us": {kind: round(own, 1) for kind, own in there.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1024, help="concurrent calls; an even number")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    start_local_cluster()
    try:
        figures = asyncio.run(real(args.calls, args.rounds))
    finally:
        ray.shutdown()
    result = summary(figures, args.calls)
    ratio = round(1e3 / result["call_of_all"]["main_thread_us"], 3)
    print(json.dumps({"benchmark": "ray_call", "ratio": ratio, **result, **machine()}))


if __name__ == "__main__":
    main()
