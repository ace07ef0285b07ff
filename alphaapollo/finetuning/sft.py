"""Supervised fine-tuning: next-token loss on given responses.

    files -> tokenized examples (data/examples.py) -> mean loss over the response tokens of a batch
    data.val_prompts -> environments -> TrainerEngine -> SftWorker.generate on the training ranks -> rewards

In the validation on held-out prompts, the current model samples answers, which are graded as in RL. No inference
engine is started and no weights are sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.schema import GenerationData, Rollout, SftConfig
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.ranks import LocalRanks, Ranks
from alphaapollo.data.examples import LoadedExamples, load_examples
from alphaapollo.data.images import collect_images
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.stream import choose_rows
from alphaapollo.engines.protocol import Engine
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningRun, FinetuningTask
from alphaapollo.launch import inputs
from alphaapollo.planning.memory_plan import MemoryRequest
from alphaapollo.planning.model_requirements import ModelUse, check_models
from alphaapollo.planning.trials import try_environment_resets
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.runs.training_examples import LoggedExample, make_example_row
from alphaapollo.session.validation import validate
from alphaapollo.types import Completion, ImageInput, Prompt, Row, Sampling, SamplingRequest
from alphaapollo.workers.finetuning_worker import SftWorker

BATCH_WAIT_SECONDS = 0.02  # wait for further requests before a batch is sampled


class SftTask(FinetuningTask):
    """Supervised fine-tuning. An example is a token sequence whose action mask marks the tokens to train on."""

    config: SftConfig
    worker_class = SftWorker
    prompts: Sequence[Prompt] = ()  # held-out prompts from data.val_prompts
    engine: TrainerEngine  # engine, worker and log of the validation on these prompts, set by `begin_run`
    worker: RolloutWorker
    log: RolloutLog

    def check_config_and_get_notices(self, num_gpus: int) -> list[str]:
        config = self.config
        notices = super().check_config_and_get_notices(num_gpus)
        if not config.data.val_prompts or config.trainer.test_freq < 1:
            return notices
        self.prompts, prompt_notices = read_held_out_prompts(config)
        num_answers = config.rollout.val_kwargs.n + (1 if config.rollout.val_kwargs.greedy else 0)
        summary = f"data.val_prompts: {len(self.prompts)} prompts x {num_answers} answers at each validation"
        return [*notices, summary, *prompt_notices]

    def load_examples(self, files: str | Sequence[str], max_samples: int, renderer: Renderer) -> LoadedExamples[Row]:
        return load_examples(files, renderer, self.config.data, max_samples)

    def make_memory_request(self, examples: Sequence[Row]) -> MemoryRequest:
        return MemoryRequest(max(len(row.token_ids) for row in examples))

    def make_batches(self, examples: Sequence[Row], plan: FinetuningPlan) -> list[RankBatch]:
        return build_batch_layout(
            examples,
            range(len(examples)),
            num_ranks=plan.placement.data_parallel_size,
            mini_batch_size=len(examples),
            max_tokens=plan.max_tokens,
            padded=plan.padded,
        ).rank_batches

    def describe_example(self, example: Row, decode: Callable[[Sequence[int]], str]) -> LoggedExample:
        return LoggedExample([make_example_row(example, decode)])

    def compute_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["loss"] / sums["tokens"]
        return {"loss": mean, "perplexity": math.exp(min(mean, 50.0)), "tokens": sums["tokens"]}

    async def begin_run(self, run: FinetuningRun, stack: AsyncExitStack) -> None:
        """Start environments and graders for the held-out prompts, in this process."""
        if not self.prompts:
            return
        config, rollout = self.config, self.config.rollout
        self.engine = TrainerEngine(run.trainer.ranks, rollout.max_num_seqs)
        engine: Any = self.engine  # implements only the parts of Engine that evaluation uses
        setup = RolloutWorkerConfig(
            model=config.model,
            rollout=Rollout(stop=rollout.stop, include_stop_str_in_output=rollout.include_stop_str_in_output),
            env=config.env,
            data=make_val_prompt_data(config),
            reward=config.reward,
            custom_reward=config.custom_reward_function,
            device="cpu",
            run_dir=str(config.trainer.folder.resolve()),
        )
        self.worker, self.log = RolloutWorker(setup, engine=engine), RolloutLog(config.trainer.folder / "rollouts")
        stack.callback(self.log.close)
        stack.push_async_callback(self.worker.close)
        await self.worker.start()

    async def validate(self, run: FinetuningRun, step: int) -> dict[str, float]:
        """Compute the same metrics as a validation in main_ppo, e.g. val/accuracy. Saves the answers to `rollouts/`."""
        if not self.prompts:
            return {}
        engine, config = self.engine, self.config
        engine.step = step
        validation = await validate(
            EngineGroup(LocalRanks(self.worker, "rollout"), 2 * engine.batch_size * engine.ranks.size),
            self.prompts,
            config.rollout.val_kwargs,
            config.data.max_response_length,
            config.trainer.seed,
            run.session.console,
        )
        for suffix, groups in validation.groups.items():
            self.log.write(step, groups, f"val{suffix}")
            run.session.tracker.log_samples(step, groups, suffix)
        return validation.metrics


def read_held_out_prompts(config: SftConfig) -> tuple[list[Prompt], list[str]]:
    """Read data.val_prompts. Returns the prompts and notices. Raises ValueError if a prompt cannot be used."""
    environment, data = inputs.find_environment_spec(config.env), make_val_prompt_data(config)
    notices = inputs.collect_environment_notices(config, environment)
    check_models([ModelUse("model.path", config.model, engine=Rollout(), lengths=data)])
    renderer = inputs.make_renderer(config.env, config.model, data.apply_chat_template_kwargs)
    settings = config.data
    choose = partial(choose_rows, max_rows=settings.val_max_samples, seed=settings.seed, shuffle=settings.shuffle)
    prompts, prompt_notices, findings = inputs.read_prompts(data.path, "data.val_prompts", renderer, data, choose)
    if with_images := [prompt.id for prompt in prompts if collect_images(prompt.content)]:
        raise ValueError(
            f"data.val_prompts: {len(with_images)} prompts have images (the first is row {with_images[0]}), but "
            "the training ranks sample answers to texts only. Remove them, or evaluate with main_generation."
        )
    reward_notices, *_ = inputs.check_rewards(
        prompts, config.reward, config.custom_reward_function, environment.is_graded(config.env)
    )
    reset_notices = asyncio.run(try_environment_resets(config.env, prompts[:1]))
    finding_notices = [f"data.val_prompts: {finding.describe()}" for finding in findings]
    return prompts, [*notices, *prompt_notices, *finding_notices, *reward_notices, *reset_notices]


def make_val_prompt_data(config: SftConfig) -> GenerationData:
    """Return a config section `data` of main_generation for the held-out prompts."""
    names = ["prompt_key", "max_prompt_length", "max_response_length", "truncation"]
    names += ["system_prompt", "apply_chat_template_kwargs"]
    return GenerationData(path=config.data.val_prompts, **{name: getattr(config.data, name) for name in names})


@dataclass
class TrainerEngine(Engine):
    """Inference engine that samples from the model in training, on the training ranks."""

    ranks: Ranks[Any]  # ranks of SftWorker
    batch_size: int  # completions per batch and rank
    step: int = 0  # optimizer steps so far; the weight version of the completions
    _waiting_requests: list[tuple[SamplingRequest, asyncio.Future[Completion]]] = field(default_factory=list)
    _sampling_task: asyncio.Task[None] | None = None

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        if images:
            raise ValueError(
                "data.val_prompts: the environment returned images, but the training ranks sample answers to texts "
                "only. Evaluate with main_generation."
            )
        completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting_requests.append((SamplingRequest(token_ids, sampling), completion))
        while not completion.done():
            if self._sampling_task is None or self._sampling_task.done():
                self._sampling_task = asyncio.ensure_future(self._sample_batch())
            await asyncio.shield(self._sampling_task)  # if sampling fails, all waiting requests raise the error
        return completion.result()

    async def _sample_batch(self) -> None:
        """Wait while requests arrive, and sample completions for a batch of them, sorted by length, on all ranks."""
        num_waiting, capacity = 0, self.ranks.size * self.batch_size
        while len(self._waiting_requests) > num_waiting and num_waiting < capacity:
            num_waiting = len(self._waiting_requests)
            await asyncio.sleep(BATCH_WAIT_SECONDS)
        self._waiting_requests.sort(key=lambda waiting: -len(waiting[0].token_ids))
        batch, self._waiting_requests = self._waiting_requests[:capacity], self._waiting_requests[capacity:]
        shares = [batch[rank :: self.ranks.size] for rank in range(self.ranks.size)]
        step, requests = self.step, [[request for request, _ in share] for share in shares]
        results = await self.ranks.call_with_items(lambda worker, share: worker.generate(share, step), requests)
        for share, completions in zip(shares, results, strict=True):
            for (_, future), completion in zip(share, completions, strict=True):
                # completions from another process contain arrays
                ids, logprobs = list(completion.token_ids), list(completion.logprobs)
                future.set_result(replace(completion, token_ids=ids, logprobs=logprobs))
