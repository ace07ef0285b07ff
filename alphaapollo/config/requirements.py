"""Combinations of settings, and machines, that cannot work: the rows of a table, and the function that checks them.

A row is a function with the decorator `requirement`. If the settings conflict, it returns the values for its message,
else a false value: `size > limit and (size, limit)` is the tuple or False. Rows about advantage estimators and policy
losses are in trainer/setup/combinations.py, rows about model families in planning/model_requirements.py, and rows about
the engine of a plug-in or a package in the engine's class (Engine.list_requirements).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from alphaapollo.config.keys import format_value, get_value, walk_sections
from alphaapollo.config.resolve import count_engine_gpus, count_engines
from alphaapollo.config.schema.algorithm import Actor, Filtration, RolloutCorrection
from alphaapollo.config.schema.base import Device, Section
from alphaapollo.config.schema.commands import Config, TuningConfig
from alphaapollo.config.schema.data import TrainingFiles
from alphaapollo.config.schema.env import Env
from alphaapollo.config.schema.generation import GenerationConfig
from alphaapollo.config.schema.model import USUAL_LORA_LR, USUAL_LR, Fsdp, Model, Optimizer, Rollout
from alphaapollo.config.schema.reward import CustomRewardFunction, Teacher
from alphaapollo.config.schema.trainer import RunSettings, Trainer, Training
from alphaapollo.utils.plugins import find_plugins, load_plugin

ROLLOUT = "actor_rollout_ref.rollout"
UNKNOWN_CORES = 1_000_000


@dataclass(frozen=True)
class CheckContext:
    """A configuration, and the machine and algorithm on which the rows of the tables may depend."""

    config: Any
    device: Device | None = None  # None: the machine is not known yet
    num_gpus: int = 0  # of a node
    num_cores: int = UNKNOWN_CORES
    estimator: Any = None  # Estimator and PolicyLoss of a training run; None: not known yet
    loss: Any = None


class Requirement(NamedTuple):
    """Row of a table. If `find_conflict(subject, context)` returns a true value, the message is
    `KEY=VALUE: {reason}. {fix}.` The returned value replaces {} in the texts; the items of a tuple replace {0}, ..."""

    find_conflict: Callable[[Any, CheckContext], object]  # its name says what is wrong
    subject: type[Any] | tuple[type[Any], ...]  # class of the sections to check, or of the use of a model
    keys: str  # keys of the section, separated by spaces; /KEY: of the configuration. For a model's use: text with {}
    reason: str
    fix: str
    is_error: bool  # False: it works, but is probably wrong

    def describe(self, subject: Any, prefix: str, context: CheckContext, found: object) -> str:
        shown, values = [], (found if isinstance(found, tuple) else (found,))
        shown_keys = self.keys.split() if isinstance(subject, Section) else ()
        for key in shown_keys:
            owner, owner_prefix = (context.config, "") if key.startswith("/") else (subject, prefix)
            shown.append(f"{owner_prefix}{key.lstrip('/')}={format_value(get_value(owner, key.lstrip('/')))}")
        reason, fix, keys = (text.format(*values, use=subject) for text in (self.reason, self.fix, self.keys))
        return f"{', '.join(shown) or keys}: {reason}. {fix}."


REQUIREMENTS: list[Requirement] = []
ConflictFinder = Callable[[Any, CheckContext], object]


def requirement(
    subject: type[Any] | tuple[type[Any], ...],
    keys: str,
    reason: str,
    fix: str,
    is_error: bool = True,
    table: list[Requirement] = REQUIREMENTS,
) -> Callable[[ConflictFinder], ConflictFinder]:
    """Return the decorator that adds a row to a table (see Requirement)."""

    def register(find_conflict: ConflictFinder) -> ConflictFinder:
        table.append(Requirement(find_conflict, subject, keys, reason, fix, is_error))
        return find_conflict

    return register


def find_conflicts(
    context: CheckContext, is_error: bool = True, table: list[Requirement] = REQUIREMENTS
) -> Iterator[str]:
    """Yield the errors, or the warnings, of a table about the sections of a configuration or about a model's use."""
    subjects = walk_sections(context.config) if isinstance(context.config, Section) else [("", context.config)]
    for prefix, subject in subjects:
        for row in table:
            is_checked = row.is_error is is_error and isinstance(subject, row.subject)
            if is_checked and (found := row.find_conflict(subject, context)):
                yield row.describe(subject, prefix, context, found)


