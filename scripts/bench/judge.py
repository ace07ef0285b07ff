"""Measure the time of many judgements at a mock server with a fixed latency.

    .venv/bin/python scripts/bench/judge.py

1,000 completions are judged by `reward.judge` with 32 connections; the server, in a process of its own, answers each
request after 200 ms. Ideal: 1000 / 32 * 0.2 s = 6.25 s. `ratio`: ideal over measured time. `again`: seconds for the
same completions once more, from the cache. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from alphaapollo.config.schema import CustomRewardFunction, Judge, Reward  # noqa: E402
from alphaapollo.rewards.grader_processes.client import RewardClient  # noqa: E402
from alphaapollo.types import Prompt  # noqa: E402
from scripts.bench._task import machine  # noqa: E402
from tests.mock_judge import MockJudge  # noqa: E402

PROMPT = Prompt(id=0, data_source="judge", content="What is 2+2?", ground_truth="4")


def serve(latency: float, pipe: Connection) -> None:
    """Serve until the parent process closes the pipe."""
    with MockJudge(lambda content: "It is right.\nSCORE: 1", latency).serve() as judge:
        pipe.send(judge.url)
        pipe.recv()
        pipe.send(judge.max_in_flight)


async def judge_all(url: str, count: int, connections: int) -> dict[str, float]:
    judge = Judge(model="mock", base_url=url, max_connections=connections)
    client = RewardClient(Reward(judge=judge), CustomRewardFunction())
    await client.start()
    seconds = []
    try:
        await client.score(PROMPT, "warm-up")
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(2):
            start = time.perf_counter()
            scores = await asyncio.gather(*(client.score(PROMPT, f"It is {number}.") for number in range(count)))
            seconds.append(time.perf_counter() - start)
            assert all(score.reward == 1 for score in scores), "a judgement failed"
        used = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        await client.close()
    cpu_seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds[0], 2), "again": round(seconds[1], 3), "cpu_seconds": round(cpu_seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judgements", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--latency", type=float, default=0.2, help="seconds per request")
    args = parser.parse_args()
    os.environ["NO_PROXY"] = "127.0.0.1"
    pipe, child_pipe = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(args.latency, child_pipe), daemon=True)
    server.start()
    result = asyncio.run(judge_all(pipe.recv(), args.judgements, args.connections))
    pipe.send(None)
    ideal = args.judgements / args.connections * args.latency
    found = result | {"ideal": ideal, "ratio": round(ideal / result["seconds"], 3), "max_in_flight": pipe.recv()}
    print(f"{args.judgements} judgements in {result['seconds']:.2f} s (ideal: {ideal:.2f} s)")
    print(json.dumps({"benchmark": "judge"} | found | machine()))


if __name__ == "__main__":
    main()
