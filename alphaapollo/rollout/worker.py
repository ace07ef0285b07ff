"""Rollout worker: one engine replica with its environments and reward functions.

    GroupRequest -> n environments x engine -> graded episodes -> TrajectoryGroup

A plain class with async methods, hosted by a Ray actor or by the driver's process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import pickle
import resource
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from alphaapollo.config.schema import CustomRewardFunction, Data, Env, GenerationData, Judge, Model, Reward, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.reward import SelfTeacher
from alphaapollo.data.images import load_image_processor
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.data.vocabulary import find_stop_ids, load_tokenizer
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import MODEL_NAME, EngineError, EngineSpec, HttpAnswer, HttpSampling
from alphaapollo.engines.weight_sync.changes import WeightCopy, WeightReader
from alphaapollo.engines.weight_sync.transport import TransportKind, WeightReceipt, get_weights_folder
from alphaapollo.environments.base import Environment, EnvironmentFactory, Services, get_environment_spec
from alphaapollo.environments.classes import load_environment_module
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.observability.timing import read_peak_memory_gib
from alphaapollo.processes.time_limit import pause_all_time_limits
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.judges import CompleteMessage
from alphaapollo.rollout.agents.endpoint import SessionGate, open_endpoint
from alphaapollo.rollout.agents.runner import AgentRunner, open_agent_runner
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, run_group
from alphaapollo.rollout.self_teacher import TeacherPromptWriter
from alphaapollo.rollout.suites import ModelServer, Suite, SuiteResult, run_suite
from alphaapollo.rollout.token_context import AppendContext, MemoryContext, PromptRenderer
from alphaapollo.rollout.tool_call_parser import make_tool_call_parser
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import GroupRequest, Prompt, Sampling, TrajectoryGroup, Turn
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.imports import pause_gc
from alphaapollo.utils.thoughts import insert_marks

THREADS = 64  # size of the default executor, which runs tools and the sandbox
START_SECONDS = 600.0  # time for an engine to start again, before it counts as stalled


@dataclass(frozen=True, kw_only=True)
class RolloutWorkerConfig:
    """Settings shared by all rollout workers of a run."""

    model: Model
    rollout: Rollout  # resolved for the device
    env: Env
    data: Data | GenerationData
    reward: Reward
    custom_reward: CustomRewardFunction
    device: Device
    self_teacher: SelfTeacher | None = None
    run_dir: str  # the run's folder; engine logs go to its `logs/`
    transport: TransportKind = "shared_memory"  # weight transport
    shared_memory: str = ""  # the run's folder under /dev/shm, removed when a worker dies; empty: no folder
    serves_suites: bool = False  # whether evaluation suites run against the engine
    serves_clients: bool = False  # whether requests may have stop strings and ask for the most probable tokens
    max_steps: int = 0  # iterations of the run, for reward functions; 0: not a training run
    needs_components: bool = False  # whether a reward component that is NaN or infinite makes the score a failure


class RolloutWorker:
    """Worker with one engine replica, its environments and its reward functions. Call `start` first.

    `node` is the worker's machine, which determines the shared-memory folder for weights. `reader` reads the weights of
    rank 0, on a machine without training ranks. `engine` replaces the engine of `rollout.name` in tests."""

    def __init__(
        self,
        setup: RolloutWorkerConfig,
        index: int = 0,
        node: str = "",
        reader: WeightReader | None = None,
        engine: Engine | None = None,
    ):
        model, rollout, data, env = setup.model, setup.rollout, setup.data, setup.env
        tokenizer = model.tokenizer_path or model.path
        spec = EngineSpec(
            index=index,
            model_path=model.path,
            trust_remote_code=model.trust_remote_code,
            rollout=rollout,
            device=setup.device,
            dtype=rollout.dtype,
            max_model_len=data.max_length,
            log_path=str(Path(setup.run_dir) / "logs" / f"engine_{index}.log"),
            transport=setup.transport,
            lora_rank=model.lora_rank,
            chat_tokenizer=tokenizer if env.env_name == "agent" or setup.serves_suites or setup.serves_clients else "",
            tokenizer_path=tokenizer,
            cleanup_folders=(setup.shared_memory,) if setup.shared_memory else (),
        )
        self.engine = engine or make_engine(spec)
        self._weights_folder = Path(get_weights_folder(setup.shared_memory, f"{node}/{index}" if reader else node))
        self._copy = WeightCopy(self._weights_folder, reader, self.engine.serves_adapter) if reader else None
        self._setup, self._index = setup, index
        load_environment_module(env)
        self._environment = get_environment_spec(env.env_name)
        self._tools: ToolBox | None = None
        self._rewards = RewardClient(setup.reward, setup.custom_reward)
        self._rewards.max_steps, self._rewards.fails_incomplete = setup.max_steps, setup.needs_components
        self._stop_token_ids: tuple[int, ...] = ()
        self._services: Services | None = None
        self._runner: EpisodeRunner | AgentRunner | None = None
        self._teacher_prompts: TeacherPromptWriter | None = None  # None: there is no self-teacher
        self._agents = AsyncExitStack()  # endpoints, and the programs of env.env_name=agent
        self._endpoint: SessionGate | None = None
        self._weight_sync = asyncio.Lock()
        self._suite_server: ModelServer | None = None
        self._numbers = itertools.count()  # numbers of requests without an environment

    async def preload_libraries(self) -> None:
        """Import libraries. Needs no GPU, so it may run while other workers use the GPU."""
        await self.engine.preload_libraries()

    async def start(self) -> None:
        """Open the tools, then start engine, graders and tokenizer. Raises ValueError if a tool is unusable."""
        model, env, data, teacher = self._setup.model, self._setup.env, self._setup.data, self._setup.self_teacher
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        self._tools = await open_toolbox(env)
        with pause_gc():
            # Before the tokenizer is loaded: concurrent imports would see a partly initialized module.
            await self.engine.preload_libraries()
            tokenizer, *_ = await asyncio.gather(
                asyncio.to_thread(load_tokenizer, model.tokenizer_path or model.path, model.trust_remote_code),
                self.engine.start(),
                self._rewards.start(),
            )
            template_arguments = data.apply_chat_template_kwargs
            processor = await asyncio.to_thread(load_image_processor, model.path, tokenizer, model.trust_remote_code)
            renderer, read_calls = Renderer(tokenizer, template_arguments, processor, model.path), None
            if env.action_format == "chat_template":
                assert self._tools is not None, "checked before the start"
                schemas = self._tools.schemas()
                renderer = tool_renderer = ToolRenderer(tokenizer, schemas, template_arguments, processor, model.path)
                read_calls = await asyncio.to_thread(make_tool_call_parser, env.tool_parser, tool_renderer)
        self._rewards.render = renderer.render_prompt
        stop_ids = find_stop_ids(tokenizer, self._setup.rollout.stop_strings)
        self._stop_token_ids = (*renderer.eos_token_ids, *stop_ids)
        if (judge := self._setup.reward.judge).backend == "policy":
            self._rewards.policy = make_policy_judge(self.engine, renderer, judge)
        self._services = Services(self._rewards.score, env, self._tools, read_calls, processor is not None)
        if teacher:
            longest = teacher.max_prompt_length or data.max_length
            self._teacher_prompts = TeacherPromptWriter(teacher, renderer.encode_for_prompt, longest)
        grade = self._rewards.score if self._environment.is_graded(env) else None
        if env.env_name == "agent":
            runner = await self._agents.enter_async_context(open_agent_runner(self.engine, env, data, grade))
            self._runner, self._endpoint = runner, runner.endpoint
        else:
            self._runner = EpisodeRunner(
                engine=self.engine,
                decode=renderer.decode,
                decode_raw=renderer.decode_raw,
                find_marks=renderer.marks.find,
                make_token_context=make_token_context_factory(env, renderer, data),
                limits=EpisodeLimits(env.max_steps, env.episode_timeout, env.max_tokens_per_turn, env.limit_reward),
                grade=grade,
                placeholder_id=processor.placeholder_id if processor else None,
                system_prompt=data.system_prompt,
            )
        if self._setup.serves_suites:
            await self._open_suite_server()
        HEARTBEAT.watch_helper_processes(lambda: self.engine.get_progress_counter(), self._list_engine_processes)
        gc.freeze()  # garbage collection over vLLM's million objects would double the time of an episode

    async def _open_suite_server(self) -> None:
        """Serve the engine to evaluation suites, through the agents' endpoint if there is one."""
        model, env, data = self._setup.model, self._setup.env, self._setup.data
        if self._endpoint is None:
            opening = open_endpoint(self.engine, env, data.apply_chat_template_kwargs)
            self._endpoint = await self._agents.enter_async_context(opening)
        url, key = f"{self._endpoint.url}/v1", self._endpoint.suite_key
        tokenizer = model.tokenizer_path or model.path
        self._suite_server = ModelServer(url, key, MODEL_NAME, tokenizer, data.max_length)

    def _list_engine_processes(self) -> dict[int, str]:
        """Return the processes that generation depends on as {pid: name}."""
        names = itertools.chain(["engine core"], itertools.repeat("engine worker"))
        return {pid: f"the {next(names)} of rollout worker {self._index}" for pid in self.engine.list_pids()}

    async def generate(self, request: GroupRequest) -> TrajectoryGroup:
        """Run the episodes of a group. Failures of graders and environments are recorded in the trajectories' scores.
        Raises EngineError if the engine fails."""
        assert self._runner is not None, "call start() first"
        rollout, sampling = self._setup.rollout, request.sampling
        ids, includes = sampling.stop_token_ids or self._stop_token_ids, rollout.include_stop_str_in_output
        sampling = replace(sampling, stop_token_ids=ids, stop=rollout.stop_strings, includes_stop=includes)
        request = replace(request, sampling=sampling)
        with HEARTBEAT.use_track(f"rollout {self._index}"):
            factory = pickle.loads(request.environment) if request.environment else self._environment.factory
            group = await run_group(request, self._runner.run, partial(self._make_environment, factory))
        if not math.isfinite(sum(sum(row.logprobs) for trajectory in group.trajectories for row in trajectory.rows)):
            raise EngineError(
                f"rollout engine {self._index} sampled a token with a non-finite log-prob for prompt "
                f"{request.prompt.id}. Check rollout.engine_kwargs and the engine's log."
            )
        if self._teacher_prompts and not request.validate:
            self._teacher_prompts.add_prompts(group)
        return group

    async def answer(self, token_ids: list[int], requests: Sequence[HttpSampling]) -> list[HttpAnswer]:
        """Sample an answer for each request with the same prompt, without an environment."""
        with HEARTBEAT.record_call("generate"):
            ids = [f"answer.{next(self._numbers)}" for _ in requests]
            return await asyncio.gather(*map(partial(self.engine.answer_http, token_ids), requests, ids))

    def _make_environment(self, factory: EnvironmentFactory, turns: Sequence[Turn]) -> Environment:
        assert self._services is not None, "call start() first"
        return factory(replace(self._services, score=partial(self._rewards.score, turns=turns), turns=turns))

    async def run_suite(self, suite: Suite, folder: Path) -> SuiteResult:
        """Run an evaluation suite with the engine's current weights, and write its result to the folder."""
        assert self._suite_server is not None, "only with serves_suites"
        with HEARTBEAT.record_call("evaluation suite", timeout=suite.timeout):
            return await run_suite(suite, self._suite_server, folder)

    async def pause(self) -> None:
        """Pause generation before the next token (engines/protocol.py), and pause the environments' time limits."""
        pause_all_time_limits()
        await self.engine.pause()

    async def resume(self) -> None:
        """Resume generation and time limits after `pause`."""
        await self.engine.resume()
        pause_all_time_limits(False)

    async def confirm_weights(self, version: int, folder: str) -> WeightReceipt | None:
        """Finish a weight sync, and return the digest of the engine's weights, if any. Running requests must be paused,
        unless they keep their adapter. `folder`: folder in this node's shared memory from which weights are loaded
        first; empty: the engine already has the weights."""
        async with self._weight_sync:
            if folder:
                source = await self._copy.update(folder) if self._copy else self._weights_folder / folder
                await self.engine.receive_weights(str(source), version)
            self._rewards.clear_judge_cache()
            receipt = await self.engine.confirm_weights(version)
        return replace(receipt, copied_bytes=self._copy.copied_bytes) if receipt and self._copy else receipt

    async def restart_dead_engine(self) -> bool:
        """Restart the engine if its core died. Returns whether it was restarted, and therefore needs a weight sync."""
        async with self._weight_sync:  # wait for a running weight sync, which continues if an engine dies
            if not self.engine.is_dead:
                return False
            with HEARTBEAT.record_call("restart engine", timeout=START_SECONDS):
                await self.engine.restart()
                if self._endpoint:
                    await self._endpoint.replace_app()
        return True

    def get_memory_metrics(self) -> dict[str, float]:
        """Return the peak resident memory in GiB of this process and of all engine processes together."""
        worker_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {
            "memory/rollout_gib": worker_gib,
            "memory/engine_gib": sum(map(read_peak_memory_gib, self.engine.list_pids())),
        }

    async def close(self) -> None:
        """Stop the engine, the graders and the tools. Idempotent."""
        gc.unfreeze()
        try:
            await self._agents.aclose()  # before the engine, which their requests use
        finally:
            tools = [self._tools.close()] if self._tools else []
            await asyncio.gather(self.engine.close(), self._rewards.close(), *tools)


