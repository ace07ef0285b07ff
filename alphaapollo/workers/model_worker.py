"""Base classes of the workers. A worker is one training rank with a frozen or a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from alphaapollo.config.schema import Fsdp, LoraForm, Model
from alphaapollo.models.checkpoint.writer import CheckpointWriter
from alphaapollo.models.export.hf_folder import export_model
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.moe_routing import RouterHooks
from alphaapollo.models.training.train_state import TrainState
from alphaapollo.observability.memory import measure_process_memory
from alphaapollo.weight_sync.digest import compute_joint_digest
from alphaapollo.workers.moe_load_balancing import ExpertLoadBalancer
from alphaapollo.workers.process_group import WITHOUT_REPLICAS, RankPlacement, initialize_rank, shut_down_rank


class ModelWorker:
    """Worker with one rank of a model. All ranks must call its methods together (collectives), except `memory`.

    Args:
        model: model section after `resolve_model`.
        fsdp: section with the sizes of the groups of ranks that share a copy of the model, or its experts.
    """

    def __init__(self, model: Model, placement: RankPlacement, fsdp: Fsdp = WITHOUT_REPLICAS):
        assert model.dtype != "auto", "call resolve_model first"
        self.config, self.placement = model, placement
        self.mesh, sequence, self.data_group = initialize_rank(placement, fsdp)
        self.device = torch.device(placement.device)
        self.dtype: torch.dtype = getattr(torch, model.dtype)  # dtype of forward and backward
        self.builder = MicroBatchBuilder(model.attention == "padded", self.device, sequence)

    def get_memory_metrics(self) -> dict[str, float]:
        """Return the memory that this process uses, in GiB, as metrics."""
        return measure_process_memory()

    def close(self) -> None:
        shut_down_rank()


class TrainingWorker(ModelWorker):
    """Worker that trains one rank of a model. Saves checkpoints in the foreground or in the background."""

    state: TrainState
    hf_model: Any  # transformers model to be written by `export`
    logprob_check_warnings: Sequence[str] = ()  # of the check against a reference when the model is loaded

    def __init__(self, model: Model, placement: RankPlacement, fsdp: Fsdp, saves_in_background: bool):
        super().__init__(model, placement, fsdp)
        self.writer = CheckpointWriter(saves_in_background)

    def offload(self) -> None:
        """Free GPU memory for other workers: reshard the model and offload the configured tensors."""
        self.state.offload()
        torch.cuda.empty_cache()  # for other processes; does nothing on a CPU

    def save(self, checkpoint_folder: str) -> None:
        """Start to write a checkpoint. Raises FloatingPointError if the weights are not finite.

        An OSError, e.g. if the disk is full, is raised by the future (`get_save_future`) if a thread writes, else here.
        """
        self.writer.start([self.state.snapshot(checkpoint_folder)])

    def get_save_future(self) -> Future[float]:
        """Return the future of the last `save`: the writing time in seconds, or an OSError."""
        return self.writer.save_future

    def load(self, checkpoint_folder: str) -> None:
        """Load a checkpoint, which any number of ranks may have written."""
        self.state.load(checkpoint_folder)
        self.state.offload()

    @torch.no_grad()
    def compute_state_fingerprints(self) -> dict[str, tuple[int, float]]:
        """Compute (digest, sum of squares) of this rank's shard of the weights and of each optimizer moment.

        The values of all ranks add up to those of the model. With several replicas (HSDP), all but the first return 0.
        """
        fingerprints = {}
        for name, shards in self.state.get_trained_tensors().items():
            counted = shards if self.mesh.is_first_replica() else []
            squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2 for tensor in counted]
            fingerprints[name] = (compute_joint_digest(counted), sum(squares))
        return fingerprints

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """Write a Hugging Face model folder. Raises FloatingPointError if the weights are not finite."""
        self.state.reload()
        self.state.check_weights_finite()
        export_model(folder, self.hf_model, self.config, self.dtype, form)

    def make_expert_load_balancer(self, routers: RouterHooks | None) -> ExpertLoadBalancer | None:
        """Create the object that computes the MoE load-balancing loss of an update. None for a dense model."""
        if routers is None:
            return None
        return ExpertLoadBalancer(routers, self.config.router_aux_loss_coef, self.device, self.data_group)

    def close(self) -> None:
        self.writer.close()
        super().close()
