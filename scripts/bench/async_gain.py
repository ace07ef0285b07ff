"""Measure the gain of asynchronous training by the length of the tail of the responses. No model, no GPU.

    .venv/bin/python scripts/bench/async_gain.py

Runs the real loops (trainer/loop.py) with real episodes on the fake engine, in alternation in one
process. The engine has a fixed number of slots and a constant time per token; an update takes a fixed time. The gain
is therefore only that of shorter waits. A real engine gains less, because it decodes few responses faster than many.
Lengths are log-normal, cut at 16 times their median; sigma sets the length of the tail. The last line is a JSON
object; `ratio` is samples/s of carry over those of the synchronous loop, at the longest tail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from alphaapollo.config.schema import Config, Data, Env  # noqa: E402
from alphaapollo.controller.engine_group import EngineGroup  # noqa: E402
from alphaapollo.controller.ranks import LocalRanks  # noqa: E402
from alphaapollo.engines.weight_sync.transport import WeightUpdate  # noqa: E402
from alphaapollo.engines.weight_sync.verification import Probe  # noqa: E402
from alphaapollo.environments.base import Services, get_environment_spec  # noqa: E402
from alphaapollo.observability.console import Console  # noqa: E402
from alphaapollo.rollout.episode import (  # noqa: E402
    EpisodeLimits,
    EpisodeRunner,
    run_group,
)
from alphaapollo.rollout.token_context import AppendContext  # noqa: E402
from alphaapollo.runs.checkpoint_folder import CheckpointFolder  # noqa: E402
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter  # noqa: E402
from alphaapollo.session.progress import Feedback, Progress, TrainingGoal  # noqa: E402
from alphaapollo.session.publish import WeightPublisher  # noqa: E402
from alphaapollo.session.training import PolicySession  # noqa: E402
from alphaapollo.trainer import loop  # noqa: E402
from alphaapollo.trainer.step.curriculum import PromptSampler  # noqa: E402
from alphaapollo.trainer.step.update_result import UpdateResult  # noqa: E402
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup  # noqa: E402
from scripts.bench._task import machine  # noqa: E402
from scripts.bench.driver import LetterRenderer, score  # noqa: E402
from scripts.simulation.timed_engine import TimedFakeEngine  # noqa: E402

MEDIAN, LONGEST = 100, 1600


class FakeEngineWorker:
    """Rollout worker with the fake engine."""

    def __init__(self, engine: TimedFakeEngine):
        letters = LetterRenderer()
        self.engine = engine
        self.runner = EpisodeRunner(
            engine,
            letters.decode,  # type: ignore[arg-type]
            lambda *_: AppendContext(letters.encode_prompt, letters.encode_observation, lambda content: ()),
            EpisodeLimits(1, 600.0),
        )

    async def generate(self, request: GroupRequest) -> TrajectoryGroup:
        factory, services = get_environment_spec("single_turn").factory, Services(score, Env())
        return await run_group(request, self.runner.run, lambda _: factory(services))

    async def pause(self) -> None:
        await self.engine.pause()

    async def resume(self) -> None:
        await self.engine.resume()

    async def confirm_weights(self, version: int, folder: str) -> Any:
        return await self.engine.confirm_weights(version)

    async def sleep(self) -> None: ...

    def get_memory_metrics(self) -> dict[str, float]:
        return {}


class FakePolicy:
    memory_metrics: Mapping[str, float] = {}

    async def compute_probe_log_probs(self, probe: Probe) -> list[float]:
        return [0.0]

    async def send_weights(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, digest="")

    async def release_sent_weights(self) -> None: ...


class FakeProfiler:
    async def start_step(self, step: int | None, timer: Any) -> None: ...


class SilentConsole(Console):
    def show_phase(self, name: str, done: int, total: int) -> None: ...

    def show_step(self, step: int, metrics: Any, failure_reason: str = "") -> None: ...


class MetricsRecorder:
    """Tracker that keeps metrics in memory, and rollout log that discards rollouts."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append(metrics)

    def write(self, step: int, groups: Any) -> None: ...


