"""What every training does with its started workers: the loops of main_ppo, fine-tuning, and loops of one's own."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.controller.handles import FinetuningGroup, PolicyGroup
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker
from alphaapollo.runs.checkpoint_folder import RunProgress
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.session.checkpoint_writer import BackgroundCheckpointWriter, run_and_save_on_signal
from alphaapollo.session.publish import WeightPublisher
from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass
class TrainingSession:
    """Started workers of a training, with console, tracker and checkpoints."""

    config: Config | TuningConfig
    workers: WorkerGroups
    console: Console
    tracker: Tracker
    checkpoint_writer: BackgroundCheckpointWriter[Any]

    async def show_warnings(self) -> None:
        """Show what the check of the trained model's log-probs has found."""
        model = next(iter(self.checkpoint_writer.groups.values()))
        for warning in await model.get_logprob_check_warnings():
            self.console.notify(warning)

    async def load(self, checkpoint: Path) -> None:
        """Load the state of all trained models. On shared GPUs, the engines must sleep."""
        with HEARTBEAT.record_call("load"):
            for name, group in reversed([*self.checkpoint_writer.groups.items()]):  # the policy last: it publishes next
                await group.load(str(checkpoint / name))

    async def resume(self, checkpoint: Path) -> None:
        """Load the checkpoint from which the run continues, and print a notice."""
        await self.load(checkpoint)
        self.console.notify(f"resumed from {checkpoint}")

    async def save(self, progress: RunProgress) -> None:
        """Write a checkpoint in the background. Raises the error of the previous one."""
        await self.checkpoint_writer.save(progress)

    def log(self, step: int, metrics: dict[str, float], failure_reason: str = "") -> None:
        """Log metrics to metrics.jsonl, the trackers and the console. failure_reason: see Console.show_step."""
        self.tracker.log(step, metrics)
        self.console.show_step(step, metrics, failure_reason)

    async def train(self, training: Coroutine[object, None, None]) -> None:
        """Run the training loop and wait until its last checkpoint is complete."""
        writer = self.checkpoint_writer
        async with writer.finish_on_exit():
            on_signal = self.config.trainer.save_on_signal
            await (run_and_save_on_signal(writer, training) if on_signal else training)

    async def export(self, model: PolicyGroup | FinetuningGroup[Any]) -> None:
        """Export the model if trainer.export_hf is set."""
        trainer = self.config.trainer
        if trainer.export_hf:
            with HEARTBEAT.record_call("export"):
                await model.export(str(trainer.folder / "model"), trainer.export_lora)


@dataclass
class PolicySession(TrainingSession):
    """Session of a policy, with the engines that sample from it."""

    config: Config
    rollout_log: RolloutLog
    publisher: WeightPublisher | None  # of the policy's weights; None: without engines

    async def restore(self, checkpoint: Path | None, version: int) -> dict[str, float]:
        """Load a checkpoint, if any, and publish the weights, if there are engines. Returns metrics of the publish."""
        if self.publisher:
            await self.publisher.hand_over()
        if checkpoint:
            await self.resume(checkpoint)
        if self.publisher is None:
            return {}
        with HEARTBEAT.record_call("publish"):
            return await self.publisher.publish(version)

    async def hand_over(self, pauses_requests: bool = False) -> None:
        """Let the engines free the GPUs that they share with trainers. pauses_requests: see WeightPublisher."""
        await self.require_publisher().hand_over(pauses_requests)

    async def publish(self, version: int) -> dict[str, float]:
        """Send the weights to the engines as `version`, and verify them. Returns metrics of the weight sync."""
        return await self.require_publisher().publish(version)

    def require_publisher(self) -> WeightPublisher:
        """Return the publisher. Raises ValueError without engines."""
        if self.publisher is None:
            raise ValueError("there are no engines. Create the trainer with engines=1 or more.")
        return self.publisher