def list_requirements(config: Section) -> list[Requirement]:
    """Return REQUIREMENTS and, if the configuration selects an engine of a plug-in or an installed package, the rows of
    that engine. Raises ValueError if the engine is missing."""
    names = [section.name for _, section in walk_sections(config) if isinstance(section, Rollout)]
    engines = filter(None, (load_plugin("engines", name) for name in names))
    return [*REQUIREMENTS, *(row for engine in engines for row in engine.list_requirements())]


def list_divisors(*numbers: int) -> str:
    """Return the common divisors of the numbers, e.g. "1, 2, 4"."""
    return ", ".join(str(n) for n in range(1, min(numbers) + 1) if not any(number % n for number in numbers))


# The machine


@requirement(RunSettings, "device", "this machine has no GPU", "Set trainer.device=auto or cpu, {}")
def machine_lacks_gpus(trainer: Any, context: CheckContext) -> object:
    has_engines = getattr(context.config, "has_engines", True)
    plan = "trainer.dry_run=true with trainer.planned_device=h100 to plan for GPUs, " * isinstance(trainer, Training)
    fixes = f"{plan}or RAY_ADDRESS of a cluster with GPUs"
    return context.device == "cuda" and not context.num_gpus and has_engines and fixes


@requirement(Optimizer, "name", "torchao is not installed", "Install it with pip, or set adamw")
def torchao_is_missing(optim: Optimizer, context: CheckContext) -> object:
    return optim.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None


@requirement(
    Model,
    "enable_gradient_checkpointing use_torch_compile",
    "results of products inside compiled layers cannot be kept",
    "Set enable_gradient_checkpointing=true, or use_torch_compile=false",
)
def products_are_compiled(model: Model, context: CheckContext) -> object:
    return model.keeps_products and model.use_torch_compile


@requirement(Training, "n_gpus_per_node", "a node has {} GPUs", "Set {} or less")
def node_has_fewer_gpus(trainer: Training, context: CheckContext) -> object:
    return context.device == "cuda" and 0 < context.num_gpus < trainer.n_gpus_per_node and context.num_gpus


@requirement(Rollout, "tensor_model_parallel_size", "a node has {} cores", "Set {} or less")
def node_has_fewer_cores(rollout: Rollout, context: CheckContext) -> object:
    return context.device == "cpu" and context.num_cores < rollout.tensor_model_parallel_size and context.num_cores


@requirement(
    Config, f"{ROLLOUT}.tensor_model_parallel_size trainer.n_gpus_per_node", "the engines split nodes", "Set one of {}"
)
def engines_split_nodes(config: Config, context: CheckContext) -> object:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    size, per_node = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node
    shares_gpus = context.device == "cuda" and rollout.colocate and not rollout.nnodes
    if shares_gpus and per_node % size and (rollout.num_engines is None or trainer.nnodes > 1):
        return list_divisors(per_node)
    return None


@requirement(
    Config,
    f"{ROLLOUT}.num_engines {ROLLOUT}.tensor_model_parallel_size",
    "the engines need {0} GPUs, but {1} GPUs on each of {2} nodes are {3}",
    "Lower one of these keys, or change trainer.n_gpus_per_node",
)
def engines_exceed_gpus(config: Config, context: CheckContext) -> object:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if context.device != "cuda" or not context.num_gpus or engines_split_nodes(config, context):
        return None
    per_node, nodes, use = trainer.n_gpus_per_node, trainer.nnodes, "shared with training"
    if rollout.nnodes:
        per_node, nodes, use = rollout.n_gpus_per_node or per_node, rollout.nnodes, "for engines"
    elif not rollout.colocate:
        per_node, use = context.num_gpus - per_node, "not used for training"
    size = rollout.tensor_model_parallel_size
    engines = count_engines(rollout, "cuda", count_engine_gpus(rollout, trainer))
    return engines > per_node // size * nodes and (engines * size, per_node, nodes, use)


@requirement(
    GenerationConfig,
    "rollout.num_engines rollout.tensor_model_parallel_size trainer.n_gpus_per_node trainer.nnodes",
    "{0} engines do not fit, only {1}",
    "Lower num_engines or tensor_model_parallel_size, or use more GPUs",
)
def generation_engines_exceed_gpus(config: GenerationConfig, context: CheckContext) -> object:
    trainer, engines = config.trainer, count_engines(config.rollout, "cuda", config.trainer.num_gpus)
    most = trainer.n_gpus_per_node // config.rollout.tensor_model_parallel_size * trainer.nnodes
    return context.device == "cuda" and engines > most and (engines, most)


