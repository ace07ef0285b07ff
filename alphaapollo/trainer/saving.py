"""Checkpoints of reinforcement learning: policy and critic, in a phase of theirs; and which one stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from alphaapollo.controller.crew import Crew
from alphaapollo.launch.background_checkpoint import BackgroundSave
from alphaapollo.launch.checkpoint_folder import CheckpointFolder
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.worth import far_better


class Saving(BackgroundSave[Progress]):
    """The checkpoint on its way. `notice`: tells people what became of one, and which one stays."""

    def __init__(self, checkpoints: CheckpointFolder, crew: Crew, notice: Callable[[str], None]):
        roles = {"policy": crew.policy, "critic": crew.critic}
        super().__init__(checkpoints, {name: role for name, role in roles.items() if role}, notice)
        self.crew = crew
        self._spared: int | None = None  # the iteration whose checkpoint stays, as told

    def phase(self) -> AbstractAsyncContextManager[None]:
        return self.crew.engines.cache_released()

    def begins(self, progress: Progress) -> None:
        progress.forget_rewards(self.checkpoints.steps())

    def spare(self, progress: Progress) -> int | None:
        """Where the newest weights are far below its own."""
        worth = progress.worth
        spared = far_better(worth, self.checkpoints.steps())
        if spared is not None and spared != self._spared and self.checkpoints.keep is not None:
            best, newest = worth[spared], worth[max(worth)]
            self.notice(
                f"the checkpoint of iteration {spared} stays beside the newest {self.checkpoints.keep}: its weights "
                f"had a mean reward of {best.mean:.3g} +- {best.error:.2g}, those of iteration {max(worth)} have "
                f"{newest.mean:.3g} +- {newest.error:.2g}. To go back to it: trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={self.checkpoints.path(spared)}"
            )
        self._spared = spared
        return spared
