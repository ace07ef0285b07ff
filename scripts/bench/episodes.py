"""Measure the overhead of episodes over the engine and the graders.

    .venv/bin/python scripts/bench/episodes.py overhead       # 256 concurrent episodes of 4 turns, without a model
    .venv/bin/python scripts/bench/episodes.py single_turn    # one turn, compared with bare engine calls and rewards
    .venv/bin/python scripts/bench/episodes.py slow_grader    # effect of one slow grader on the other episodes
    .venv/bin/python scripts/bench/episodes.py vllm           # tokens/s, compared with the same requests open-loop

The sides of a comparison alternate; results are medians of the rounds. Each part ends with a line that is a JSON
object with `ratio`. Without an argument all parts run, vllm last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, Model, Reward, Rollout  # noqa: E402
from alphaapollo.data.rendering import Renderer  # noqa: E402
from alphaapollo.data.vocabulary import load_tokenizer  # noqa: E402
from alphaapollo.engines.fake import FakeEngine  # noqa: E402
from alphaapollo.engines.protocol import Engine  # noqa: E402
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment  # noqa: E402
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig  # noqa: E402
from alphaapollo.types import Completion, GroupRequest, ImageInput, Message, Prompt, Sampling, Score, Trajectory  # noqa: E402
from examples.quickstart.make_task import make_tokenizer  # noqa: E402
from scripts.bench._task import SIZES, machine, make_model, make_reward  # noqa: E402

FOLDER = ROOT / "outputs" / "bench"
GROUP = 16
ANSWER_TOKENS = 48  # of the fake engine
STOP_TOKENS = tuple(range(30, 38))  # with these, responses of a random model end after about 30 tokens
SLOW = "slow?"
AGAIN = Message(role="user", content="Not yet: look at the last line again.")
Request = tuple[list[int], Sampling, str]


class FixedTurnsEnvironment:
    """Environment with a fixed observation for `env.max_steps - 1` turns; the reward function scores the last text."""

    def __init__(self, services: Services):
        self._score, self._left = services.score, services.config.max_steps

    async def reset(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        return first(prompt)

    async def step(self, action: str) -> StepResult:
        self._left -= 1
        if self._left == 0:
            return StepResult(done=True, score=await self._score(self._prompt, action))
        return StepResult(Observation([AGAIN]))

    async def close(self) -> None:
        pass


class SyncTurnsEnvironment:
    """FixedTurnsEnvironment with sync methods, which run in threads, and without scores."""

    def __init__(self, services: Services):
        self._left = services.config.max_steps

    def reset(self, prompt: Prompt) -> Observation:
        return first(prompt)

    def step(self, action: str) -> StepResult:
        self._left -= 1
        return StepResult(Observation([AGAIN]), done=self._left == 0)

    def close(self) -> None:
        pass


def first(prompt: Prompt) -> Observation:
    assert isinstance(prompt.content, list)
    return Observation(prompt.content)


register_environment("bench_turns", graded=True)(FixedTurnsEnvironment)
register_environment("bench_sync_turns")(SyncTurnsEnvironment)


class RecordingEngine:
    """Engine wrapper that records its requests."""

    def __init__(self, engine: Any):
        self.engine, self.requests = engine, list[Request]()

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        self.requests.append((token_ids, sampling, request_id))
        return await self.engine.generate(token_ids, sampling, request_id, images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def fake_engine() -> FakeEngine:
    """Engine that responds at once with a precomputed list."""
    answer = [65 + place % 26 for place in range(ANSWER_TOKENS)]
    return FakeEngine(272, script=lambda token_ids, sampling: answer)


def requests_of(count: int, draw: int, stop_token_ids: tuple[int, ...] = (), group: int = GROUP) -> list[GroupRequest]:
    """Group requests with `count` episodes in total."""
    sampling = Sampling(2000, stop_token_ids=stop_token_ids)
    chats = [[Message(role="user", content=f"What is {id} plus {draw}?")] for id in range(count // group)]
    prompts = [Prompt(id, "exact", chat, ground_truth="A") for id, chat in enumerate(chats)]
    return [GroupRequest(prompt, group, sampling, draw) for prompt in prompts]


async def make_worker(
    env: Env,
    model: Path,
    engine: Engine | None,
    grades: bool = True,
    reward_file: Path | None = None,
    timeout: float = 10.0,
    **rollout: Any,
) -> RolloutWorker:
    """Start a rollout worker. `engine` None: vLLM. Without `grades`, every reward is 1 without a grader."""
    setup = RolloutWorkerConfig(
        model=Model(path=str(model)),
        rollout=Rollout(**{"enforce_eager": True, "max_num_seqs": 256} | rollout),
        env=env,
        data=Data(max_prompt_length=512, max_response_length=2000),
        reward=Reward(timeout=timeout),
        custom_reward=CustomRewardFunction(path=str(reward_file or make_reward(FOLDER))),
        device="cpu",
        run_dir=str(FOLDER),
    )
    worker = RolloutWorker(setup, engine=engine)
    if not grades:
        worker._rewards.score = always_one  # type: ignore[method-assign]
    await worker.start()
    return worker


async def always_one(prompt: Prompt, text: str) -> Score:
    return Score(1.0)


def tokenizer_folder() -> Path:
    folder = FOLDER / "tokenizer"
    make_tokenizer(folder)
    (folder / "config.json").write_text('{"vocab_size": 272}')
    return folder


async def play(worker: RolloutWorker, requests: Sequence[GroupRequest]) -> list[Trajectory]:
    groups = await asyncio.gather(*map(worker.generate, requests))
    return [trajectory for group in groups for trajectory in group.trajectories]


async def seconds_of(work: Awaitable[Any]) -> float:
    """Processor seconds of this process, which vary less than elapsed time on a busy machine."""
    start = time.process_time()
    await work
    return time.process_time() - start


async def overhead(args: argparse.Namespace) -> dict[str, object]:
    """Milliseconds per turn of a trajectory beyond the engine's calls, without graders. `ratio`: to 1 ms."""
    kinds = {
        "append": Env(env_name="bench_turns", max_steps=args.turns),
        "memory": Env(env_name="bench_turns", max_steps=args.turns, context="memory"),
        "sync environment": Env(env_name="bench_sync_turns", max_steps=args.turns),
    }
    costs = {}
    for name, env in kinds.items():
        engine = fake_engine()
        worker = await make_worker(env, tokenizer_folder(), engine, grades=False)
        rounds = []
        for draw in range(args.rounds + 1):
            calls = [engine.generate([1], Sampling(100), "bare") for _ in range(args.episodes * args.turns)]
            bare = await seconds_of(asyncio.gather(*calls))
            rounds.append(await seconds_of(play(worker, requests_of(args.episodes, draw))) - bare)
        await worker.close()
        costs[name] = round(statistics.median(rounds[1:]) * 1e3 / args.episodes / args.turns, 3)
    return {"ratio": max(costs.values()), "ms_a_turn": costs, "episodes": args.episodes, "turns": args.turns}


