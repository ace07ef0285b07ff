"""Engine side of the CPU weight transfer: a backend of vLLM's weight transfer that loads safetensors files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from alphaapollo.engines.weight_sync.shared_memory import read_safetensors


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Folder in shared memory with one version of the weights."""

    folder: str  # with *.safetensors files, named as in a checkpoint


class SharedMemoryWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, SharedMemoryUpdateInfo]):
    """Backend of vLLM's weight transfer that loads weights from shared memory like a checkpoint. Each tensor-parallel
    rank reads all files and keeps its shard."""

    init_info_cls = WeightTransferInitInfo  # shared memory needs no settings
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        self.model.load_weights(read_safetensors(Path(update_info.folder)))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass
