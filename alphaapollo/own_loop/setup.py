"""Check the settings of a user's loop, and make the specifications of its workers, before a worker starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import Settings, format_settings, list_keys, list_sections, replace_value
from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.requirements import CheckContext, find_conflicts
from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.launch.policy import PolicyPreparation
from alphaapollo.launch.specs import make_worker_specs
from alphaapollo.observability.console import Console
from alphaapollo.own_loop.rows import RowReader
from alphaapollo.planning.plan_table import summarize_memory
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.runs.newest_model import resolve_model_paths
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.trainer.setup.combinations import COMBINATIONS, trpo_with_other_distributions

LEFT_OUT_REASON = "the caller brings prompts, rows and rewards"
OMITTED_PREFIXES = ("actor_rollout_ref.", "actor_rollout_ref.model.", "actor_rollout_ref.actor.")
"""Prefixes that a key may omit, e.g. in model.path, lora_rank, optim.weight_decay and rollout.name."""


class LoopPreparation(PolicyPreparation):
    """Checked settings of a loop that has not started any worker."""

    LEFT_OUT: ClassVar = dict.fromkeys(("read_data", "try_rewards", "try_environment"), LEFT_OUT_REASON)
    OPTIONAL_PATHS = frozenset({"data.train_files"})
    reader: RowReader
    has_engines: bool

    def check_config(self) -> None:
        super().check_config()
        check_settings(self.config)
        optim = self.config.actor_rollout_ref.actor.optim
        needs_steps = optim.warmup_style == "cosine" or (optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio)
        if needs_steps and not self.config.trainer.total_training_steps:
            keys = f"warmup_style={optim.warmup_style}, lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio:g}"
            raise ValueError(
                f"optim.{keys} need the number of optimizer steps. Set trainer.total_training_steps to it."
            )

    def check_models(self) -> None:
        super().check_models()
        self.reader = RowReader.for_model(self.model)

    def describe(self) -> RunPlan:
        """Describe the workers and the memory, for the run folder."""
        return RunPlan(self.plan.placement.describe_roles(), summarize_memory(self.memory), self.all_notices)

    def show_plan(self) -> None:
        """Print the notices; the caller's loop has its own output."""
        if self.memory and self.memory.problem:
            raise ValueError(self.memory.problem)
        for notice in self.all_notices:
            self.console.notify(notice)

    def make_specs(self) -> WorkerSpecs:
        """Describe how to build the policy workers and, if there are engines, the rollout workers. A loop has no critic
        and no reward model."""
        steps = self.config.trainer.total_training_steps or 1  # if it is not set, no schedule needs it (check_config)
        run_id = new_run_id()
        specs = make_worker_specs(
            self.config, self.plan, run_id, steps, has_reward_function=True, policy_steps=steps, serves_clients=True
        )
        specs = replace(specs, rank_builders={"policy": specs.rank_builders["policy"]})
        if self.has_engines:
            return specs
        return replace(specs, engine_builder=None, placement=replace(specs.placement, num_engines=0))


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that no call of a policy loss could use."""
    table = [row for row in COMBINATIONS if row.find_conflict is trpo_with_other_distributions]
    errors = [*find_conflicts(CheckContext(config), table=table)]
    if config.trainer.dry_run:
        errors.append("trainer.dry_run=true: a loop of your own has no dry run. Check its settings with main_ppo.")
    if errors:
        raise ConfigError(errors)


def expand_key(word: str) -> str:
    """Complete the key of KEY=VALUE if it lacks one of the OMITTED_PREFIXES."""
    known, key = {*list_keys(Config), *list_sections(Config)}, word.partition("=")[0]
    completed = (prefix + word for prefix in OMITTED_PREFIXES if key not in known and prefix + key in known)
    return next(completed, word)


def load_loop_config(settings: Settings, overrides: Sequence[str], engines: int | None, ranks: int | None) -> Config:
    """Load the configuration of a loop. Raises ConfigError."""
    settings_words = format_settings(settings, Config) if isinstance(settings, Mapping) else ["--config", str(settings)]
    words = ["trainer.experiment_name=own_loop", *map(expand_key, [*settings_words, *overrides])]
    config, user_settings = load_config_and_user_settings(Config, "ppo", words)
    is_local = (ranks or config.trainer.num_ranks) == 1 and (engines or 1) == 1 and not os.environ.get("RAY_ADDRESS")
    values = {
        "algorithm.adv_estimator": NO_ESTIMATOR,
        "actor_rollout_ref.rollout.num_engines": engines or None,
        "trainer.n_gpus_per_node": ranks,
        "trainer.controller": "local" if is_local and "trainer.controller" not in user_settings.keys else None,
    }
    for key, value in values.items():
        config = config if value is None else replace_value(config, key, value)
    return resolve_model_paths(config)


def prepare_loop(config: Config, has_engines: bool, console: Console) -> LoopPreparation:
    """Check the configuration, the machine and the model. Raises ValueError if one of them cannot be used."""
    prepared = LoopPreparation(config, console)
    prepared.has_engines = has_engines
    return prepared.prepare()