@requirement(
    Config, f"trainer.async_mode {ROLLOUT}.colocate", "engines need GPUs of their own", f"Set {ROLLOUT}.colocate=false"
)
def separate_engines_share_gpus(config: Config, context: CheckContext) -> object:
    rollout = config.actor_rollout_ref.rollout
    shares_gpus = context.device == "cuda" and rollout.colocate and not rollout.nnodes
    return shares_gpus and config.trainer.async_mode == "separate"


# Ranks and batches

DIVIDES_RANKS = "it must divide the number of ranks, and divide n_gpus_per_node or be a multiple of it"
RANKS = "/trainer.n_gpus_per_node /trainer.nnodes"


def _list_sizes_unless_valid(size: int, trainer: Training) -> str:
    """Return the valid sizes of groups of ranks, see DIVIDES_RANKS; "" if `size` is one of them."""
    ranks, per_node = trainer.num_ranks, trainer.n_gpus_per_node
    valid = [n for n in range(1, ranks + 1) if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]
    return "" if size in valid else ", ".join(map(str, valid))


@requirement(Fsdp, f"fsdp_size {RANKS}", DIVIDES_RANKS, "Set one of {}, or -1 for all")
def shards_split_nodes(fsdp: Fsdp, context: CheckContext) -> object:
    return fsdp.fsdp_size != -1 and _list_sizes_unless_valid(fsdp.fsdp_size, context.config.trainer)


@requirement((Actor, TuningConfig), f"ulysses_sequence_parallel_size {RANKS}", DIVIDES_RANKS, "Set one of {}")
def sequence_groups_split_nodes(section: Any, context: CheckContext) -> object:
    return _list_sizes_unless_valid(section.ulysses_sequence_parallel_size, context.config.trainer)


@requirement(Fsdp, "ep_size fsdp_size", "ep_size must divide the {0} ranks of a copy of the model", "Set one of {1}")
def expert_groups_split_shards(fsdp: Fsdp, context: CheckContext) -> object:
    shards = fsdp.count_shards(context.config.trainer.num_ranks)
    return shards % fsdp.ep_size and (shards, list_divisors(shards))


@requirement(Rollout, "expert_parallel_size tensor_model_parallel_size", "they differ", "Set expert_parallel_size=1")
def engine_experts_differ_from_gpus(rollout: Rollout, context: CheckContext) -> object:
    return rollout.expert_parallel_size not in (1, rollout.tensor_model_parallel_size)


@requirement(
    Config,
    "actor_rollout_ref.actor.ppo_mini_batch_size data.train_batch_size env.rollout.n",
    "the mini-batch must divide the {0} trajectories of an iteration",
    "Set {1} or another divisor",
)
def mini_batches_split_the_batch(config: Config, context: CheckContext) -> object:
    total, size = config.trajectories_per_update, config.actor_rollout_ref.actor.ppo_mini_batch_size
    return size < total and total % size and (total, next(d for d in range(size, 0, -1) if total % d == 0))


@requirement(Filtration, "method size /env.rollout.n", "the method needs a size from 2 to n", "Set at most {}")
def selection_exceeds_the_group(filtration: Filtration, context: CheckContext) -> object:
    size, n = filtration.size, context.config.group_size
    return filtration.selects and (size is None or size > n) and n


@requirement(TrainingFiles, "source_weights train_files", "there must be one share per file", "Add or remove shares")
def files_lack_weights(data: TrainingFiles, context: CheckContext) -> object:
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
    return data.source_weights and len(data.source_weights) != len(files)


# The algorithm


@requirement(Optimizer, "lr", "{0:g} to {1:g} are usual{2}", "Set a usual value, or keep it", is_error=False)
def learning_rate_is_unusual(optim: Optimizer, context: CheckContext) -> object:
    role = getattr(context.config, "actor_rollout_ref", context.config)
    if (critic := getattr(context.config, "critic", None)) and critic.optim is optim:
        role = critic
    (low, high), where = (USUAL_LORA_LR, " with LoRA") if role.model.lora_rank else (USUAL_LR, "")
    return not low <= optim.lr <= high and (low, high, where)


