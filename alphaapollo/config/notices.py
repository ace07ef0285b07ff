"""Keys that do nothing in this run, because a switch is off or the device lacks what they are about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel

from alphaapollo.config.keys import accepted_keys, plain, sections, value_of
from alphaapollo.config.schema import (
    Algorithm,
    Config,
    Env,
    EvalConfig,
    GenerationConfig,
    Optimizer,
    Rollout,
    SftConfig,
    TuningConfig,
)
from alphaapollo.config.schema.base import Device

Switch = tuple[bool, str, list[str]]  # is it on, what to say if not, the keys that then do nothing

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

OFFLOADS = {  # sections with offload_policy -> the keys that it makes void
    f"{ACTOR}.fsdp_config": ("param_offload", "optimizer_offload"),
    "actor_rollout_ref.ref.fsdp_config": ("param_offload",),
    "critic.fsdp_config": ("param_offload", "optimizer_offload"),
    "teacher.model.fsdp_config": ("param_offload",),
    "reward_model.model.fsdp_config": ("param_offload",),
}
TUNING_OFFLOADS = {"fsdp_config": ("optimizer_offload",)}


def _offload_keys(sections: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section, names in sections.items() for name in (*names, "offload_policy"))


GPU_ONLY = (
    *_offload_keys(OFFLOADS),
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.colocate",
)
CPU_ONLY = (f"{ROLLOUT}.kv_cache_gib", f"{ROLLOUT}.block_size", f"{ROLLOUT}.cpu_threads")
GENERATION_GPU_ONLY = ("rollout.gpu_memory_utilization", "trainer.n_gpus_per_node", "trainer.nnodes")
GENERATION_CPU_ONLY = ("rollout.kv_cache_gib", "rollout.block_size", "rollout.cpu_threads")
OF_TRAINING = (  # keys of sections that main_generation shares with main_ppo
    "model.attention",
    "model.enable_gradient_checkpointing",
    "model.router_aux_loss_coef",
    "model.lora_rank",
    "model.lora_alpha",
    "model.target_modules",
    "rollout.colocate",
    "rollout.free_cache_engine",
    "rollout.lora",
    "rollout.router_replay",
    *(f"rollout.val_kwargs.{name}" for name in ("n", "temperature", "top_p", "top_k", "greedy")),
)
OFF: dict[str, float | None] = {  # values that say what is so anyway where the key has no effect
    f"{ACTOR}.kl_loss_coef": 0.0,
    f"{ACTOR}.invalid_action_penalty_coef": 0.0,
    f"{ROLLOUT}.free_cache_engine": False,
    "algorithm.kl_ctrl.kl_coef": 0.0,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
}
OF_ALL_ENVIRONMENTS = ("env.rollout", "env.tool_limits")  # the other sections of env belong to one each


def notices(config: Config, device: Device, num_cores: int) -> list[str]:
    """One line for each key that the user set and that changes nothing, and for what will surprise."""
    trainer, validation = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    by_device = [
        *_void_by_device(device, GPU_ONLY, CPU_ONLY),
        *_void_by_policy(config, device, OFFLOADS),
        *_void_replicas(ROLLOUT, config.actor_rollout_ref.rollout, device),
    ]
    lines = void_lines(config, [*_void_by_switch(config), *by_device])
    if device == "cpu" and config.actor_rollout_ref.rollout.router_replay:
        lines.append(f"{ROLLOUT}.router_replay=true: without a GPU the engine is many times slower with it.")
    if device == "cpu" and trainer.n_gpus_per_node > num_cores:
        ranks = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
        lines.append(f"{ranks} on {num_cores} cores: the ranks share them and slow each other down.")
    if validation.temperature == 0 and validation.n > 1:
        lines.append(f"{ROLLOUT}.val_kwargs.n={validation.n} at temperature 0: the samples will be equal.")
    return [*lines, *_cut_distribution(config)]


def _cut_distribution(config: Config) -> Iterator[str]:
    """Training samples come from less than the distribution whose log-probs are trained."""
    rollout = config.actor_rollout_ref.rollout
    for key, value, is_cut in (
        ("top_p", rollout.top_p, rollout.top_p < 1),
        ("top_k", rollout.top_k, rollout.top_k > 0),
    ):
        if is_cut:
            yield (
                f"{ROLLOUT}.{key}={value}: training samples come from the most likely tokens alone, but log-probs, "
                "ratios and KL are of the whole distribution: gradients are biased. Leave it out for training."
            )


def tuning_notices(config: TuningConfig, device: Device) -> list[str]:
    """As `notices`, for all kinds of fine-tuning."""
    void = [
        *_void_by_device(device, _offload_keys(TUNING_OFFLOADS), ()),
        *_void_by_policy(config, device, TUNING_OFFLOADS),
        *_void_schedule("optim", config.optim),
    ]
    if config.trainer.num_ranks == 1:
        void.append(("fsdp_config.sync_each_micro_batch", "there is one rank"))
    return void_lines(config, void)


# of main_sft: keys about data.val_prompts alone
OF_ANSWERS = (
    "rollout.",
    "env.",
    "reward.",
    "custom_reward_function.",
    "data.max_prompt_length",
    "data.max_response_length",
)


def answer_notices(config: SftConfig) -> list[str]:
    """As `notices`, of main_sft's keys about held-out prompts."""
    if not config.data.val_prompts:
        void = [(key, "data.val_prompts is empty") for key in accepted_keys(SftConfig) if key.startswith(OF_ANSWERS)]
        return void_lines(config, void)
    validation = config.rollout.val_kwargs
    void = [
        *_switched_off([(config.trainer.test_freq != -1, "trainer.test_freq is -1", ["data.val_prompts"])]),
        ("env.rollout.n", "rollout.val_kwargs.n counts the samples"),
        *_switched_off(_env_switches(config.env)),
        *_void_function_name(config.custom_reward_function.path),
    ]
    lines = void_lines(config, void)
    if validation.temperature == 0 and validation.n > 1:
        lines.append(f"rollout.val_kwargs.n={validation.n} at temperature 0: the samples will be equal.")
    return lines


