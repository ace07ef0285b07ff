"""Print the plan of a command before it starts: a table of settings, the planned memory, and notices."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Column, Table

from alphaapollo.config.keys import flatten_maps, format_value
from alphaapollo.config.resolve import has_worker_processes
from alphaapollo.config.schema import Config, Model, TuningConfig
from alphaapollo.config.schema.planned_device import get_planned_gpu_memory
from alphaapollo.config.schema.trainer import Training
from alphaapollo.observability.console import Console
from alphaapollo.planning.memory_plan import PROCESS, MemoryPlan, has_critic
from alphaapollo.planning.model_memory import GIB
from alphaapollo.planning.speed import IterationTime, count_answers_at_once
from alphaapollo.runs.run_plan import PlannedMemory, RunPlan
from alphaapollo.utils.frequency import AUTO_SAVE_SECONDS

# Bytes per token: in the driver, and with a critic or a KL in the reward (scripts/bench/results); in rollouts/.
DRIVER_BYTES, CREDIT_BYTES, LOG_BYTES = 50, 110, 45


def print_plan_table(folder: Path, plan: RunPlan, console: Console, shows_memory: bool = False) -> None:
    """Print the plan of a run: a table of its settings, the planned memory if `shows_memory`, and notices."""
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, value in plan.settings.items():
        table.add_row(name, escape(value))
    console.show_line(str(folder))
    console.terminal.print(table)
    if plan.memory and shows_memory:
        console.terminal.print(make_memory_table(plan.memory))
    for notice in [*plan.notices, *(finding.describe() for finding in plan.data)]:
        console.notify(notice)


def summarize_memory(plan: MemoryPlan | None) -> PlannedMemory | None:
    """Convert planned memory to GiB, for plan.json and the table."""
    if plan is None:
        return None
    gib = {phase: {kind: size / GIB for kind, size in usage.items() if size} for phase, usage in plan.phases.items()}
    return PlannedMemory(plan.device_name, gib)


def describe_memory(model: Model, memory: MemoryPlan | None) -> dict[str, str]:
    """Return the plan rows about the peak of memory, and about what a trained model recomputes to reduce it. model:
    resolved."""
    return {"memory": describe_memory_peak(memory), "gradient checkpointing": describe_checkpointing(model, memory)}


def describe_memory_peak(memory: MemoryPlan | None) -> str:
    """Describe the peak of planned memory, e.g. `31.2 GiB on a GPU of 80 GiB at its peak (publish), calculated`."""
    if memory is None:
        return "not known"
    phase, usage = memory.peak
    offloaded = f"{memory.host_bytes / GIB:.1f} GiB of host memory per node"
    host = f"; offloaded, {offloaded}" if memory.host_bytes else ""
    return f"{usage.total() / GIB:.1f} GiB on {memory.device_name} at its peak ({phase}){host}, calculated"


def describe_checkpointing(model: Model, memory: MemoryPlan | None) -> str:
    """Describe which layers are recomputed, what an update computes more, and what the layers then save, e.g. `every
    layer, 33% more products in updates; 1.9 GiB of activations`. model: resolved."""
    interval, passes = model.recompute_interval, 2 if model.lora_rank else 3  # forward, backward
    saved = f"; {memory.saved_activations / GIB:.1f} GiB of activations" if memory else ""
    if not interval:
        return f"off{saved}"
    if model.keeps_products:
        return f"selective, no more products in updates{saved}"
    place = ", inputs in host memory" * model.activation_offload
    layers = "every layer" if interval == 1 else f"1 of {interval} layers"
    return f"{layers}, {1 / interval / passes:.0%} more products in updates{saved}{place}"


def describe_sharding(memory: MemoryPlan | None, num_ranks: int) -> dict[str, str]:
    """Return the plan rows about the ranks that share a copy of the model; none for a single rank."""
    if memory is None or num_ranks == 1:
        return {}
    copies = num_ranks // memory.shards
    rows = {"copies of the model": f"{copies}, each over {memory.shards} ranks" + (" (HSDP)" if copies > 1 else "")}
    received = f"each rank receives {memory.traffic_bytes / 1e9:.1f} GB per micro-batch"
    return rows | ({"traffic": received} if memory.traffic_bytes else {})


def describe_micro_batch(max_tokens: int, longest: int) -> str:
    """Describe the size of a micro-batch on the ranks that share its rows. longest: tokens of the longest example."""
    return f"at most {max_tokens} tokens" + f", or one longer example of up to {longest}" * (longest > max_tokens)


def describe_estimates(
    config: Config, memory: MemoryPlan | None, times: tuple[IterationTime, IterationTime] | None
) -> dict[str, str]:
    """Return the plan rows about the engines' cache, the driver's memory and, if their times are known, an iteration
    and the files of a day; none if the memory is unknown. config: with resolved values."""
    if memory is None:
        return {}
    rows, trainer, length, days = dict[str, str](), config.trainer, config.data.max_length, 86_400 / GIB
    if memory.kv_cache_tokens:
        at_once, waiting = count_answers_at_once(config, memory, length)
        answers = f"{at_once} of {at_once + waiting} full answers ({length:,} with the prompt) at once, {waiting} wait"
        rows["KV cache"] = f"{memory.kv_cache_tokens:,} tokens per engine: {answers}"
    tokens = config.trajectories_per_batch * length * (1 + (max(1, trainer.max_staleness) if trainer.async_mode else 0))
    has_columns = has_critic(config) or config.algorithm.use_kl_in_reward
    driver = (PROCESS["cpu"] + tokens * (CREDIT_BYTES if has_columns else DRIVER_BYTES)) / GIB
    in_driver = "" if has_worker_processes(trainer) else ", and the policy's memory"
    rows["driver memory"] = f"at most about {driver:.1f} GiB{in_driver}"
    if times is None:
        return rows
    step, generate, update, recompute, speed, _ = (format_range(*values) for values in zip(*times, strict=True))
    source = f"answers of half and of full length; {trainer.planned_device or 'this machine'}"
    if config.actor_rollout_ref.model.recompute_interval:
        update += f", of which gradient checkpointing {recompute}"
    rows["time"] = f"{step} s per iteration (generate {generate}, update {update}), {speed} tokens/s ({source})"
    rows["disk"] = f"rollouts {format_range(*(days / one.step * one.tokens * LOG_BYTES for one in times))} GiB a day"
    if trainer.save_freq > 0:
        size = memory.checkpoint_copy_bytes * (trainer.nnodes if memory.shards > trainer.n_gpus_per_node else 1)
        written, kept = (days / one.step / trainer.save_freq * size for one in times), trainer.max_ckpt_to_keep or "all"
        rows["disk"] += (
            f"; checkpoints {format_range(*written)} GiB a day, {kept} of {format_range(size / GIB)} GiB kept"
        )
    return rows


def format_range(*numbers: float) -> str:
    """Format numbers in ascending order, e.g. `1.8 to 350`; those that look equal once."""
    texts = [f"{number:,.0f}" if number >= 10 else f"{number:.2g}" for number in sorted(numbers)]
    return " to ".join(dict.fromkeys(texts))


def describe_planned_device(trainer: Training) -> dict[str, str]:
    """Return the plan row about the GPUs for which a dry run plans; none for this machine."""
    if not (device := trainer.planned_device):
        return {}
    gpus = f"GPUs of {get_planned_gpu_memory(device) / GIB:.1f} GiB ({device})"
    return {"planned for": f"{gpus}; the host memory of a node is not known, and not checked"}


def describe_chosen_keys(config: Config | TuningConfig, chosen: Config | TuningConfig) -> dict[str, str]:
    """Return the plan row with the values that the run has chosen for keys that are auto, null or -1."""
    values, open_values = flatten_maps(chosen.model_dump()), ("auto", "fastest", None, -1)
    open_keys = [key for key, value in flatten_maps(config.model_dump()).items() if value in open_values]
    keys = [f"{key}={format_value(values[key])}" for key in open_keys if values[key] not in open_values]
    return {"chosen keys": ", ".join(keys)} if keys else {}


def describe_checkpoint_schedule(
    frequency: int | Literal["auto"], unit: str, memory: MemoryPlan | None, keep_best: str | None = None
) -> str:
    """Describe how often checkpoints are written, and whether the next iteration waits for them. frequency: iterations
    between checkpoints, or auto; -1: never. unit: plural word for iterations, e.g. steps. keep_best: metric whose best
    checkpoint is kept."""
    if frequency in (-1, 0):
        return "never"
    best = f"the best {keep_best} is kept; " if keep_best else ""
    validations = ", with each validation" if keep_best else ""
    interval = f"{AUTO_SAVE_SECONDS / 60:.0f} minutes{validations}" if frequency == "auto" else f"{frequency} {unit},"
    schedule = f"every {interval} and at the end; {best}written"
    if memory is None:
        return f"{schedule} while the next one runs"
    size = f"{memory.checkpoint_copy_bytes / GIB:.1f} GiB"
    if memory.saves_in_background:
        return f"{schedule} while the next one runs, from copies in host memory ({size})"
    return f"{schedule} before the next one begins: copies ({size}) do not fit into memory"


def make_memory_table(memory: PlannedMemory) -> Table:
    """Return a table of the planned memory in GiB in each phase: the total, and each kind with at least 0.05 GiB."""
    table = Table.grid(Column(no_wrap=True), Column(justify="right", no_wrap=True), "", padding=(0, 2, 0, 0))
    table.title, table.title_justify = f"GiB on {memory.device}", "left"
    for phase, usage in memory.gib.items():
        words = ", ".join(f"{kind} {gib:.1f}" for kind, gib in usage.items() if gib >= 0.05)
        table.add_row(escape(phase), f"{sum(usage.values()):.1f}", words)
    return table
