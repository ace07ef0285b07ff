"""Validation of SFT on held-out prompts: the current model samples answers, which are graded as in RL.

    data.val_prompts -> environments -> TrainerEngine -> SftWorker.generate on the training ranks -> rewards

No inference engine is started and no weights are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from alphaapollo.config.schema import GenerationData, Rollout, SftConfig
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.controller.ranks import LocalRanks, Ranks
from alphaapollo.data.images import collect_images
from alphaapollo.data.stream import choose_rows
from alphaapollo.engines.protocol import Engine
from alphaapollo.evaluation.validation import validate
from alphaapollo.launch import input_checks
from alphaapollo.launch.model_requirements import ModelUse, check_models
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker
from alphaapollo.planning.trials import try_environment_resets
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.types import Completion, ImageInput, Prompt, Sampling, SamplingRequest

BURST = 0.02  # seconds to wait for further requests before a batch is sampled


def read_held_out_prompts(config: SftConfig) -> tuple[list[Prompt], list[str]]:
    """Read data.val_prompts. Returns the prompts and notices. Raises ValueError if a prompt cannot be used."""
    environment, data = input_checks.find_environment_spec(config.env), make_val_prompt_data(config)
    notices = input_checks.collect_environment_notices(config, environment)
    check_models([ModelUse("model.path", config.model, engine=Rollout(), lengths=data)])
    renderer = input_checks.make_renderer(config.env, config.model, data.apply_chat_template_kwargs)
    keys = config.data
    choose = partial(choose_rows, max_rows=keys.val_max_samples, seed=keys.seed, shuffle=keys.shuffle)
    prompts, truncated = input_checks.read_prompts(data.path, "data.val_prompts", renderer, data, choose)
    if with_images := [prompt.id for prompt in prompts if collect_images(prompt.content)]:
        raise ValueError(
            f"data.val_prompts: {len(with_images)} prompts have images (the first is row {with_images[0]}), but "
            "the training ranks sample answers to texts only. Remove them, or evaluate with main_generation."
        )
    reward_notices, *_ = input_checks.check_rewards(
        prompts, config.reward, config.custom_reward_function, environment.is_graded(config.env)
    )
    reset_notices = asyncio.run(try_environment_resets(config.env, prompts[:1]))
    return prompts, [*notices, *truncated, *reward_notices, *reset_notices]


def make_val_prompt_data(config: SftConfig) -> GenerationData:
    """Return a config section `data` of main_generation for the held-out prompts."""
    names = ("prompt_key", "max_prompt_length", "max_response_length", "truncation", "apply_chat_template_kwargs")
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
        """Sample completions for a batch of waiting requests on all ranks. Sorts them by length to reduce padding."""
        num_waiting, capacity = 0, self.ranks.size * self.batch_size
        while len(self._waiting_requests) > num_waiting and num_waiting < capacity:
            num_waiting = len(self._waiting_requests)
            await asyncio.sleep(BURST)
        self._waiting_requests.sort(key=lambda waiting: -len(waiting[0].token_ids))
        batch, self._waiting_requests = self._waiting_requests[:capacity], self._waiting_requests[capacity:]
        shares = [batch[rank :: self.ranks.size] for rank in range(self.ranks.size)]
        step, requests = self.step, [[request for request, _ in share] for share in shares]
        results = await self.ranks.call_with_items(lambda worker, share: worker.generate(share, step), requests)
        for share, completions in zip(shares, results, strict=True):
            for (_, future), completion in zip(share, completions, strict=True):
                # completions of another process have arrays
                ids, logprobs = list(completion.token_ids), list(completion.logprobs)
                future.set_result(replace(completion, token_ids=ids, logprobs=logprobs))


class HeldOutEvaluation:
    """Validation on held-out prompts. Environments and graders run in this process and are started by `start`."""

    def __init__(self, config: SftConfig, prompts: Sequence[Prompt], ranks: Ranks[Any]):
        self.config, self.prompts, rollout = config, prompts, config.rollout
        self.engine = TrainerEngine(ranks, config.rollout.max_num_seqs)
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
        self._worker = RolloutWorker(setup, engine=engine)
        self._log = RolloutLog(config.trainer.folder / "rollouts")

    async def start(self) -> None:
        await self._worker.start()

    async def validate(self, step: int, console: Console, tracker: Tracker) -> dict[str, float]:
        """Compute the same metrics as a validation in main_ppo, e.g. val/accuracy. Saves the answers to `rollouts/`."""
        self.engine.step = step
        engine, config = self.engine, self.config
        validation = await validate(
            EngineGroup(LocalRanks(self._worker, "rollout"), 2 * engine.batch_size * engine.ranks.size),
            self.prompts,
            config.rollout.val_kwargs,
            config.data.max_response_length,
            config.trainer.seed,
            console,
        )
        for suffix, groups in validation.groups.items():
            self._log.write(step, groups, f"val{suffix}")
            tracker.log_samples(step, groups, suffix)
        return validation.metrics

    async def close(self) -> None:
        """Stop environments and graders, and close the log of answers."""
        await self._worker.close()
        self._log.close()
