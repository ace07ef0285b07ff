"""Base classes of the workers. A worker is one rank with a frozen or a trained model."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.models.checkpoint.writer import CheckpointWriter
from alphaapollo.models.export.hf_folder import export_model
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.moe_routing import Routers
from alphaapollo.models.training.train_state import TrainState
from alphaapollo.observability.memory import measure_process_memory
from alphaapollo.weight_sync.digest import tensors_digest
from alphaapollo.workers.moe_load_balancing import ExpertLoadBalancer
from alphaapollo.workers.process_group import RankPlacement, initialize_rank, shut_down_rank


class ModelWorker:
    """One rank with a model. Methods other than `memory` are collectives.

    Args:
        model: model configuration after `resolve_model`.
        fsdp_size: number of ranks that share one copy of the model; -1 = all.
    """

    def __init__(self, model: Model, placement: RankPlacement, fsdp_size: int = -1):
        assert model.dtype != "auto", "call resolve_model first"
        self.config, self.placement = model, placement
        self.mesh, sequence, self.data_group = initialize_rank(placement, fsdp_size)
        self.device = torch.device(placement.device)
        self.dtype: torch.dtype = getattr(torch, model.dtype)  # dtype of forward and backward
        self.builder = MicroBatchBuilder(model.attention == "padded", self.device, sequence)

    def free_cache(self) -> None:
        """Release the GPU memory that torch caches, so that other processes can use it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, float]:
        """Return memory metrics of this process in GiB."""
        return measure_process_memory()

    def close(self) -> None:
        shut_down_rank()


class TrainingWorker(ModelWorker):
    """One rank with a trained model. Methods other than `get_save_future` and `memory` are collectives.

    Args:
        saves_in_background: write checkpoints from a copy while training continues.
    """

    state: TrainState
    hf_model: Any  # transformers model to be written by `export`

    def __init__(self, model: Model, placement: RankPlacement, fsdp_size: int, saves_in_background: bool):
        super().__init__(model, placement, fsdp_size)
        self.writer = CheckpointWriter(saves_in_background)

    def offload(self) -> None:
        """End a phase: reshard the model, offload the configured tensors, and free cached GPU memory."""
        self.state.offload()
        self.free_cache()

    def save(self, folder: str) -> None:
        """Start to write a checkpoint of the current state. `get_save_future` returns the future of it.

        Raises OSError, e.g. if the disk is full, and FloatingPointError if the weights are not finite.
        """
        self.writer.start([self.state.snapshot(folder)])

    def get_save_future(self) -> Future[float]:
        """Return the future of the last save. Its result is the writing time in seconds, or an OSError."""
        return self.writer.save_future

    def load(self, folder: str) -> None:
        """Load a checkpoint written by any number of ranks."""
        self.state.load(folder)
        self.state.offload()

    @torch.no_grad()
    def compute_fingerprints(self) -> dict[str, tuple[int, float]]:
        """Compute (digest, sum of squares) of this rank's slices of the weights and of each optimizer moment.

        Digests and sums of squares of all ranks add up to the model's. Of several copies (HSDP) only the first counts.
        """
        counted = {
            name: slices if self.is_first_replica() else [] for name, slices in self.state.get_trained_tensors().items()
        }
        norms = {
            name: sum(torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2 for tensor in slices)
            for name, slices in counted.items()
        }
        return {name: (tensors_digest(slices), norms[name]) for name, slices in counted.items()}

    def is_first_replica(self) -> bool:
        """Return whether this rank's slices belong to the first of several copies of the model (HSDP)."""
        return self.mesh.ndim == 1 or self.mesh.get_local_rank("replicate") == 0

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """Write a Hugging Face folder (see export_model). Raises FloatingPointError if the weights are not finite."""
        self.state.reload()
        self.state.check_finite()
        export_model(folder, self.hf_model, self.config, self.dtype, form)

    def make_expert_load_balancer(self, routers: Routers | None) -> ExpertLoadBalancer | None:
        """Create the object that computes the MoE load-balancing loss of one update. Returns None for a dense model."""
        if routers is None:
            return None
        return ExpertLoadBalancer(routers, self.config.router_aux_loss_coef, self.device, self.data_group)

    def close(self) -> None:
        self.writer.close()
        super().close()