def generation_notices(config: GenerationConfig, device: Device) -> list[str]:
    """As `notices`, for main_generation."""
    rollout = config.rollout.name
    void = [
        *_void_by_device(device, GENERATION_GPU_ONLY, GENERATION_CPU_ONLY),
        *_void_replicas("rollout", config.rollout, device),
        *((key, "data.n_samples counts the samples") for key in ("rollout.n", "env.rollout.n")),
        *((key, "it is about training") for key in OF_TRAINING),
        *_switched_off(_env_switches(config.env)),
        *_switched_off(
            [(rollout == "vllm", f"rollout.name is {rollout}", ["rollout.engine_kwargs.vllm", "rollout.cpu_threads"])]
        ),
        *_void_function_name(config.custom_reward_function.path),
    ]
    lines = void_lines(config, void)
    if config.rollout.temperature == 0 and config.data.n_samples > 1:
        lines.append(f"data.n_samples={config.data.n_samples} at rollout.temperature=0: the samples will be equal.")
    return lines


def eval_notices(config: EvalConfig) -> list[str]:
    """As `notices`, for main_eval."""
    return void_lines(config, _void_function_name(config.custom_reward_function.path))


def void_lines(config: BaseModel, void: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each (key, reason) where the key has another value than its default, unless it asks for nothing."""
    keys = accepted_keys(type(config))
    lines = []
    for key, because in void:
        value = value_of(config, key)
        asks_for_nothing = key in OFF and value == OFF[key]
        if value != keys[key].default and not asks_for_nothing:
            lines.append(f"{key}={plain(value)} has no effect: {because}.")
    return lines


def _void_by_device(device: Device, gpu_only: Iterable[str], cpu_only: Iterable[str]) -> Iterator[tuple[str, str]]:
    if device == "cpu":
        yield from ((key, "it needs a GPU") for key in gpu_only)
    else:
        yield from ((key, "it is for machines without GPUs") for key in cpu_only)


def _void_by_policy(
    config: BaseModel, device: Device, sections: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Offload between phases has nothing to do where FSDP's own keeps everything in host memory."""
    for section, names in sections.items():
        if device == "cuda" and value_of(config, f"{section}.offload_policy"):
            yield from ((f"{section}.{name}", f"{section}.offload_policy is true") for name in names)


def _void_replicas(section: str, rollout: Rollout, device: Device) -> Iterator[tuple[str, str]]:
    if device == "cuda" or rollout.num_engines is not None:
        yield (
            f"{section}.data_parallel_size",
            "each replica is an engine of its own, and their number follows otherwise",
        )


def _void_by_switch(config: Config) -> Iterator[tuple[str, str]]:
    actor = config.actor_rollout_ref.actor
    switches = [*_actor_switches(config), *_reward_switches(config.algorithm), *_trainer_switches(config)]
    yield from _switched_off([*switches, *_env_switches(config.env)])
    yield from _void_function_name(config.custom_reward_function.path)
    yield from _void_schedule(f"{ACTOR}.optim", actor.optim)
    yield from _void_schedule("critic.optim", config.critic.optim)


def _actor_switches(config: Config) -> list[Switch]:
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    engine = config.actor_rollout_ref.rollout.name
    one_range = actor.clip_ratio_low is None or actor.clip_ratio_high is None
    return [
        (actor.use_kl_loss, f"{ACTOR}.use_kl_loss is false", [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]),
        (
            actor.use_invalid_action_penalty,
            f"{ACTOR}.use_invalid_action_penalty is false",
            [f"{ACTOR}.invalid_action_penalty_coef"],
        ),
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm",
            f"{ACTOR}.loss_agg_mode is {actor.loss_agg_mode}",
            [f"{ACTOR}.loss_scale_factor"],
        ),
        (config.algorithm.overlong_filter, "algorithm.overlong_filter is false", [f"{ACTOR}.loss_agg_count"]),
        (
            engine == "vllm",
            f"{ROLLOUT}.name is {engine}",
            [f"{ROLLOUT}.engine_kwargs.vllm", f"{ROLLOUT}.cpu_threads"],
        ),
        (one_range, "clip_ratio_low and clip_ratio_high are both given", [f"{ACTOR}.clip_ratio"]),
        (
            correction.method is not None,
            "algorithm.rollout_correction.method is null",
            [f"algorithm.rollout_correction.{name}" for name in ("level", "low", "high")],
        ),
    ]


