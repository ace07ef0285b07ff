"""Record an update for `alphaapollo verify`: the gradient of each optimizer step and the weights after the last one.

<folder>/gradient_0.safetensors        complete gradients of the first step, before clipping; _1 of the second, ...
<folder>/gradient_sample.safetensors   complete gradients of a few rows, before the first step
<folder>/weights_1.safetensors         the trained parameters after the first step, if there are further steps
<folder>/weights.safetensors           the trained parameters after the last step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from alphaapollo.batching.batch import MiniBatch, Rows
from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.sharding import full_tensor


class UpdateRecord:
    """Writer of the gradients and weights of a sharded model. All methods are collectives; rank 0 writes.

    sample_tokens: also write the gradients of a sample of up to this many tokens per rank (`choose_sample`); 0: do not.
    """

    def __init__(self, folder: str, module: nn.Module, sample_tokens: int = 0):
        self.folder, self.num_steps, self.sample_tokens = Path(folder), 0, sample_tokens
        self.trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]

    def write_gradients(self) -> None:
        """Write the gradients of the next step, and before the second step also the weights."""
        if self.num_steps == 1:
            _write_tensors(self.folder / "weights_1.safetensors", self.trained)
        self._write_gradients(str(self.num_steps))
        self.num_steps += 1

    def write_sample_gradients(self) -> None:
        """Write the gradients of the sample."""
        self._write_gradients("sample")

    def write_weights(self) -> None:
        _write_tensors(self.folder / "weights.safetensors", self.trained)

    def _write_gradients(self, name: str) -> None:
        gradients = ((name, p.grad) for name, p in self.trained if p.grad is not None)
        _write_tensors(self.folder / f"gradient_{name}.safetensors", gradients)


def choose_sample(
    rows: Rows, mini_batches: Sequence[MiniBatch], trajectory_ids: np.ndarray, max_tokens: int
) -> list[int]:
    """Choose the rows of the shortest trajectories of a rank's first mini-batch: at least one trajectory, and
    more trajectories up to max_tokens tokens in total. trajectory_ids: [R]."""
    rows_by_trajectory = dict[int, list[int]]()
    for row in mini_batches[0].row_indices if mini_batches else ():
        rows_by_trajectory.setdefault(int(trajectory_ids[row]), []).append(row)
    chosen: list[int] = []
    for row_indices in sorted(rows_by_trajectory.values(), key=lambda indices: int(rows.lengths[indices].sum())):
        if chosen and rows.lengths[chosen + row_indices].sum() > max_tokens:
            break
        chosen += row_indices
    return chosen


@torch.no_grad()
def _write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    gathered = {}
    for name, tensor in tensors:
        full = full_tensor(tensor.detach())
        if dist.get_rank() == 0:
            gathered[name] = full.cpu().contiguous()
    if dist.get_rank() == 0:
        with explain_write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(gathered, path)
