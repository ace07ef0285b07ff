"""Plan a fine-tuning run: read and check all inputs and plan its memory. Starts nothing."""

from __future__ import annotations

from typing import Any, TypeVar

from alphaapollo.config.resolve import resolve_controller, resolve_device, resolve_model
from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.controller.placement import Machine, Placement
from alphaapollo.data.batch import FinetuningBatch
from alphaapollo.data.rendering import Renderer, load_tokenizer, unused_template_arguments
from alphaapollo.data.sources import LoadedExamples, source_names
from alphaapollo.data.stream import MixedStream, PromptStream
from alphaapollo.finetuning.layout import Layout
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningTask
from alphaapollo.launch.cpu_threads import choose_tuning_threads
from alphaapollo.launch.input_checks import (
    check_adapters,
    check_experts,
    check_sequence_parallel,
    choose_kernels,
    find_machine,
    missing_cluster,
)
from alphaapollo.launch.memory.finetuning import fit_finetuning
from alphaapollo.launch.memory.plan import GIB, NAMES, UNMEASURED, MemoryPlan, unmeasured_notice
from alphaapollo.launch.resume import find_start
from alphaapollo.models.folder_check import check_weights
from alphaapollo.observability.trackers import check_trackers

C = TypeVar("C", bound=TuningConfig)
E = TypeVar("E")
B = TypeVar("B", bound=FinetuningBatch)
Stream = PromptStream | MixedStream


