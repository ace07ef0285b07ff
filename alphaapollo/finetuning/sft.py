"""Supervised fine-tuning: examples -> batches -> steps. Ray-free: one process, or one a rank under torchrun.

files -> rows with exact masks -> per step: the stream's next examples -> this rank's micro-batches -> optimiser step
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from alphaapollo.checkpoint_folder import CheckpointFolder, read_progress, write_progress
from alphaapollo.config.check import check_sft
from alphaapollo.config.check_parallelism import check_fsdp_size, check_group
from alphaapollo.config.diff import (
    ANOTHER_MODEL,
    LENGTH,
    OTHER_ADAPTERS,
    OTHER_DATA,
    OTHER_SELECTION,
    REORDERED,
    ROUNDING,
    Verdict,
)
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.notices import void_lines
from alphaapollo.config.resolve import resolve_device, resolve_model
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.controller.worker_counts import detect_machine
from alphaapollo.data.batch import RankBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.rendering import Renderer, load_tokenizer, unread_arguments
from alphaapollo.data.sft_examples import load_examples
from alphaapollo.data.stream import PromptStream
from alphaapollo.due import due
from alphaapollo.finetuning.memory import fit_sft
from alphaapollo.models.checkpoint import read_state
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import check_trackers, make_tracker
from alphaapollo.startup.input_checks import check_adapters, check_experts, check_sequence_parallel
from alphaapollo.startup.model_memory import GIB, NAMES, UNMEASURED, MemoryPlan, unmeasured_notice
from alphaapollo.startup.resume import Start, find_start
from alphaapollo.startup.threads import OTHER_ROUNDING, TRAINER, settle_sft_threads
from alphaapollo.types import Row
from alphaapollo.workers.base import ALONE, RankPlacement
from alphaapollo.workers.sft import SftWorker


@dataclass
class Progress:
    """What a checkpoint holds beside the worker's state."""

    step: int = 0
    examples_consumed: int = 0  # position in the stream of examples


@dataclass(frozen=True)
class SftRun:
    """A run that has passed every check."""

    config: SftConfig
    model: Model  # dtype and attention chosen
    placement: RankPlacement
    examples: list[Row]
    val_examples: list[Row]
    total_steps: int
    folder: Path
    start: Start
    notices: list[str]
    memory: MemoryPlan | None  # of a rank's device; None: not known

    @property
    def complete(self) -> bool:
        """No step remains, and the model is written."""
        written = self.start.is_exported() or not self.config.trainer.export_hf
        return self.start.step >= self.total_steps and written


IDENTITY = {
    **dict.fromkeys(("model.path", "model.tokenizer_path"), ANOTHER_MODEL),
    **dict.fromkeys(("model.lora_rank", "model.lora_alpha", "model.target_modules"), OTHER_ADAPTERS),
    **dict.fromkeys(("data.train_files", "data.messages_key", "data.prompt_key", "data.response_key"), OTHER_DATA),
}
EFFECTS = {
    **dict.fromkeys(("data.seed", "data.shuffle", "data.train_max_samples"), REORDERED),
    **dict.fromkeys(("data.max_length", "data.truncation"), OTHER_SELECTION),
    **dict.fromkeys(("trainer.total_epochs", "trainer.total_training_steps"), LENGTH),
    **dict.fromkeys(("data.max_token_len_per_gpu", "fsdp_config.fsdp_size", "trainer.device"), ROUNDING),
    **dict.fromkeys(("model.dtype", "model.attention", "model.use_torch_compile"), ROUNDING),
    **dict.fromkeys(("data.val_files", "data.val_max_samples"), "validations before and after do not compare"),
    "ulysses_sequence_parallel_size": ROUNDING,
    TRAINER: OTHER_ROUNDING,
}


def change_rule(key: str) -> tuple[Verdict, str]:
    """What becomes of a key that has changed since the run's earlier start: model and data are what a run is."""
    return ("refused", IDENTITY[key]) if key in IDENTITY else ("applied", EFFECTS.get(key, ""))


