"""Compute a recorded iteration again: call `learn` in this process, with policy and critic but without engines.

recording + overrides -> prepare_replay (the run's settings, but one rank) -> load the recorded state -> learn
-> outcome -> table of the recorded and the replayed values
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from alphaapollo.config.keys import replace_value
from alphaapollo.config.load import SavedConfig, drop_unknown_keys, load_config
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import detect_machine
from alphaapollo.controller.worker_groups import LocalWorkerGroups
from alphaapollo.launch.plan import Plan, resolve_plan
from alphaapollo.launch.specs import make_worker_specs
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.load import load_config as load_model_config
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.observability.timing import Timer
from alphaapollo.planning.model_requirements import choose_kernels
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.session.progress import Progress
from alphaapollo.trainer.replay.record import collect_outcome, describe_machine
from alphaapollo.trainer.replay.recording import Outcome, RecordedInputs, Value, read_recording
from alphaapollo.trainer.run_state import LearnerState
from alphaapollo.trainer.step.learn import learn
from alphaapollo.utils.user_module import load_user_module

MODEL = "actor_rollout_ref.model"
RESOLVED = ("dtype", "attention", "enable_gradient_checkpointing")  # model keys that the run's plan resolves
LOCATION_KEYS = (  # changing these does not change the computation
    *("trainer.device", "trainer.cpu_threads", "algorithm.custom_module"),
    *(f"{MODEL}.path", "critic.model.path", "teacher.model.path"),
)
EFFECTIVE_KEYS = (  # keys or beginnings of keys that a replay reads
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
    """Checked inputs of a replay. The result must be bit for bit equal without changes and causes."""

    folder: Path
    inputs: RecordedInputs
    recorded: Outcome
    config: Config  # reduced to one rank
    plan: Plan
    float64: bool
    changes: list[str]  # why the result differs: KEY=VALUE arguments that change the computation, float64
    causes: list[str]  # why rounding may differ even without changes


def prepare_replay(folder: Path, overrides: Sequence[str], float64: bool) -> PreparedReplay:
    """Read a recording, and reduce the run's settings to one rank. overrides: KEY=VALUE arguments. Raises ValueError if
    the recording cannot be read, an override has no effect on a replay, or the model is missing."""
    inputs, recorded = read_recording(folder)
    keys = [word.partition("=")[0].lstrip("+~") for word in overrides]
    for key in keys:
        if not key.startswith(EFFECTIVE_KEYS) or key.startswith(INEFFECTIVE_KEYS) or key.endswith(GROUP_SIZES):
            raise ValueError(
                f"{key} has no effect on a replay, which computes one update on one rank. Remove {key}. A replay reads "
                f"keys that begin with {', '.join(EFFECTIVE_KEYS)}."
            )
    saved = SavedConfig(folder, drop_unknown_keys(Config, read_saved_config(folder)), EFFECTIVE_KEYS)
    config = load_config(Config, "ppo", overrides, saved)
    machine = detect_machine()
    requested = config.trainer.device if "trainer.device" in keys else inputs.machine["device"]
    device: Device = "cuda" if requested in ("cuda", "auto") and machine.num_gpus else "cpu"
    config = _make_one_rank_config(config, inputs, device, float64, keys)
    if config.algorithm.custom_module:
        load_user_module(config.algorithm.custom_module, "algorithm.custom_module")
    plan = resolve_plan(config, machine, [])
    load_model_config(plan.model)
    model = choose_kernels(plan.model, config.actor_rollout_ref.model)
    plan = replace(plan, model=model.model_copy(update=FLOAT64) if float64 else model)
    changing = [key not in LOCATION_KEYS and not key.endswith(".trust_remote_code") for key in keys]
    changes = [f"with {word}" for word, is_change in zip(overrides, changing, strict=True) if is_change]
    here, of_run = describe_machine(plan.placement), inputs.machine
    causes = ["GPU kernels may sum in any order"] * (device == "cuda") + [
        f"{name}: the run had {of_run.get(name)}, this replay has {value}"
        for name, value in here.items()
        if of_run.get(name) != value
    ]
    return PreparedReplay(folder, inputs, recorded, config, plan, float64, ["in float64"] * float64 + changes, causes)


async def replay(prepared: PreparedReplay) -> Outcome:
    """Compute the recorded iteration again."""
    inputs, config, plan = prepared.inputs, prepared.config, prepared.plan
    with Float64Mode() if prepared.float64 else nullcontext():
        specs = make_worker_specs(config, plan, f"replay-{os.getpid()}", inputs.iterations, has_reward_function=True)
        trained = {role: build for role, build in specs.rank_builders.items() if role != "reward model"}
        workers = LocalWorkerGroups(replace(specs, engine_builder=None, rank_builders=trained))
        try:
            await workers.policy.load(str(prepared.folder / "policy"))
            if workers.critic:
                await workers.critic.load(str(prepared.folder / "critic"))
            run = LearnerState(
                config=config,
                plan=plan,
                workers=workers,
                progress=Progress(
                    step=inputs.step - 1,
                    kl_coef=inputs.kl_coef,
                    policy_kl_coef=inputs.policy_kl_coef,
                    baseline=inputs.baseline,
                ),
                console=Console(Terminal(quiet=True)),
                column_dtype="float64" if prepared.float64 else "float32",
                uses_shared_prompts=inputs.shares_prompts and plan.uses_shared_prompts,
            )
            learned = await learn(run, inputs.step, inputs.groups, Timer())
            return await collect_outcome(run, inputs.step, learned)
        finally:
            await workers.close()


def _make_one_rank_config(
    config: Config, inputs: RecordedInputs, device: Device, float64: bool, override_keys: Sequence[str]
) -> Config:
    """Return the configuration for one local rank without engines. `auto` settings get the value that the run chose."""
    settings: dict[str, object] = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.controller": "local",
        "trainer.device": device,
        "trainer.async_mode": None,
        "trainer.cpu_threads": inputs.machine["threads per rank"],
        "reward_model.enable": False,
        "actor_rollout_ref.rollout.name": "fake",
        "actor_rollout_ref.rollout.num_engines": 1,
        "actor_rollout_ref.rollout.nnodes": 0,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.expert_parallel_size": 1,
        "actor_rollout_ref.rollout.lora": "merged",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": inputs.max_tokens,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": -1,
        "critic.fsdp_config.fsdp_size": -1,
        "actor_rollout_ref.actor.fsdp_config.ep_size": 1,
        "critic.fsdp_config.ep_size": 1,
    } | {f"{MODEL}.{name}": inputs.model[name] for name in RESOLVED}
    if (device == "cpu" or float64) and inputs.model["attention"] not in ("padded", "sdpa"):
        settings[f"{MODEL}.attention"] = "padded" if device == "cpu" else "sdpa"
    for key, value in settings.items():
        if key not in override_keys or key == "trainer.device":
            config = replace_value(config, key, value)
    return config


def print_and_check_comparison(prepared: PreparedReplay, replayed: Outcome) -> bool:
    """Print recorded and replayed values side by side. Returns False if they differ but should be equal."""
    recorded, is_exact = prepared.recorded, not (prepared.changes or prepared.causes)
    excluded = {*NOT_COMPARED, *(() if is_exact else LAYOUT)}  # the layout depends on the number of ranks
    print(f"iteration {prepared.inputs.step}, recorded in {prepared.folder}")
    print(f"{'':34}{'recorded':>15}{'replayed':>15}  relative difference")
    differences: dict[str, float] = {}  # of values that are not equal bit for bit
    names = [name for name in recorded | replayed if name not in excluded]
    for name in names:
        pair = recorded.get(name), replayed.get(name)
        if (difference := compare_values(name, *pair)) is not None:
            differences[name] = difference
        shown = "0" if difference is None else f"{difference:.1e}"
        print(f"{name:34}{_format_value(pair[0]):>15}{_format_value(pair[1]):>15}  {shown}")
    if not recorded:
        print("the run ended before there was an outcome")
        return True
    if not differences:
        print(f"bit for bit equal: {len(names)} of {len(names)}")
        return True
    largest = max(differences, key=lambda name: differences[name])
    verdict = f"the largest difference is {differences[largest]:.1e}, in {largest}"
    if prepared.changes:
        print(f"{', '.join(prepared.changes)}: {verdict}")
        return True
    if is_exact:
        print(f"not equal: the first difference is in {next(iter(differences))}; {verdict}")
        return False
    tolerance = TOLERANCE[prepared.plan.model.dtype]
    is_close = differences[largest] <= tolerance
    causes = f"Not bit for bit, because {'; '.join(prepared.causes)}"
    print(f"{'equal' if is_close else 'not equal'} within {tolerance:g}: {verdict}. {causes}")
    return is_close


def _read_column(value: Value) -> tuple[object, np.ndarray]:
    """Return what must be equal bit for bit, and the numbers of a value as float64: a metric, tokens, or a norm."""
    if isinstance(value, tuple):
        return value[0], np.array([value[1]])
    numbers = value if isinstance(value, np.ndarray) else np.array([float(value)])
    return (numbers.dtype, numbers.tobytes()), numbers.astype(np.float64)


def compare_values(name: str, recorded: Value | None, replayed: Value | None) -> float | None:
    """Return the relative difference of two values: None if they are equal bit for bit, inf if one is missing."""
    if recorded is None or replayed is None:
        return math.inf
    (bits, numbers), (other_bits, others) = _read_column(recorded), _read_column(replayed)
    if bits == other_bits:
        return None
    if numbers.shape != others.shape:
        return math.inf
    floor = FLOOR if "/" in name and "norm" not in name else 0.0  # of metrics
    scale = max(np.abs(column).max(initial=floor) for column in (numbers, others))
    difference = float(np.abs(numbers - others).max(initial=0.0) / (scale or 1.0))
    return math.inf if math.isnan(difference) else difference


def _format_value(value: Value | None) -> str:
    """Format a metric, or the norm of a column or of weights."""
    if value is None:
        return "-"
    _, numbers = _read_column(value)
    return f"{numbers[0] if len(numbers) == 1 else np.linalg.norm(numbers):.8g}"
