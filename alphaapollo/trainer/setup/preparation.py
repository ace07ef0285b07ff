"""Prepare a training run of main_ppo: data, rewards, teachers and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.data.stream import choose_rows
from alphaapollo.planning.plan_table import summarize_memory
from alphaapollo.planning.trials import describe_sources, try_environment
from alphaapollo.rollout.suites import Suite, check_suites
from alphaapollo.runs.run_history import RunPlan
from alphaapollo.session.inputs import check_rewards, read_prompts
from alphaapollo.session.policy import PolicyPreparation
from alphaapollo.session.publish import make_probe
from alphaapollo.trainer.progress import (
    CurriculumState,
    Progress,
    RecentGroups,
    TrainingGoal,
    check_steps_within_run,
)
from alphaapollo.trainer.setup.combinations import check_setting_combinations
from alphaapollo.trainer.setup.plan_rows import describe_algorithm_and_data, describe_iterations
from alphaapollo.trainer.setup.teachers import check_teachers
from alphaapollo.trainer.step.curriculum import assign_stages
from alphaapollo.trainer.step.reward_model_scorer import (
    RewardModelTokenizer,
    make_reward_model_tokenizer,
    uses_reward_function,
)
from alphaapollo.trainer.step.training_batch import check_prompts_have_length_budgets
from alphaapollo.types import Prompt
from alphaapollo.weight_sync.verification import Probe


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
        rows = describe_algorithm_and_data(self) | describe_iterations(self) | self.plan.placement.describe_roles()
        return RunPlan(rows, summarize_memory(self.memory), self.all_notices, data=self.findings)

    def list_graded_prompts(self) -> Sequence[Prompt]:
        return [*self.prompts, *self.val_prompts]

    def check_config(self) -> None:
        super().check_config()
        config, trainer = self.config, self.config.trainer
        estimator = get_estimator(config.algorithm.adv_estimator)
        policy_loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        self.notices += check_setting_combinations(config, estimator, policy_loss)
        if trainer.keep_best and not config.validates:
            raise ValueError(f"trainer.keep_best={trainer.keep_best} needs validation data. Set data.val_files.")
        self.val_suites = [Suite(text, trainer.suite_python, trainer.suite_timeout) for text in trainer.val_suites]
        check_suites(self.val_suites)

    def read_data(self) -> None:
        config, data, trainer = self.config, self.config.data, self.config.trainer
        self.prompts = self._read_prompts(data.train_files, "data.train_files", data.train_max_samples)
        has_val = bool(data.val_files)
        self.val_prompts = self._read_prompts(data.val_files, "data.val_files", data.val_max_samples) if has_val else []
        assign_stages(self.prompts, data)
        if config.algorithm.length_budget.mode:
            check_prompts_have_length_budgets(self.prompts)
        self.probe = make_probe(self.renderer, self.prompts[0].content, data.max_length - 1)
        steps = trainer.total_training_steps, trainer.total_epochs
        self.goal = TrainingGoal.from_schedule(*steps, len(self.prompts), data.train_batch_size)
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
            self.notices += check_teachers(self.config, self.renderer, self.prompts)
            super().check_teachers()

    def try_rewards(self) -> None:
        """Try the reward function on some rows, and check the reward model's tokenizer."""
        config, prompts = self.config, self.list_graded_prompts()
        is_graded = self.environment.is_graded(config.env)
        self.has_reward_function = uses_reward_function(config, is_graded, prompts)
        filters, best = config.algorithm.filter_groups, config.trainer.keep_best or ""
        needs_accuracy = [
            *["algorithm.filter_groups.metric=accuracy"] * (filters.enable and filters.metric == "accuracy"),
            *[f"trainer.keep_best={best}"] * best.startswith(("val/accuracy", "val/pass@", "val/maj@")),
            *["data.sampler or data.curriculum"] * config.data.is_adaptive,
        ]
        needs_grading, custom = is_graded and self.has_reward_function, config.custom_reward_function
        notices, truths = check_rewards(prompts, config.reward, custom, needs_grading, needs_accuracy)
        self.notices += notices
        if config.reward_model.enable:
            self.reward_model_tokenizer = make_reward_model_tokenizer(config, self.renderer, prompts)
        elif not self.has_reward_function:
            self.notices.append(
                "nothing gives a reward, so reward/* and val/* are 0. For rewards, add to each row a data_source "
                "with a built-in grader and its ground truth, or set custom_reward_function.path."
            )
        reads_columns = bool(custom.path or config.env.custom_module)
        self.sources = describe_sources(self.prompts, self.renderer, truths, reads_columns)

    def try_environment(self) -> None:
        self.notices += try_environment(self.config.env, [*self.prompts[:1], *self.val_prompts[:1]])
