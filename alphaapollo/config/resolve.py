"""Replace `auto` in a configuration by the value for this machine: device, dtype, attention, number of engines.

The driver resolves sections once, before workers start. Workers receive resolved sections, which contain no `auto`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Literal, TypeVar

from alphaapollo.config.schema import GenerationConfig, GenerationTrainer, Model, Rollout, Trainer, TuningTrainer
from alphaapollo.config.schema.base import Device

Dtype = Literal["float32", "bfloat16"]
Attention = Literal["varlen", "flash", "sdpa", "padded"]
Number = TypeVar("Number", int, float)

CPU_INFO = Path("/proc/cpuinfo")
MIN_SEQUENCES, MAX_SEQUENCES = 256, 1024  # bounds of max_num_seqs=auto on a GPU; a CPU has the minimum


def resolve_device(device: Literal["auto", "cpu", "cuda"], num_gpus: int) -> Device:
    """Return the device of a run; `auto` is `cuda` if the machine has a GPU."""
    if device == "auto":
        return "cuda" if num_gpus else "cpu"
    return device


def resolve_controller(trainer: Trainer | TuningTrainer | GenerationTrainer) -> Literal["ray", "local"]:
    """Return how workers run: as Ray actors (`ray`), or without Ray in this process or forked processes (`local`).

    `auto` is `local` for one rank, unless RAY_ADDRESS is set.
    """
    if trainer.controller != "auto":
        return trainer.controller
    return "ray" if trainer.n_gpus_per_node * trainer.nnodes > 1 or os.environ.get("RAY_ADDRESS") else "local"


def has_worker_processes(trainer: Trainer | TuningTrainer, num_engines: int | None = 1) -> bool:
    """Return whether each worker has its own process: a Ray actor or, with several ranks or engines, a forked one."""
    return resolve_controller(trainer) == "ray" or max(trainer.n_gpus_per_node, num_engines or 1) > 1


def resolve_model(model: Model, device: Device, max_length: int = 0) -> Model:
    """Replace `auto` in dtype, attention, use_liger and enable_gradient_checkpointing of a trained model.

    `enable_gradient_checkpointing=auto` becomes false here; the memory plan (planning/memory_fit.py) may enable it.
    `max_length`: tokens of the longest row of the run. Raises ValueError for a value that cannot run on the device.
    """
    dtype = _choose_dtype(model.dtype, device)
    checkpointing = model.enable_gradient_checkpointing != "auto" and model.enable_gradient_checkpointing
    attention = _choose_attention(model.attention, dtype, device)
    chosen = {"dtype": dtype, "attention": attention, "enable_gradient_checkpointing": checkpointing}
    resolved = model.model_copy(update=chosen | {"use_liger": _should_use_liger(model, dtype, device)})
    resolved._max_length = max_length
    return resolved


def resolve_rollout(
    rollout: Rollout, model: Model, device: Device, num_gpus: int, num_trajectories: int | None = None
) -> Rollout:
    """Choose the engines' dtype (by default the model's), their number and batch size, and whether they compile and
    share GPUs. `gpu_memory_utilization` stays `auto` until memory is planned.

    num_gpus: number of GPUs for engines (count_engine_gpus). num_trajectories: trajectories that all engines generate
    at a time; None: unknown.
    """
    dtype = _choose_dtype(rollout.dtype if rollout.dtype != "auto" else model.dtype, device)
    eager = device == "cpu" if rollout.enforce_eager is None else rollout.enforce_eager
    engines, sequences = count_engines(rollout, device, num_gpus), rollout.max_num_seqs
    if sequences == "auto":
        sequences = min(MAX_SEQUENCES if device == "cuda" else MIN_SEQUENCES, rollout.max_num_batched_tokens)
        if num_trajectories is not None:
            sequences = min(sequences, max(MIN_SEQUENCES, -(-num_trajectories // engines)))
    chosen = {"dtype": dtype, "num_engines": engines, "enforce_eager": eager, "max_num_seqs": sequences}
    return rollout.model_copy(update=chosen | {"colocate": rollout.colocate and not rollout.nnodes})


def resolve_inference_rollout(
    rollout: Rollout, model: Model, device: Device, num_gpus: int, num_cores: int, nnodes: int = 1
) -> Rollout:
    """Choose the engines' number, dtype and CPU threads for a command without training, and disable sleep mode."""
    engines = rollout.num_engines or (nnodes if device == "cpu" else None)
    rollout = resolve_rollout(rollout.model_copy(update={"nnodes": 0, "num_engines": engines}), model, device, num_gpus)
    threads = count_engine_threads(rollout, num_cores, nnodes, runs_during_training=False)
    without_trainer = {"colocate": False, "free_cache_engine": False, "router_replay": False, "sampling_mask": False}
    return rollout.model_copy(update=without_trainer | {"cpu_threads": threads})


def resolve_generation(config: GenerationConfig, num_gpus: int, num_cores: int) -> tuple[Device, Rollout]:
    """Return the device and the resolved engine settings of main_generation. num_gpus, num_cores: of a node."""
    trainer, device = config.trainer, resolve_device(config.trainer.device, num_gpus)
    size = (trainer.num_gpus, num_cores, trainer.nnodes)
    return device, resolve_inference_rollout(config.rollout, config.model, device, *size)


