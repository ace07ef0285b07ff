"""`actor_rollout_ref.rollout`: the inference engines and their sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_ROUNDING,
    CHANGES_THREADS,
    CHANGES_VALIDATION,
    CPU_ONLY,
    NEEDS_GPU,
    ActiveWhen,
    CountOrMinusOne,
    PositiveRatio,
    Requires,
    Scalar,
    Section,
)
from alphaapollo.config.schema.model import LoraForm

NonEmptyText = Annotated[str, Field(min_length=1)]
NEEDS_VLLM = Requires(ActiveWhen("name", "vllm"))
NEEDS_NO_STALENESS = Requires(ActiveWhen("/engine_staleness", 0, shown_key="/trainer.max_staleness"))


class ValSampling(Section):
    n: PositiveInt = 1
    """Samples per validation prompt."""
    temperature: NonNegativeFloat = 1.0
    """Temperature of validation; 0 = greedy."""
    top_p: PositiveRatio = 1.0
    """Nucleus sampling of validation."""
    top_k: CountOrMinusOne = -1
    """Top-k sampling of validation; -1 or 0 = all tokens."""
    greedy: bool = False
    """Also validate once greedily: val/accuracy_greedy."""


class EngineKwargs(Section):
    vllm: dict[str, Scalar | list[Scalar] | dict[str, Scalar | list[Scalar]]] = {}
    """Further arguments of vLLM's engine (EngineArgs) by name, e.g. {max_cudagraph_capture_size: 64}."""


class Rollout(Section):
    name: Annotated[Literal["vllm", "hf", "fake"], CHANGES_ROUNDING] = "vllm"
    """Engine: vllm; hf = slow reference implementation with transformers; fake = mock for tests of the loop."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts; the trainer's log-probs use the same temperature."""
    top_p: PositiveRatio = 1.0
    """Nucleus sampling."""
    top_k: CountOrMinusOne = -1
    """Top-k sampling; -1 or 0 = all tokens."""
    stop: Annotated[str | list[NonEmptyText], ActiveWhen("name", "vllm", "hf")] = []
    """Strings that end an answer like a stop token, for models without an end of turn, e.g. ["\\n\\nQuestion:"]. The
    tokens up to the one that completes the string are trained on."""
    include_stop_str_in_output: Annotated[bool, ActiveWhen("stop")] = False
    """Graders and environments see the stop string at the end of the answer; false = only the text before it."""
    tensor_model_parallel_size: Annotated[PositiveInt, NEEDS_VLLM, CHANGES_ROUNDING] = 1
    """GPUs (on a CPU: processes) per engine."""
    expert_parallel_size: Annotated[PositiveInt, NEEDS_GPU, CHANGES_ROUNDING] = 1
    """Mixture of experts: 1 = each GPU of an engine has a part of every expert; tensor_model_parallel_size = each GPU
    has complete experts (vLLM's enable_expert_parallel; GPU only)."""
    num_engines: Annotated[PositiveInt | None, CHANGES_ROUNDING] = None
    """Number of engines; null = GPUs of the run / tensor_model_parallel_size, 1 on a CPU."""
    colocate: Annotated[bool, NEEDS_GPU] = True
    """Engines share the training GPUs; false, or with nnodes, they get their own GPUs."""
    nnodes: Annotated[NonNegativeInt, CHANGES_ROUNDING] = 0
    """Nodes for engines only, in addition to the trainer.nnodes nodes; 0 = engines run on the training nodes."""
    n_gpus_per_node: Annotated[PositiveInt | None, NEEDS_GPU, ActiveWhen("nnodes"), CHANGES_ROUNDING] = None
    """GPUs of an engine node; null = trainer.n_gpus_per_node."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], CHANGES_ROUNDING] = "auto"
    """Precision of the engine; auto = the model's dtype."""
    gpu_memory_utilization: Annotated[PositiveRatio | Literal["auto"], NEEDS_GPU] = "auto"
    """Share of a GPU's memory that an engine may use; auto = what training leaves free, at most 0.9."""
    kv_cache_gib: Annotated[PositiveFloat, CPU_ONLY] = 0.5
    """KV cache of an engine, in GiB (CPU only)."""
    cpu_threads: Annotated[PositiveInt | None, CPU_ONLY, ActiveWhen("name", "vllm"), CHANGES_THREADS] = None
    """Threads per engine process (CPU only); null = an equal share of the node's cores. A resumed run keeps its number
    of threads."""
    max_num_seqs: Annotated[PositiveInt | Literal["auto"], CHANGES_ROUNDING] = "auto"
    """Sequences that an engine decodes at a time; auto = 256 on a CPU; on a GPU 1024, or less (256 at least) if an
    engine has fewer trajectories at a time."""
    max_num_batched_tokens: Annotated[PositiveInt, CHANGES_ROUNDING] = 8192
    """Maximum tokens per engine step."""
    enforce_eager: Annotated[bool | None, CHANGES_ROUNDING] = None
    """Run the engine without compilation and CUDA graphs; null = true on a CPU, false on a GPU."""
    lora: Annotated[
        LoraForm,
        NEEDS_VLLM,
        NEEDS_NO_STALENESS,
        Requires(ActiveWhen("tensor_model_parallel_size", 1)),
        Requires(ActiveWhen("/actor_rollout_ref.model.lora_rank", *range(1, 513)), fix="a rank from 1 to 512"),
    ] = "merged"
    """Weight sync of a policy with LoRA: merged = full weights; adapter = adapters only, which vLLM serves."""
    enable_prefix_caching: Annotated[bool, CHANGES_ROUNDING] = True
    """Share the prefill of equal prefixes: the n samples of a prompt, the turns of an episode."""
    router_replay: Annotated[
        bool,
        NEEDS_VLLM,
        NEEDS_NO_STALENESS,
        Requires(ActiveWhen("enable_prefix_caching", True)),
        Requires(ActiveWhen("stop_strings", (), shown_key="stop")),
        Requires(ActiveWhen("lora", "merged")),
        Requires(ActiveWhen("/data.reuse.groups", 0)),
    ] = False
    """Mixture of experts: log-probs and update use the experts that the engine's routers chose (R3, arXiv 2510.11370;
    docs/parallelism.md)."""
    free_cache_engine: Annotated[bool, ActiveWhen("@device", "cuda", reason=NEEDS_GPU.reason, silent_value=False)] = (
        True
    )
    """Put engines to sleep while training (only engines that share the training GPUs)."""
    val_kwargs: Annotated[ValSampling, CHANGES_VALIDATION] = ValSampling()
    engine_kwargs: Annotated[EngineKwargs, ActiveWhen("name", "vllm"), CHANGES_ROUNDING] = EngineKwargs()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))

    def find_problems(self) -> Iterator[str]:
        if self.expert_parallel_size not in (1, self.tensor_model_parallel_size):
            size = f"expert_parallel_size={self.expert_parallel_size}"
            yield f"{size} must be 1 or tensor_model_parallel_size={self.tensor_model_parallel_size}. Set one of these."

    def find_warnings(self) -> Iterator[str]:
        for key, value, is_cut in (("top_p", self.top_p, self.top_p < 1), ("top_k", self.top_k, self.top_k > 0)):
            if is_cut:
                why = "log-probs, ratios and KL use the full distribution"
                yield f"{key}={value} biases the gradients: {why}. Use it for validation only (val_kwargs)."
