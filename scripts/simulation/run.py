"""A run of the real loop over a simulated cluster."""

from __future__ import annotations

import cProfile
import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from alphaapollo.config.schema import Config
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.controller.placement import Machine
from alphaapollo.engines.weight_sync.verification import PROBE_TOLERANCE_FLOAT32, Probe
from alphaapollo.launch.plan import resolve_plan
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.trackers import Tracker
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter
from alphaapollo.session.progress import Progress, TrainingGoal
from alphaapollo.session.publish import WeightPublisher
from alphaapollo.session.training import PolicySession
from alphaapollo.trainer import loop
from alphaapollo.trainer.lifecycle import tune_gc_and_huge_pages
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.learn import learn
from alphaapollo.types import Prompt
from scripts.simulation.clock import Clock, Loop, PhaseTimer
from scripts.simulation.workers import FakePolicy, FakeRollout, Latencies, Network, SimulatedRanks

Mode = Literal["sync", "carry", "separate"]
QUESTION = "A train leaves at nine and goes 80 miles an hour; another leaves at ten. When do they meet? " * 8
MODEL = Path(__file__).resolve().parents[1] / "published_models" / "qwen2.5-0.5b"  # for the plan; never loaded
IN_FLIGHT = 256  # samples per engine, like vLLM's max_num_seqs


@dataclass(frozen=True)
class SimulatedStep:
    """Times of one iteration."""

    seconds: float
    work: dict[str, float]  # processor seconds of the controller's main thread, by phase
    stretch: float  # longest time that one callback blocked the event loop during generation


class Cluster:
    """Simulated cluster; each GPU has a training rank and an engine."""

    def __init__(
        self,
        workers: int,
        trajectories: int,
        group: int,
        mini_batches: int,
        steps: int,
        latencies: Latencies,
        folder: Path,
        mode: Mode = "sync",
    ):
        total = workers * trajectories
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.network = Network(self.clock, latencies)
        self.work_of_threads = 0.0
        self._timers: list[PhaseTimer] = []
        self._steps: list[SimulatedStep] = []
        prompts = folder / "prompts.jsonl"
        prompts.touch()  # never read
        config = Config.model_validate(
            {
                "data": {
                    "train_files": str(prompts),
                    "train_batch_size": total // group,
                    "max_prompt_length": latencies.prompt,
                    "max_response_length": latencies.longest,
                },
                "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"method": "tis"}},
                "env": {"rollout": {"n": group}},
                "actor_rollout_ref": {
                    "model": {"path": str(MODEL), "dtype": "float32", "attention": "sdpa"},
                    "rollout": {"colocate": mode != "separate"},
                    "actor": {"ppo_mini_batch_size": -(-total // mini_batches), "ppo_max_token_len_per_gpu": 16_384},
                },
                "trainer": {"nnodes": workers, "test_freq": -1, "save_freq": -1, "device": "cuda"}
                | ({} if mode == "sync" else {"async_mode": mode}),
            }
        )
        self._run = self._make_run(config, steps, latencies, folder)

    def _make_run(self, config: Config, steps: int, latencies: Latencies, folder: Path) -> TrainingRun:
        workers = config.trainer.nnodes
        policies = [FakePolicy(latencies, self.clock) for _ in range(workers)]
        engines = [FakeRollout(latencies, self.clock) for _ in range(workers)]
        policy = PolicyGroup(SimulatedRanks("policy", self.network, policies))
        plan = resolve_plan(config, Machine(num_cores=64, num_gpus=2), [])
        shares_gpus = plan.placement.shares_gpus
        rollout = EngineGroup(SimulatedRanks("rollout", self.network, engines), IN_FLIGHT, shares_gpus)
        prompts = [Prompt(i, "simulated", [{"role": "user", "content": f"{i}: {QUESTION}"}]) for i in range(20_000)]
        console = Console(Terminal(file=io.StringIO()))
        groups: Any = SimpleNamespace(policy=policy, critic=None, reward_model=None, engines=rollout)
        pauses_requests = config.trainer.async_mode is not None
        session = PolicySession(
            config,
            groups,
            console,
            Tracker(config.model_dump(mode="json"), folder, 0),
            BackgroundCheckpointWriter(CheckpointFolder(folder / "checkpoints", None), {}, console.notify),
            RolloutLog(folder / "rollouts"),
            WeightPublisher(policy, rollout, Probe(list(range(64))), PROBE_TOLERANCE_FLOAT32, pauses_requests),
        )
        return TrainingRun(
            config=config,
            plan=plan,
            uses_shared_prompts=plan.uses_shared_prompts,
            workers=groups,
            session=session,
            prompts=prompts,
            val_prompts=[],
            goal=TrainingGoal(steps),
            sampler=PromptSampler(prompts, config.data, 0),
            learn=learn,
            metric_sources=[],
            progress=Progress(),
            console=console,
            profiler=StepProfiler([], groups, folder, console),
        )

    def run(self, profile: cProfile.Profile | None = None) -> list[SimulatedStep]:
        """Run all iterations, with the loop's timers on the simulated clock."""
        torch.set_num_threads(1)
        modules: list[Any] = [loop]
        own = [module.Timer for module in modules]
        for module in modules:
            module.Timer = self._timer
        train = loop.train_async if self._run.config.trainer.async_mode else loop.train
        try:
            if profile:
                profile.enable()
            with tune_gc_and_huge_pages():
                self.loop.run_until_complete(train(self._run))
        finally:
            for module, timer in zip(modules, own, strict=True):
                module.Timer = timer
            if profile:
                profile.disable()
        self._run.session.rollout_log.close()
        self._run.session.tracker.close()
        self.work_of_threads = self.clock.work_of_threads() + self.network.unpickling
        return self._steps

    def _timer(self) -> PhaseTimer:
        """Record the previous iteration and return the timer of the next one."""
        stretches = self.loop.stretches
        if self._timers:
            last = self._timers[-1]
            work = dict(last.work) | {"other": last.all_work - sum(last.work.values())}
            self._steps.append(SimulatedStep(last.elapsed, work, max(stretches[self._seen :], default=0.0)))
        self._seen = len(stretches)
        self._timers.append(PhaseTimer(self.clock))
        return self._timers[-1]
