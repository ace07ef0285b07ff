"""`actor_rollout_ref.rollout`: the engines and how they sample."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Ratio, Scalar, Section
from alphaapollo.config.schema.model import LoraForm


class ValSampling(Section):
    n: PositiveInt = 1
    """Samples a validation prompt."""
    temperature: NonNegativeFloat = 1.0
    """Temperature of the sampled validation."""
    top_p: Ratio = 1.0
    """Nucleus of the sampled validation."""
    top_k: int = -1
    """Top-k of the sampled validation; -1 = all."""
    greedy: bool = False
    """Also validate once greedily: val/accuracy_greedy."""


class EngineKwargs(Section):
    vllm: dict[str, Scalar | list[Scalar] | dict[str, Scalar | list[Scalar]]] = {}
    """Further arguments of vLLM's engine (its EngineArgs) by name, e.g. {max_cudagraph_capture_size: 64}."""


class Rollout(Section):
    name: Literal["vllm", "hf", "fake"] = "vllm"
    """The engine: vllm is the real one, hf the slow twin for comparison, fake the twin for tests of the loop."""
    n: PositiveInt = 1
    """Group size, when env.rollout.n is not set."""
    temperature: PositiveFloat = 1.0
    """Temperature of training rollouts; the trainer's log-probs use the same."""
    top_p: Ratio = 1.0
    """Nucleus; below 1 the trained distribution is not the sampled one."""
    top_k: int = -1
    """Top-k; -1 = all."""
    tensor_model_parallel_size: PositiveInt = 1
    """GPUs (or processes, on a CPU) of one engine."""
    num_engines: PositiveInt | None = None
    """Engine replicas; null = training ranks / tensor_model_parallel_size on GPUs, data_parallel_size on a CPU."""
    data_parallel_size: PositiveInt = 1
    """Replicas that verl serves as one engine. Here each is an engine of its own, so it must divide their number."""
    colocate: bool = True
    """Engines share the training GPUs (sleep while training); false = they get GPUs of their own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the engine; auto = the trainer's."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of a GPU's memory that the engine may take."""
    kv_cache_gib: PositiveFloat = 0.5
    """Memory of the engine's KV cache in GiB (CPU only)."""
    cpu_threads: PositiveInt | None = None
    """Threads of each process of an engine (CPU only); null = its share of a node's cores, as the trainer waits while
    it works, and where a run goes on the count that it began with."""
    max_num_seqs: PositiveInt = 256
    """Sequences the engine decodes at a time."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of one engine step at most."""
    block_size: PositiveInt = 32
    """Tokens a KV block: the grain of prefix caching (CPU only)."""
    enforce_eager: bool | None = None
    """Run the engine without compilation and CUDA graphs; null = on a CPU, not on a GPU, where graphs make small models
    decode faster and cost a longer start and some memory."""
    lora: LoraForm = "merged"
    """What an engine gets of a policy with LoRA: whole weights, or the adapters, which vLLM then serves."""
    enable_prefix_caching: bool = True
    """Share the prefill of equal prefixes: the n samples of a prompt, the turns of an episode."""
    router_replay: bool = False
    """Of a mixture of experts: the engine returns the experts that its routers chose for each token, and the policy's
    and the reference's log-probs, and the update, are computed with them (R3, arXiv 2510.11370; docs/moe.md)."""
    free_cache_engine: bool = True
    """Put the engine to sleep while training (colocated GPUs only)."""
    val_kwargs: ValSampling = ValSampling()
    engine_kwargs: EngineKwargs = EngineKwargs()
