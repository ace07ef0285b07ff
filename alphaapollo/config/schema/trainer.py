"""`trainer`: run folder, duration, hardware, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    ONLY_AT_START,
    ActiveUnless,
    ActiveWhen,
    CountOrMinusOne,
    FilePath,
    FolderName,
    Requires,
    ResumeRule,
    RunPath,
    Section,
)
from alphaapollo.config.schema.model import LoraForm
from alphaapollo.config.schema.planned_device import PlannedDevice
from alphaapollo.config.schema.plugins import make_name_check

VALIDATES = Requires(ActiveUnless("test_freq", -1, 0))
LOCAL_HAS_ONE_NODE = Requires(ActiveWhen("nnodes", 1), when="local")


class RunFolder(Section):
    """`trainer` section of every command."""

    project_name: FolderName = "alphaapollo"
    """First folder of the run under output_dir."""
    experiment_name: FolderName = "default"
    """Second folder of the run under output_dir."""
    output_dir: RunPath = "outputs"
    """Parent of all runs: <output_dir>/<project_name>/<experiment_name>."""

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.project_name / self.experiment_name


class RunSettings(RunFolder):
    """`trainer` section of every command with workers."""

    stall_timeout: PositiveFloat | None = 600.0
    """Seconds without progress after which the run is stopped, with an error that names the blocking worker, and Python
    stacks are written to <run>/stalls (docs/reliability.md). A warning is shown after a tenth of this time, at
    the latest after a minute. null = never."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run; auto = cuda if there is a GPU."""
    seed: int = 0
    """Seed of everything random: samples, mini-batches, new heads and adapters."""
    dry_run: Annotated[bool, ONLY_AT_START] = False
    """Check the configuration, print the plan, and stop."""

    @property
    def stall_notice_seconds(self) -> float:
        """Seconds without progress after which the console shows a warning: a tenth of stall_timeout, at most 60."""
        return min(60.0, (self.stall_timeout or math.inf) / 10)


