"""Prepare a training run of main_ppo: data, rewards, teachers and schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from alphaapollo.config.keys import format_value, get_value, list_keys
from alphaapollo.config.schema import Config
from alphaapollo.data.mixture import describe_mixture
from alphaapollo.data.stream import choose_rows
from alphaapollo.engines.weight_sync.verification import Probe
from alphaapollo.launch.inputs import check_rewards, read_prompts
from alphaapollo.launch.policy import PolicyPreparation
from alphaapollo.planning.plan_table import (
    describe_checkpoint_schedule,
    describe_estimates,
    describe_memory,
    describe_micro_batch,
    describe_sharding,
    summarize_memory,
)
from alphaapollo.planning.speed import IterationEstimator, IterationTime, find_device_speed
from alphaapollo.planning.trials import NUM_ROWS, describe_sources, try_environment
from alphaapollo.rollout.suites import Suite, make_suites
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.session.progress import (
    CurriculumState,
    Progress,
    RecentGroups,
    TrainingGoal,
    check_has_validation_data,
    check_steps_within_run,
)
from alphaapollo.session.publish import make_probe
from alphaapollo.trainer.setup.combinations import check_setting_combinations, describe_unusual_presets
from alphaapollo.trainer.setup.teachers import check_teachers
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.reward_model_tokenizer import (
    RewardModelTokenizer,
    make_reward_model_tokenizer,
    uses_reward_function,
)
from alphaapollo.trainer.step.shaped_rewards import check_prompts_have_length_budgets
from alphaapollo.types import Prompt


class RlPreparation(PolicyPreparation):
    """Checked inputs of a training run that has not started any worker."""

    prompts: list[Prompt]
    val_prompts: list[Prompt]
    val_suites: list[Suite]
    goal: TrainingGoal
    probe: Probe  # weight syncs are verified by its log-probs
    reward_model_tokenizer: RewardModelTokenizer | None = None
    has_reward_function: bool  # whether a reward function or the environment computes a reward, besides a reward model
    sources: dict[str, str]  # data source -> what is known about its training prompts
    times: tuple[IterationTime, IterationTime] | None = None  # in a dry run, if the speed of the device is known

    @property
    def progress(self) -> Progress:
        """Progress of the checkpoint to resume from, or of a new run. A fixed KL coefficient is read from the
        configuration, so it can be changed when a run resumes. With other data, the curriculum starts from scratch, and
        groups of the earlier data are dropped."""
        kl = self.config.algorithm.kl_ctrl
        if self.start.checkpoint is None:
            return Progress(kl_coef=kl.kl_coef)
        progress = Progress.read(self.start.checkpoint)
        if self.start.has_other_data:  # prompt ids are rows of the files
            progress.curriculum = CurriculumState(stage_start=progress.prompts_consumed)
            progress.unfinished, progress.recent = [], RecentGroups()
        return replace(progress, kl_coef=kl.kl_coef) if kl.type == "fixed" else progress

    @property
    def is_complete(self) -> bool:
        """Whether all iterations are done and the model is exported."""
        return self.goal.is_reached(self.progress) and (
            self.start.has_exported_model() or not self.config.trainer.export_hf
        )

    def describe(self) -> RunPlan:
        """Describe model, data, sizes and schedules of the run, its memory, and all notices."""
        rows = _describe_algorithm_and_data(self) | _describe_iterations(self) | self.plan.placement.describe_roles()
        return RunPlan(rows, summarize_memory(self.memory), self.all_notices, data=self.findings)

    def list_graded_prompts(self) -> Sequence[Prompt]:
        return [*self.prompts, *self.val_prompts]

    def check_config(self) -> None:
        super().check_config()
        config, trainer = self.config, self.config.trainer
        self.notices += check_setting_combinations(config)
        self.notices += describe_unusual_presets(config, self.user_settings)
        check_has_validation_data(trainer, config.validates)
        self.val_suites = make_suites(trainer.val_suites, trainer.suite_python, trainer.suite_timeout)

    def read_data(self) -> None:
        config, data, trainer = self.config, self.config.data, self.config.trainer
        self.prompts = self._read_prompts(data.train_files, "data.train_files", data.train_max_samples)
        has_val = bool(data.val_files)
        self.val_prompts = self._read_prompts(data.val_files, "data.val_files", data.val_max_samples) if has_val else []
        PromptSampler(self.prompts, data)  # refuses wrong shares and stages
        if config.algorithm.length_budget.mode:
            check_prompts_have_length_budgets(self.prompts)
        self.probe = make_probe(self.renderer, self.prompts[0].content, data.max_length - 1)
        self.goal = TrainingGoal.from_settings(trainer, len(self.prompts), data.train_batch_size)
        for key in ("profile_steps", "record_steps"):
            check_steps_within_run(f"trainer.{key}", getattr(trainer, key) or [], self.goal.max_steps)

    def _read_prompts(self, files: str | list[str], key: str, max_rows: int) -> list[Prompt]:
        data = self.config.data
        choose = partial(choose_rows, max_rows=max_rows, seed=data.seed, shuffle=data.shuffle)
        prompts, notices, findings = read_prompts(files, key, self.renderer, data, choose)
        self.notices += notices
        self.findings += (finding for finding in findings if finding not in self.findings)
        return prompts

    def check_teachers(self) -> None:
        if self.config.teacher.divergence:
            super().check_teachers()
            self.notices += check_teachers(self.config, self.renderer, self.prompts)

    def try_rewards(self) -> None:
        """Try the reward function on some rows, and check the reward model's tokenizer."""
        config, prompts = self.config, self.list_graded_prompts()
        uses_grader = self.environment.is_graded(config.env)
        self.has_reward_function = uses_reward_function(config, uses_grader, prompts)
        needs_grading, custom = uses_grader and self.has_reward_function, config.custom_reward_function
        notices, truths = check_rewards(prompts, config.reward, custom, needs_grading, self.accuracy_settings)
        self.notices += notices
        if config.reward_model.enable:
            self.reward_model_tokenizer = make_reward_model_tokenizer(config, self.renderer, prompts)
        elif not self.has_reward_function:
            self.notices.append(
                "nothing gives a reward, so reward/* and val/* are 0. For rewards, add to each row a data_source "
                "with a built-in grader and its ground truth, or set custom_reward_function.path."
            )
        reads_columns = bool(custom.path or config.env.custom_module)
        truth_key = config.data.ground_truth_key
        self.sources = describe_sources(self.prompts, self.renderer, truths, reads_columns, truth_key)

    def try_environment(self) -> None:
        prompts = [*self.prompts[:1], *self.val_prompts[:1]]
        self.notices += try_environment(self.config.env, prompts, self.accuracy_settings)

    def plan_memory(self) -> None:
        """Plan the memory and, in a dry run, estimate the time of an iteration."""
        super().plan_memory()
        placement, memory = self.plan.placement, self.config.trainer.dry_run and self.memory
        if memory and (speed := find_device_speed(self.chosen, placement, self.machine)):
            prompt = median(self.renderer.count_prompt_tokens(self.prompts[:NUM_ROWS]))
            has_base_pass = bool(self.model.lora_rank) and self.config.needs_reference  # the base is the reference
            settings = prompt, self.plan.needs_old_logprobs + has_base_pass
            share = 0.5 if self.plan.skips_rows_without_advantage else 1.0
            self.times = IterationEstimator(self.chosen, memory, placement, *settings, share).estimate(speed)

    @property
    def accuracy_settings(self) -> list[str]:
        """Settings that need to know which answers are right."""
        config = self.config
        filters, best = config.algorithm.filter_groups, config.trainer.keep_best or ""
        needs = {
            "algorithm.filter_groups.metric=accuracy": filters.enable and filters.metric == "accuracy",
            f"trainer.keep_best={best}": best.startswith(("val/accuracy", "val/pass@", "val/maj@")),
            "data.sampler or data.curriculum": config.data.is_adaptive,
        }
        return [setting for setting, needs_accuracy in needs.items() if needs_accuracy]


