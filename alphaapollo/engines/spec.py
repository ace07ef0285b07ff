"""Settings of an engine replica."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.weight_sync.transport import TransportKind


@dataclass(frozen=True)
class EngineSpec:
    """Settings of one engine replica."""

    index: int  # index among the replicas, shown in errors
    model_path: str
    trust_remote_code: bool
    rollout: Rollout  # with defaults resolved for the device
    device: Device
    dtype: str  # dtype of weights and activations: float32 | bfloat16
    max_model_len: int  # tokens of prompt and response together
    log_path: str  # log file of the engine
    transport: TransportKind = "shared_memory"  # weight transport
    lora_rank: int = 0  # LoRA rank of the served adapters, with transport=adapter
    chat_tokenizer: str = ""  # tokenizer of the HTTP API for agents; empty: requests are token ids
    tokenizer_path: str = ""  # only ids of its tokens are sampled; empty: all ids except placeholders of images

    def find_excluded_ids(self) -> tuple[int, ...]:
        """Return the ids that must never be sampled. Raises ValueError if the model or the tokenizer cannot be read."""
        return find_excluded_ids(self.model_path, self.tokenizer_path, self.trust_remote_code)

    cleanup_folders: tuple[str, ...] = ()  # shared-memory folders to remove when the run ends

    @property
    def name(self) -> str:
        return f"rollout engine {self.index}"

    @property
    def is_colocated(self) -> bool:
        """Whether the engine shares its GPU with the trainer and frees its memory between generation phases."""
        return self.device == "cuda" and self.rollout.colocate and self.rollout.free_cache_engine

    def check_request_length(self, prompt_tokens: int, max_response_tokens: int) -> None:
        """Raise ValueError if the prompt and the longest possible response together exceed max_model_len."""
        if prompt_tokens + max_response_tokens > self.max_model_len:
            raise ValueError(
                f"{self.name}: a prompt of {prompt_tokens} tokens and a response of up to {max_response_tokens} tokens "
                f"exceed the limit, data.max_prompt_length + data.max_response_length = {self.max_model_len} tokens. "
                "Increase one of these two keys."
            )
