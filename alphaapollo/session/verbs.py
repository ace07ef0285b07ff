"""The verbs of a user's loop, as coroutines on the event loop that controls the workers (own_loop/trainer.py)."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alphaapollo.algorithms.adaptive_coefficients import next_policy_kl_coef
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import Columns
from alphaapollo.batching.sampled_rows import check_first_ratio
from alphaapollo.data.prompts import check_length_limit
from alphaapollo.data.rendering import Renderer
from alphaapollo.environments.base import EnvironmentFactory, StepResult, get_environment_spec
from alphaapollo.environments.single_turn import SingleTurnEnvironment
from alphaapollo.metrics.rollouts import compute_rollout_metrics
from alphaapollo.rewards.base import RewardFunction, adapt_to_episode, convert_to_score
from alphaapollo.runs.checkpoint_folder import find_damage
from alphaapollo.session.plan import Plan
from alphaapollo.session.policy_columns import check_loss, make_columns
from alphaapollo.session.progress import Progress
from alphaapollo.session.rows import RowReader, distribute, split_by_row
from alphaapollo.session.teachers import compute_target_columns
from alphaapollo.session.training import PolicySession
from alphaapollo.session.validation import compute_group_metrics
from alphaapollo.types import Episode, EpisodeTurn, GroupRequest, Message, Prompt, Row, Sampling, TrajectoryGroup
from alphaapollo.user_objects import pickle_by_value
from alphaapollo.utils.seeds import derive_seed
from alphaapollo.workers.loss_functions import LossFunction, cross_entropy

Prompts = Sequence[Prompt | str | list[Message]]
"""Each is a text to continue, a chat `[{"role": ..., "content": ...}]`, or a Prompt of a data file."""
STEP_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class GradientResult:
    """Result of one `forward_backward`, over all ranks."""

    loss: float
    num_tokens: int  # trained tokens
    logprobs: list[np.ndarray]  # of each row, [T], before the step; 0 for tokens not trained on
    metrics: dict[str, float]  # of a policy loss: means over trained tokens, or over rows for a loss of rows


class UnscoredAnswer(SingleTurnEnvironment):
    """Environment that ends the episode after one answer, without a score."""

    async def step(self, action: str) -> StepResult:
        return StepResult(done=True)


class Verbs:
    """State of a user's loop in the driver, and its verbs. Only one verb at a time uses the training ranks."""

    def __init__(self, session: PolicySession, plan: Plan, renderer: Renderer, reader: RowReader):
        self._session, self._config, self._workers = session, session.config, session.workers
        self._publisher, self._plan, self._renderer, self._reader = session.weights, plan, renderer, reader
        self.progress = Progress()
        self._num_accumulated = 0  # forward_backward calls since the last step
        self._trained_version: int | None = None  # version of the trainer's weights; None: not published
        self._version, self._training = 0, asyncio.Lock()

    async def begin(self, checkpoint: Path | None) -> None:
        """Load the checkpoint to resume from, if any, and send the weights to the engines."""
        self.progress = Progress.read(checkpoint) if checkpoint else self.progress
        await self._session.show_warnings()
        self._trained_version = self._version = self.progress.step + 1
        await self._session.restore(checkpoint, self._version)

    async def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        reward: RewardFunction | None = None,
        seed: int | None = None,
    ) -> list[TrajectoryGroup]:
        """Sample n answers to each prompt. Returns a group per prompt: each of its `trajectories` has `turns[0].text`,
        `turns[0].completion` (tokens, log-probs, stop reason, weight version) and `rows[0]`, the row to train on.

        max_tokens, temperature: as configured if None. reward: function (prompt, completion) that scores the answers in
        this process. seed: None: other samples in each call.
        """
        groups = await self.rollout(prompts, n, max_tokens, temperature, UnscoredAnswer, seed)
        if reward is not None:
            score = adapt_to_episode(reward)
            for prompt, one in ((group.prompt, one) for group in groups for one in group.trajectories):
                shown = [EpisodeTurn(turn.text, token_ids=turn.completion.token_ids) for turn in one.turns]
                result: Any = score(prompt, Episode(shown[-1].text, shown))
                one.score = convert_to_score(await result if inspect.isawaitable(result) else result)
        return groups

    async def rollout(
        self,
        prompts: Prompts,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        environment: str | EnvironmentFactory | None = None,
        seed: int | None = None,
    ) -> list[TrajectoryGroup]:
        """Run n episodes per prompt, with the configured rewards, tools and limits. environment: class or registered
        name; None: env.env_name. Other arguments and result as for `sample`."""
        publisher = self._session.require_engines()
        async with self._training:
            if not publisher.engines_hold_weights:
                await self._publish()
        data, rollout, renderer = self._config.data, self._plan.rollout, self._renderer
        made = [one if isinstance(one, Prompt) else Prompt(number, "", one) for number, one in enumerate(prompts)]
        lengths = [length for one in made for length in renderer.count_prompt_tokens([one])]
        names, limit = [f"prompt {number}" for number in range(len(made))], data.max_prompt_length
        check_length_limit(lengths, names, "prompts", "data.max_prompt_length", limit, data.truncation)
        factory = get_environment_spec(environment).factory if isinstance(environment, str) else environment
        pickled = pickle_by_value("environment", factory, [factory]) if factory else b""
        self.progress.prompts_consumed += seed is None
        position = self.progress.prompts_consumed if seed is None else -1 - seed
        heat = rollout.temperature if temperature is None else temperature
        budget, run_seed = max_tokens or data.max_response_length, self._config.trainer.seed
        sampling = Sampling(budget, heat, rollout.top_p, rollout.top_k, run_seed)
        requests = [GroupRequest(one, n, sampling, position, environment=pickled) for one in made]
        groups = {number: group async for number, group in self._workers.engines.generate(requests)}
        return [groups[number] for number in range(len(requests))]

    async def forward_backward(
        self,
        rows: Sequence[Row],
        loss: str | LossFunction = "cross_entropy",
        denominator: float | None = None,
        groups: Sequence[object] | None = None,
        **columns: Sequence[Any],
    ) -> GradientResult:
        """Compute a loss, and add its gradients to those of earlier calls. If it raises, they are unchanged.

        Args:
            loss: cross_entropy, a policy loss (docs/algorithms) with the columns advantages and, by default those of
                the engine, old_logprobs, or a LossFunction. Its columns include `mask` (trained tokens) and `weights`.
            denominator: of the weighted sum over all tokens (or rows, for a policy loss of rows); None: the number of
                trained tokens, or for a policy loss the weights of actor.loss_agg_mode.
            groups: group of each row. The rows of a group are in one call of the function, one after the other.
            columns: for each row a number, or a number per token.
        """
        config = self._config
        loss = cross_entropy if loss == "cross_entropy" else loss
        policy_loss = get_policy_loss(loss) if isinstance(loss, str) else None
        read = self._reader.read(rows, columns)
        check_loss(config, policy_loss, read)
        layout, num_tokens = distribute(read, self._plan, groups), sum(sum(row.action_mask) for row in read)
        sent: str | bytes
        if policy_loss:
            sent, divisor, teacher, policy = policy_loss.name, denominator, config.teacher, self._workers.policy
            scored = Columns[np.ndarray]()
            if teacher.uses_full_vocabulary:
                scored = await compute_target_columns(teacher, policy, self._plan.model, read, layout)
            seed = derive_seed(config.trainer.seed, "choice", self.progress.step, self._num_accumulated)
            inputs = make_columns(read, layout, policy_loss, config, denominator, groups, seed, scored)
        else:
            sent = pickle_by_value("loss", loss, [loss])
            divisor = float(num_tokens) if denominator is None else denominator
            inputs = [Columns[np.ndarray]()] * len(layout.rank_batches)
        kl_coef = self.progress.policy_kl_coef if config.actor_rollout_ref.actor.policy_loss.adapts_kl_coef else None
        has_ratio = policy_loss and not policy_loss.on_policy and "old_logprobs" not in read[0].columns
        async with self._use_trainer():
            batches = layout.rank_batches
            metrics, values = await self._workers.policy.accumulate(batches, inputs, sent, divisor, kl_coef)
            self._num_accumulated, logprobs = self._num_accumulated + 1, split_by_row(layout, read, values)
            if has_ratio and self._publisher:
                limit = self._publisher.probe_tolerance / min(self._plan.rollout.temperature, 1.0)
                check_first_ratio(read, logprobs, self._trained_version, limit)
        return GradientResult(metrics.pop("loss"), num_tokens, logprobs, metrics)

    async def optim_step(self, lr: float | None = None, grad_clip: float | None = None) -> dict[str, float]:
        """Take an optimizer step with the accumulated gradients. None: as configured. Returns lr, the gradient norm
        before clipping, and metrics of TRPO and of ppo_kl's coefficient. Raises FloatingPointError if the gradients are
        not finite."""
        config = self._config
        if not self._num_accumulated:
            raise ValueError("there are no gradients. Call forward_backward before optim_step.")
        if config.uses_trpo and lr is not None:
            raise ValueError("optim.name=trpo chooses the size of its steps. Leave lr out, and set optim.delta.")
        async with self._use_trainer():
            self._num_accumulated, self._trained_version = 0, None
            metrics = await self._workers.policy.take_step(lr, grad_clip)
        if "policy_kl" in metrics:
            options, coef = config.actor_rollout_ref.actor.policy_loss, self.progress.policy_kl_coef
            self.progress.policy_kl_coef = next_policy_kl_coef(options, coef, metrics["policy_kl"])
        return metrics

    async def publish(self) -> dict[str, float]:
        """Send the weights to the engines, and verify them as main_ppo does. Returns metrics of the weight sync."""
        async with self._use_trainer():
            return await self._publish()

    async def log_probs(self, rows: Sequence[Row], model: str = "policy") -> list[np.ndarray]:
        """Compute the log-probs of each row at rollout.temperature, [T]; 0 for tokens not trained on. model: policy,
        reference (needs actor.use_kl_loss) or teacher (needs teacher.model.path and teacher.divergence)."""
        config = self._config
        exists = {"policy": True, "reference": config.needs_reference, "teacher": config.teacher.uses_sampled_tokens}
        if not exists.get(model):
            raise ValueError(f"model={model}: the workers have {', '.join(one for one in exists if exists[one])}.")
        read = self._reader.read(rows)
        layout = distribute(read, self._plan)
        async with self._use_trainer():
            policy = self._workers.policy
            await policy.load_batch(layout.rank_batches)
            if model == "teacher":
                scored = await compute_target_columns(config.teacher, policy, self._plan.model, read, layout)
                assert scored.target_logprobs is not None
                values = layout.split_by_rank(scored.target_logprobs)
            else:
                values = await policy.compute_log_probs(model)
        return split_by_row(layout, read, values)

    async def save(self, name: str | None = None) -> Path:
        """Write a checkpoint to checkpoints/NAME of the run folder, and return its path. None: step_N, after the last
        logged step."""
        if self._num_accumulated:
            raise ValueError("there are gradients, which are not saved. Call optim_step before save.")
        writer, now = self._session.checkpoint_writer, replace(self.progress)
        if matched := STEP_NAME.fullmatch(name or ""):
            now.step, name = int(matched[1]), None
        async with self._use_trainer():
            folder = writer.checkpoints.begin_checkpoint(now.step, name or "")
            await writer.save_and_wait(folder)
            now.write(folder)
            return await asyncio.to_thread(writer.checkpoints.complete_checkpoint, folder)

    async def load(self, name: str | Path) -> int:
        """Load a checkpoint of this run by name, or of any run by path, publish it, and drop gradients. Returns its
        step. Raises ValueError if it is missing or damaged; the state is then unchanged."""
        matched = STEP_NAME.fullmatch(str(name))
        checkpoints = self._session.checkpoint_writer.checkpoints
        named = checkpoints.folder / (f"step_{int(matched[1]):06d}" if matched else name)
        path = named if named.is_dir() else Path(name).expanduser()
        if damage := await asyncio.to_thread(find_damage, path):
            known = ", ".join(sorted(one.name for one in named.parent.glob("[!.]*"))) or "none"
            raise ValueError(f"{path} cannot be loaded: {damage[0]}. Checkpoints of this run: {known}.")
        progress = Progress.read(path)
        async with self._use_trainer():
            await self._workers.policy.clear_gradients()
            await self._session.load(path)
            self._num_accumulated, self.progress = 0, progress
            if self._publisher:
                await self._publish()
        return progress.step

    async def evaluate(
        self,
        prompts: Prompts,
        reward: RewardFunction | None = None,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> dict[str, float]:
        """Answer prompts, always with the same seeds, and return metrics such as val/accuracy. Without `reward`, the
        configured environment scores the answers."""
        sampling = prompts, n, max_tokens, temperature
        sampled = self.sample(*sampling, reward, seed=0) if reward else self.rollout(*sampling, seed=0)
        return compute_group_metrics(await sampled, "")

    async def log(
        self, step: int, groups: Sequence[TrajectoryGroup] = (), metrics: Mapping[str, float] | None = None
    ) -> None:
        """Write `metrics` and those of the groups to metrics.jsonl and the trackers, and the groups to rollouts/, for
        the viewer. Names are like train/loss."""
        logged = {**(metrics or {})}
        if wrong := [name for name in logged if "/" not in name]:
            raise ValueError(f"the metric {wrong[0]!r} has no group. Name it group/name, e.g. train/{wrong[0]}.")
        if groups:
            logged = compute_rollout_metrics(groups, groups, 1, 0.0) | logged
            del logged["rollout/tokens_per_second"]  # unknown
            self._session.rollout_log.write(step, groups)
        self.progress.step = step
        self._session.log(step, logged)

    async def _publish(self) -> dict[str, float]:
        self._session.require_engines()
        self._version += 1
        self._trained_version = self._version
        return await self._session.publish(self._version)

    @asynccontextmanager
    async def _use_trainer(self) -> AsyncIterator[None]:
        """Context manager in which the training ranks work. Engines on the same GPUs free their memory first, and get
        the weights again before the next sample."""
        async with self._training:
            shares_gpus = self._plan.placement.shares_gpus
            if shares_gpus and self._publisher and self._publisher.engines_hold_weights:
                await self._session.hand_over(pauses_requests=True)
            yield