def _describe_algorithm_and_data(run: RlPreparation) -> dict[str, str]:
    """Return the table rows (label -> text) about algorithm, model, data and reward."""
    config, plan, actor = run.config, run.plan, run.config.actor_rollout_ref.actor
    dtypes = plan.model.dtype + (", Liger's kernels" if plan.model.use_liger is True else "")
    dtypes += f", engines {plan.rollout.dtype}" if plan.rollout.dtype != plan.model.dtype else ""
    epochs = run.goal.max_steps * config.data.train_batch_size / len(run.prompts)
    built_in = "the functions of the rows' data sources" if run.has_reward_function else "none"
    grader = config.custom_reward_function.path or built_in
    reward = grader if run.environment.is_graded(config.env) else f"the environment {config.env.env_name}"
    rows = {
        "preset": ", ".join(run.user_settings.presets) or "none",
        "algorithm": f"{config.algorithm.adv_estimator}, loss {actor.policy_loss.loss_mode}, {actor.loss_agg_mode}",
        "model": f"{config.actor_rollout_ref.model.path}, {dtypes}{plan.model.lora_summary}",
        "data": f"{len(run.prompts)} training prompts, {len(run.val_prompts)} for validation",
        "files": format_value(config.data.train_files),
        "sampler": (config.data.sampler if config.data.shuffle else "none: the order of the files")
        + (f", {len(config.data.curriculum.stages)} stages" if config.data.curriculum.stages else ""),
        **describe_mixture(config.data, Counter(prompt.file for prompt in run.prompts), epochs),
        **{f"data: {name}": described for name, described in run.sources.items()},
        "stops": run.renderer.describe_stops(),
        "env": config.env.env_name,
        "reward": reward,
    }
    if run.reward_model_tokenizer:
        rows["reward"] += f" + {run.reward_model_tokenizer.describe_reward(config.reward_model)}"
    for section in ("algorithm", "actor_rollout_ref.actor", "teacher", "env", "reward"):
        keys = (key for name, key in list_keys(Config).items() if name.startswith(f"{section}."))
        values = {key.name: (get_value(config, key.name), key.default) for key in keys}
        changed = [
            f"{name.removeprefix(f'{section}.')}={format_value(value)[:80]}"
            for name, (value, default) in values.items()
            if value != default
        ]
        rows[section] = ", ".join([*filter(None, [rows.get(section)]), *changed])
    return {label: text for label, text in rows.items() if text}