class Training(RunSettings):
    """`trainer` section of every command that trains."""

    logger: list[Annotated[str, make_name_check("tracker", "trackers", ("console",))]] = ["console"]
    """Trackers: console, tensorboard, wandb, mlflow, trackio, swanlab (docs/metrics.md#trackers), or that of an
    installed package (docs/plugins.md). metrics.jsonl is always written."""
    total_training_steps: PositiveInt | None = None
    """Iterations (optimizer steps of fine-tuning); null = from total_epochs."""
    total_epochs: Annotated[PositiveInt, ActiveWhen("total_training_steps", None)] = 1
    """Passes over the training data, if total_training_steps is not set. main_ppo ends after the last full batch of
    prompts."""
    stop_at_step: PositiveInt | None = None
    """End the run after this iteration, as if it were the last one: it also validates and saves. Schedules still refer
    to total_training_steps, and the same command without this key continues."""
    early_stopping_metric: Annotated[str | None, VALIDATES] = None
    """Validation metric, e.g. val/accuracy: the run ends when early_stopping_patience validations have not improved it.
    Better is higher or lower, as for keep_best (docs/checkpoints.md#early-stopping)."""
    early_stopping_patience: Annotated[PositiveInt, ActiveWhen("early_stopping_metric")] = 3
    """Consecutive validations without an improvement of early_stopping_metric after which the run ends."""
    early_stopping_threshold: Annotated[NonNegativeFloat, ActiveWhen("early_stopping_metric")] = 0.0
    """An improvement of early_stopping_metric counts if it is larger than this."""
    max_ckpt_to_keep: Annotated[PositiveInt | None, ActiveUnless("save_freq", -1, silent_value=None)] = 2
    """Number of newest checkpoints to keep; null = all."""
    keep_best: Annotated[
        str | None, ActiveUnless("save_freq", -1), ActiveUnless("max_ckpt_to_keep", None), VALIDATES
    ] = None
    """Validation metric, e.g. val/accuracy: the best checkpoint by it is kept besides the newest max_ckpt_to_keep. A
    checkpoint counts if its iteration also validated. Higher is better, except for losses, perplexities and
    failures."""
    resume_mode: Annotated[Literal["auto", "disable", "resume_path"], ONLY_AT_START] = "auto"
    """auto = resume from the newest complete checkpoint of this run; disable = start from scratch; resume_path = resume
    from resume_from_path."""
    resume_from_path: Annotated[
        str, ActiveWhen("resume_mode", "resume_path"), FilePath("folder", required=True), ONLY_AT_START
    ] = ""
    """Checkpoint folder, for resume_mode=resume_path."""
    resume_with_other_data: Annotated[bool, ONLY_AT_START] = False
    """Resume although the training data has changed: its rows come in a new order, and pass rates start again."""
    export_hf: bool = True
    """At the end, write the model as a Hugging Face folder: <run>/model."""
    export_lora: Annotated[
        LoraForm,
        ActiveWhen("export_hf"),
        Requires(ActiveWhen("/actor_rollout_ref.model.lora_rank")),
        Requires(ActiveWhen("/model.lora_rank")),
    ] = "merged"
    """With LoRA: write full weights with the adapters merged in, or the adapters alone (peft's format)."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """For an optimizer step with a non-finite gradient: stop = end the run; skip = skip the step (counted in
    actor/steps_skipped or train/steps_skipped), but end the run after many in a row. In main_ppo, non-finite log-probs
    or values skip all steps of the iteration (batch/left_out)."""
    save_on_signal: bool = False
    """On SIGTERM or Ctrl-C, write a checkpoint of the last complete iteration before the run ends; an update in
    progress is finished first. A second signal ends the run at once. false = the first signal ends it at once."""
    max_restarts: NonNegativeInt = 3
    """How often the command may restart from its newest checkpoint after a worker, an engine, Ray or a node has died or
    hung (docs/reliability.md); an engine on a CPU is first replaced. A second death of the same role in the same
    iteration ends the run. 0 = a death ends the run."""
    n_gpus_per_node: PositiveInt = 1
    """Training ranks per node: GPUs, or processes on a machine without GPUs."""
    nnodes: PositiveInt = 1
    """Number of nodes."""
    cpu_threads: PositiveInt | None = None
    """Torch threads per training rank; null = cores of a node / its ranks. A run that resumes on a CPU keeps its number
    of threads."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that cluster nodes may take to join, and that starting workers and engines may spend without using the
    CPU or the disk; the error names the missing ones."""

    planned_device: Annotated[
        PlannedDevice, Requires(ActiveWhen("dry_run")), Requires(ActiveUnless("device", "cpu")), ONLY_AT_START
    ] = ""
    """Dry run: plan for nodes with GPUs of this kind instead of this machine (docs/scaling.md): a100, a100_40, b200,
    h100, h200, h800, l4, l40s, rtx4090, rtx5090, or the memory of a GPU, e.g. 24GiB. Empty = this machine, or the
    cluster in RAY_ADDRESS."""

    @property
    def num_ranks(self) -> int:
        """Training ranks of all nodes."""
        return self.n_gpus_per_node * self.nnodes


class Trainer(Training):
    save_freq: CountOrMinusOne = 20
    """Write a checkpoint every so many iterations, and at the end; -1 = never."""
    test_freq: Annotated[
        CountOrMinusOne,
        ActiveWhen("/validates", reason="data.val_files and trainer.val_suites are empty", silent_value=-1),
    ] = 20
    """Validate every so many iterations, and at the end; -1 = never."""
    val_before_train: Annotated[bool, ResumeRule("kept", "the run has begun")] = True
    """Validate before the first iteration."""
    val_suites: Annotated[list[str], Requires(ActiveWhen("/actor_rollout_ref.rollout.name", "vllm", "sglang"))] = []
    """Evaluation suites of every validation, run against the engine: lm-eval:TASK or inspect:FILE.py@TASK, each
    with options of the suite's own command, e.g. "lm-eval:gsm8k --limit 100" (docs/evaluation.md#evaluation-suites)."""
    suite_timeout: Annotated[PositiveFloat, ActiveWhen("val_suites")] = 3600.0
    """Seconds after which a suite is ended, and counted as failed."""
    suite_python: Annotated[str, ActiveWhen("val_suites"), FilePath("code")] = ""
    """Python of an environment with the suites' packages; empty = .venv/suites if it exists, otherwise this Python."""
    async_mode: Literal["carry", "separate"] | None = None
    """Asynchronous training (docs/async.md): carry = unfinished responses pause when a batch is full and continue with
    the new weights; separate = generation runs in parallel with training; null = synchronous."""
    max_staleness: Annotated[NonNegativeInt, ActiveWhen("async_mode")] = 1
    """Async: how many weight updates old a token may be when it is trained on; the run generates this many batches
    ahead. 0 = synchronous."""
    critic_warmup: NonNegativeInt = 0
    """Number of iterations at the start in which only the critic is trained."""
    controller: Annotated[
        Literal["ray", "local"],
        LOCAL_HAS_ONE_NODE,
        Requires(ActiveWhen("/actor_rollout_ref.rollout.nnodes", 0), when="local"),
    ] = "ray"
    """ray = worker processes on any number of nodes; local = one node without Ray: everything in this process, or with
    several ranks or engines in forked processes (docs/scaling.md#without-ray)."""
    profile_steps: list[PositiveInt] | None = None
    """Iterations to profile, counted from 1; null = none. Writes a trace of controller, ranks and engines to
    <run>/profiles (docs/replay.md). Results do not change."""
    record_steps: list[PositiveInt] | None = None
    """Iterations to record, to repeat or verify them, counted from 1; null = none. Writes inputs and results of the
    update to <run>/recorded, 16 bytes per parameter, and 4 per optimizer step (docs/replay.md). Results do not
    change."""
    verify_first_iteration: bool = False
    """Compare the update of the first iteration with an independent reference in float64, and say the result
    (docs/verify.md). Computes the gradient of a few rows once more. Results do not change."""
