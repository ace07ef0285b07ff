"""Prepare and run a fine-tuning.

prepare_run: check all inputs and plan the memory, before workers start.
run: start the workers, resume, train and export.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar

from alphaapollo.config.keys import format_value
from alphaapollo.config.load import UserSettings
from alphaapollo.config.resolve import has_worker_processes, resolve_controller, resolve_device, resolve_model
from alphaapollo.config.schema import DpoConfig, RmConfig, SftConfig, TuningConfig
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.data.cache import load_or_compute
from alphaapollo.data.examples import LoadedExamples, make_source_names
from alphaapollo.data.files import HELD_OUT, TRAIN, name_splits
from alphaapollo.data.mixture import describe_mixture, make_stream
from alphaapollo.data.rendering import Renderer
from alphaapollo.finetuning.dpo import DpoTask, RewardModelTask
from alphaapollo.finetuning.sft import SftTask
from alphaapollo.finetuning.task import FinetuningPlan, FinetuningProgress, FinetuningRun, FinetuningTask, train
from alphaapollo.launch.inputs import load_renderer
from alphaapollo.launch.prepare import Preparation
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.planning.memory_fit import fit_to_memory_if_measurable, get_max_tokens
from alphaapollo.planning.model_requirements import ModelUse, choose_kernels
from alphaapollo.planning.plan_table import (
    describe_checkpoint_schedule,
    describe_memory,
    describe_micro_batch,
    describe_sharding,
    summarize_memory,
)
from alphaapollo.processes.watchdog import new_run_id
from alphaapollo.runs.input_digests import Digests
from alphaapollo.runs.run_plan import RunPlan
from alphaapollo.runs.training_examples import NUM_LOGGED, write_examples
from alphaapollo.session.progress import TrainingGoal, check_has_validation_data
from alphaapollo.session.start import open_session
from alphaapollo.utils.heartbeat import HEARTBEAT

TASKS: dict[type[TuningConfig], type[FinetuningTask]] = {
    SftConfig: SftTask,
    DpoConfig: DpoTask,
    RmConfig: RewardModelTask,
}
ONLY_HELD_OUT = "only SFT's held-out prompts are played and graded: the task tries them in check_config"


class FinetuningPreparation(Preparation):
    """Checked configuration and data of a fine-tuning that has not started any worker."""

    LEFT_OUT: ClassVar = dict.fromkeys(("load_environment", "try_rewards", "try_environment"), ONLY_HELD_OUT) | {
        "check_teachers": "it has no teacher"
    }
    config: TuningConfig
    task: FinetuningTask
    placement: Placement
    train: LoadedExamples[Any]
    val: dict[str, list[Any]]  # validation examples by source
    longest_example: int  # tokens of all rows
    plan: FinetuningPlan

    @property
    def progress(self) -> FinetuningProgress:
        """Progress of the checkpoint that the run resumes from, or of a new run."""
        return FinetuningProgress.read(self.start.checkpoint) if self.start.checkpoint else FinetuningProgress()

    @property
    def goal(self) -> TrainingGoal:
        return self.plan.goal

    @property
    def is_complete(self) -> bool:
        """Whether the run has no steps left and its model is exported, so that nothing is left to do."""
        is_exported = self.start.has_exported_model() or not self.config.trainer.export_hf
        return self.plan.goal.is_last_step(self.progress, self.start.step) and is_exported

    def list_models(self) -> list[ModelUse]:
        config, trains_scores = self.config, isinstance(self.config, RmConfig)
        return [
            ModelUse(
                "model.path",
                config.model,
                writes_text=not trains_scores,
                fsdp=config.fsdp_config,
                num_ranks=config.trainer.num_ranks,
                ulysses_size=config.ulysses_sequence_parallel_size,
                trains_scores=trains_scores,
            )
        ]

    def check_config(self) -> None:
        self.task = TASKS[type(self.config)](self.config)
        self.notices += self.task.check_config_and_get_notices(self.machine.num_gpus)
        self.notices += self.user_settings.notices

    def resolve_workers(self) -> None:
        trainer = self.config.trainer
        self.placement = Placement(
            device=resolve_device(trainer.device, self.machine.num_gpus),
            num_nodes=trainer.nnodes,
            ranks_per_node=trainer.n_gpus_per_node,
            threads=trainer.cpu_threads or max(1, self.machine.num_cores // trainer.n_gpus_per_node),
            sequence_parallel=self.config.ulysses_sequence_parallel_size,
        )

    def make_renderer(self) -> None:
        self.renderer = load_renderer(self.model, self.config.data.apply_chat_template_kwargs)

    def read_data(self) -> None:
        self.train, self.val, notices = _read_examples(self.task, self.config, self.renderer, self.start.inputs.digests)
        self.notices += notices
        self.findings = self.train.findings
        has_prompts = bool(getattr(self.config.data, "val_prompts", ""))
        check_has_validation_data(self.config.trainer, bool(self.val) or has_prompts)

    def plan_memory(self) -> None:
        """Estimate the memory of a device, choose what depends on it, and complete the plan."""
        config, device, trainer = self.config, self.placement.device, self.config.trainer
        model = choose_kernels(resolve_model(config.model, device, config.data.max_length), config.model)
        resolved = config.model_copy(update={"model": model})
        may_choose = config.model.enable_gradient_checkpointing == "auto"
        request = self.task.make_memory_request(self.train.examples)
        self.longest_example = request.longest_row * request.rows_per_example
        fitted, self.memory, notices = fit_to_memory_if_measurable(resolved, device, self.machine, may_choose, request)
        self.chosen = fitted
        self.notices += notices
        sizes, data = dict(enumerate(self.train.file_sizes)), config.data
        stream = make_stream(data, sizes, data.seed, self.start.inputs.data_start)
        decode = self.renderer.tokenizer.decode
        self.plan = FinetuningPlan(
            task=self.task,
            config=config,
            model=fitted.model,
            fsdp=fitted.fsdp_config,
            decode=partial(decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            placement=self.placement,
            max_tokens=get_max_tokens(fitted.data.max_token_len_per_gpu) * config.ulysses_sequence_parallel_size,
            train=self.train,
            val=self.val,
            stream=stream,
            goal=TrainingGoal.from_settings(trainer, stream.num_prompts, config.data.train_batch_size),
        )

    def describe(self) -> RunPlan:
        """Describe model, data, steps, ranks and memory of the run, and all notices."""
        trainer, memory, plan, size = self.config.trainer, self.memory, self.plan, self.config.data.train_batch_size
        epochs, num_val = plan.goal.max_steps * size / plan.stream.num_prompts, sum(map(len, plan.val.values()))
        without_ray = "in forked processes" if has_worker_processes(trainer) else "in this process"
        controller = "over Ray" if resolve_controller(trainer) == "ray" else without_ray
        settings = {
            "model": f"{plan.config.model.path}, {plan.model.dtype}{plan.model.lora_summary}",
            "data": f"{len(plan.train.examples)} examples" + (f", {num_val} for validation" if num_val else ""),
            **describe_mixture(self.config.data, dict(enumerate(plan.train.file_sizes)), epochs),
            "steps": f"{plan.goal.max_steps} of {size} examples, {epochs:.2f} epochs",
            "micro-batch": describe_micro_batch(plan.max_tokens, self.longest_example),
            "ranks": f"{plan.placement.describe_ranks()}, {controller}",
            "files": format_value(plan.config.data.train_files),
            "checkpoints": describe_checkpoint_schedule(trainer.save_freq, "steps", memory, trainer.keep_best),
            "trackers": ", ".join(trainer.logger),
            **describe_memory(plan.model, memory),
            **describe_sharding(memory, plan.placement.num_ranks),
        }
        return RunPlan(settings, summarize_memory(memory), self.all_notices, data=self.findings)


def prepare_run(config: TuningConfig, user_settings: UserSettings, console: Console) -> FinetuningPreparation:
    """Check the configuration and the data, plan the memory and print the plan. Raises ValueError for invalid input."""
    return FinetuningPreparation(config, console, user_settings).prepare()


@HEARTBEAT.record_call("read examples")
def _read_examples(
    task: FinetuningTask, config: TuningConfig, renderer: Renderer, digests: Digests
) -> tuple[LoadedExamples[Any], dict[str, list[Any]], list[str]]:
    """Read the data files. Returns training examples with all findings, validation examples by file name, and
    notices."""
    data, notices = config.data, list[str]()

    def load(files: str | list[str], key: str, max_samples: int) -> LoadedExamples[Any]:
        compute = partial(task.load_examples, files, max_samples, renderer)
        settings = config.model_dump(mode="json", include={"data": True, "preference": {"loss"}})
        file_digests, module_digests = digests.get(key), digests.get("preference.custom_module")
        inputs = (type(task).__name__, files, max_samples, settings, (file_digests, module_digests))
        return load_or_compute(renderer, inputs, compute) if file_digests else compute()

    train_files = name_splits(data.train_files, TRAIN, notices)
    train = load(train_files, "data.train_files", data.train_max_samples)
    notices += [f"data.train_files: {notice}" for notice in train.notices]
    val: dict[str, list[Any]] = {}
    if data.val_files:
        val_files = name_splits(data.val_files, HELD_OUT, notices)
        loaded = load(val_files, "data.val_files", data.val_max_samples)
        notices += [f"data.val_files: {notice}" for notice in loaded.notices]
        train.findings.extend(finding for finding in loaded.findings if finding not in train.findings)
        sources = zip(make_source_names(val_files), loaded.split_by_file(), strict=True)
        val = {name: examples for name, examples in sources if examples}
    return train, val, notices


async def run(prepared: FinetuningPreparation, progress: FinetuningProgress) -> None:
    """Train from `progress` to the last step, export the model, and end all started processes."""
    config, trainer, plan, start = prepared.config, prepared.config.trainer, prepared.plan, prepared.start
    build = partial(
        plan.task.worker_class,
        config.model_copy(update={"fsdp_config": plan.fsdp}),
        plan.model,
        optimizer_steps=plan.goal.max_steps,
        saves_in_background=prepared.memory is None or prepared.memory.saves_in_background,
    )
    run_id = new_run_id() if has_worker_processes(trainer) else ""
    specs = WorkerSpecs(placement=plan.placement, run_id=run_id, rank_builders={"trainer": build})
    prepared.console.start(plan.goal.max_steps, progress.step)
    async with open_session(prepared, specs, Timer()) as session, AsyncExitStack() as stack:
        model = session.workers.trainer
        finetuning_run = FinetuningRun(plan, model, progress, session)
        await session.show_warnings()
        await plan.task.begin_run(finetuning_run, stack)
        first_indices = plan.stream.prompt_indices(start.inputs.data_start, min(NUM_LOGGED, plan.stream.num_prompts))
        examples = [plan.task.describe_example(plan.train.examples[index], plan.decode) for index in first_indices]
        write_examples(trainer.folder, examples)
        if start.checkpoint:
            await session.resume(start.checkpoint)
        await session.train(train(finetuning_run))
        if reason := plan.goal.describe_early_end(progress):
            prepared.console.notify(reason)
        await session.export(model)
