"""Compute a recorded iteration again: call `learn` in this process, with policy and critic but without engines.

recording + overrides -> prepare_replay (the run's settings, but one rank) -> load the recorded state -> learn
-> outcome -> table of the recorded and the replayed values
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import Placement, detect_machine
from alphaapollo.controller.worker_groups import LocalWorkerGroups
from alphaapollo.launch.command import REPORTED_ERRORS
from alphaapollo.launch.model_requirements import choose_kernels
from alphaapollo.models.load import load_config
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.replay.record import collect_learning_outcome, describe_machine
from alphaapollo.trainer.replay.recording import LearningOutcome, Recording, RecordingInfo
from alphaapollo.trainer.run_state import LearnerState
from alphaapollo.trainer.setup.plan import Plan, make_worker_specs, resolve_plan
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
NOT_COMPARED = ("perf/mfu/actor", "actor/sharing_gap", "critic/sharing_gap")  # measured times; first batch only
LAYOUT = ("batch/sharing", "batch/micro_batches", "batch/padding", "batch/rank_imbalance", "batch/rows_skipped")
FLOOR = 1e-2  # smallest scale of relative differences: metrics near 0 may be sums that cancel
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # largest relative difference where rounding may differ, by dtype


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
    return PreparedReplay(
        recording, config, plan, float64, changes, list(_list_rounding_difference_causes(info, plan.placement))
    )


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
                uses_shared_prompts=info.shares_prompts and plan.uses_shared_prompts,
            )
            try:
                learned = await learn(run, info.step, recording.groups, Timer())
            except REPORTED_ERRORS as error:
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


def _list_rounding_difference_causes(info: RecordingInfo, placement: Placement) -> Iterable[str]:
    if placement.device == "cuda":
        yield "GPU kernels may sum in any order"
    recorded = {"training ranks": info.ranks, "device": info.device, "threads per rank": info.threads, **info.machine}
    here = {"training ranks": 1, "device": placement.device, "threads per rank": placement.threads}
    for name, value in (here | describe_machine()).items():
        if recorded.get(name) != value:
            yield f"{name}: the run had {recorded.get(name)}, this replay has {value}"


class Float64Mode(TorchFunctionMode):
    """Context manager in which casts of tensors to float32 return float64, e.g. in transformers' norms, rotary
    embeddings and softmaxes. The dtype of new tensors does not change.

    With gradient checkpointing, which recomputes layers, the backward pass needs this context, too.
    """

    def __torch_function__(
        self, function: Callable[..., object], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_view = function is Tensor.view  # view(dtype) reinterprets bytes
        if args and isinstance(args[0], Tensor) and not is_view:
            if function is Tensor.float:
                return args[0].double(**kwargs)
            args = tuple(map(_replace_float32, args))
            kwargs = {name: _replace_float32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _replace_float32(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


Value = float | np.ndarray | tuple[str, float]
"""Metric, column, or (digest, norm) of weights."""


@dataclass(frozen=True)
class ComparedValue:
    """Comparison of a recorded and a replayed number: a metric, or the norm of per-token values or of weights."""

    name: str
    recorded: float | None  # None if missing
    replayed: float | None  # None if missing
    is_equal: bool  # bitwise
    difference: float  # relative difference


def compare_outcomes(
    recorded: LearningOutcome, replayed: LearningOutcome, compare_batching: bool
) -> list[ComparedValue]:
    """Compare all values of two results, in the order of their computation. With `compare_batching`, also compare the
    metrics of micro-batches and padding, which depend on the number of ranks."""
    excluded, values = {*NOT_COMPARED, *(() if compare_batching else LAYOUT)}, []
    for part in ("columns", "metrics", "fingerprints"):
        left, right = getattr(recorded, part), getattr(replayed, part)
        names = [name for name in left | right if name not in excluded]
        values.extend([_compare_value(name, left.get(name), right.get(name)) for name in names])
    return values


def print_and_check_comparison(prepared: PreparedReplay, replayed: LearningOutcome) -> bool:
    """Print recorded and replayed values side by side. Returns False if they differ but should be equal."""
    recording, recorded = prepared.recording, prepared.recording.outcome
    print(f"iteration {recording.info.step}, recorded in {recording.folder}")
    if recorded is None:
        recorded = LearningOutcome({}, {}, {}, "the run ended before there was an outcome")
    values = compare_outcomes(recorded, replayed, prepared.expects_exact_result)
    print(f"{'':34}{'recorded':>15}{'replayed':>15}  relative difference")
    for value in values:
        difference = "0" if value.is_equal else f"{value.difference:.1e}"
        print(f"{value.name:34}{_format_number(value.recorded):>15}{_format_number(value.replayed):>15}  {difference}")
    if not (recorded.error or replayed.error):
        equal, verdict = judge_replay(prepared, values)
        print(verdict)
        return equal
    print(f"recorded: {recorded.error or 'a complete step'}")
    print(f"replayed: {replayed.error or 'a complete step'}")
    if recorded.error and replayed.error:  # the recorded error may begin with the worker's name
        return replayed.error in recorded.error
    expects_change = prepared.float64 or bool(prepared.result_changing_overrides) or recording.outcome is None
    return expects_change and not replayed.error


def judge_replay(prepared: PreparedReplay, values: list[ComparedValue]) -> tuple[bool, str]:
    """Return whether the replayed values are as expected, and a sentence that describes the largest difference."""
    differing = [value for value in values if not value.is_equal]
    largest = max(differing, key=lambda value: value.difference, default=None)
    if largest is None:
        return True, f"bit for bit equal: {len(values)} of {len(values)}"
    largest_difference = f"the largest difference is {largest.difference:.1e}, in {largest.name}"
    if prepared.float64 or prepared.result_changing_overrides:
        words = ["in float64"] * prepared.float64 + [f"with {word}" for word in prepared.result_changing_overrides]
        return True, f"{', '.join(words)}: {largest_difference}"
    if prepared.expects_exact_result:
        return False, f"not equal: the first difference is in {differing[0].name}; {largest_difference}"
    tolerance = TOLERANCE[prepared.plan.model.dtype]
    equal = largest.difference <= tolerance
    verdict = f"{'equal' if equal else 'not equal'} within {tolerance:g}: {largest_difference}"
    return equal, f"{verdict}. Not bit for bit, because {'; '.join(prepared.rounding_difference_causes)}"


def _compare_value(name: str, recorded: Value | None, replayed: Value | None) -> ComparedValue:
    same, gap, scale = False, math.inf, 1.0
    if isinstance(recorded, np.ndarray) and isinstance(replayed, np.ndarray) and recorded.shape == replayed.shape:
        same = recorded.dtype == replayed.dtype and recorded.tobytes() == replayed.tobytes()
        gap = float(np.abs(recorded.astype(np.float64) - replayed).max(initial=0.0))
        scale = float(np.abs(recorded).max(initial=0.0))
    elif isinstance(recorded, tuple) and isinstance(replayed, tuple):
        same = recorded[0] == replayed[0]
        gap, scale = abs(recorded[1] - replayed[1]), max(recorded[1], replayed[1])
    elif isinstance(recorded, float | int) and isinstance(replayed, float | int):
        same = recorded == replayed or (math.isnan(recorded) and math.isnan(replayed))
        gap = abs(recorded - replayed)
        scale = max(abs(recorded), abs(replayed), 0.0 if "norm" in name else FLOOR)
    difference = 0.0 if same else gap / (scale or 1.0)
    difference = math.inf if math.isnan(difference) else difference
    return ComparedValue(name, _get_value_or_norm(recorded), _get_value_or_norm(replayed), same, difference)


def _get_value_or_norm(value: Value | None) -> float | None:
    if isinstance(value, np.ndarray):
        return float(np.linalg.norm(value.astype(np.float64)))
    return value[1] if isinstance(value, tuple) else value


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
