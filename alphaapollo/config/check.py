"""Combinations of keys that cannot work. No registry, no heavy library, no worker.

Unknown keys and wrong types are refused before: by the schema (schema/base.py), in words by load.py. What depends on
registered names is checked where those are at hand: estimators and losses in trainer/setup/combinations.py, environments in
launch/input_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import isqrt

from alphaapollo.config.check_async import check_async
from alphaapollo.config.check_common import (
    check_files,
    check_model,
    check_optimizer,
    check_python_file,
    check_required,
    check_resume,
    check_template_arguments,
    check_user_files,
)
from alphaapollo.config.check_engine import check_engine, check_nucleus, check_sampling
from alphaapollo.config.check_experts import check_experts
from alphaapollo.config.check_folder import check_folder
from alphaapollo.config.check_lora import check_lora
from alphaapollo.config.check_parallelism import check_parallelism, check_replicas
from alphaapollo.config.check_stalls import check_stalls
from alphaapollo.config.check_teacher import check_teacher
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import plain
from alphaapollo.config.notices import eval_notices, generation_notices, notices
from alphaapollo.config.resolve import num_engines, resolve_device
from alphaapollo.config.schema import (
    Actor,
    Config,
    EvalConfig,
    ExportConfig,
    GenerationConfig,
    RolloutCorrection,
)
from alphaapollo.config.schema.base import Device
from alphaapollo.config.verl_notices import verl_notices

MOST_TRAJECTORIES = 10_000_000  # of an iteration: all of them are in the driver's memory at once


def check(config: Config, num_gpus: int, num_cores: int, given: Set[str] = frozenset()) -> list[str]:
    """Notices about keys without effect or with another one in verl; raises ConfigError naming every impossible
    combination.

    num_gpus, num_cores: of one node. given: the keys that the user set himself.
    """
    device = resolve_device(config.trainer.device, num_gpus)
    problems = [
        *_check_paths(config),
        *check_template_arguments(config.data.apply_chat_template_kwargs),
        *_check_batch(config),
        *_check_algorithm(config),
        *check_lora(config),
        *check_experts(config),
        *check_teacher(config),
        *check_sampling(config),
        *check_engine("actor_rollout_ref.rollout", config.actor_rollout_ref.rollout, config.data, device),
        *check_optimizer("actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim),
        *check_optimizer("critic.optim", config.critic.optim),
        *_check_machine(config, device, num_gpus, num_cores),
        *check_parallelism(config),
        *check_async(config, device, num_cores),
        *check_stalls(config.trainer),
        *check_folder(config.trainer),
    ]
    if problems:
        raise ConfigError(problems)
    return [*notices(config, device, num_cores), *verl_notices(config, given)]


def check_generation(config: GenerationConfig, num_gpus: int, num_cores: int) -> list[str]:
    """As `check`, for main_generation."""
    device = resolve_device(config.trainer.device, num_gpus)
    rollout = config.rollout
    problems = [
        *check_required("model.path", config.model.path),
        *check_model("model.path", config.model.path),
        *check_required("data.path", config.data.path),
        *check_files("data.path", config.data.path),
        *check_user_files(config.env, config.reward, config.custom_reward_function),
        *check_template_arguments(config.data.apply_chat_template_kwargs),
        *check_nucleus("rollout", rollout.top_p, rollout.top_k),
        *check_engine("rollout", rollout, config.data, device),
        *_check_generation_machine(config, device, num_gpus, num_cores),
        *check_stalls(config.trainer),
        *check_folder(config.trainer),
    ]
    if problems:
        raise ConfigError(problems)
    return generation_notices(config, device)


def check_export(config: ExportConfig) -> None:
    """As `check`, for main_export."""
    problems = [*check_required("checkpoint", config.checkpoint), *check_model("model_path", config.model_path)]
    if problems:
        raise ConfigError(problems)


def check_eval(config: EvalConfig) -> list[str]:
    """As `check`, for main_eval."""
    problems = [
        *check_required("data.path", config.data.path),
        *check_files("data.path", config.data.path),
        *check_python_file("custom_reward_function.path", config.custom_reward_function.path),
        *check_python_file("reward.custom_module", config.reward.custom_module),
        *check_folder(config.trainer),
    ]
    if problems:
        raise ConfigError(problems)
    return eval_notices(config)


def _check_generation_machine(config: GenerationConfig, device: Device, num_gpus: int, num_cores: int) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    size, key = rollout.tensor_model_parallel_size, "rollout.tensor_model_parallel_size"
    if size > 1 and rollout.name != "vllm":
        yield f"{key}={size}: only the vllm engine splits a model. Set 1, or rollout.name=vllm."
    gpus = trainer.num_gpus
    engines = num_engines(rollout, device, gpus)
    yield from check_replicas("rollout.data_parallel_size", rollout.data_parallel_size, engines)
    if trainer.controller == "local" and engines > 1:
        yield f"trainer.controller=local: it has one engine, not {engines}. Set rollout.num_engines=1, or ray."
    if device == "cpu" and size > num_cores:
        yield f"{key}={size}: every part needs a core, and there are {num_cores}. Set {num_cores} or less."
    elif device == "cuda" and not num_gpus:
        yield "trainer.device: got cuda, but this machine has no GPU. Set trainer.device=auto or cpu."
    elif device == "cuda" and trainer.n_gpus_per_node > num_gpus:
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: a node has {num_gpus} GPUs. Set {num_gpus} or less."
        )
    elif device == "cuda" and (engines > (room := trainer.n_gpus_per_node // size * trainer.nnodes) or engines == 0):
        yield (
            f"{key}={size}, rollout.num_engines={plain(rollout.num_engines)}: an engine's GPUs are of one node, and of "
            f"such engines {room} fit into trainer.n_gpus_per_node={trainer.n_gpus_per_node} x "
            f"trainer.nnodes={trainer.nnodes}. Raise those, or lower these."
        )


def _check_paths(config: Config) -> Iterator[str]:
    model = "actor_rollout_ref.model.path"
    yield from check_required(model, config.actor_rollout_ref.model.path)
    yield from check_model(model, config.actor_rollout_ref.model.path)
    yield from check_model("critic.model.path", config.critic.model.path)
    yield from check_model("teacher.model.path", config.teacher.model.path)
    if config.reward_model.enable:
        yield from check_required("reward_model.model.path", config.reward_model.model.path)
        yield from check_model("reward_model.model.path", config.reward_model.model.path)
    yield from check_required("data.train_files", config.data.train_files)
    yield from check_files("data.train_files", config.data.train_files)
    yield from check_files("data.val_files", config.data.val_files)
    yield from check_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
    yield from check_user_files(config.env, config.reward, config.custom_reward_function)
    yield from check_python_file("algorithm.custom_module", config.algorithm.custom_module)


def _check_batch(config: Config) -> Iterator[str]:
    ours, theirs = config.env.rollout.n, config.actor_rollout_ref.rollout.n
    if ours > 1 and theirs > 1 and ours != theirs:
        yield f"env.rollout.n={ours}, actor_rollout_ref.rollout.n={theirs}: two group sizes. Set only env.rollout.n."
        return
    trajectories = config.trajectories
    if trajectories > MOST_TRAJECTORIES:
        yield (
            f"data.train_batch_size={config.data.train_batch_size}: with groups of {config.group_size} an iteration "
            f"would have {trajectories} trajectories. Set a batch of {MOST_TRAJECTORIES} trajectories or less."
        )
        return
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if size < trajectories and trajectories % size:
        small = [d for d in range(1, isqrt(trajectories) + 1) if trajectories % d == 0]
        divisors = [*small, *(trajectories // d for d in small)]
        below = max(d for d in divisors if d < size)
        above = min(d for d in divisors if d > size)
        yield (
            f"{key}={size}: an iteration has {trajectories} trajectories ({config.data.train_batch_size} prompts x "
            f"{config.group_size}), which mini-batches of {size} do not divide. Set {below} or {above}."
        )
    if config.algorithm.filter_groups.enable and config.group_size == 1:
        yield "algorithm.filter_groups.enable=true: groups of one have no spread to filter by. Set env.rollout.n=8."


def _check_algorithm(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward are both true: the KL would count "
            "twice. Keep one."
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield _zero_kl("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.use_kl_loss")
    starts_at_zero = algorithm.kl_ctrl.type == "dual"  # dual ascent raises it where the KL passes its target
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0 and not starts_at_zero:
        yield _zero_kl("algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward")
    yield from _check_clip(actor)
    yield from _check_correction(algorithm.rollout_correction)
    yield from _check_lengths(config)
    yield from _check_reset(config)
    if algorithm.filtration.method and config.group_size == 1:
        yield (
            f"algorithm.filtration.method={algorithm.filtration.method}: groups of one have nothing to choose from. "
            "Set env.rollout.n=8."
        )


def _zero_kl(coefficient: str, switch: str) -> str:
    return f"{coefficient}=0: the reference model would run for nothing. Raise it, or set {switch}=false."


def _check_clip(actor: Actor) -> Iterator[str]:
    if actor.clip_ratio_c is not None and actor.clip_ratio_c <= 1:
        key = "actor_rollout_ref.actor.clip_ratio_c"
        yield f"{key}={actor.clip_ratio_c}: the dual clip must be above 1. Set 3.0, or null to switch it off."


def _check_correction(correction: RolloutCorrection) -> Iterator[str]:
    key, low, high = "algorithm.rollout_correction", correction.low, correction.high
    if correction.method and correction.bypass:
        yield (
            f"{key}.method={correction.method} and {key}.bypass=true: with the engine's log-probs as the old ones the "
            "loss's own ratio corrects already, and both would correct twice. Keep one."
        )
    if correction.method and low is not None and high is not None and low >= high:
        yield f"{key}.low={low:g}, {key}.high={high:g}: no ratio lies between. Set low below 1 and high above it."
    if correction.method and low is None and high is None:
        yield f"{key}.method={correction.method} without low and high bounds nothing. Set {key}.high=2.0."


def _check_lengths(config: Config) -> Iterator[str]:
    cache, longest = config.algorithm.overlong_penalty.cache, config.data.max_response_length
    if config.algorithm.overlong_penalty.enable and cache is not None and cache > longest:
        yield (
            f"algorithm.overlong_penalty.cache={cache}: more than data.max_response_length={longest}, so that every "
            f"response would be punished. Set null for a fifth of it, the paper's share."
        )


def _check_reset(config: Config) -> Iterator[str]:
    reset, key = config.algorithm.reference_reset, "algorithm.reference_reset"
    if reset.every is None and reset.patience is None:
        return
    if not (config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        yield (
            f"{key}: there is no reference model to reset. Set actor_rollout_ref.actor.use_kl_loss=true, or leave "
            f"{key} out."
        )
    if reset.patience is not None and (not config.data.val_files or config.trainer.test_freq == -1):
        yield f"{key}.patience={reset.patience}: needs validations. Set data.val_files and trainer.test_freq."


def _check_machine(config: Config, device: Device, num_gpus: int, num_cores: int) -> Iterator[str]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    ranks = trainer.num_ranks
    if trainer.controller == "local" and ranks > 1:
        yield (
            f"trainer.controller=local: it has one process, but trainer.n_gpus_per_node x trainer.nnodes is {ranks}. "
            "Set both to 1, or trainer.controller=ray."
        )
    engines = num_engines(rollout, device, ranks)
    yield from check_replicas("actor_rollout_ref.rollout.data_parallel_size", rollout.data_parallel_size, engines)
    if trainer.controller == "local" and engines > 1:
        yield (
            f"trainer.controller=local: it has one engine, but actor_rollout_ref.rollout.num_engines={engines}. Set it "
            "to 1, or trainer.controller=ray."
        )
    parallel = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    size = rollout.tensor_model_parallel_size
    if size > 1 and rollout.name != "vllm":
        yield f"{parallel}={size}: only the vllm engine splits a model. Set 1, or actor_rollout_ref.rollout.name=vllm."
    if device == "cpu":
        if size > num_cores:
            yield f"{parallel}={size}: every part needs a core, and there are {num_cores}. Set {num_cores} or less."
        return
    if not num_gpus:
        yield "trainer.device: got cuda, but this machine has no GPU. Set trainer.device=auto or cpu."
        return
    if trainer.n_gpus_per_node > num_gpus:
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: a node has {num_gpus} GPUs. Set {num_gpus} or less."
    if size > num_gpus:
        yield f"{parallel}={size}: a node has {num_gpus} GPUs. Set {num_gpus} or less."
    yield from _check_engines(config, ranks, num_gpus)


def _check_engines(config: Config, ranks: int, num_gpus: int) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    per_node = config.trainer.n_gpus_per_node
    if rollout.colocate and per_node % size and (rollout.num_engines is None or config.trainer.nnodes > 1):
        divisors = ", ".join(str(one) for one in range(1, per_node + 1) if per_node % one == 0)
        fewer = ", or actor_rollout_ref.rollout.num_engines" if config.trainer.nnodes == 1 else ""
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: does not divide the {per_node} training "
            f"ranks of a node (trainer.n_gpus_per_node), and an engine's GPUs are of one node. Set one of {divisors}"
            f"{fewer}."
        )
        return
    engines = num_engines(rollout, "cuda", ranks)
    nodes, free = config.trainer.nnodes, per_node if rollout.colocate else num_gpus - per_node
    if engines > (free // size * nodes):
        where = "on the training side" if rollout.colocate else "beside the training GPUs"
        each = f" on each of {nodes} nodes, and an engine's GPUs are of one" if nodes > 1 else ""
        yield (
            f"actor_rollout_ref.rollout.num_engines={engines}: with tensor_model_parallel_size={size} that is "
            f"{engines * size} GPUs, but {where} there are {free}{each}. Lower either, or change "
            "trainer.n_gpus_per_node."
        )
