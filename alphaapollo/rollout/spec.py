"""What an engine replica is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphaapollo.config.notices import Device
from alphaapollo.config.schema import Model, Rollout
from alphaapollo.weights.transport import Kind, transport_kind

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine replica is built from."""

    index: int  # among the replicas; names it in errors
    model_path: str
    trust_remote_code: bool
    rollout: Rollout
    device: Device
    dtype: Dtype
    max_model_len: int  # tokens of prompt and response together
    log_path: str  # where the engine's own log goes
    cleanup: tuple[str, ...] = ()  # shared-memory folders that must not outlive the run

    @property
    def name(self) -> str:
        return f"rollout engine {self.index}"

    def check_fits(self, num_tokens: int, max_tokens: int) -> None:
        """ValueError for a request that is longer than the engine's sequences."""
        if num_tokens + max_tokens > self.max_model_len:
            raise ValueError(
                f"{self.name}: {num_tokens} tokens and up to {max_tokens} more do not fit into {self.max_model_len} "
                "(data.max_prompt_length + data.max_response_length)."
            )

    @property
    def transport(self) -> Kind:
        """How weights reach it."""
        return transport_kind(self.device, self.rollout.colocate)


def engine_dtype(rollout: Rollout, model: Model, device: Device) -> Dtype:
    """The engine's arithmetic: its own, else the trainer's, else bfloat16 on a GPU and float32 on a CPU."""
    for choice in (rollout.dtype, model.dtype):
        if choice != "auto":
            return choice
    return "bfloat16" if device == "cuda" else "float32"
