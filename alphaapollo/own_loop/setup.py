"""Check the settings of a user's loop, and make the specifications of its workers, before a worker starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR
from alphaapollo.api import Settings, format_settings
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.keys import list_keys, list_sections, replace_value
from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.data.rendering import Renderer
from alphaapollo.launch.input_checks import detect_node_resources, find_environment_spec, make_renderer
from alphaapollo.launch.model_requirements import check_models
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import check_trackers
from alphaapollo.own_loop.rows import RowReader
from alphaapollo.planning.first_start import choose_cpu_threads, fix_template_date
from alphaapollo.planning.plan_table import summarize_memory
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.runs.newest_model import resolve_model_paths
from alphaapollo.runs.resume import StartPoint, find_start_point
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.trainer.setup.inputs import check_teacher_vocabulary, list_model_uses
from alphaapollo.trainer.setup.plan import Plan, add_memory_plan, make_worker_specs, resolve_plan
from alphaapollo.utils.user_module import load_user_module

PREFIXES = ("actor_rollout_ref.", "actor_rollout_ref.model.", "actor_rollout_ref.actor.")
"""Beginnings of keys that may be left out: model.path, lora_rank, optim.weight_decay, rollout.name, ..."""


@dataclass(frozen=True)
class PreparedLoop:
    """Checked settings of a loop that has not started any worker."""

    config: Config
    plan: Plan
    start: StartPoint
    renderer: Renderer
    reader: RowReader
    has_engines: bool

    def describe(self) -> RunPlan:
        """Describe the workers and the memory, for the run folder."""
        notices = [*self.plan.notices, *self.start.describe()]
        return RunPlan(self.plan.placement.describe_roles(), summarize_memory(self.plan.memory), notices)

    def make_specs(self) -> WorkerSpecs:
        """Describe how to build the policy workers and, if there are engines, the rollout workers."""
        steps = self.config.trainer.total_training_steps or 1
        specs = make_worker_specs(self.config, self.plan, new_run_id(), steps, True, policy_steps=steps)
        specs = replace(specs, rank_builders={"policy": specs.rank_builders["policy"]})
        if self.has_engines:
            return specs
        return replace(specs, engine_builder=None, placement=replace(specs.placement, num_engines=0))


def expand_key(word: str) -> str:
    """Complete the key of KEY=VALUE if one of the PREFIXES was left out."""
    known, key = {*list_keys(Config), *list_sections(Config)}, word.partition("=")[0]
    longer = (prefix + word for prefix in PREFIXES if key not in known and prefix + key in known)
    return next(longer, word)


def load_loop_config(settings: Settings, overrides: Sequence[str], engines: int | None, ranks: int | None) -> Config:
    """Load the configuration of a loop. Raises ConfigError."""
    given = format_settings(settings, Config) if isinstance(settings, Mapping) else ["--config", str(settings)]
    words = ["trainer.experiment_name=own_loop", *map(expand_key, [*given, *overrides])]
    config, user_settings = load_config_and_user_settings(Config, "ppo", words)
    is_small = (ranks or config.trainer.num_ranks) == 1 and (engines or 1) == 1 and not os.environ.get("RAY_ADDRESS")
    chosen = {
        "algorithm.adv_estimator": NO_ESTIMATOR,
        "actor_rollout_ref.rollout.num_engines": engines or None,
        "trainer.n_gpus_per_node": ranks,
        "trainer.controller": "local" if is_small and "trainer.controller" not in user_settings.keys else None,
    }
    for key, value in chosen.items():
        config = config if value is None else replace_value(config, key, value)
    return resolve_model_paths(config)


def prepare_loop(config: Config, has_engines: bool, console: Console) -> PreparedLoop:
    """Check the configuration, the machine and the model. Raises ValueError if one of them cannot be used."""
    machine, model, trainer = detect_node_resources(config), config.actor_rollout_ref.model, config.trainer
    config, kept_threads = choose_cpu_threads(fix_template_date(config, model), machine)
    sizes = machine.num_gpus, machine.num_cores
    notices = check_config_and_get_notices(config, *sizes, optional_paths={"data.train_files"})
    if config.uses_trpo:
        raise ValueError("optim.name=trpo needs the loss of main_ppo's update. Set another optimizer, e.g. adamw.")
    optim, end = config.actor_rollout_ref.actor.optim, trainer.total_training_steps
    if not end and (optim.warmup_style == "cosine" or (optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio)):
        keys = f"warmup_style={optim.warmup_style}, lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio:g}"
        raise ValueError(f"optim.{keys} need the number of optimizer steps. Set trainer.total_training_steps to it.")
    if config.algorithm.custom_module:
        load_user_module(config.algorithm.custom_module, "algorithm.custom_module")
    find_environment_spec(config.env)
    check_trackers(trainer.logger)
    check_models(list_model_uses(config))
    plan = add_memory_plan(resolve_plan(config, machine, [*notices, *kept_threads]), config, machine)
    if plan.memory and plan.memory.problem:
        raise ValueError(plan.memory.problem)
    renderer = make_renderer(config.env, model, config.data.apply_chat_template_kwargs)
    for key, one in config.teacher.local_models.items() if config.teacher.divergence else ():
        check_teacher_vocabulary(key, one, config.teacher, model, renderer)
    prepared = PreparedLoop(config, plan, find_start_point(config), renderer, RowReader.for_model(model), has_engines)
    for notice in prepared.describe().notices:
        console.notify(notice)
    return prepared
