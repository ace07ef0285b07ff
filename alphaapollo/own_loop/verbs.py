"""The verbs of a user's loop, as coroutines on the event loop that controls the workers (own_loop/trainer.py)."""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from alphaapollo.algorithms.adaptive_coefficients import next_policy_kl_coef
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import Columns
from alphaapollo.data.prompts import check_length_limit
from alphaapollo.data.rendering import Renderer
from alphaapollo.engines.types import HttpAnswer, HttpSampling
from alphaapollo.environments.base import EnvironmentFactory, get_environment_spec
from alphaapollo.environments.single_turn import UnscoredAnswer
from alphaapollo.launch.plan import Plan
from alphaapollo.models.train_state import AS_CONFIGURED, AdamSettings
from alphaapollo.observability.rollout_metrics import compute_rollout_metrics
from alphaapollo.own_loop.adapters import ADAPTERS, Adapters
from alphaapollo.own_loop.compute_turns import ComputeTurns
from alphaapollo.own_loop.loop_checkpoints import STATE, STEP_NAME, find_checkpoint, format_state, read_state
from alphaapollo.own_loop.policy_columns import check_loss, make_columns
from alphaapollo.own_loop.rows import GradientResult, RowReader, distribute, split_by_row
from alphaapollo.own_loop.sampled_rows import check_first_ratio, check_sampling
from alphaapollo.own_loop.verb_timer import GENERATE, VerbTimer
from alphaapollo.rewards.base import RewardFunction, adapt_to_episode, convert_to_score
from alphaapollo.runs.resume import StartPoint
from alphaapollo.session.progress import Progress
from alphaapollo.session.teachers import compute_target_columns
from alphaapollo.session.training import PolicySession
from alphaapollo.session.validation import compute_group_metrics
from alphaapollo.types import Episode, EpisodeTurn, GroupRequest, Message, Prompt, Row, Sampling, TrajectoryGroup
from alphaapollo.user_objects import pickle_by_value
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.seeds import derive_seed, derive_seeds
from alphaapollo.workers.adapter_slots import OWN
from alphaapollo.workers.loss_functions import LossFunction, cross_entropy

Prompts = Sequence[Prompt | str | list[Message]]
"""Each is a text to continue, a chat `[{"role": ..., "content": ...}]`, or a Prompt of a data file."""


