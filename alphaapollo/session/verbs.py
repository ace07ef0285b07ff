"""What every training does with its started workers: the loop of main_ppo, fine-tuning, and loops of one's own."""

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
from alphaapollo.session.checkpoints import BackgroundCheckpointWriter, run_and_save_on_signal
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
        """Load the checkpoint from which the run continues, and say so."""
        await self.load(checkpoint)
        self.console.notify(f"resumed from {checkpoint}")

    async def restore(self, checkpoint: Path | None, weights: WeightPublisher, version: int) -> dict[str, float]:
        """Load a checkpoint, if any, and publish the weights as `version`. Returns metrics of the weight sync."""
        await weights.hand_over()
        if checkpoint:
            await self.resume(checkpoint)
        with HEARTBEAT.record_call("publish"):
            return await weights.publish(version)

    async def train(self, training: Coroutine[Any, Any, None]) -> None:
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
