"""Compare tokens per second of the rollout loop with a bare engine on the same requests.

    .venv/bin/python scripts/bench/generation.py --size 3M
    .venv/bin/python scripts/bench/generation.py --engine vllm sglang
    .venv/bin/python scripts/bench/generation.py --model DIR --dtype bfloat16 --num-prompts 16 --group 8

Both sides use the same engine with the same threads and alternate over several rounds. Bare: all requests at once,
open-loop. Ours: requests go through rendering, episodes, decoding and grading to TrajectoryGroups. The last lines are
JSON objects, one per engine; `ratio` is our tokens/s over those of the bare engine, the median of the rounds. With
several engines, another line has the tokens/s of each engine over those of the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, Model, Reward, Rollout  # noqa: E402
from alphaapollo.data.prompts import load_prompts  # noqa: E402
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig  # noqa: E402
from alphaapollo.types import GroupRequest, Sampling  # noqa: E402
from alphaapollo.utils.seeds import derive_seed  # noqa: E402
from scripts.bench._task import SIZES, count_parameters, machine, make_model, make_prompts, make_reward  # noqa: E402

FOLDER = ROOT / "outputs" / "bench"


async def bare(worker: RolloutWorker, prompts: list[list[int]], requests: list[GroupRequest]) -> int:
    """Generate with the engine alone, with the same token ids, limits and seeds."""
    calls = []
    for token_ids, request in zip(prompts, requests, strict=True):
        for sample in range(request.num_samples):
            seed = derive_seed(request.sampling.seed, "rollout", request.stream_position, request.prompt.id, sample, 0)
            sampling = Sampling(request.sampling.max_tokens, seed=seed, stop_token_ids=request.sampling.stop_token_ids)
            calls.append(worker.engine.generate(token_ids, sampling, f"{request.stream_position}.{sample}"))
    return sum(len(completion.token_ids) for completion in await asyncio.gather(*calls))


async def ours(worker: RolloutWorker, requests: list[GroupRequest]) -> int:
    groups = await asyncio.gather(*(worker.generate(request) for request in requests))
    return sum(trajectory.num_tokens for group in groups for trajectory in group.trajectories)


async def measure(args: argparse.Namespace, engine: str) -> dict[str, object]:
    folder = args.model or FOLDER / args.size
    parameters = count_parameters(folder) if args.model else make_model(folder, SIZES[args.size])
    make_prompts(FOLDER / "prompts.parquet", args.num_prompts)
    setup = RolloutWorkerConfig(
        model=Model(path=str(folder), dtype=args.dtype),
        rollout=Rollout(
            name=engine,
            dtype=args.dtype,
            max_num_seqs=args.num_prompts * args.group,
            enforce_eager=True,
            cpu_threads=args.threads,
        ),
        env=Env(),
        data=Data(max_prompt_length=64, max_response_length=args.max_tokens),
        reward=Reward(),
        custom_reward=CustomRewardFunction(path=str(make_reward(FOLDER))),
        device="cpu",
        run_dir=str(FOLDER),
    )
    worker = RolloutWorker(setup)
    await worker.start()
    from alphaapollo.data.rendering import Renderer
    from alphaapollo.data.vocabulary import load_tokenizer

    renderer = Renderer(load_tokenizer(str(folder)))
    prompts = load_prompts(str(FOLDER / "prompts.parquet"), "prompt")
    token_ids = [renderer.encode_prompt(prompt.content) for prompt in prompts]
    sampling = Sampling(args.max_tokens, stop_token_ids=renderer.eos_token_ids)
    speeds: dict[str, list[float]] = {"bare": [], "ours": []}
    for round_number in range(args.rounds + 1):
        requests = [GroupRequest(prompt, args.group, sampling, stream_position=round_number) for prompt in prompts]
        for side in speeds:
            start = time.perf_counter()
            tokens = await (bare(worker, token_ids, requests) if side == "bare" else ours(worker, requests))
            if round_number:  # the first round warms up
                speeds[side].append(tokens / (time.perf_counter() - start))
    await worker.close()
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["bare"], strict=True)]
    return {
        "benchmark": "generation",
        "engine": engine,
        "model": str(args.model or args.size),
        "dtype": args.dtype,
        "parameters": parameters,
        "ratio": round(statistics.median(ratios), 3),
        "tokens_per_second": {side: round(statistics.median(values)) for side, values in speeds.items()},
        "requests": args.num_prompts * args.group,
        "threads": args.threads,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of --size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=42)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", choices=["vllm", "sglang"], nargs="+", default=["vllm"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = parser.parse_args()
    results = [asyncio.run(measure(args, engine)) for engine in args.engine]
    print(*map(json.dumps, results), sep="\n")
    speeds: list[Any] = [result["tokens_per_second"] for result in results]
    for engine, speed in zip(args.engine[1:], speeds[1:], strict=True):
        ratios = {side: round(speed[side] / speeds[0][side], 3) for side in speed}
        print(json.dumps({"benchmark": f"generation: {engine} / {args.engine[0]}", "ratios": ratios}))


if __name__ == "__main__":
    main()
