"""`trainer`: where a run goes, how long it takes, and on what."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Frequency, Section
from alphaapollo.config.schema.model import LoraForm


class RunFolder(Section):
    """What the `trainer` section of every command has."""

    project_name: str = "alphaapollo"
    """First folder of the run under output_dir."""
    experiment_name: str = "default"
    """Second folder of the run under output_dir."""
    output_dir: str = "outputs"
    """Where runs go: <output_dir>/<project_name>/<experiment_name>."""

    @property
    def folder(self) -> Path:
        """Where this run goes."""
        return Path(self.output_dir) / self.project_name / self.experiment_name


class WatchedRun(RunFolder):
    """What the `trainer` section of a command with workers has."""

    stall_notice: PositiveFloat = 60.0
    """Seconds without any movement after which the console says who waits for whom, in which phase, since when."""
    stall_timeout: PositiveFloat | None = 600.0
    """Seconds without any movement after which the run ends: whoever holds it up is named, and Python stacks lie in
    <run>/stalls (docs/reliability.md). null = it waits for ever."""


class Training(WatchedRun):
    """What the `trainer` section of every command that trains has."""

    logger: list[Literal["console", "tensorboard", "wandb"]] = ["console"]
    """Trackers besides metrics.jsonl, which is always written."""
    total_training_steps: PositiveInt | None = None
    """Iterations; null = from total_epochs."""
    max_ckpt_to_keep: PositiveInt | None = 2
    """Older checkpoints are removed; null = keep all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto = from this run's newest whole checkpoint; disable = start anew; resume_path = from resume_from_path."""
    resume_from_path: str = ""
    """A checkpoint folder, for resume_mode=resume_path."""
    export_hf: bool = True
    """At the end, write the model as a Hugging Face folder: <run>/model."""
    export_lora: LoraForm = "merged"
    """With LoRA: write whole weights with the adapters merged into them, or the adapters alone (peft's folder)."""
    save_on_signal: bool = False
    """A run that is told to end, by SIGTERM or Ctrl-C, first writes a checkpoint of its last whole iteration; one whose
    update has begun is finished before that. A second signal ends it at once. false = the first one does."""
    max_restarts: NonNegativeInt = 3
    """How often in all a run goes on by itself, in the same command and from its newest checkpoint, after a worker, an
    engine, Ray or a node has died or stood still (docs/reliability.md). A second death of the same role in the same
    iteration ends it at once, so what dies of itself costs one restart. As many engines are replaced without a restart,
    where that can be. 0 = a death ends the run."""
    n_gpus_per_node: PositiveInt = 1
    """Training ranks a node: GPUs, or processes on a machine without them."""
    nnodes: PositiveInt = 1
    """Nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto = cuda if there is a GPU."""
    cpu_threads: PositiveInt | None = None
    """Torch threads of a training rank; null = cores / ranks of a node, and where a run goes on without a GPU the count
    that it began with."""
    seed: int = 0
    """Seed of everything that is drawn: rollouts, mini-batches, fresh heads and adapters."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that nodes of a cluster may take to come, and then workers and engines to start; after that the run stops
    and names who did not."""
    dry_run: bool = False
    """Compose, check, print the plan, and stop."""

    @property
    def num_ranks(self) -> int:
        """Training ranks of all nodes."""
        return self.n_gpus_per_node * self.nnodes


class Trainer(Training):
    total_epochs: PositiveInt = 1
    """Passes over the training data, unless total_training_steps is given: the run ends with the iteration that has
    consumed the last whole batch of prompts."""
    save_freq: Frequency = 20
    """Checkpoint every so many iterations, and at the end; -1 = never."""
    test_freq: Frequency = 20
    """Validate every so many iterations, and at the end; -1 = never."""
    val_before_train: bool = True
    """Validate before the first iteration."""
    async_mode: Literal["carry", "separate"] | None = None
    """Asynchronous training (docs/async.md): carry = one pool, what is unfinished when a batch is whole pauses and goes
    on with the new weights; separate = generation goes on beside the trainer; null = the synchronous loop."""
    max_staleness: NonNegativeInt = 1
    """With async_mode: how many publishes the oldest token that is trained on may lie behind the weights that are
    trained. The run has so many batches ahead; 0 = none, which gives the synchronous run's weights."""
    keep_kv_cache: bool = False
    """With async_mode: what the engine has computed of unfinished answers stays when weights change, so that they go on
    at once, on keys and values of older weights; false = computed anew."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """An optimiser step whose gradient is not finite: stop = end the run there; skip = leave it out, count it
    (actor/steps_skipped), and go on, unless many are bad in a row. Its trajectories are in rollouts/. Log-probs or
    values that are not finite: the same of all the iteration's steps (batch/left_out)."""
    critic_warmup: NonNegativeInt = 0
    """First iterations that train the critic only."""
    controller: Literal["ray", "local"] = "ray"
    """ray = worker processes; local = everything in this process, for tests and debugging (one rank)."""
    profile_steps: list[PositiveInt] | None = None
    """Iterations to profile, counted from 1, null = none: of each a trace of controller, training ranks and engines on
    one clock, in <run>/profiles (docs/profiles.md). Recording slows an iteration down and changes none of its
    numbers."""
    record_steps: list[PositiveInt] | None = None
    """Iterations to record, counted from 1, null = none: in <run>/recorded all that their learning got and what came
    out, to compute it again without engines, bit for bit or in float64 (docs/replay.md). Each takes a checkpoint's
    room and the time to write it, changes none of the run's numbers, and is never removed."""
