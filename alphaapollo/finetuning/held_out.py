"""Evaluate held-out prompts during fine-tuning: sample answers with the current model and grade them as in RL.

    data.val_prompts -> environments -> TrainerEngine -> ranks -> rewards -> val/accuracy

The training ranks sample (SftWorker.generate), so no weights are published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alphaapollo.config.schema import GenerationData, Rollout, SftConfig
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.controller.ranks import LocalRanks, Ranks
from alphaapollo.data.stream import choose_row_indices
from alphaapollo.engines.protocol import Engine
from alphaapollo.evaluation.validation import validate
from alphaapollo.launch.input_checks import (
    check_lengths,
    check_rewards,
    collect_environment_notices,
    find_environment,
    make_renderer,
    read_prompts,
)
from alphaapollo.launch.try_environment import try_resets
from alphaapollo.observability.console import Console
from alphaapollo.observability.rollout_log import RolloutLog
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.types import Completion, Prompt, Sampling, SamplingRequest

BURST = 0.02  # seconds; requests that arrive within this interval are sampled as one batch


def read_held_out_prompts(config: SftConfig) -> tuple[list[Prompt], list[str]]:
    """Read and check the held-out prompts. Returns prompts and notices.

    Raises ValueError for prompts that cannot be rendered or graded.
    """
    environment, data = find_environment(config.env), make_prompt_data(config)
    notices = collect_environment_notices(config, environment)
    check_lengths(config.model, Rollout(), data)
    renderer = make_renderer(config.env, config.model, data.apply_chat_template_kwargs)

    def select(prompts: list[Prompt]) -> list[Prompt]:
        keys = config.data
        return [
            prompts[index] for index in choose_row_indices(len(prompts), keys.val_max_samples, keys.seed, keys.shuffle)
        ]

    prompts, truncated = read_prompts(data.path, "data.val_prompts", renderer, data, select)
    reward_notices, _ = check_rewards(prompts, config.reward, config.custom_reward_function, environment.graded)
    return prompts, [*notices, *truncated, *reward_notices, *asyncio.run(try_resets(config.env, prompts[:1]))]


def make_prompt_data(config: SftConfig) -> GenerationData:
    """Build the data section of the rollout worker's configuration."""
    names = ("prompt_key", "max_prompt_length", "max_response_length", "truncation", "apply_chat_template_kwargs")
    return GenerationData(path=config.data.val_prompts, **{name: getattr(config.data, name) for name in names})


@dataclass
class _PendingRequest:
    """Sampling request and its completion, once it is available."""

    prompt: SamplingRequest
    completion: Completion | None = None


@dataclass
class TrainerEngine(Engine):
    """Engine that samples from the model in training. It receives no weights and is never paused."""

    ranks: Ranks[Any]  # ranks of SftWorker
    batch_size: int  # completions per batch and rank
    step: int = 0  # optimizer steps of the current weights
    has_weights = False
    _waiting: list[_PendingRequest] = field(default_factory=list)
    _serving: asyncio.Task[None] | None = None

    async def generate(self, token_ids: list[int], sampling: Sampling, request_id: str) -> Completion:
        request = _PendingRequest(SamplingRequest(token_ids, sampling))
        self._waiting.append(request)
        while request.completion is None:
            if self._serving is None or self._serving.done():
                self._serving = asyncio.ensure_future(self._serve())
            await asyncio.shield(self._serving)  # if sampling fails, all waiting requests raise the error
        return request.completion

    async def _serve(self) -> None:
        """Sample one batch on all ranks. Requests are sorted by length to reduce padding."""
        num_waiting, capacity = 0, self.ranks.size * self.batch_size
        while len(self._waiting) > num_waiting and num_waiting < capacity:
            num_waiting = len(self._waiting)
            await asyncio.sleep(BURST)
        self._waiting.sort(key=lambda request: -len(request.prompt.token_ids))
        batch, self._waiting = self._waiting[:capacity], self._waiting[capacity:]
        shares = [batch[rank :: self.ranks.size] for rank in range(self.ranks.size)]
        step, prompts = self.step, [[request.prompt for request in share] for share in shares]
        results = await self.ranks.call_each(lambda worker, share: worker.generate(share, step), prompts)
        for share, completions in zip(shares, results, strict=True):
            for request, completion in zip(share, completions, strict=True):
                # completions of another process have arrays
                ids, logprobs = list(completion.token_ids), list(completion.logprobs)
                request.completion = replace(completion, token_ids=ids, logprobs=logprobs)


class HeldOutEvaluation:
    """Evaluation of held-out prompts with environments and graders in this process. Call `start` first."""

    def __init__(self, config: SftConfig, prompts: Sequence[Prompt], ranks: Ranks[Any]):
        self.config, self.prompts = config, prompts
        self.engine = TrainerEngine(ranks, config.rollout.max_num_seqs)
        engine: Any = self.engine  # implements only the parts of Engine that evaluation uses
        setup = RolloutWorkerConfig(
            model=config.model,
            rollout=Rollout(),
            env=config.env,
            data=make_prompt_data(config),
            reward=config.reward,
            custom_reward=config.custom_reward_function,
            device="cpu",
            run_dir=str(config.trainer.folder.resolve()),
        )
        self._worker = RolloutWorker(setup, engine=engine)
        self._log = RolloutLog(config.trainer.folder / "rollouts")

    async def start(self) -> None:
        await self._worker.start()

    async def validate(self, step: int, console: Console) -> dict[str, float]:
        """Return the validation metrics of main_ppo (val/accuracy, ...). Completions are logged to rollouts/."""
        self.engine.step = step
        engine, config = self.engine, self.config
        validation = await validate(
            EngineGroup(LocalRanks(self._worker), 2 * engine.batch_size * engine.ranks.size),
            self.prompts,
            config.rollout.val_kwargs,
            config.data.max_response_length,
            config.trainer.seed,
            console,
        )
        for suffix, groups in validation.groups.items():
            self._log.write_validation(step, groups, suffix)
        return validation.metrics

    async def close(self) -> None:
        """Stop the graders and close the log."""
        await self._worker.close()
        self._log.close()