def make_token_context_factory(
    env: Env, renderer: Renderer, data: Data | GenerationData
) -> Callable[[Environment, Prompt], AppendContext]:
    """Return a function that builds the token context of an episode. Prompts without their own tools and variables for
    the chat template share a cache of rendered prompts."""
    cached = PromptRenderer(renderer.encode_prompt, data.max_prompt_length, data.truncation)

    def make_token_context(environment: Environment, prompt: Prompt) -> AppendContext:
        row_renderer, prompts = renderer.with_arguments(prompt.template_arguments), cached
        if row_renderer is not renderer:
            prompts = PromptRenderer(row_renderer.encode_prompt, data.max_prompt_length, data.truncation)
        if env.context == "append":
            return AppendContext(prompts, row_renderer.encode_observation, row_renderer.prepare_images)
        memory_settings = env.history_length, env.memory_type, data.system_prompt
        return MemoryContext(environment, prompts, row_renderer.prepare_images, *memory_settings)

    return make_token_context


def make_policy_judge(engine: Engine, renderer: Renderer, judge: Judge) -> CompleteMessage:
    """Return the judge of reward.judge.backend=policy: a function that samples the reply to a user message with the
    rollout worker's engine. The seed depends only on the message. The function has no time limit: judgements wait in
    the same queue as episodes, and the generation of episodes has no time limit."""
    numbers = itertools.count()

    async def complete(content: str) -> str:
        token_ids = renderer.encode_prompt([{"role": "user", "content": content}])
        seed = zlib.crc32(content.encode())
        sampling = Sampling(judge.max_tokens, judge.temperature, seed=seed, stop_token_ids=renderer.eos_token_ids)
        with HEARTBEAT.record_call("judge"):
            completion = await engine.generate(token_ids, sampling, f"judge.{next(numbers)}")
        marks = renderer.marks.find(token_ids, completion.token_ids)
        return insert_marks(renderer.decode(completion.token_ids), marks)

    return complete


async def start_rollout_worker(build: Callable[[], RolloutWorker], without_gpu: bool = False) -> RolloutWorker:
    """Build a rollout worker in this process, start its engine and return the worker. without_gpu: only import the
    libraries that the start needs."""
    worker = build()
    await (worker.preload_libraries() if without_gpu else worker.start())
    return worker
