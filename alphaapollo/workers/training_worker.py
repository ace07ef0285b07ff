"""What every worker that trains a model has: its place among the ranks, the state of its training, and its
checkpoints.

Policy, critic, and the models of fine-tuning are subclasses. All methods but `written` and `memory` are collectives.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from alphaapollo.models.checkpoint.writer import CheckpointWriter
from alphaapollo.models.training.train_state import TrainState
from alphaapollo.observability.memory import process_memory
from alphaapollo.weight_sync.digest import tensors_digest
from alphaapollo.workers.process_group import RankGroups, RankPlacement, free_cache, join, leave


class TrainingWorker:
    """One rank. A subclass makes `state` when its model is loaded.

    Args:
        fsdp_size: ranks that hold one copy of the model; -1 = all.
        saves_in_background: checkpoints are copied, and written while the worker goes on.
    """

    state: TrainState

    def __init__(self, placement: RankPlacement, fsdp_size: int, saves_in_background: bool):
        self.placement = placement
        self.groups: RankGroups = join(placement, fsdp_size)
        self.device = torch.device(placement.device)
        self.writer = CheckpointWriter(saves_in_background)

    def offload(self) -> None:
        """The end of a phase: nothing stays gathered, what is offloaded goes to host memory, and what can be spared of
        the GPU's memory is free for others."""
        self.state.offload()
        free_cache(self.device)

    def save(self, folder: str) -> None:
        """Everything that a resumed run needs of this worker, as it is now: what happens to the worker while the files
        are `written` does not matter. Raises OSError that names the folder; FloatingPointError: ruined weights."""
        self.writer.start([self.state.snapshot(folder)])

    def written(self) -> Future[float]:
        """Of the last save: the seconds that its writing took, or the OSError that names the folder."""
        return self.writer.written()

    def load(self, folder: str) -> None:
        """Go on from a checkpoint, written by any number of ranks."""
        self.state.load(folder)
        self.state.offload()

    @torch.no_grad()
    def fingerprint(self) -> dict[str, tuple[int, float]]:
        """Of the weights that are trained and of each of their moments: the digest and the sum of squares of this
        rank's slices. Those of all ranks add up to the model's; of several copies of it the first counts."""
        shards = self.groups.shards
        counts = shards.ndim == 1 or shards.get_local_rank("replicate") == 0
        return {
            name: (
                tensors_digest(slices if counts else []),
                sum(torch.linalg.vector_norm(one, dtype=torch.float64).item() ** 2 for one in slices if counts),
            )
            for name, slices in self.state.trained().items()
        }

    def memory(self) -> dict[str, float]:
        """GiB."""
        return process_memory()

    def close(self) -> None:
        self.writer.close()
        leave()
