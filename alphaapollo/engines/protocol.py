"""Interface of an inference engine: token ids in, token ids out.

Implementations: vllm/engine.py and sglang/server.py (used through remote.py) for production, hf.py as a slow reference,
fake.py without a model for tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.engines.http_api import HttpApiSettings
from alphaapollo.types import Completion, ImageInput, Sampling, WeightReceipt

if TYPE_CHECKING:
    from alphaapollo.weight_sync.transport import TransportKind, UpdateInfo


CHANGES_SAMPLES = (
    *("speculative_*", "spec_*", "quantiz*", "*_quant", "*quant_profile", "*torchao_config", "kv_cache_dtype*"),
    *("logits_processors", "override_generation_config", "reasoning_config", "watermark_config", "diffusion_config"),
)
"""Patterns of arguments of engines with which tokens are sampled from another distribution than the trainer's."""


class EngineError(RuntimeError):
    """Error: an inference engine failed and cannot be used any more."""


class EngineDied(EngineError):
    """Error: the engine's core process died. The run can be restarted."""


class Engine:
    """Interface of one engine replica, called from one event loop. Calls of generate and log_probs may overlap."""

    async def preload_libraries(self) -> None:
        """Do the part of `start` that needs no GPU, such as imports, while other processes use the GPU."""

    async def start(self) -> None:
        """Load the model. Raises ValueError if the model cannot be served, EngineError if the start fails."""

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        """Sample one completion of 1 to `sampling.max_tokens` tokens. `images`: images in the prompt, in order.

        The log-probs of the sampled tokens are computed from softmax(logits / temperature), before top-p and top-k. At
        temperature 0 they are computed from softmax(logits).
        """
        raise NotImplementedError

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        """Return the log-probs at temperature 1 of `token_ids[1:]`, each given the tokens before it."""
        raise NotImplementedError

    def build_http_app(self, settings: HttpApiSettings) -> Callable[..., Awaitable[None]]:
        """Return an ASGI application that serves the model to agents (http_api.py)."""
        raise NotImplementedError

    async def answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        """Sample an answer to a request to the HTTP API, if the API runs in another process than the engine."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Pause generation between two tokens. Idempotent. Running requests keep their tokens and continue after
        `resume` with the latest weights and a recomputed KV cache. New requests wait."""
        raise NotImplementedError

    async def resume(self) -> None:
        """Continue generation after `pause`."""
        raise NotImplementedError

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache, if the engine shares its GPU with the trainer. To continue, call
        wake_weights, receive_weights, confirm_weights and wake_cache in this order."""

    async def wake_weights(self) -> None:
        """Allocate GPU memory for the weights after `sleep`. Their values are undefined until receive_weights."""

    async def receive_weights(self, folder: str) -> None:
        """Load the weights that the trainer wrote to a shared-memory folder. Not used on GPUs."""
        raise NotImplementedError

    # Weight sync on GPUs (weight_sync/transfer.py). The trainer calls these methods by their names.

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the engine's workers to the trainer, once. `rank_offset`, if any: rank of the first engine's first
        worker."""
        raise NotImplementedError

    async def start_weight_update(self) -> None:
        """Begin to load new weights. Running requests must be paused."""
        raise NotImplementedError

    async def update_weights(self, update_info: UpdateInfo) -> None:
        """Load a bucket of tensors: from the trainer's GPU memory, or from a broadcast."""
        raise NotImplementedError

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish loading after the last bucket."""
        raise NotImplementedError

    async def confirm_weights(self, version: int) -> WeightReceipt | None:
        """Finish a weight sync: clear caches computed with old weights, and return the digest of the new weights, or
        None if the engine has no weights. Running requests must be paused."""
        raise NotImplementedError

    async def release_cache(self) -> None:
        """Free the GPU memory of the KV cache. Running requests are paused until wake_cache."""

    async def wake_cache(self) -> None:
        """Allocate GPU memory for the KV cache after `sleep` or release_cache."""

    def list_pids(self) -> list[int]:
        """Return the pids of the engine's separate processes, the engine core first."""
        return []

    def get_progress_counter(self) -> int:
        """Return a number that changes while running requests make progress, e.g. the number of sampled tokens."""
        return 0

    async def close(self) -> None:
        """Stop the engine and its processes. Idempotent."""


@dataclass(frozen=True)
class HttpSampling:
    """Sampling settings of a request to the HTTP API, which may ask for more than a rollout."""

    sampling: Sampling
    penalties: Mapping[str, float] = field(default_factory=dict)  # e.g. min_p, frequency_penalty
    num_top: int = 0  # number of most probable tokens to return at each position
    scores_prompt: bool = False  # whether to return the log-probs of the prompt


@dataclass(frozen=True)
class HttpAnswer:
    """Answer to a request to the HTTP API. The log-probs of a position are those of its token, and then those of the
    most probable tokens."""

    completion: Completion
    stop_string: str  # the stop string that ended the completion, or an empty text
    logprobs: list[dict[int, float]]  # of the sampled tokens
    prompt_logprobs: list[dict[int, float]]  # of the prompt's tokens after the first, if they were requested


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
    cleanup_folders: tuple[str, ...] = ()  # shared-memory folders to remove when the run ends

    def find_excluded_ids(self) -> tuple[int, ...]:
        """Return the ids that must never be sampled. Raises ValueError if the model or the tokenizer cannot be read."""
        return find_excluded_ids(self.model_path, self.tokenizer_path, self.trust_remote_code)

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