@requirement(
    Config,
    "actor_rollout_ref.actor.optim.name actor_rollout_ref.model.dtype",
    "TRPO needs differences of gradients, which bfloat16 rounds",
    "Set actor_rollout_ref.model.dtype=float32",
)
def trpo_lacks_float32(config: Config, context: CheckContext) -> object:
    exact = {"float32"} if context.device == "cuda" else {"float32", "auto"}
    return config.uses_trpo and config.actor_rollout_ref.model.dtype not in exact


@requirement(Actor, "kl_loss_type", "its gradient is only noise with mean zero", "Append +, or set k2", is_error=False)
def kl_loss_has_no_gradient(actor: Actor, context: CheckContext) -> object:
    return actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1")


@requirement(
    Rollout,
    "top_p top_k min_p sampling_mask",
    "they bias the gradients, because log-probs, ratios and KL use the full distribution",
    "Set sampling_mask=auto, or use them for validation only (val_kwargs)",
    is_error=False,
)
def sampling_is_truncated(rollout: Rollout, context: CheckContext) -> object:
    return isinstance(context.config, Config) and rollout.is_truncated and not rollout.returns_kept_tokens


@requirement(
    RolloutCorrection, "method low high", "there must be bounds, with low below high", "Set high=2.0, low=null"
)
def correction_lacks_bounds(correction: RolloutCorrection, context: CheckContext) -> object:
    low, high = correction.low or 0.0, correction.high or math.inf
    return correction.method and (low >= high or (low == 0 and high == math.inf))


@requirement(
    Config, "data.val_files trainer.test_freq", "data.curriculum.stages wait for {}", "Set both, e.g. test_freq=10"
)
def curriculum_lacks_validation(config: Config, context: CheckContext) -> object:
    gates = [stage.metric for stage in config.data.curriculum.stages[:-1] if stage.metric != "pass_rate"]
    return not config.validates_on_rows and ", ".join(gates)


@requirement(Config, "algorithm.reference_reset.patience data.val_files trainer.test_freq", "no validation", "Set all")
def reference_reset_lacks_validation(config: Config, context: CheckContext) -> object:
    return context.device and not config.validates_on_rows and config.algorithm.reference_reset.patience


# Teachers and rewards


@requirement(Teacher, "by_source", "the pattern {0!r} {1}", "Use names in models, and weights that sum to 1")
def teacher_shares_are_wrong(teacher: Teacher, context: CheckContext) -> object:
    for pattern, chosen in teacher.by_source.items():
        weights = {chosen: 1.0} if isinstance(chosen, str) else chosen
        if unknown := [name for name in weights if name not in teacher.models]:
            return pattern, f"names {unknown[0]!r}, which is not in models ({', '.join(teacher.models)})"
        if abs(math.fsum(weights.values()) - 1.0) > 1e-6:
            return pattern, f"has weights that sum to {math.fsum(weights.values()):g}"
    return None


@requirement(
    Teacher, "divergence top_k", "the server of {} has no full distributions", "Set top_k=20, or divergence=sampled"
)
def servers_lack_distributions(teacher: Teacher, context: CheckContext) -> object:
    return teacher.uses_full_vocabulary and teacher.top_k is None and next(iter(teacher.servers), "")


@requirement(Config, f"{ROLLOUT}.temperature", "the server of {} has log-probs at temperature 1", "Set it to 1")
def servers_ignore_temperature(config: Config, context: CheckContext) -> object:
    return config.actor_rollout_ref.rollout.temperature != 1 and next(iter(config.teacher.servers), "")


@requirement(Env, "plugins env_name", "{} belongs to another environment", "Remove it", is_error=False)
def environment_section_is_unused(env: Env, context: CheckContext) -> object:
    used = {env.env_name, *find_plugins("tool_sources")}
    return next((name for name in env.plugins if name not in used), "")


@requirement(Rollout, "plugins name", "{} belongs to another engine", "Remove it", is_error=False)
def engine_section_is_unused(rollout: Rollout, context: CheckContext) -> object:
    return next((name for name in rollout.plugins if name != rollout.name), "")


@requirement(CustomRewardFunction, "name weights", "there must be one weight for each name", "Add or remove weights")
def rewards_lack_weights(custom: CustomRewardFunction, context: CheckContext) -> object:
    return custom.weights and len(custom.weights) != len(custom.names)


@requirement(Trainer, "verify_first_iteration", "{} is missing", "Install it, or set false")
def verification_is_missing(trainer: Trainer, context: CheckContext) -> object:
    checks = find_plugins("recorded_updates").values()
    return trainer.verify_first_iteration and next((plugin.owner for plugin in checks if plugin.is_missing), "")