async def single_turn(args: argparse.Namespace) -> dict[str, object]:
    """Milliseconds per single-turn episode, compared with bare engine calls and rewards, with and without graders.

    `ratio`: ours to bare, with graders."""
    costs: dict[str, dict[str, float]] = {}
    for name, grades in (("with graders", True), ("without", False)):
        engine = fake_engine()
        worker = await make_worker(Env(), tokenizer_folder(), engine, grades)
        renderer = Renderer(load_tokenizer(str(tokenizer_folder())))

        async def bare(request: GroupRequest, worker: RolloutWorker = worker, renderer: Renderer = renderer) -> None:
            token_ids = renderer.encode_prompt(request.prompt.content)

            async def one() -> Score:
                completion = await worker.engine.generate(token_ids, request.sampling, "bare")
                return await worker._rewards.score(request.prompt, renderer.decode(completion.token_ids))

            await asyncio.gather(*(one() for _ in range(request.num_samples)))

        rounds: dict[str, list[float]] = {"bare": [], "ours": []}
        for draw in range(args.rounds + 1):
            requests = requests_of(args.episodes, draw)
            rounds["bare"].append(await seconds_of(asyncio.gather(*map(bare, requests))))
            rounds["ours"].append(await seconds_of(play(worker, requests)))
        await worker.close()
        costs[name] = {
            side: round(statistics.median(values[1:]) * 1e3 / args.episodes, 4) for side, values in rounds.items()
        }
    graded = costs["with graders"]
    return {"ratio": round(graded["ours"] / graded["bare"], 3), "ms_an_episode": costs, "episodes": args.episodes}


