"""Prepare and run a fine-tuning.

prepare_run: check all inputs and plan the memory, before workers start.
run: start the workers, resume, train and export.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from alphaapollo.config.keys import format_value
from alphaapollo.config.load import UserSettings
from alphaapollo.config.resolve import has_worker_processes, resolve_controller, resolve_device, resolve_model
from alphaapollo.config.schema import DpoConfig, RmConfig, SftConfig, TuningConfig
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.data.examples import LoadedExamples, make_source_names
from alphaapollo.data.files import HELD_OUT, TRAIN, name_splits
from alphaapollo.data.images import load_image_processor
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.data.stream import PromptStream, WeightedFileStream
from alphaapollo.finetuning.dpo import DpoTask, RewardModelTask
from alphaapollo.finetuning.sft import SftTask
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningProgress, FinetuningRun, FinetuningTask, train
from alphaapollo.launch import input_checks
from alphaapollo.launch.model_requirements import ModelUse, check_models, choose_kernels
from alphaapollo.launch.session import BackgroundCheckpointWriter, open_session
from alphaapollo.models.load import list_template_notices
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.observability.trackers import check_trackers
from alphaapollo.planning.first_start import choose_cpu_threads, fix_template_date
from alphaapollo.planning.memory_fit import fit_to_memory_if_measurable, get_max_tokens
from alphaapollo.planning.plan_table import (
    describe_checkpoint_schedule,
    describe_memory_peak,
    describe_sharding,
    print_plan_table,
    summarize_memory,
)
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.runs.checkpoint_folder import CheckpointFolder
from alphaapollo.runs.resume import find_start_point
from alphaapollo.runs.run_history import NUM_LOGGED, RunPlan, write_examples
from alphaapollo.utils.heartbeat import HEARTBEAT

TASKS: dict[type[TuningConfig], type[FinetuningTask]] = {
    SftConfig: SftTask,
    DpoConfig: DpoTask,
    RmConfig: RewardModelTask,
}


def prepare_run(config: TuningConfig, user_settings: UserSettings, console: Console) -> FinetuningPlan:
    """Check the configuration and the data, plan the memory and print the plan. Raises ValueError for invalid input."""
    machine = input_checks.detect_node_resources(config)
    config = fix_template_date(config, config.model)
    config, kept_threads = choose_cpu_threads(config, machine)
    task = TASKS[type(config)](config)
    notices = task.check_config_and_get_notices(machine.num_gpus) + kept_threads
    check_trackers(config.trainer.logger)
    start = find_start_point(config)
    trainer, data = config.trainer, config.data
    size, trains_scores = config.ulysses_sequence_parallel_size, isinstance(config, RmConfig)
    use = ModelUse("model.path", config.model, not trains_scores, trains_scores=trains_scores, ulysses_size=size)
    check_models([replace(use, fsdp=config.fsdp_config, num_ranks=trainer.num_ranks)])
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.trust_remote_code)
    images = load_image_processor(config.model.path, tokenizer, config.model.trust_remote_code)
    renderer = Renderer(tokenizer, data.apply_chat_template_kwargs, images, config.model.path)
    train, val, more = _read_examples(task, config, renderer)
    notices += more
    if trainer.keep_best and not val and not getattr(data, "val_prompts", ""):
        raise ValueError(f"trainer.keep_best={trainer.keep_best} needs validation data. Set data.val_files.")
    placement = Placement(
        device=resolve_device(trainer.device, machine.num_gpus),
        num_nodes=trainer.nnodes,
        ranks_per_node=trainer.n_gpus_per_node,
        threads=trainer.cpu_threads or max(1, machine.num_cores // trainer.n_gpus_per_node),
        sequence_parallel=size,
    )
    notices += list_template_notices(config.model, renderer, data.apply_chat_template_kwargs)
    notices += filter(None, [input_checks.explain_missing_cluster(config)])
    model = choose_kernels(resolve_model(config.model, placement.device, data.max_length), config.model)
    resolved = config.model_copy(update={"model": model})
    may_choose = config.model.enable_gradient_checkpointing == "auto"
    request = task.make_memory_request(train.examples)
    fitted, memory, more = fit_to_memory_if_measurable(resolved, placement.device, machine, may_choose, request)
    if memory and memory.problem:
        raise ValueError(memory.problem)
    stream = make_example_stream(config, train.file_sizes, start.inputs.data_start)
    plan = FinetuningPlan(
        task=task,
        config=config,
        model=fitted.model,
        fsdp=fitted.fsdp_config,
        decode=partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        placement=placement,
        max_tokens=get_max_tokens(fitted.data.max_token_len_per_gpu) * size,
        train=train,
        val=val,
        stream=stream,
        total_steps=trainer.total_training_steps
        or max(1, stream.num_prompts * trainer.total_epochs // data.train_batch_size),
        start=start,
        notices=[*notices, *more, *start.describe()],
        memory=memory,
    )
    print_plan_table(trainer.folder, make_run_plan(plan), console, shows_memory=trainer.dry_run)
    return plan


def make_example_stream(
    config: TuningConfig, file_sizes: list[int], start: int = 0
) -> PromptStream | WeightedFileStream:
    """Create the order of training examples. file_sizes: number of examples in each file. start: see PromptStream."""
    data = config.data
    if data.source_weights is None:
        return PromptStream(sum(file_sizes), data.seed, data.shuffle, start)
    return WeightedFileStream(file_sizes, data.source_weights, data.seed, data.shuffle, start)


@HEARTBEAT.record_call("read examples")
def _read_examples(
    task: FinetuningTask, config: TuningConfig, renderer: Renderer
) -> tuple[LoadedExamples[Any], dict[str, list[Any]], list[str]]:
    """Read the data files. Returns training examples with all findings, validation examples by file name, and
    notices."""
    data, notices = config.data, list[str]()

    train_files = name_splits(data.train_files, TRAIN, notices)
    train = task.load_examples(train_files, data.train_max_samples, renderer)
    if data.source_weights is not None and 0 in train.file_sizes:
        empty = make_source_names(train_files)[train.file_sizes.index(0)]
        raise ValueError(
            f"data.source_weights has a weight for {empty}, but data.train_max_samples and data.max_length exclude all "
            "examples of this file. Increase one of these keys, or remove the file and its weight."
        )
    notices += [f"data.train_files: {notice}" for notice in train.notices]
    val: dict[str, list[Any]] = {}
    if data.val_files:
        val_files = name_splits(data.val_files, HELD_OUT, notices)
        read = task.load_examples(val_files, data.val_max_samples, renderer)
        notices += [f"data.val_files: {notice}" for notice in read.notices]
        train.findings.extend(one for one in read.findings if one not in train.findings)
        sources = zip(make_source_names(val_files), read.split_by_file(), strict=True)
        val = {name: examples for name, examples in sources if examples}
    return train, val, notices


def make_run_plan(plan: FinetuningPlan) -> RunPlan:
    """Describe model, data, steps, ranks and memory of a run, and all notices."""
    trainer, memory, size = plan.config.trainer, plan.memory, plan.config.data.train_batch_size
    epochs, num_val = plan.total_steps * size / plan.stream.num_prompts, sum(map(len, plan.val.values()))
    without_ray = "in forked processes" if has_worker_processes(trainer) else "in this process"
    controller = "over Ray" if resolve_controller(trainer) == "ray" else without_ray
    settings = {
        "model": f"{plan.config.model.path}, {plan.model.dtype}{plan.model.lora_summary}",
        "data": f"{len(plan.train.examples)} examples" + (f", {num_val} for validation" if num_val else ""),
        **(_describe_sources(plan, epochs) if len(plan.train.file_sizes) > 1 else {}),
        "steps": f"{plan.total_steps} of {size} examples, {epochs:.2f} epochs",
        "micro-batch": f"at most {plan.max_tokens} tokens",
        "ranks": f"{plan.placement.describe_ranks()}, {controller}",
        "files": format_value(plan.config.data.train_files),
        "checkpoints": describe_checkpoint_schedule(trainer.save_freq, "steps", memory, trainer.keep_best),
        "trackers": ", ".join(trainer.logger),
        "memory": describe_memory_peak(memory),
        "gradient checkpointing": "on" if plan.model.enable_gradient_checkpointing else "off",
        **describe_sharding(memory, plan.placement.num_ranks),
    }
    return RunPlan(settings, summarize_memory(memory), plan.notices, data=plan.train.findings)


def _describe_sources(plan: FinetuningPlan, epochs: float) -> dict[str, str]:
    """Return one line per training file: number of examples, share of each batch, and passes in the run."""
    data, sizes, rows = plan.config.data, plan.train.file_sizes, {}
    weights = data.source_weights or [1.0] * len(sizes)
    for name, size, weight in zip(make_source_names(data.train_files), sizes, weights, strict=True):
        share = size * weight / sum(s * w for s, w in zip(sizes, weights, strict=True))
        rows[f"  {name}"] = f"{size} examples x {weight:g}, {share:.0%} of a batch, {weight * epochs:.2f} passes"
    return rows


async def run(plan: FinetuningPlan, progress: FinetuningProgress, console: Console) -> None:
    """Train from `progress` to the last step, export the model, and end all started processes."""
    config, trainer = plan.config, plan.config.trainer
    build = partial(
        plan.task.worker_class,
        config.model_copy(update={"fsdp_config": plan.fsdp}),
        plan.model,
        optimizer_steps=plan.total_steps,
        saves_in_background=plan.memory is None or plan.memory.saves_in_background,
    )
    run_id = new_run_id() if has_worker_processes(trainer) else ""
    specs = WorkerSpecs(placement=plan.placement, run_id=run_id, rank_builders={"trainer": build})
    console.start(plan.total_steps, progress.step)
    async with (
        open_session(config, plan.start, make_run_plan(plan), specs, Timer(), console) as session,
        AsyncExitStack() as stack,
    ):
        model = session.workers.trainer
        keep = (trainer.max_ckpt_to_keep, trainer.keep_best)
        checkpoints = CheckpointFolder(trainer.folder / "checkpoints", *keep, plan.start.inputs)
        writer = BackgroundCheckpointWriter[FinetuningProgress](checkpoints, {"model": model}, console.notify)
        ready = FinetuningRun(plan, model, progress, writer, session.tracker, console)
        for warning in await model.get_logprob_check_warnings():
            console.notify(warning)
        await plan.task.begin_run(ready, stack)
        first = plan.stream.prompt_indices(plan.start.inputs.data_start, min(NUM_LOGGED, plan.stream.num_prompts))
        examples = [plan.task.describe_example(plan.train.examples[index], plan.decode) for index in first]
        write_examples(trainer.folder, examples)
        if checkpoint := plan.start.checkpoint:
            await model.load(str(checkpoint / "model"))
            console.notify(f"resumed from {checkpoint}")
        await session.train(train(ready), writer)
        await session.export(model)