class Verbs:
    """State of a user's loop in the driver, and its verbs."""

    def __init__(self, session: PolicySession, plan: Plan, renderer: Renderer, reader: RowReader):
        self._session, self._config, self._workers = session, session.config, session.workers
        self._publisher, self._plan, self._renderer, self._reader = session.publisher, plan, renderer, reader
        self.progress, self.adapters = Progress(), Adapters(self._config, plan.model, self._workers.policy)
        self._turns = ComputeTurns(session, self.adapters, plan.placement.shares_gpus)
        self.state: JsonObject = {}  # the user's values (Trainer.state)
        self.timer, self._step_metrics, self._needs_export = VerbTimer(), dict[str, float](), False

    async def begin(self, start: StartPoint) -> None:
        """Load the checkpoint to resume from, if any, and send the weights to the engines."""
        self.adapters.remove_published()
        if checkpoint := start.checkpoint:
            self.progress = Progress.read(checkpoint)
        await self._session.show_warnings()
        self.adapters[OWN].trained_version = self.adapters.version = self.progress.step + 1
        await self._session.restore(checkpoint, self.adapters.version)
        if checkpoint:
            self.state.update(read_state(checkpoint))
            self._needs_export = not start.has_exported_model()
            await self.adapters.load_all(checkpoint / ADAPTERS)
        self.timer = VerbTimer()  # without the time of the start

    async def finish(self) -> None:
        """Export the model if trainer.export_hf is set and the trainer's own weights were trained or loaded."""
        if self._needs_export and self._config.trainer.export_hf:
            async with self._turns.use_ranks():
                await self._session.export(self._workers.policy)
            self._session.console.show_line(f"model: {self._config.trainer.folder / 'model'}")

    async def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        reward: RewardFunction | None = None,
        seed: int | None = None,
        adapter: str | Path | None = OWN,
    ) -> list[TrajectoryGroup]:
        """Sample n answers to each prompt. Returns a group per prompt: each of its `trajectories` has `turns[0].text`,
        `turns[0].completion` (tokens, log-probs, stop reason, weight version) and `rows[0]`, the row to train on.

        max_tokens, temperature: None: as configured. reward: function (prompt, completion) that scores answers in this
        process. seed: None: other samples in each call. adapter: name or folder of an adapter; None: without adapters.
        """
        groups = await self.rollout(prompts, n, max_tokens, temperature, UnscoredAnswer, seed, adapter)
        if reward is not None:
            score = adapt_to_episode(reward)
            for prompt, sample in ((group.prompt, sample) for group in groups for sample in group.trajectories):
                turns = [EpisodeTurn(turn.text, token_ids=turn.completion.token_ids) for turn in sample.turns]
                result: object = score(prompt, Episode(turns[-1].text, turns))
                sample.score = convert_to_score(await result if inspect.isawaitable(result) else result)
        return groups

    async def rollout(
        self,
        prompts: Prompts,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        environment: str | EnvironmentFactory | None = None,
        seed: int | None = None,
        adapter: str | Path | None = OWN,
    ) -> list[TrajectoryGroup]:
        """Run n episodes per prompt, with the configured rewards, tools and limits. environment: class or registered
        name; None: env.env_name. Other arguments and result as for `sample`."""
        async with self._turns.use_engines():
            served = await self.adapters.find(adapter, self._workers.engines)
        data, renderer = self._config.data, self._renderer
        tasks = [item if isinstance(item, Prompt) else Prompt(number, "", item) for number, item in enumerate(prompts)]
        lengths = [length for task in tasks for length in renderer.count_prompt_tokens([task])]
        names, limit = [f"prompt {number}" for number in range(len(tasks))], data.max_prompt_length
        check_length_limit(lengths, names, "prompts", "data.max_prompt_length", limit, data.truncation)
        factory = get_environment_spec(environment).factory if isinstance(environment, str) else environment
        pickled = pickle_by_value("environment", factory, [factory]) if factory else b""
        self.progress.prompts_consumed += 1 if seed is None else 0
        position = self.progress.prompts_consumed if seed is None else -1 - seed  # determines the samples
        shared = replace(self._plan.sampling, max_tokens=max_tokens or data.max_response_length)
        shared = shared if temperature is None else replace(shared, temperature=temperature)
        seeds = derive_seeds(self._config.trainer.seed, [task.id for task in tasks])
        samplings = [replace(shared, seed=task_seed, adapter=served) for task_seed in seeds]
        requests = [GroupRequest(task, n, samplings[i], position, environment=pickled) for i, task in enumerate(tasks)]
        async with self._turns.sample():
            with self.timer(GENERATE):
                groups = {number: group async for number, group in self._workers.engines.generate(requests)}
        self.timer.tokens += sum(sample.num_tokens for group in groups.values() for sample in group.trajectories)
        return [groups[number] for number in range(len(requests))]

    async def sample_tokens(
        self,
        token_ids: Sequence[int],
        sampling: Sequence[Sampling],
        num_top: int = 0,
        scores_prompt: bool = False,
        adapter: str | Path | None = OWN,
    ) -> list[HttpAnswer]:
        """Sample an answer to the same token ids for each item of `sampling`, without an environment. num_top: most
        probable tokens per position to return beside the sampled one. scores_prompt: also score the prompt."""
        check_sampling(self._config.actor_rollout_ref.rollout, sampling)
        async with self._turns.use_engines():
            served = await self.adapters.find(adapter, self._workers.engines)
        requests = [
            HttpSampling(replace(item, adapter=served), num_top=num_top, scores_prompt=scores_prompt and number == 0)
            for number, item in enumerate(sampling)
        ]
        async with self._turns.sample():
            with self.timer(GENERATE):
                answers = await self._workers.engines.answer([*token_ids], requests)
        self.timer.tokens += sum(len(answer.completion.token_ids) for answer in answers)
        return answers

    async def forward_backward(
        self,
        /,
        rows: Sequence[Row],
        loss: str | LossFunction = "cross_entropy",
        denominator: float | None = None,
        groups: Sequence[object] | None = None,
        adapter: str = OWN,
        **columns: Sequence[object],
    ) -> GradientResult:
        """Compute a loss, and add its gradients to those of earlier calls. If it raises, they are unchanged.

        Args:
            loss: cross_entropy; or a policy loss (docs/algorithms), with the columns advantages and old_logprobs (by
                default the engine's); or a LossFunction, whose columns include `mask` (trained tokens) and `weights`.
            denominator: of the weighted sum over all tokens (or rows, for a policy loss of rows); None: the number of
                trained tokens, or for a policy loss the weights of actor.loss_agg_mode.
            groups: group of each row. A LossFunction gets all rows of a group in one call, one after the other.
            adapter: name of the adapter to train (add_adapter).
            columns: for each row a number, or a number per token.
        """
        config, state = self._config, self.adapters[adapter]
        loss = cross_entropy if loss == "cross_entropy" else loss
        policy_loss = get_policy_loss(loss) if isinstance(loss, str) else None
        checked = self._reader.read(rows, columns)
        check_loss(config, policy_loss, checked)
        layout, num_tokens = distribute(checked, self._plan, groups), sum(sum(row.action_mask) for row in checked)
        sent_loss: str | bytes
        if policy_loss:
            sent_loss, divisor, teacher, policy = policy_loss.name, denominator, config.teacher, self._workers.policy
            scored = Columns[np.ndarray]()
            if teacher.uses_full_vocabulary:
                scored = await compute_target_columns(teacher, policy, self._plan.model, checked, layout)
            seed = derive_seed(config.trainer.seed, "choice", self.progress.step, state.num_accumulated)
            inputs = make_columns(checked, layout, policy_loss, config, denominator, groups, seed, scored)
        else:
            sent_loss = pickle_by_value("loss", loss, [loss])
            divisor = float(num_tokens) if denominator is None else denominator
            inputs = [Columns[np.ndarray]()] * len(layout.rank_batches)
        kl_coef = self.progress.policy_kl_coef if config.actor_rollout_ref.actor.policy_loss.adapts_kl_coef else None
        if kl_coef is not None and adapter != OWN:
            raise ValueError("actor.policy_loss adapts one KL coefficient, for one adapter. Leave adapter out.")
        has_engine_ratio = policy_loss and not policy_loss.on_policy and "old_logprobs" not in checked[0].columns
        async with self._turns.use_ranks(adapter):
            batches = layout.rank_batches
            metrics, values = await self._workers.policy.accumulate(batches, inputs, sent_loss, divisor, kl_coef)
            state.num_accumulated, logprobs = state.num_accumulated + 1, split_by_row(layout, checked, values)
            if has_engine_ratio and self._publisher:
                limit = self._publisher.probe_tolerance / min(self._plan.rollout.temperature, 1.0)
                check_first_ratio(checked, logprobs, state.trained_version, limit)
        return GradientResult(metrics.pop("loss"), num_tokens, logprobs, metrics)

    async def optim_step(
        self,
        lr: float | None = None,
        grad_clip: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        adapter: str = OWN,
    ) -> dict[str, float]:
        """Take an optimizer step with the accumulated gradients. None: as configured. Returns lr, the gradient norm
        before clipping, and metrics of TRPO and of ppo_kl's coefficient. Raises FloatingPointError if the gradients are
        not finite. betas, eps, weight_decay: of AdamW, for this step."""
        config, state, adam = self._config, self.adapters[adapter], AdamSettings(betas, eps, weight_decay)
        optimizer = config.actor_rollout_ref.actor.optim.name
        if not state.num_accumulated:
            raise ValueError("there are no gradients. Call forward_backward before optim_step.")
        if adam != AS_CONFIGURED and optimizer not in ("adamw", "adamw_8bit"):
            raise ValueError(f"optim.name={optimizer} is not AdamW. Leave betas, eps and weight_decay out.")
        if not all(0 <= beta < 1 for beta in betas or ()) or (eps is not None and eps <= 0):
            raise ValueError(f"betas={betas}, eps={eps}: betas must be in [0, 1), and eps above 0.")
        if config.uses_trpo and lr is not None:
            raise ValueError("optim.name=trpo chooses the size of its steps. Leave lr out, and set optim.delta.")
        async with self._turns.use_ranks(adapter):
            state.num_accumulated, state.trained_version = 0, None
            metrics = await self._workers.policy.take_step(lr, grad_clip, adam)
        self._needs_export |= adapter == OWN
        prefix = f"actor/{adapter}/" if adapter else "actor/"
        self._step_metrics |= {prefix + name: metrics[name] for name in ("lr", "grad_norm")}
        if "policy_kl" in metrics:
            options, coef = config.actor_rollout_ref.actor.policy_loss, self.progress.policy_kl_coef
            self.progress.policy_kl_coef = next_policy_kl_coef(options, coef, metrics["policy_kl"])
        return metrics

    async def clear_gradients(self, adapter: str = OWN) -> None:
        """Drop the accumulated gradients."""
        async with self._turns.use_ranks(adapter):
            self.adapters[adapter].num_accumulated = 0
            await self._workers.policy.clear_gradients()

    async def publish(self, adapter: str = OWN, folder: str | Path | None = None) -> dict[str, float]:
        """Send the weights to the engines, and verify them as main_ppo does. Returns metrics of the weight sync.

        adapter: name of an adapter, which the engines then serve beside others; running requests keep their version.
        folder: where this version of the adapter is written in peft's format, so that you can sample from it later, too
        (`sample(adapter=folder)`); None: a folder of the run, which is removed when later ones exist.
        """
        if adapter == OWN:
            if folder is not None:
                raise ValueError("folder is for adapters by name. Pass adapter=NAME, or leave folder out.")
            async with self._turns.use_ranks():
                return await self._turns.publish()
        self.adapters.check_engine()
        publisher, version = self._session.require_publisher(), self.adapters.begin_publish(adapter, folder)
        try:
            async with self._turns.use_ranks(adapter):
                written = await publisher.write_adapter(version)
            async with self._turns.use_engines():
                return {"sync/probe_gap": await self.adapters.end_publish(adapter, version, publisher, *written)}
        except BaseException:
            shutil.rmtree(version.folder, ignore_errors=True)
            raise

    async def log_probs(self, rows: Sequence[Row], model: str = "policy", adapter: str = OWN) -> list[np.ndarray]:
        """Compute the log-probs of each row at rollout.temperature, [T]; 0 for tokens not trained on. model: policy,
        reference (needs actor.use_kl_loss) or teacher (needs teacher.model.path and teacher.divergence). adapter: name
        of the policy's adapter."""
        config = self._config
        exists = {"policy": True, "reference": config.needs_reference, "teacher": config.teacher.uses_sampled_tokens}
        if not exists.get(model):
            raise ValueError(f"model={model}: the workers have {', '.join(name for name in exists if exists[name])}.")
        checked = self._reader.read(rows)
        layout = distribute(checked, self._plan)
        async with self._turns.use_ranks(adapter):
            policy = self._workers.policy
            policy.load_batch(layout.rank_batches)
            if model == "teacher":
                scored = await compute_target_columns(config.teacher, policy, self._plan.model, checked, layout)
                assert scored.target_logprobs is not None
                values = layout.split_by_rank(scored.target_logprobs)
            else:
                values = await policy.compute_log_probs(model)
        return split_by_row(layout, checked, values)

    async def save(self, name: str | None = None) -> Path:
        """Write a checkpoint with all adapters and `t.state` to checkpoints/NAME of the run folder. Returns its path.
        None: step_N, after the last logged step; the newest trainer.max_ckpt_to_keep of them are kept. Checkpoints of
        other names are never removed."""
        if any(state.num_accumulated for state in self.adapters.states.values()):
            raise ValueError("there are gradients, which are not saved. Call optim_step before save.")
        writer, progress, state = self._session.checkpoint_writer, replace(self.progress), format_state(self.state)
        if matched := STEP_NAME.fullmatch(name or ""):
            progress.step, name = int(matched[1]), None
        if progress.validation:
            writer.checkpoints.check_keep_best_metric(progress.validation)
        async with self._turns.use_ranks():
            if not name:  # later checkpoints exist if the loop has loaded an earlier one
                writer.checkpoints.move_later_checkpoints_aside(progress.step)
            folder = writer.checkpoints.begin_checkpoint(progress.step, name or "")
            await writer.save_and_wait(folder)
            await self.adapters.save_all(folder / ADAPTERS, self._publisher)
            progress.write(folder)
            (folder / STATE).write_text(state)
            return await asyncio.to_thread(writer.checkpoints.complete_checkpoint, folder)

    async def load(self, name: str | Path) -> int:
        """Load a checkpoint of this run by name, or of any run by path, with its `t.state`, publish it, and drop
        gradients. Returns its step. Raises ValueError if it is missing or damaged; nothing is then changed."""
        folder = self._session.checkpoint_writer.checkpoints.folder
        path = await asyncio.to_thread(find_checkpoint, folder, name)
        progress, state = Progress.read(path), read_state(path)
        async with self._turns.use_ranks():
            await self._workers.policy.clear_gradients()
            await self._session.load(path)
            self.adapters[OWN].num_accumulated, self.progress, self._needs_export = 0, progress, True
            self.state.clear()
            self.state.update(state)
            if self._publisher:
                await self._turns.publish()
            await self.adapters.load_all(path / ADAPTERS)
        return progress.step

    async def add_adapter(
        self,
        name: str,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        target_modules: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """Add a LoRA adapter with its own weights, gradients and optimizer. lora_rank (at most the configured one),
        lora_alpha: None: as configured. target_modules: names of layers; empty: all adapted layers."""
        form = self.adapters.make_form(name, lora_rank, lora_alpha, tuple(target_modules), seed)
        async with self._turns.use_ranks():
            await self.adapters.add(name, form)

    async def list_adapted_layers(self) -> list[str]:
        """Return the paths of the layers that get adapters, e.g. model.layers.0.self_attn.q_proj."""
        return await self._workers.policy.list_adapted_layers()

    async def remove_adapter(self, name: str) -> None:
        """Remove an adapter, with its optimizer. Its folders remain."""
        async with self._turns.use_ranks():
            await self.adapters.remove(name)

    async def save_adapter(self, adapter: str, folder: str | Path) -> None:
        """Save an adapter with its optimizer, but without gradients. An earlier folder is replaced when it is
        complete. Raises FloatingPointError if the weights are not finite."""
        async with self._turns.use_ranks(adapter):
            await self.adapters.save(adapter, Path(folder), self._publisher)

    async def load_adapter(self, adapter: str, folder: str | Path, with_optimizer: bool = True) -> None:
        """Add an adapter as save_adapter saved it, or replace the one of this name. Raises ValueError if the folder
        is missing or damaged; nothing is then changed. If reading it fails later, there is no adapter of this name."""
        async with self._turns.use_ranks():
            await self.adapters.load(adapter, Path(folder), with_optimizer)

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
        arguments = prompts, n, max_tokens, temperature
        groups = await (self.sample(*arguments, reward, seed=0) if reward else self.rollout(*arguments, seed=0))
        return compute_group_metrics(groups, "")

    async def log(
        self, step: int, groups: Sequence[TrajectoryGroup] = (), metrics: Mapping[str, float] | None = None
    ) -> None:
        """Log `metrics` (names like train/loss), metrics of the groups, learning rate and gradient norm of the last
        optim_step, and the time of each verb to metrics.jsonl and the trackers. Write the groups to rollouts/."""
        if wrong := [name for name in metrics or {} if "/" not in name]:
            raise ValueError(f"the metric {wrong[0]!r} has no group. Name it group/name, e.g. train/{wrong[0]}.")
        logged, self._step_metrics = self._step_metrics, {}
        if groups:
            logged |= compute_rollout_metrics(groups, groups, 1, 0.0)
            del logged["rollout/tokens_per_second"]  # take_metrics returns the speed of all samples
            self._session.rollout_log.write(step, groups)
        logged |= {**self.timer.take_metrics(), **(metrics or {})}
        self.progress.step = step
        self.progress.validation = {name: value for name, value in logged.items() if name.startswith("val/")}
        self._session.log(step, logged)