async def slow_grader(args: argparse.Namespace) -> dict[str, object]:
    """Seconds until the other episodes end, with and without one episode that is graded for `--sleep` seconds.

    One grader process. `ratio`: median time of the other episodes with the slow one to that without."""
    reward = FOLDER / "slow_reward.py"
    reward.write_text(
        "import time\n\n\ndef compute_score(prompt, completion):\n"
        f"    time.sleep({args.sleep} if {SLOW!r} in prompt.content else 0.001)\n    return 1.0\n"
    )
    engine = fake_engine()
    worker = await make_worker(Env(), tokenizer_folder(), engine, reward_file=reward, timeout=args.sleep + 30)
    slow = GroupRequest(Prompt(10**6, "exact", SLOW), 1, Sampling(2000), stream_position=0)
    await play(worker, requests_of(args.episodes, 0))  # warm-up
    found: dict[str, dict[str, float]] = {}
    for name, extra in (("without", []), ("with", [slow])):
        waiting = asyncio.gather(*(play(worker, [request]) for request in extra))
        await asyncio.sleep(0.1)
        seconds = sorted(one.seconds for one in await play(worker, requests_of(args.episodes, 1)))
        held = [one.seconds for (one,) in await waiting]
        found[name] = {"median": statistics.median(seconds), "last": seconds[-1]} | ({"slow": held[0]} if held else {})
    await worker.close()
    shown = {name: {key: round(value, 3) for key, value in one.items()} for name, one in found.items()}
    ratio = found["with"]["median"] / found["without"]["median"]
    return {"ratio": round(ratio, 2), "seconds": shown, "episodes": args.episodes, "sleep": args.sleep}


async def vllm(args: argparse.Namespace) -> dict[str, object]:
    """Tokens per second of single-turn and multi-turn episodes, compared with the same requests sent at once.

    The open-loop side sends the requests recorded in a first round; the prefix cache is reset before each round.
    `ratio`: ours to open-loop, the lower of the two kinds."""
    model = FOLDER / args.size
    make_model(model, SIZES[args.size])
    env = Env(env_name="bench_turns", max_tokens_per_turn=args.max_tokens)
    worker = await make_worker(env, model, None, max_num_seqs=args.episodes)
    engine = worker.engine = RecordingEngine(worker.engine)
    runner = worker._runner
    assert runner is not None
    speeds: dict[str, dict[str, float]] = {}
    for turns in (1, args.turns):
        worker._setup = replace(worker._setup, env=env.model_copy(update={"max_steps": turns}))
        worker._runner = replace(runner, engine=engine, limits=replace(runner.limits, max_turns=turns))
        engine.requests.clear()
        await play(worker, requests_of(args.episodes, 0, STOP_TOKENS))  # warm-up
        asked = list(engine.requests)

        async def ours(draw: int) -> int:
            trajectories = await play(worker, requests_of(args.episodes, draw, STOP_TOKENS))
            return sum(one.num_tokens for one in trajectories)

        async def open_loop(draw: int, asked: list[Request] = asked) -> int:
            calls = (engine.engine.generate(ids, sampling, f"{name}.{draw}") for ids, sampling, name in asked)
            return sum(len(answer.token_ids) for answer in await asyncio.gather(*calls))

        found: dict[str, list[float]] = {"ours": [], "open-loop": []}
        for draw in range(1, args.rounds + 1):
            order = [("ours", ours), ("open-loop", open_loop)]
            for side, run in order if draw % 2 else reversed(order):
                await engine.engine._running_llm.reset_prefix_cache()
                start = time.perf_counter()
                found[side].append(await run(draw) / (time.perf_counter() - start))
        ratios = [one / other for one, other in zip(*found.values(), strict=True)]
        speeds[f"{turns} turns"] = {side: round(statistics.median(values)) for side, values in found.items()}
        speeds[f"{turns} turns"]["ratio"] = round(statistics.median(ratios), 3)
    await worker.close()
    ratio = min(one["ratio"] for one in speeds.values())
    return {"ratio": ratio, "tokens_per_second": speeds, "size": args.size, "episodes": args.episodes}


PARTS = {"overhead": overhead, "single_turn": single_turn, "slow_grader": slow_grader, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all parts")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sleep", type=float, default=60.0)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per turn, with vllm")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in [args.part] if args.part else PARTS:
        result = asyncio.run(PARTS[part](args))
        print(json.dumps({"benchmark": f"episodes {part}"} | result | machine()), flush=True)


if __name__ == "__main__":
    main()
