"""Phases on a shared GPU: the real loop, publisher and handles over workers that record their calls, and a simulated
GPU that rejects what would run out of memory."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alphaapollo.algorithms.mismatch import MismatchSums, sum_mismatch
from alphaapollo.config.schema import Config, Data
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.handles import CriticGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.engines.weight_sync.verification import Probe
from alphaapollo.observability.timing import Timer
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter
from alphaapollo.session.progress import TrainingGoal
from alphaapollo.session.publish import WeightPublisher
from alphaapollo.trainer.lifecycle import initialize_run
from alphaapollo.trainer.loop import train, train_async
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.learn import learn
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.types import Completion, Prompt, StopReason
from tests.unit.trainer.fakes import make_plan, make_run_state
from tests.unit.trainer.samples import group, trajectory


class Gpu:
    """Simulated GPU that has "weights" and "cache" of the engine, and the trainers that are not offloaded."""

    def __init__(self) -> None:
        self.engine = {"weights", "cache"}  # as it starts
        self.trainers: set[str] = set()
        self.calls: list[str] = []

    def work(self, role: str, name: str) -> None:
        self.calls.append(f"{role}.{name}")
        assert "cache" not in self.engine, f"{role}.{name} beside an engine with its cache"
        assert self.trainers <= {role}, f"{role}.{name} beside {self.trainers}"
        self.trainers.add(role)

    def note(self, name: str, *needs: str) -> None:
        self.calls.append(f"engine.{name}")
        assert self.engine >= set(needs), f"engine.{name} with {self.engine}"


class Trainer:
    """A worker of one role."""

    def __init__(self, role: str, gpu: Gpu):
        self.role, self.gpu = role, gpu

    def load_batch(self, batch: Any) -> None:
        self.batch = batch  # in host memory

    def offload(self) -> None:
        self.gpu.calls.append(f"{self.role}.rest")
        self.gpu.trainers.discard(self.role)

    def get_old_log_probs(self) -> np.ndarray:
        return np.zeros_like(self.batch.rows.rollout_logprobs)

    def sum_logprob_mismatch(self) -> MismatchSums:
        return sum_mismatch(*np.zeros((4, 0), dtype=np.int64))  # in host memory

    def compute_log_probs(self, role: str = "policy") -> np.ndarray:
        self.gpu.work(self.role, "log_probs" if role == "policy" else "ref_log_probs")
        return self._zeros()

    def compute_surprises(self) -> np.ndarray:
        self.gpu.work(self.role, "surprises")
        return np.zeros((len(self.batch.rows.rollout_logprobs), 3))

    def compute_values(self) -> np.ndarray:
        self.gpu.work(self.role, "values")
        return self._zeros()

    def compute_scores(self, batch: Any) -> np.ndarray:
        self.gpu.work(self.role, "scores")
        return np.ones(len(batch.rows), dtype=np.float32)

    def update(self, columns: Any, *_: object) -> dict[str, float]:
        self.gpu.work(self.role, "update")
        return {}

    def compute_probe_log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        self.gpu.work(self.role, "probe")
        self.offload()
        return [-1.0]

    def send_weights(self, version: int) -> WeightUpdate:
        self.gpu.work(self.role, "send")
        return WeightUpdate(version, "digest", "folder")

    def release_sent_weights(self) -> None:
        self.gpu.calls.append(f"{self.role}.release")
        self.offload()

    def reset_reference_and_optimizer(self) -> None:
        self.gpu.work(self.role, "reset_reference_and_optimizer")

    def save(self, folder: str) -> None:
        self.gpu.work(self.role, "save")

    def get_save_future(self) -> Future[float]:
        done: Future[float] = Future()  # in host memory
        done.set_result(0.0)
        return done

    def load(self, folder: str) -> None:
        self.gpu.work(self.role, "load")
        self.offload()

    shared_prompts = SimpleNamespace(unsupported_reason=None)
    logprob_check_warnings = ("bfloat16 is doubtful",)

    def get_memory_metrics(self) -> dict[str, float]:
        return {}

    def _zeros(self) -> np.ndarray:
        return np.zeros_like(self.batch.rows.rollout_logprobs)


class Engine:
    """Rollout worker with an engine that can sleep."""

    updates_in_flight = False

    def __init__(self, gpu: Gpu):
        self.gpu, self.engine = gpu, self

    async def generate(self, request: Any, *of_the_engine: Any) -> Any:
        self.gpu.note("sample" if of_the_engine else "generate", "weights", "cache")
        if of_the_engine:
            return Completion([7], [-1.0], StopReason.LENGTH, 1)
        return group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2))

    async def log_probs(self, token_ids: list[int], images: Any) -> list[float]:
        self.gpu.note("log_probs", "weights", "cache")
        return [-1.0]

    async def pause(self) -> None:
        self.gpu.note("pause")

    async def resume(self) -> None:
        self.gpu.note("resume", "weights", "cache")

    async def sleep(self) -> None:
        self.gpu.note("sleep")
        for _ in range(10):  # vLLM asserts that no other process takes memory meanwhile (`work` would fail)
            await asyncio.sleep(0)
        self.gpu.engine.clear()

    async def wake_weights(self) -> None:
        self.gpu.note("wake_weights")
        assert not self.gpu.trainers, f"weights wake into memory that {self.gpu.trainers} hold"
        self.gpu.engine.add("weights")

    async def confirm_weights(self, version: int, folder: str) -> WeightReceipt:
        if folder:
            self.gpu.note("receive", "weights")
        self.gpu.note("confirm", "weights")
        return WeightReceipt(version, "digest")

    async def release_cache(self) -> None:
        self.gpu.note("release_cache", "weights", "cache")
        self.gpu.engine.remove("cache")

    async def wake_cache(self) -> None:
        self.gpu.note("wake_cache", "weights")
        assert not self.gpu.trainers, f"the cache wakes into memory that {self.gpu.trainers} hold"
        self.gpu.engine.add("cache")

    def get_memory_metrics(self) -> dict[str, float]:
        return {}


class Tokenizer:
    """Tokenizer of the reward model: every text has the same three tokens."""

    def encode_trajectory(self, trajectory: Any) -> list[int]:
        return [1, 2, 3]

    def find_input_error(self, token_ids: list[int]) -> None:
        return None

    max_length = None


def make_run(gpu: Gpu, folder: Path, critic: bool = False, reward_model: bool = False, **config: Any) -> Any:
    """One iteration over one prompt, with a validation, a checkpoint and optionally a reset of the reference."""
    whole = Config.model_validate(
        {
            "data": {"train_batch_size": 1, "val_files": "given", "shuffle": False},
            "env": {"rollout": {"n": 2}},
            "algorithm": {"adv_estimator": "gae" if critic else "grpo", "use_kl_in_reward": True, **config},
            "trainer": {"test_freq": 1, "save_freq": 1},
        }
    )
    ranks: Any = {role: LocalRanks(Trainer(role, gpu)) for role in ("policy", "critic", "scorer")}
    workers = SimpleNamespace(
        policy=PolicyGroup(ranks["policy"]),
        critic=CriticGroup(ranks["critic"]) if critic else None,
        reward_model=RewardModelGroup(ranks["scorer"]) if reward_model else None,
        engines=EngineGroup(LocalRanks(Engine(gpu)), 4),  # type: ignore[arg-type]
    )
    placement = SimpleNamespace(data_parallel_size=1, sequence_parallel=1, num_gpus=1)
    plan = make_plan(placement=placement, uses_shared_prompts=True)
    reward = None
    if workers.reward_model:
        parts = workers.reward_model, workers.engines, Tokenizer()
        reward = RewardModelScorer(whole, plan.placement, plan.padded, *parts, is_only_reward=False)  # type: ignore[arg-type]
    return make_run_state(
        whole,
        [Prompt(0, "test", "text")],
        workers,
        plan=plan,
        weights=WeightPublisher(workers.policy, workers.engines, Probe([1, 2]), 0.1, on_cpus=False),
        learn=learn,
        metric_sources=[reward] if reward else [],
        checkpoint_writer=BackgroundCheckpointWriter(
            CheckpointFolder(folder, 1),
            {"policy": workers.policy} | ({"critic": workers.critic} if critic else {}),
            print,
            workers.engines.release_kv_cache_temporarily,
        ),
        reward_model_scorer=reward,
    )


PUBLISH = [
    *("policy.probe", "policy.rest", "engine.wake_weights", "policy.send", "engine.receive", "engine.confirm"),
    *("policy.release", "policy.rest", "engine.wake_cache", "engine.log_probs", "engine.sample"),
    *("engine.release_cache", "policy.probe", "policy.rest", "engine.wake_cache"),
]
SAVE = ["engine.release_cache", "policy.save", "policy.rest", "engine.wake_cache"]


def test_an_iteration(tmp_path: Path) -> None:
    gpu = Gpu()
    asyncio.run(train(make_run(gpu, tmp_path)))
    assert gpu.calls == [
        "engine.generate",
        "engine.sleep",
        *("policy.surprises", "policy.log_probs", "policy.ref_log_probs", "policy.update"),
        *PUBLISH,
        "engine.generate",
        *SAVE,
    ]


def test_an_iteration_with_critic_reward_model_and_reset(tmp_path: Path) -> None:
    """Each trainer has its own phase and is offloaded before the next."""
    gpu = Gpu()
    run = make_run(gpu, tmp_path, critic=True, reward_model=True, reference_reset={"every": 1})
    asyncio.run(train(run))
    score = ["engine.generate", "engine.release_cache", "scorer.scores", "scorer.rest", "engine.wake_cache"]
    assert gpu.calls == [
        *score,
        "engine.sleep",
        *("policy.surprises", "policy.log_probs", "policy.ref_log_probs", "policy.rest"),
        *("critic.values", "critic.update", "critic.rest"),
        "policy.update",
        *PUBLISH,
        *score,
        *("engine.release_cache", "policy.reset_reference_and_optimizer", "policy.rest", "engine.wake_cache"),
        *SAVE[:-1],
        *("critic.save", "critic.rest", "engine.wake_cache"),
    ]


@pytest.mark.parametrize("critic", [False, True])
def test_gpu_phases_of_start_and_resume(tmp_path: Path, critic: bool) -> None:
    """The checkpoint is loaded while the engine sleeps."""
    fresh, resumed = Gpu(), Gpu()

    def initialize(gpu: Gpu, checkpoint: Path | None) -> None:
        run = make_run(gpu, tmp_path, critic)
        asyncio.run(initialize_run(run, checkpoint, Timer()))

    initialize(fresh, None)
    assert fresh.calls == ["engine.sleep", *PUBLISH, "engine.generate"]  # and the first validation
    initialize(resumed, tmp_path)
    load = ["critic.load", "critic.rest"] if critic else []
    assert resumed.calls == ["engine.sleep", *load, "policy.load", "policy.rest", *PUBLISH]


def test_two_iterations_in_carry_mode(tmp_path: Path) -> None:
    """Requests are paused before the engine sleeps, and continue when it has weights and cache again."""
    gpu = Gpu()
    run = make_run(gpu, tmp_path)
    trainer = run.config.trainer.model_copy(update={"async_mode": "carry", "test_freq": -1})
    run.config = run.config.model_copy(update={"trainer": trainer})
    run.prompts, run.goal = run.prompts * 2, TrainingGoal(2)
    run.sampler = PromptSampler(range(2), Data(shuffle=False))
    run.session.publisher.pauses_requests = True
    asyncio.run(train_async(run))
    publish = [*PUBLISH[:2], "engine.pause", *PUBLISH[2:9], "engine.resume", *PUBLISH[9:]]
    iteration = [
        "engine.pause",
        "engine.sleep",
        *("policy.log_probs", "policy.ref_log_probs", "policy.update"),
        *publish,
    ]
    assert gpu.calls == ["engine.generate", "engine.generate", *iteration, *SAVE, *iteration, *SAVE]
