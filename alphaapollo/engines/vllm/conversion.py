"""Convert sampling settings to vLLM's, and vLLM's outputs to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alphaapollo.types import Completion, Sampling, StopReason

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs, SampleLogprobs
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams


def make_sampling_params(sampling: Sampling, **changes: object) -> SamplingParams:
    """Convert sampling settings. changes: arguments of vLLM's SamplingParams that differ from those of a rollout."""
    from vllm.sampling_params import SamplingParams

    arguments = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
        "flat_logprobs": True,  # lists of numbers instead of objects per token
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),  # vLLM finds stop strings in the text
    }
    return SamplingParams(**arguments | changes)


def build_completion(answer: CompletionOutput, num_cached_tokens: int) -> Completion:
    """Build the completion of a finished request. num_cached_tokens: prompt tokens found in the prefix cache."""
    assert answer.weight_versions is not None and answer.logprobs is not None
    *earlier, (version, _) = [(int(span.version), span.end - span.start) for span in answer.weight_versions]
    return Completion(
        token_ids=list(answer.token_ids),
        logprobs=_read_logprobs(answer.logprobs, answer.token_ids),
        stop_reason=StopReason(answer.finish_reason),
        weight_version=version,
        num_cached_tokens=num_cached_tokens,
        earlier_version_token_counts=tuple(earlier),
        columns={} if answer.routed_experts is None else {"routed_experts": answer.routed_experts},
    )


def read_flat_logprobs(found: FlatLogprobs, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of the given tokens, the only ones that were requested at each position."""
    assert found.token_ids == [*token_ids]
    return found.logprobs


def _read_logprobs(found: SampleLogprobs, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of the sampled tokens. If a client requested other tokens too, `found` has one dict each."""
    if hasattr(found, "token_ids"):
        return read_flat_logprobs(found, token_ids)
    return [choices[token].logprob for choices, token in zip(found, token_ids, strict=True)]