def prepare(task: FinetuningTask[C, E, B], config: C) -> FinetuningPlan[C, E, B]:
    """Check, read and measure everything. Raises ValueError for invalid input."""
    machine = find_machine(config.trainer)
    notices = task.check(config, machine.num_gpus)
    config, kept_threads = choose_tuning_threads(config, machine)
    check_trackers(config.trainer.logger)
    start = find_start(config)
    trainer, data = config.trainer, config.data
    check_adapters(config.model, "model")
    check_experts(config.model, "model")
    check_weights(config.model, "model.path")
    key = "ulysses_sequence_parallel_size"
    size = config.ulysses_sequence_parallel_size
    check_sequence_parallel(size, trainer.num_ranks, key, {"model.path": config.model})
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.trust_remote_code)
    renderer = Renderer(tokenizer, data.apply_chat_template_kwargs)
    train, val, more = _read(task, config, renderer)
    more += task.read_more(config)
    if trainer.keep_best and not val and not getattr(data, "val_prompts", ""):
        raise ValueError(f"trainer.keep_best={trainer.keep_best} needs validation data. Set data.val_files.")
    counts = _counts(config, machine)
    model, memory, unmeasured = _fit(task, config, train, counts, machine)
    stream = make_stream(config, train.sizes)
    more += unused_template_arguments(data.apply_chat_template_kwargs, tokenizer)
    more += filter(None, [missing_cluster(trainer)])
    return FinetuningPlan(
        task=task,
        config=config,
        model=model,
        counts=counts,
        layout=Layout(counts.data_parallel, data.max_token_len_per_gpu * size, model.attention == "padded"),
        train=train,
        val=val,
        stream=stream,
        total_steps=trainer.total_training_steps
        or max(1, stream.num_prompts * trainer.total_epochs // data.train_batch_size),
        start=start,
        notices=[*notices, *kept_threads, *more, *unmeasured, *start.lines()],
        memory=memory,
    )


def make_stream(config: TuningConfig, sizes: list[int]) -> Stream:
    """Build the stream of examples. sizes: number of examples of each source."""
    data = config.data
    if data.source_weights is None:
        return PromptStream(sum(sizes), data.seed, data.shuffle)
    return MixedStream(sizes, data.source_weights, data.seed, data.shuffle)


def _read(
    task: FinetuningTask[C, E, B], config: C, renderer: Renderer
) -> tuple[LoadedExamples[E], dict[str, list[E]], list[str]]:
    """Read training examples, and validation examples by source. Returns notices. Raises ValueError for an empty
    source."""
    data = config.data
    train = task.read(config, data.train_files, data.train_max_samples, renderer)
    names = source_names(data.train_files)
    if data.source_weights is not None and 0 in train.sizes:
        raise ValueError(
            f"data.source_weights: nothing is left of {names[train.sizes.index(0)]} to take a share of. Raise "
            "data.train_max_samples or data.max_length, or leave the file out."
        )
    notices = [f"data.train_files: {notice}" for notice in train.notices]
    val: dict[str, list[E]] = {}
    if data.val_files:
        read = task.read(config, data.val_files, data.val_max_samples, renderer)
        notices += [f"data.val_files: {notice}" for notice in read.notices]
        sources = zip(source_names(data.val_files), read.by_source(), strict=True)
        val = {name: examples for name, examples in sources if examples}
    return train, val, notices


def _counts(config: TuningConfig, machine: Machine) -> Placement:
    trainer = config.trainer
    return Placement(
        device=resolve_device(trainer.device, machine.num_gpus),
        num_nodes=trainer.nnodes,
        ranks_per_node=trainer.n_gpus_per_node,
        threads=trainer.cpu_threads or max(1, machine.num_cores // trainer.n_gpus_per_node),
        sequence_parallel=config.ulysses_sequence_parallel_size,
    )


def _fit(
    task: FinetuningTask[C, E, B], config: C, train: LoadedExamples[E], counts: Placement, machine: Machine
) -> tuple[Model, MemoryPlan | None, list[str]]:
    """Resolve the model and plan its memory. Returns a notice if it cannot be measured. Raises ValueError if it cannot
    fit."""
    device = counts.device
    model = choose_kernels(resolve_model(config.model, device), config.model.use_liger)
    request = task.memory_request(config, train.examples)
    try:
        model, memory = fit_finetuning(config, model, device, request, machine.memory_for(device), machine.memory)
    except UNMEASURED as error:
        may_choose = config.model.enable_gradient_checkpointing == "auto"
        return model, None, [unmeasured_notice(config.model.path, error, may_choose)]
    if memory.problem:
        raise ValueError(memory.problem)
    return model, memory, []


def print_plan(run: FinetuningPlan[C, E, B]) -> None:
    """Print the plan."""
    config, size = run.config, run.config.data.train_batch_size
    epochs = run.total_steps * size / run.stream.num_prompts
    print(
        f"{config.trainer.folder}: {run.total_steps} steps of {size} examples ({len(run.train.examples)} examples, "
        f"{epochs:.2f} epochs), {sum(map(len, run.val.values()))} for validation{run.model.lora_words}"
    )
    how = "in this process" if resolve_controller(config.trainer) == "local" else "over Ray"
    print(f"ranks: {run.counts.describe_ranks()}, {how}")
    if len(run.train.sizes) > 1:
        _print_sources(run, epochs)
    if run.memory:
        _print_memory(run.memory, run.model, config.trainer)
    for notice in run.notices:
        print(f"note: {notice}")


def _print_sources(run: FinetuningPlan[C, E, B], epochs: float) -> None:
    """Print the examples, batch share and number of passes of each source."""
    data, sizes = run.config.data, run.train.sizes
    weights = data.source_weights or [1.0] * len(sizes)
    for name, size, weight in zip(source_names(data.train_files), sizes, weights, strict=True):
        share = size * weight / sum(s * w for s, w in zip(sizes, weights, strict=True))
        print(f"  {name}: {size} examples x {weight:g} per epoch, {share:.0%} of a batch, {weight * epochs:.2f} passes")


def _print_memory(memory: MemoryPlan, model: Model, trainer: Any) -> None:
    moment, held = memory.peak
    checkpointing = "on" if model.enable_gradient_checkpointing else "off"
    print(
        f"memory: {held.total / GIB:.1f} GiB on {memory.what} at its peak ({moment}), calculated; gradient "
        f"checkpointing {checkpointing}"
    )
    if trainer.save_freq > 0:
        when = "in the background" if memory.saves_in_background else "between steps: a copy in memory does not fit"
        print(f"checkpoints: every {trainer.save_freq} steps, written {when}")
    for moment, held in memory.moments.items() if trainer.dry_run else ():
        parts = ", ".join(f"{NAMES[role]} {size / GIB:.2f}" for role, size in held.by_kind().items() if size)
        print(f"  {moment}: {parts}")
