"""Worker extension of vLLM: methods added to vLLM's worker class, called on every rank by `collective_rpc`.

vLLM imports this module in each worker process before it builds the model. The import itself therefore sets up the
process (watchdog, log), applies the patches and registers the weight transfer; vLLM has no other hook this early.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from alphaapollo.engines.process import set_up_engine_process
from alphaapollo.engines.vllm.excluded_tokens import exclude_from_logits
from alphaapollo.engines.vllm.images import clear_deepstack_features
from alphaapollo.engines.vllm.patches import UNPACKED_DIGEST, patch_vllm
from alphaapollo.engines.vllm.settings import SHARED_MEMORY, VllmObject, make_lora_request
from alphaapollo.engines.weight_sync.vllm_digest import compute_adapter_digest, compute_model_digest, find_tied_layers
from alphaapollo.types import Adapter


class WorkerExtension:
    """Mixin with the methods added to vLLM's worker class; `self` is the worker."""

    model_runner: VllmObject

    def alphaapollo_compute_weight_digest(self, repack_lm_heads: bool = True) -> int:
        """Return this rank's part of the digest of the received weights. The parts of all ranks add up to the digest.

        repack_lm_heads: whether to repack tied heads first. A test passes False: the digest must detect stale heads.
        """
        model = self.model_runner.get_model()
        if repack_lm_heads:
            repack_tied_lm_heads_on_cpu(model)
        digest = compute_model_digest(model, UNPACKED_DIGEST)
        torch.cuda.empty_cache()  # copies of received weights; does nothing on a CPU
        return digest

    def alphaapollo_load_adapter(self, folder: str, version: int) -> int:
        """Load a LoRA adapter, and return the digest of the weights in its slot."""
        request = make_lora_request(Adapter(folder, version), replaces=True)
        assert request is not None
        self.model_runner.add_lora(request)
        slots = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        return compute_adapter_digest(self.model_runner.get_model(), slots.index(request.lora_int_id))

    def alphaapollo_exclude_from_sampling(self, token_ids: Sequence[int]) -> None:
        """Keep the model from sampling `token_ids`. Call once, after the model is loaded."""
        exclude_from_logits(self.model_runner.get_model(), token_ids, self.model_runner.device)

    def alphaapollo_clear_deepstack_features(self) -> None:
        """Clear buffers of image features. Call after the memory of the weights is allocated again."""
        clear_deepstack_features(self.model_runner.get_model())

    def alphaapollo_unlink_shared_memory(self) -> None:
        """Unlink the shared-memory files of vLLM's CPU ranks, which vLLM never removes. Call after all ranks start."""
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
            path.unlink(missing_ok=True)


def repack_tied_lm_heads_on_cpu(model: torch.nn.Module) -> None:
    """Repack the output heads that share their weight with the embedding. On a CPU, vLLM computes with a packed
    copy of the weight, which a weight sync does not update."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in find_tied_layers(model):
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _set_up_worker_process() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    set_up_engine_process()
    patch_vllm()
    WeightTransferEngineFactory.register_engine(
        SHARED_MEMORY, "alphaapollo.engines.weight_sync.vllm_shared_memory", "SharedMemoryWeightTransferEngine"
    )


_set_up_worker_process()