def get_resolved(value: Number | Literal["auto"]) -> Number:
    """Return a value in which `auto` has been replaced."""
    assert value != "auto", "the memory plan comes first"
    return value


def get_attention_kernel(model: Model) -> Attention:
    """Return the attention kernel of a model section that resolve_model has resolved."""
    assert model.attention != "auto", "resolve_model comes first"
    return model.attention


def count_engine_gpus(rollout: Rollout, trainer: Trainer) -> int:
    """Return the number of GPUs of the nodes for engines or, without such nodes, the number of training GPUs."""
    return rollout.nnodes * (rollout.n_gpus_per_node or trainer.n_gpus_per_node) or trainer.num_ranks


def count_engines(rollout: Rollout, device: Device, num_gpus: int) -> int:
    """Return rollout.num_engines or, if it is null, how many engines fit the GPUs (on CPUs: one, or one per node for
    engines); at least one."""
    if rollout.num_engines is not None:
        return rollout.num_engines
    fit = rollout.nnodes if device == "cpu" else num_gpus // rollout.tensor_model_parallel_size
    return max(fit, 1)


def count_engine_processes(rollout: Rollout, nnodes: int) -> int:
    """Return how many engine processes run on a node: one per tensor-parallel rank of each engine. nnodes: training
    nodes, which have the engines unless there are nodes for engines."""
    assert rollout.num_engines is not None, "resolve_rollout comes first"
    return -(-rollout.num_engines * rollout.tensor_model_parallel_size // (rollout.nnodes or nnodes))


def count_engine_threads(rollout: Rollout, num_cores: int, nnodes: int, runs_during_training: bool) -> int:
    """Return the threads of each engine process on a CPU: rollout.cpu_threads or, if null, an equal share of the cores.

    If training runs at the same time (runs_during_training) on the same nodes, the share is one core.
    """
    share = 1 if runs_during_training and not rollout.nnodes else num_cores // count_engine_processes(rollout, nnodes)
    return rollout.cpu_threads or max(1, share)


def has_bfloat16_instructions() -> bool:
    """Return whether this CPU multiplies in bfloat16 (AMX or avx512_bf16); other CPUs convert each number."""
    return CPU_INFO.exists() and not {"amx_bf16", "avx512_bf16"}.isdisjoint(CPU_INFO.read_text().split())


def _choose_dtype(requested: Literal["auto", "fastest"] | Dtype, device: Device) -> Dtype:
    if requested in ("float32", "bfloat16"):
        return requested
    is_fast = device == "cuda" or (requested == "fastest" and has_bfloat16_instructions())
    return "bfloat16" if is_fast else "float32"


def _choose_attention(requested: Literal["auto"] | Attention, dtype: Dtype, device: Device) -> Attention:
    has_flash = has_flash_attn()
    if requested == "auto":
        if device == "cpu":
            return "padded"
        if dtype == "float32":
            return "sdpa"
        return "flash" if has_flash and not has_flash_attn_3() else "varlen"
    if device == "cpu" and requested in ("varlen", "flash"):
        raise ValueError(f"model.attention={requested} cannot train on a CPU. Set it to auto, padded or sdpa.")
    if requested in ("varlen", "flash") and dtype == "float32":
        fix = "Set model.dtype=bfloat16 or model.attention=sdpa."
        raise ValueError(f"model.attention={requested} supports only bfloat16, but model.dtype=float32. {fix}")
    if requested == "flash" and not has_flash:
        fix = "Build it (pip install flash-attn --no-build-isolation; docs/install.md), or set model.attention=varlen."
        raise ValueError(f"model.attention=flash, but flash-attn 2 is not installed. {fix}")
    return requested


def _should_use_liger(model: Model, dtype: Dtype, device: Device) -> bool:
    has_liger, key = importlib.util.find_spec("liger_kernel") is not None, "model.use_liger"
    if model.use_liger == "auto":
        return device == "cuda" and dtype == "bfloat16" and has_liger and not model.use_torch_compile
    if not model.use_liger:
        return False
    if device == "cpu":
        raise ValueError(f"{key}=true needs a GPU, because Liger's kernels do not run on a CPU. Set {key}=auto.")
    if not has_liger:
        raise ValueError(f"{key}=true, but liger-kernel is not installed. Install it with pip, or set {key}=auto.")
    if model.use_torch_compile:
        raise ValueError(f"{key}=true and model.use_torch_compile=true fuse the same layers. Set one of them to false.")
    return True


def has_flash_attn() -> bool:
    """Return whether flash-attn 2 is installed; version 4, which has the same module name, does not count."""
    return importlib.util.find_spec("flash_attn_2_cuda") is not None


def has_flash_attn_3() -> bool:
    """Return whether FlashAttention 3 is installed, which model.attention=varlen uses on a Hopper GPU."""
    return importlib.util.find_spec("flash_attn_interface") is not None
