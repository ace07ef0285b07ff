"""Compute a recorded iteration again: call `learn` in this process, with policy and critic but without engines.

recording + overrides -> prepare_replay (the run's settings, but one rank) -> load the recorded state -> learn
-> outcome
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import detect_machine
from alphaapollo.controller.worker_groups import LocalWorkerGroups
from alphaapollo.launch.failures import FAILURES
from alphaapollo.launch.input_checks import choose_kernels
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.load import load_config
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.replay.record import collect_learning_outcome, describe_machine
from alphaapollo.trainer.replay.recording import LearningOutcome, Recording, RecordingInfo
from alphaapollo.trainer.run_state import LearnerState
from alphaapollo.trainer.setup.plan import Plan, resolve_plan
from alphaapollo.trainer.setup.worker_specs import make_worker_specs
from alphaapollo.trainer.step.learn import learn
from alphaapollo.utils.user_module import load_user_module

MODEL = "actor_rollout_ref.model"
RESOLVED = ("dtype", "attention", "enable_gradient_checkpointing")  # model keys that the run's plan resolves
LOCATION_KEYS = (  # changing these does not change the computation
    *("trainer.device", "trainer.cpu_threads", "algorithm.custom_module"),
    *(f"{MODEL}.path", "critic.model.path", "teacher.model.path"),
)
EFFECTIVE_KEYS = (  # keys or prefixes of keys that a replay reads
    *(*LOCATION_KEYS, f"{MODEL}.", "actor_rollout_ref.actor.", "algorithm.", "critic.", "teacher."),
    *("data.max_response_length", "trainer.on_bad_step", "trainer.critic_warmup"),
)
INEFFECTIVE_KEYS = ("algorithm.filter_groups.", "algorithm.reference_reset.", "actor_rollout_ref.actor.ulysses")
GROUP_SIZES = (".fsdp_size", ".ep_size")  # ends of keys without effect
FLOAT64 = {"dtype": "float64", "use_torch_compile": False, "use_liger": False, "enable_gradient_checkpointing": False}


@dataclass(frozen=True)
class PreparedReplay:
    """Checked inputs of a replay."""

    recording: Recording
    config: Config  # reduced to one rank
    plan: Plan
    float64: bool
    result_changing_overrides: list[str]  # KEY=VALUE arguments that change the computation
    rounding_difference_causes: list[str]  # why rounding may differ even without such arguments

    @property
    def expects_exact_result(self) -> bool:
        """Whether the replayed result must equal the recorded result bit for bit."""
        return not (self.float64 or self.result_changing_overrides or self.rounding_difference_causes)


def prepare_replay(recording: Recording, config: Config, overrides: Sequence[str], float64: bool) -> PreparedReplay:
    """Check the inputs of a replay and reduce the run's settings to one rank.

    config: configuration of the run, with the overrides (KEY=VALUE arguments) applied. Raises ValueError if an
    override has no effect on a replay or the model is missing.
    """
    override_keys = [word.partition("=")[0].lstrip("+~") for word in overrides]
    _check_overrides_have_effect(override_keys)
    info, machine = recording.info, detect_machine()
    requested = config.trainer.device if "trainer.device" in override_keys else info.device
    device: Device = "cuda" if requested in ("cuda", "auto") and machine.num_gpus else "cpu"
    config = _make_one_rank_config(config, info, device, float64, override_keys)
    if config.algorithm.custom_module:
        load_user_module(config.algorithm.custom_module, "algorithm.custom_module")
    plan = resolve_plan(config, machine, [])
    load_config(plan.model)
    plan = replace(plan, model=choose_kernels(plan.model, config.actor_rollout_ref.model))
    if float64:
        plan = replace(plan, model=plan.model.model_copy(update=FLOAT64))
    changes = [word for word, key in zip(overrides, override_keys, strict=True) if key not in LOCATION_KEYS]
    return PreparedReplay(recording, config, plan, float64, changes, list(_list_rounding_difference_causes(info, plan)))


async def replay(prepared: PreparedReplay) -> LearningOutcome:
    """Compute the recorded iteration again. If the update raises, the outcome contains the error."""
    recording, info, config, plan = prepared.recording, prepared.recording.info, prepared.config, prepared.plan
    with Float64Mode() if prepared.float64 else nullcontext():
        specs = make_worker_specs(config, plan, f"replay-{os.getpid()}", info.iterations, has_reward_function=True)
        trained = {role: build for role, build in specs.rank_builders.items() if role != "reward model"}
        workers = LocalWorkerGroups(replace(specs, engine_builder=None, rank_builders=trained))
        try:
            await workers.policy.load(str(recording.folder / "policy"))
            if workers.critic:
                await workers.critic.load(str(recording.folder / "critic"))
            run = LearnerState(
                config=config,
                plan=plan,
                workers=workers,
                progress=Progress(step=info.step - 1, kl_coef=info.kl_coef),
                console=Console(Terminal(quiet=True)),
                column_dtype="float64" if prepared.float64 else "float32",
                shares_prompts=info.shares_prompts and plan.shares_prompts,
            )
            try:
                learned = await learn(run, info.step, recording.groups, Timer())
            except FAILURES as error:
                return LearningOutcome({}, {}, {}, str(error))
            return await collect_learning_outcome(run, info.step, learned)
        finally:
            await workers.close()


def _check_overrides_have_effect(keys: Iterable[str]) -> None:
    """Raise ValueError for a config key that a replay does not read, e.g. a key of generation or parallelism."""
    for key in keys:
        if not key.startswith(EFFECTIVE_KEYS) or key.startswith(INEFFECTIVE_KEYS) or key.endswith(GROUP_SIZES):
            keys_with_effect = [f"{name}*" if name.endswith(".") else name for name in EFFECTIVE_KEYS]
            exceptions = ", ".join(f"{prefix}*" for prefix in INEFFECTIVE_KEYS)
            raise ValueError(
                f"{key} has no effect on a replay, which computes one update on one rank. Remove {key}. A replay "
                f"reads {', '.join(keys_with_effect)}, except {exceptions}, *.fsdp_size and *.ep_size."
            )


def _make_one_rank_config(
    config: Config, info: RecordingInfo, device: Device, float64: bool, override_keys: Sequence[str]
) -> Config:
    """Return the configuration for one local rank without engines. `auto` settings get the value that the run chose."""
    settings: dict[str, object] = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.controller": "local",
        "trainer.device": device,
        "trainer.async_mode": None,
        "trainer.cpu_threads": info.threads,
        "reward_model.enable": False,
        "actor_rollout_ref.rollout.name": "fake",
        "actor_rollout_ref.rollout.num_engines": 1,
        "actor_rollout_ref.rollout.nnodes": 0,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.expert_parallel_size": 1,
        "actor_rollout_ref.rollout.lora": "merged",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": info.max_tokens,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
        "critic.fsdp_config.fsdp_size": -1,
        "actor_rollout_ref.actor.fsdp_config.ep_size": 1,
        "critic.fsdp_config.ep_size": 1,
    } | {f"{MODEL}.{name}": info.model[name] for name in RESOLVED}
    if (device == "cpu" or float64) and info.model["attention"] not in ("padded", "sdpa"):
        settings[f"{MODEL}.attention"] = "padded" if device == "cpu" else "sdpa"
    for key, value in settings.items():
        if key not in override_keys or key == "trainer.device":
            config = replace_value(config, key, value)
    return config


def _list_rounding_difference_causes(info: RecordingInfo, plan: Plan) -> Iterable[str]:
    placement = plan.placement
    if info.ranks > 1:
        yield f"the run had {info.ranks} training ranks and sums in another order"
    if info.device != placement.device:
        yield f"the run computed on {info.device}, this replay on {placement.device}"
    elif placement.device == "cuda":
        yield "GPU kernels may sum in any order"
    if info.threads != placement.threads:
        yield f"the run had {info.threads} threads per rank, this replay has {placement.threads}"
    for name, here in describe_machine().items():
        if (recorded := info.machine.get(name)) != here:
            yield f"{name} was {recorded}, here it is {here}"