def prepare(config: SftConfig) -> SftRun:
    """Check, read and measure everything. Raises ValueError for what cannot work."""
    machine = detect_machine()
    notices = check_sft(config, machine.num_gpus)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    config, kept_threads = settle_sft_threads(config, machine, ranks_per_node)
    notices += kept_threads
    notices += _check_ranks(config, world_size, ranks_per_node)
    check_trackers(config.trainer.logger)
    start = find_start(config, change_rule)
    check_adapters(config.model, "model")
    check_experts(config.model, "model")
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.trust_remote_code)
    notices += unread_arguments(config.data.apply_chat_template_kwargs, tokenizer)
    renderer = Renderer(tokenizer, config.data.apply_chat_template_kwargs)
    data = config.data
    examples, lengths = load_examples(data.train_files, renderer, data, data.train_max_samples)
    val_examples = load_examples(data.val_files, renderer, data, data.val_max_samples)[0] if data.val_files else []
    if lengths.too_long:
        notices.append(f"{lengths.too_long} of {lengths.total} examples were over data.max_length.")
    trainer, size = config.trainer, data.train_batch_size
    device = resolve_device(trainer.device, machine.num_gpus)
    longest = max(len(row.token_ids) for row in examples)
    capacity = machine.memory_for(device)
    model, memory = resolve_model(config.model, device), None
    try:
        model, memory = fit_sft(config, model, device, world_size, ranks_per_node, longest, capacity)
    except UNMEASURED as error:
        may_choose = config.model.enable_gradient_checkpointing == "auto"
        notices.append(unmeasured_notice(config.model.path, error, may_choose))
    if memory and memory.problem:
        raise ValueError(memory.problem)
    return SftRun(
        config=config,
        model=model,
        memory=memory,
        placement=RankPlacement(
            rank=int(os.environ.get("RANK", 0)),
            world_size=world_size,
            init_method="env://" if world_size > 1 else ALONE,
            device=device,
            threads=trainer.cpu_threads or max(1, machine.num_cores // ranks_per_node),
            sequence_parallel=config.ulysses_sequence_parallel_size,
        ),
        examples=examples,
        val_examples=val_examples,
        total_steps=trainer.total_training_steps or max(1, len(examples) * trainer.total_epochs // size),
        folder=trainer.folder,
        start=start,
        notices=[*notices, *start.lines(), *ranks_notice(start.checkpoint, world_size)],
    )


def ranks_notice(checkpoint: Path | None, ranks: int) -> list[str]:
    """Their number is torchrun's and no key, so no change of a key tells of it."""
    if checkpoint is None or not (checkpoint / "model" / "state.json").is_file():  # the worker's load says so
        return []
    if (before := read_state(checkpoint / "model")["world_size"]) == ranks:
        return []
    return [f"the checkpoint was written by {before} rank(s), and there are {ranks} now: {ROUNDING}."]


def _check_ranks(config: SftConfig, ranks: int, per_node: int) -> list[str]:
    """What to tell about keys of several ranks. ValueError: sizes that do not fit torchrun's ranks, or the model."""
    where = f"{ranks} ranks that torchrun started"
    size = config.ulysses_sequence_parallel_size
    problems = [
        *check_fsdp_size("fsdp_config.fsdp_size", config.fsdp_config, ranks, per_node, where),
        *check_group("ulysses_sequence_parallel_size", size, ranks, per_node, where),
    ]
    if problems:
        raise ConfigError(problems)
    check_sequence_parallel(size, ranks, "ulysses_sequence_parallel_size", {"model.path": config.model})
    return void_lines(config, [("fsdp_config.sync_each_micro_batch", "there is one rank")] if ranks == 1 else [])


def print_plan(run: SftRun) -> None:
    """The numbers that people get wrong."""
    size = run.config.data.train_batch_size
    print(
        f"{run.folder}: {run.total_steps} steps of {size} examples ({len(run.examples)} examples, "
        f"{run.total_steps * size / len(run.examples):.2f} epochs), {len(run.val_examples)} for validation, "
        f"{run.placement.world_size} rank(s) on {run.placement.device}{run.model.lora_words}"
    )
    if run.memory:
        _print_memory(run.memory, run.model, run.config.trainer.dry_run)
    for notice in run.notices:
        print(f"note: {notice}")


def _print_memory(memory: MemoryPlan, model: Model, whole: bool) -> None:
    moment, held = memory.peak
    checkpointing = "on" if model.enable_gradient_checkpointing else "off"
    print(
        f"memory: {held.total / GIB:.1f} GiB on {memory.what} at its peak ({moment}), by arithmetic; gradient "
        f"checkpointing {checkpointing}"
    )
    for moment, held in memory.moments.items() if whole else ():
        parts = ", ".join(f"{NAMES[role]} {size / GIB:.2f}" for role, size in held.by_role().items() if size)
        print(f"  {moment}: {parts}")


def train(run: SftRun) -> None:
    """Train from the newest checkpoint, or from the start, to the last step, and export the model."""
    config, trainer = run.config, run.config.trainer
    is_main, checkpoint = run.placement.rank == 0, run.start.checkpoint
    checkpoints = CheckpointFolder(run.folder / "checkpoints", trainer.max_ckpt_to_keep)
    # A collective: every rank has read the folder by now.
    if is_main:
        print("loading the model ...", flush=True)
    worker = SftWorker(config, run.model, run.placement, run.total_steps)
    if is_main and (moved := run.start.claim(config)):
        print(f"note: the earlier run of this name lies in {moved}")
    progress = Progress(**read_progress(checkpoint)) if checkpoint else Progress()
    if checkpoint:
        worker.load(str(checkpoint / "model"))
    log = MainRankLog(run, progress.step) if is_main else None
    if log:
        for doubt in worker.doubts:
            log.console.notice(doubt)
    stream = PromptStream(len(run.examples), config.data.seed, config.data.shuffle)
    begin = time.perf_counter()
    tokens = 0.0
    for step in range(progress.step + 1, run.total_steps + 1):
        metrics = worker.step(next_batch(run, stream, progress, worker.padded), trainer.on_bad_step == "skip")
        tokens += metrics["train/tokens"]
        is_last = step == run.total_steps
        if run.val_examples and due(step, trainer.test_freq, is_last):
            metrics |= worker.evaluate(deal(run, run.val_examples, worker.padded))
        if log and (is_last or step % trainer.log_freq == 0 or "val/loss" in metrics):
            metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - begin)
            log.write(step, metrics)
        if due(step, trainer.save_freq, is_last):
            save(run, worker, checkpoints, Progress(step, progress.examples_consumed))
    if trainer.export_hf:
        worker.export(str(run.folder / "model"), trainer.export_lora)
        if log:
            log.console.notice(f"the model lies in {run.folder / 'model'}")
    elif log and trainer.save_freq > 0:
        log.console.notice(f"to write the model: python -m alphaapollo.trainer.main_export checkpoint={run.folder}")
    worker.close()
    if log:
        log.close()


def next_batch(run: SftRun, stream: PromptStream, progress: Progress, padded: bool) -> RankBatch:
    """This rank's share of the next examples: every rank computes the same layout and takes its own."""
    size = run.config.data.train_batch_size
    indices = stream.indices(progress.examples_consumed, size)
    progress.examples_consumed += size
    return deal(run, [run.examples[index] for index in indices], padded)


def deal(run: SftRun, rows: list[Row], padded: bool) -> RankBatch:
    """Ranks that share sequences get the same rows, of their token budgets together."""
    shared = run.placement.sequence_parallel
    layout = build_train_batch(
        rows,
        range(len(rows)),
        num_ranks=run.placement.world_size // shared,
        mini_batch_size=len(rows),
        max_tokens=run.config.data.max_token_len_per_gpu * shared,
        padded=padded,
        seed=0,
        shuffle=False,
    )
    return layout.rank_batches[run.placement.rank // shared]


def save(run: SftRun, worker: SftWorker, checkpoints: CheckpointFolder, progress: Progress) -> None:
    """Every rank writes its part into one folder; rank 0 names it when all are done."""
    folder = checkpoints.folder / f".writing_step_{progress.step:06d}"
    if run.placement.rank == 0:
        checkpoints.begin(progress.step)
    worker.wait_for_all()
    worker.save(str(folder / "model"))
    worker.wait_for_all()
    if run.placement.rank == 0:
        write_progress(folder, asdict(progress))
        checkpoints.finish(folder)


class MainRankLog:
    """Metrics and console of the run, on rank 0 alone."""

    def __init__(self, run: SftRun, resumed_step: int):
        self.console = Console()
        self.tracker = make_tracker(run.config, run.folder, resumed_step, self.console.notice)
        self.console.start(run.total_steps, resumed_step)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log(step, metrics)
        self.console.step(step, metrics)

    def close(self) -> None:
        self.tracker.close()
        self.console.close()
