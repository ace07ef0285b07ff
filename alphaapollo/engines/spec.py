"""What an engine replica is built from."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.weight_sync.transport import Kind


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine replica is built from."""

    index: int  # among the replicas; names it in errors
    model_path: str
    trust_remote_code: bool
    rollout: Rollout  # resolved
    device: Device
    dtype: str  # of its arithmetic: float32 | bfloat16
    max_model_len: int  # tokens of prompt and response together
    log_path: str  # where the engine's own log goes
    transport: Kind = "shared_memory"  # how weights reach it
    lora_rank: int = 0  # of the adapters that it serves, with transport=adapter
    cleanup: tuple[str, ...] = ()  # shared-memory folders that must not outlive the run

    @property
    def name(self) -> str:
        return f"rollout engine {self.index}"

    @property
    def shares_gpu(self) -> bool:
        """With the trainer: the engine gives its memory up between its own phases."""
        return self.device == "cuda" and self.rollout.colocate and self.rollout.free_cache_engine

    def check_fits(self, num_tokens: int, max_tokens: int) -> None:
        """ValueError for a request that is longer than the engine's sequences."""
        if num_tokens + max_tokens > self.max_model_len:
            raise ValueError(
                f"{self.name}: {num_tokens} tokens and up to {max_tokens} more do not fit into {self.max_model_len} "
                "(data.max_prompt_length + data.max_response_length)."
            )