def make_run(args: argparse.Namespace, sigma: float, mode: str | None, staleness: int) -> Any:
    def answer(token_ids: list[int], sampling: Sampling) -> list[int]:
        draws = random.Random(sampling.seed)
        return [1] * min(LONGEST, max(1, round(MEDIAN * math.exp(sigma * draws.gauss(0, 1)))))

    samples = args.prompts * args.group
    engine = TimedFakeEngine(
        256, script=answer, seconds_per_token=args.token_ms / 1e3, max_concurrent_requests=args.slots
    )
    engines = EngineGroup(LocalRanks(FakeEngineWorker(engine)), 2 * args.slots)  # type: ignore[arg-type]
    trainer = {"async_mode": mode, "max_staleness": staleness, "save_freq": -1, "test_freq": -1}
    config = {
        "data": {"train_batch_size": args.prompts},
        "trainer": trainer,
        "env": {"rollout": {"n": args.group}},
        "actor_rollout_ref": {"rollout": {"name": "fake"}},
        "algorithm": {"rollout_correction": {"method": "tis"}} if staleness else {},
    }
    policy: Any = FakePolicy()
    workers: Any = SimpleNamespace(policy=policy, critic=None, reward_model=None, engines=engines)
    checked, console, recorder = Config.model_validate(config), SilentConsole(), MetricsRecorder()
    writer = BackgroundCheckpointWriter[Any](CheckpointFolder(Path(), None), {}, print)  # save_freq=-1: unused
    weights = WeightPublisher(policy, engines, Probe([1, 2]), 1.0, pauses_requests=mode is not None)
    return SimpleNamespace(
        config=checked,
        plan=SimpleNamespace(
            placement=SimpleNamespace(num_gpus=0), sampling=Sampling(LONGEST + 1), greedy_baseline=False
        ),
        workers=workers,
        session=PolicySession(checked, workers, console, recorder, writer, recorder, weights),  # type: ignore[arg-type]
        prompts=[Prompt(index, "bench", f"question {index}") for index in range(4096)],
        sampler=PromptSampler(range(4096), Data(seed=0)),  # type: ignore[arg-type]
        learn=learn,
        metric_sources=[],
        goal=TrainingGoal(args.iterations),
        progress=Progress(),
        console=console,
        reward_model_scorer=None,
        profiler=FakeProfiler(),
        update_seconds=args.update_share * samples * MEDIAN * args.token_ms / 1e3 / args.slots,
    )


async def learn(run: Any, step: int, groups: list[TrajectoryGroup], timer: Any) -> UpdateResult:
    with timer("update"):
        await asyncio.sleep(run.update_seconds)
    return UpdateResult({}, Feedback(), trained_tokens=1)


def measure(args: argparse.Namespace, sigma: float, mode: str | None, staleness: int = 0) -> tuple[float, float]:
    """Return samples per second over all iterations and the mean staleness of the trained tokens."""
    run = make_run(args, sigma, mode, staleness)
    start = time.perf_counter()
    asyncio.run(loop.train_async(run) if mode else loop.train(run))
    seconds = time.perf_counter() - start
    stale = [line.get("staleness/mean", 0.0) for line in run.session.tracker.lines]
    return args.iterations * args.prompts * args.group / seconds, sum(stale) / len(stale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=16, help="prompts per iteration")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--slots", type=int, default=128, help="responses that the engine decodes at once")
    parser.add_argument("--token-ms", type=float, default=1.0)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--update-share", type=float, default=0.5, help="update time as a share of generation time")
    args = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    for sigma in args.sigmas:
        base, _ = measure(args, sigma, None)
        row = {"sync_samples_per_second": round(base, 1)}
        for mode in ("carry", "separate"):
            for staleness in args.staleness:
                rate, stale = measure(args, sigma, mode, staleness)
                row[f"{mode}_{staleness}"] = round(rate / base, 3)
                row[f"{mode}_{staleness}_staleness"] = round(stale, 2)
        table[f"{sigma:g}"] = row
        gains = ", ".join(f"{name} {value:g}" for name, value in row.items())
        print(f"sigma {sigma:g}: {gains}", file=sys.stderr)
    longest = table[f"{args.sigmas[-1]:g}"]
    result = {
        "benchmark": "async_gain",
        "ratio": longest[f"carry_{max(args.staleness)}"],
        "ratio_separate": longest[f"separate_{max(args.staleness)}"],
        "by_tail": table,
        **machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
