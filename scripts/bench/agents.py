"""Compare requests through the endpoint of agents with the same requests made directly to the engine.

    .venv/bin/python scripts/bench/agents.py

256 sessions send 4 requests each. A session's requests form one chat, so each request waits for the answer before it.
Direct: the same tokens, limits and seeds, sent to the engine without HTTP, after the requests through the endpoint, so
the prefix cache favors it. The clients run in a process of their own. `ratio`: requests per second through the endpoint
over direct requests per second, median of the rounds. `added_ms`: median latency of requests through the endpoint minus
that of direct requests, one session at a time, median of 20 comparisons of 16 requests. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from alphaapollo.config.schema import Env, Rollout  # noqa: E402
from alphaapollo.engines.agent_sessions import AgentSession, SessionLimits  # noqa: E402
from alphaapollo.engines.factory import make_engine  # noqa: E402
from alphaapollo.engines.protocol import Engine  # noqa: E402
from alphaapollo.engines.types import EngineSpec  # noqa: E402
from alphaapollo.processes.time_limit import TimeLimit  # noqa: E402
from alphaapollo.rollout.agents.endpoint import open_endpoint  # noqa: E402
from alphaapollo.types import Sampling  # noqa: E402
from alphaapollo.utils.seeds import derive_seed  # noqa: E402
from scripts.bench._task import SIZES, machine, make_model  # noqa: E402

FOLDER = ROOT / "outputs" / "bench"
REQUESTS = 4  # of a session
MAX_MODEL_LEN = 1024


async def send_chats(url: str, keys: list[str], concurrent: int, max_tokens: int) -> tuple[float, list[float]]:
    """Send the requests of all sessions. Returns the seconds of all, and of each."""
    import aiohttp  # its requests take much less processor time than those of httpx

    slots, seconds = asyncio.Semaphore(concurrent), []

    async def chat(client: aiohttp.ClientSession, index: int, key: str) -> None:
        async with slots:
            messages = [{"role": "user", "content": f"question {index}"}]
            for _ in range(REQUESTS):
                body = {"model": "policy", "messages": messages, "max_tokens": max_tokens}
                start = time.perf_counter()
                async with client.post("/v1/chat/completions", json=body, headers={"x-api-key": key}) as reply:
                    reply.raise_for_status()
                    answer = (await reply.json())["choices"][0]["message"]["content"]
                seconds.append(time.perf_counter() - start)
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:
        start = time.perf_counter()
        await asyncio.gather(*(chat(client, index, key) for index, key in enumerate(keys)))
        return time.perf_counter() - start, seconds


async def send_direct(engine: Engine, sessions: list[AgentSession], concurrent: int) -> tuple[float, list[float]]:
    """Send the requests of finished sessions to the engine, with the same tokens."""
    slots, seconds = asyncio.Semaphore(concurrent), []

    async def chat(session: AgentSession) -> None:
        async with slots:
            for number, answer in enumerate(session.answers):
                tokens = len(answer.completion.token_ids)
                sampling = Sampling(tokens, seed=number)
                start = time.perf_counter()
                await engine.generate(answer.request.prompt_ids, sampling, f"{session.token}.{number}")
                seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*map(chat, sessions))
    return time.perf_counter() - start, seconds


async def measure(args: argparse.Namespace) -> dict[str, object]:
    folder = FOLDER / args.size
    make_model(folder, SIZES[args.size])
    spec = EngineSpec(
        index=0,
        model_path=str(folder),
        trust_remote_code=False,
        rollout=Rollout(max_num_seqs=args.sessions, enforce_eager=True, cpu_threads=1),
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        log_path=str(FOLDER / "engine.log"),
        chat_tokenizer=str(folder),
    )
    engine = make_engine(spec)
    await engine.start()
    serving = AsyncExitStack()
    endpoint = await serving.enter_async_context(open_endpoint(engine, Env(), {}))
    limits = SessionLimits(MAX_MODEL_LEN, REQUESTS)
    gc.freeze()  # as rollout workers do

    async def compare(count: int, concurrent: int) -> tuple[float, float, float]:
        """Return the throughput ratio, and the median latencies through the endpoint and direct."""
        sessions = [
            AgentSession(Sampling(MAX_MODEL_LEN), lambda number, index=index: derive_seed(index, number), limits)
            for index in range(count)
        ]
        with ExitStack() as stack:
            for session in sessions:
                stack.enter_context(endpoint.open_session(session, TimeLimit(3600)))
            words = [endpoint.url, str(concurrent), str(args.max_tokens)]
            clients = await asyncio.create_subprocess_exec(
                *[sys.executable, __file__, "--clients", *words],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            keys = json.dumps([session.token for session in sessions]).encode()
            output, _ = await clients.communicate(keys)
        total, each = json.loads(output)
        assert all(len(session.answers) == REQUESTS for session in sessions)
        direct_total, direct_each = await send_direct(engine, sessions, concurrent)
        return direct_total / total, statistics.median(each), statistics.median(direct_each)

    await compare(args.sessions, args.sessions)  # warm-up
    ratios = [(await compare(args.sessions, args.sessions))[0] for _ in range(args.rounds)]
    latencies = [(await compare(4, 1))[1:] for _ in range(4 * args.rounds)]
    await serving.aclose()
    await engine.close()
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "added_ms": round(1000 * statistics.median(one - direct for one, direct in latencies), 2),
        "latency_ms": round(1000 * statistics.median(one for one, _ in latencies), 2),
        "direct_latency_ms": round(1000 * statistics.median(direct for _, direct in latencies), 2),
        "sessions": args.sessions,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", nargs=3, metavar=("URL", "CONCURRENT", "MAX_TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    import uvloop

    if args.clients:
        url, concurrent, max_tokens = args.clients
        print(json.dumps(uvloop.run(send_chats(url, json.load(sys.stdin), int(concurrent), int(max_tokens)))))
        return
    print(json.dumps(uvloop.run(measure(args))))  # the event loop of Ray's actors


if __name__ == "__main__":
    main()