def _describe_iterations(run: RlPreparation) -> dict[str, str]:
    """Return the table rows (label -> text) about batch sizes, lengths and schedules."""
    config, plan = run.config, run.plan
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    prompts, samples, steps = config.data.train_batch_size, config.group_size, config.steps_per_iteration
    staleness = f"at most {trainer.max_staleness} publishes old, async_mode {trainer.async_mode}"
    rows = {"samples": staleness} if trainer.async_mode else {}
    validation = ["before training"] if trainer.val_before_train else []
    validation += [f"every {trainer.test_freq} iterations", "at the end"] if trainer.test_freq > 0 else []
    return rows | {
        "iterations": f"{run.goal.max_steps}" + (f", {run.start.step} of them done" if run.start.step else ""),
        "an iteration": f"{prompts} prompts x {samples} samples = {config.trajectories_per_batch} trajectories",
        "mini-batch": f"{min(actor.ppo_mini_batch_size, config.trajectories_per_batch)} trajectories over all ranks",
        "micro-batch": describe_micro_batch(plan.max_tokens, config.data.max_length)
        + ", padding counted" * plan.padded,
        "prompts": "computed once for all their samples" if plan.uses_shared_prompts else "computed for each sample",
        "optimizer steps an iteration": f"{steps} ({config.num_mini_batches} mini-batches x {actor.ppo_epochs} epochs)",
        "learning rate": f"{actor.optim.lr:g}, {actor.optim.warmup_style}"
        + f"; critic {config.critic.optim.lr:g}, {config.critic.optim.warmup_style}" * plan.placement.has_critic,
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
        "validation": ", ".join(validation if run.val_prompts else []) or "none",
        "checkpoints": describe_checkpoint_schedule(trainer.save_freq, "iterations", plan.memory, trainer.keep_best),
        "trackers": ", ".join(trainer.logger),
        **describe_memory(plan.model, plan.memory),
        "data-parallel degree": f"{plan.placement.data_parallel_size}",
        **describe_sharding(plan.memory, plan.placement.num_ranks),
        **describe_estimates(run.chosen, plan.memory, run.times),
    }