def _reward_switches(algorithm: Algorithm) -> list[Switch]:
    control, budget = algorithm.kl_ctrl, algorithm.length_budget
    by_type = {"target_kl": ("adaptive", "doubling", "dual"), "horizon": ("adaptive",), "dual_step_size": ("dual",)}
    every = ["kl_coef", *by_type, "type"]
    off = ["algorithm.kl_penalty", *(f"algorithm.kl_ctrl.{name}" for name in every)]
    switches: list[Switch] = [(algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is false", off)]
    if algorithm.use_kl_in_reward:
        switches += [
            (control.type in types, f"algorithm.kl_ctrl.type is {control.type}", [f"algorithm.kl_ctrl.{name}"])
            for name, types in by_type.items()
        ]
    return [
        *switches,
        (
            algorithm.overlong_penalty.enable,
            "algorithm.overlong_penalty.enable is false",
            ["algorithm.overlong_penalty.cache", "algorithm.overlong_penalty.factor"],
        ),
        (budget.mode is not None, "algorithm.length_budget.mode is null", ["algorithm.length_budget.coef"]),
        (
            budget.mode == "max",
            f"algorithm.length_budget.mode is {plain(budget.mode)}",
            ["algorithm.length_budget.slack"],
        ),
    ]


def _trainer_switches(config: Config) -> list[Switch]:
    actor, algorithm, trainer = config.actor_rollout_ref.actor, config.algorithm, config.trainer
    of_reward_model = [key for key in accepted_keys(Config) if key.startswith("reward_model.")]
    distance, of_teacher = (
        config.teacher.divergence,
        [key for key in accepted_keys(Config) if key.startswith("teacher.")],
    )
    return [
        (distance is not None, "teacher.divergence is null", of_teacher),
        (distance in (None, "jsd"), f"teacher.divergence is {distance}", ["teacher.beta"]),
        (config.reward_model.enable, "reward_model.enable is false", of_reward_model),
        (
            algorithm.filter_groups.enable,
            "algorithm.filter_groups.enable is false",
            ["algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"],
        ),
        (
            algorithm.reference_reset.patience is not None,
            "algorithm.reference_reset.patience is null",
            ["algorithm.reference_reset.min_gain"],
        ),
        (bool(config.data.val_files), "data.val_files is empty", ["trainer.test_freq"]),
        (
            trainer.async_mode is not None,
            "trainer.async_mode is null",
            ["trainer.max_staleness", "trainer.keep_kv_cache"],
        ),
        (trainer.max_staleness > 0, "trainer.max_staleness=0: nothing is in flight", ["trainer.keep_kv_cache"]),
        (
            trainer.num_ranks > 1,
            "there is one training rank",
            [f"{section}.fsdp_config.sync_each_micro_batch" for section in (ACTOR, "critic")],
        ),
        (trainer.total_training_steps is None, "trainer.total_training_steps is given", ["trainer.total_epochs"]),
        (
            trainer.resume_mode == "resume_path",
            f"trainer.resume_mode is {trainer.resume_mode}",
            ["trainer.resume_from_path"],
        ),
        (trainer.export_hf, "trainer.export_hf is false", ["trainer.export_lora"]),
        (
            algorithm.use_kl_in_reward or (actor.use_kl_loss and not actor.full_kl),
            "no KL compares log-probs with the reference's",
            ["actor_rollout_ref.ref.log_probs_ahead"],
        ),
        (
            not config.actor_rollout_ref.model.lora_rank,
            "with LoRA the reference is the policy without its adapters",
            [f"actor_rollout_ref.ref.fsdp_config.{name}" for name in ("param_offload", "offload_policy")],
        ),
        (trainer.save_freq != -1, "trainer.save_freq is -1", ["trainer.max_ckpt_to_keep"]),
    ]


def _env_switches(env: Env) -> list[Switch]:
    by_name = f"env.env_name is {env.env_name}"
    switches: list[Switch] = [
        (env.context == "memory", f"env.context is {env.context}", ["env.history_length", "env.memory_type"]),
        (env.env_name != "single_turn", f"{by_name}, which has one turn", ["env.max_steps", "env.context"]),
        (
            env.informal_math.enable_python_code or "python_code" in env.tools,
            "env.informal_math.enable_python_code is false",
            ["env.informal_math.python_code_timeout"],
        ),
    ]
    if env.custom_module:  # an environment of the user's own may read every section
        return switches
    own = [name for name in sections(Config) if name.startswith("env.") and name not in OF_ALL_ENVIRONMENTS]
    keys = {name: [key for key in accepted_keys(Config) if key.startswith(f"{name}.")] for name in own}
    return [*switches, *((name == f"env.{env.env_name}", by_name, keys[name]) for name in own)]


def _switched_off(switches: Iterable[Switch]) -> Iterator[tuple[str, str]]:
    yield from ((key, because) for is_on, because, keys in switches if not is_on for key in keys)


def _void_function_name(path: str) -> Iterator[tuple[str, str]]:
    if not path:
        yield "custom_reward_function.name", "custom_reward_function.path is empty"


def _void_schedule(prefix: str, optim: Optimizer) -> Iterator[tuple[str, str]]:
    if optim.lr_warmup_steps >= 0:
        yield f"{prefix}.lr_warmup_steps_ratio", f"{prefix}.lr_warmup_steps is given"
    if optim.warmup_style == "constant":
        yield f"{prefix}.min_lr_ratio", f"{prefix}.warmup_style is constant"
