"""What an engine gets and returns: its settings, requests and answers of its HTTP API, and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.types import Completion, Sampling
from alphaapollo.utils.kept_tokens import KeptTokens

if TYPE_CHECKING:
    from alphaapollo.engines.weight_sync.transport import TransportKind

MODEL_NAME = "policy"  # name of the policy in requests to the HTTP API


class EngineError(RuntimeError):
    """Error: an inference engine failed and cannot be used any more."""


class EngineDied(EngineError):
    """Error: the engine's core process died. The run can be restarted."""


@dataclass(frozen=True)
class HttpApiSettings:
    tool_parser: str = ""  # vLLM's parser of tool calls; empty: answers have no tool calls
    reasoning_parser: str = ""  # vLLM's parser of reasoning; empty: reasoning is part of the text
    template_arguments: Mapping[str, object] = field(default_factory=dict)  # data.apply_chat_template_kwargs
    allow_image_urls: bool = False  # data.allow_image_urls


@dataclass(frozen=True)
class HttpSampling:
    """Sampling settings of a request to the HTTP API, including settings that no rollout uses."""

    sampling: Sampling
    penalties: Mapping[str, float] = field(default_factory=dict)  # only those with an effect, e.g. min_p
    num_top: int = 0  # number of most probable tokens to return at each position
    scores_prompt: bool = False  # whether to return the log-probs of the prompt


@dataclass(frozen=True)
class HttpAnswer:
    """Answer to a request to the HTTP API. The log-probs at a position are those of the token there and, after it, of
    the most probable tokens."""

    completion: Completion
    stop_string: str | None  # the stop string that ended the completion; empty: none; None: the API searches the text
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
    chat_tokenizer: str = ""  # for clients that send chats or stop strings; empty: requests are token ids
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

    def check_kept_tokens(self, kept: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        """Raise EngineError unless there are kept tokens for each sampled token, and it is one of them. An empty set
        stands for all tokens."""
        if len(kept) != len(token_ids):
            raise EngineError(f"{self.name} returned kept tokens for {len(kept)} of {len(token_ids)} sampled tokens.")
        if len(outside := KeptTokens.of_sets(kept).find_outside(token_ids)):
            first = outside[0]
            raise EngineError(
                f"{self.name} (rollout.name={self.rollout.name}) sampled the token {token_ids[first]} at position "
                f"{first}, but it is not among the {len(kept[first])} tokens that its sampler kept. Set "
                "rollout.sampling_mask=False, and report this."
            )

    def check_request_length(self, prompt_tokens: int, max_response_tokens: int) -> None:
        """Raise ValueError if the prompt and the longest possible response together exceed max_model_len."""
        if prompt_tokens + max_response_tokens > self.max_model_len:
            raise ValueError(
                f"{self.name}: a prompt of {prompt_tokens} tokens and a response of up to {max_response_tokens} tokens "
                f"exceed the limit, data.max_prompt_length + data.max_response_length = {self.max_model_len} tokens. "
                "Increase one of these two keys."
            )
