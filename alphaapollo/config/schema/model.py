"""`model`, `optim` and `fsdp_config`: the sections of every role that has a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_ADAPTERS,
    CHANGES_MODEL,
    CHANGES_OPTIMIZER,
    CPU_ONLY,
    NAMES_CODE,
    NEEDS_GPU,
    ActiveUnless,
    ActiveWhen,
    CountOrMinusOne,
    DecayRate,
    FilePath,
    PositiveRatio,
    Ratio,
    Requires,
    ResumeRule,
    Scalar,
    Section,
)
from alphaapollo.config.schema.plugins import PluginSections, Sections, make_name_check

OptimizerName = Literal["adamw", "muon", "adamw_8bit"]
PolicyOptimizerName = Literal[OptimizerName, "trpo"]
LoraForm = Literal["merged", "adapter"]
"""Weights that the trainer exports or syncs: full weights with the adapters merged in, or the adapters alone."""
WHEN_NONDETERMINISTIC = ActiveWhen("@device", "cuda", reason="computations on a CPU are always deterministic")
WHEN_SHARDED = ActiveUnless("/trainer.num_ranks", 1, reason="there is one training rank")
NEEDS_ADAPTERS = Requires(ActiveWhen("lora_rank"), fix="lora_rank=16")
INACTIVE_WITH_OFFLOAD_POLICY = ActiveUnless("offload_policy")


class Lora(Section):
    """LoRA of one trained model (docs/lora.md)."""

    lora_rank: Annotated[NonNegativeInt, CHANGES_ADAPTERS] = 0
    """Rank of the LoRA adapters, which are trained instead of the weights; 0 = train the weights."""
    lora_alpha: Annotated[PositiveInt | None, NEEDS_ADAPTERS, CHANGES_ADAPTERS] = None
    """LoRA alpha: the output of an adapter is scaled by lora_alpha / lora_rank; null = 16."""
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], NEEDS_ADAPTERS, CHANGES_ADAPTERS
    ] = "all-linear"
    """Linear layers that get an adapter: all except the output head, or a list of names, e.g. [q_proj,v_proj]."""

    @property
    def alpha(self) -> int:
        return 16 if self.lora_alpha is None else self.lora_alpha

    @property
    def lora_summary(self) -> str:
        """Text for the printed plan, e.g. `, LoRA of rank 16, alpha 32, on all-linear`; empty without LoRA."""
        where = self.target_modules if isinstance(self.target_modules, str) else ", ".join(self.target_modules)
        return f", LoRA of rank {self.lora_rank}, alpha {self.alpha}, on {where}" if self.lora_rank else ""


class Model(Lora):
    path: Annotated[str, CHANGES_MODEL, FilePath("model", required=True)] = ""
    """Hugging Face hub id, or local folder with config, weights and tokenizer (required)."""
    tokenizer_path: Annotated[str, ResumeRule("refused", "another tokenizer"), FilePath("tokenizer")] = ""
    """Folder or hub id of the tokenizer; empty = same as path."""
    trust_remote_code: Annotated[bool, NAMES_CODE] = False
    """Run Python code that comes with the model."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass; master weights are always float32. auto = bfloat16 on a GPU, float32
    on a CPU. fastest = bfloat16 also on a CPU with instructions for it (AMX, avx512_bf16). On other CPUs bfloat16 is
    many times slower than float32."""
    attention: Literal["auto", "varlen", "flash", "sdpa", "padded"] = "auto"
    """Attention kernel. auto = on a GPU flash if flash-attn 2 is installed, otherwise varlen (part of torch), or
    sdpa in float32; on a CPU padded, over sequences sorted by length."""
    enable_gradient_checkpointing: bool | Literal["auto", "selective"] | Annotated[int, Field(ge=2)] = "auto"
    """Recompute layers in the backward pass: less memory, the same gradients. true = every layer, about a third more
    time; N = every N-th layer; selective = every layer, but results of its matrix products and of fused attention are
    kept; auto = what the memory plan needs: nothing, selective, or every layer."""
    activation_offload: Annotated[
        bool, Requires(ActiveWhen("enable_gradient_checkpointing"), fix="enable_gradient_checkpointing=true")
    ] = False
    """Keep the inputs of recomputed decoder layers in pinned host memory. Copies overlap with computation. On a CPU,
    they are copied within host memory, which saves nothing."""
    use_torch_compile: bool = False
    """Compile each layer except its attention (torch.compile). The first batches take about a minute longer. Not yet
    measured on GPUs."""
    use_liger: bool | Literal["auto"] = "auto"
    """Use Liger's fused kernels for norms, rotary embeddings and gates (docs/install.md). auto = on a GPU in bfloat16,
    if liger-kernel is installed, the architecture is granite, llama, qwen2 or qwen3, and use_torch_compile is off."""
    freeze_vision: Annotated[bool, Requires(ActiveWhen("lora_rank", 0)), CHANGES_MODEL] = True
    """Vision-language models: train the language part only. false = also train the vision tower (docs/vision.md)."""
    router_aux_loss_coef: Annotated[NonNegativeFloat, Requires(ActiveWhen("lora_rank", 0))] = 0.0
    """Weight of the load-balancing loss of a mixture of experts (docs/parallelism.md); 0 = off, as usual in RL."""

    _max_length: int = 0

    @property
    def keeps_products(self) -> bool:
        """Whether recomputed layers keep results of matrix products and of attention."""
        return self.enable_gradient_checkpointing == "selective"

    @property
    def recompute_interval(self) -> int:
        """1 = every layer is recomputed in the backward pass, N = every N-th one, 0 = none."""
        choice = self.enable_gradient_checkpointing
        return 1 if isinstance(choice, str) else int(choice)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row of the run, which resolve_model sets; 0 = unknown."""
        return self._max_length


WITH_TRPO, NOT_WITH_TRPO = ActiveWhen("name", "trpo"), ActiveUnless("name", "trpo")


USUAL_LR, USUAL_LORA_LR = (1e-7, 1e-3), (1e-7, 5e-3)


class Optimizer(Section):
    name: Annotated[OptimizerName, CHANGES_OPTIMIZER] = "adamw"
    """adamw; muon = Muon for the matrices of the decoder layers, AdamW for all other parameters; adamw_8bit = AdamW
    with moments of 8 bits (needs torchao). See docs/lora.md."""
    lr: Annotated[Annotated[float, Field(gt=0.0, le=1.0)], NOT_WITH_TRPO] = 1e-6
    """Peak learning rate; 1e-7 to 1e-3 are usual, with LoRA up to 5e-3. Muon's updates are scaled to the size of
    AdamW's."""
    betas: Annotated[tuple[DecayRate, DecayRate], NOT_WITH_TRPO] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: Annotated[NonNegativeFloat, NOT_WITH_TRPO] = 0.01
    """Decoupled weight decay of matrices; norms and biases have none."""
    lr_warmup_steps: Annotated[CountOrMinusOne, NOT_WITH_TRPO] = -1
    """Linear warmup in optimizer steps; -1 = use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Annotated[Ratio, NOT_WITH_TRPO, ActiveWhen("lr_warmup_steps", -1)] = 0.0
    """Linear warmup as a share of all optimizer steps."""
    warmup_style: Annotated[Literal["constant", "cosine"], NOT_WITH_TRPO] = "constant"
    """Learning-rate schedule after the warmup."""
    min_lr_ratio: Annotated[Ratio, NOT_WITH_TRPO, ActiveWhen("warmup_style", "cosine")] = 0.0
    """Final learning rate of the cosine schedule, as a share of lr."""


class PolicyOptimizer(Optimizer):
    name: Annotated[PolicyOptimizerName, CHANGES_OPTIMIZER] = "adamw"  # type: ignore[assignment]
    """adamw, muon or adamw_8bit as for other models (docs/lora.md); trpo = natural gradient steps of limited KL
    (docs/algorithms/trust_region.md)."""
    delta: Annotated[PositiveFloat, WITH_TRPO] = 0.01
    """trpo: largest KL from the policy before a step to the policy after it, in nats per token."""
    cg_steps: Annotated[PositiveInt, WITH_TRPO] = 10
    """trpo: conjugate gradient steps. Each has a forward and a backward pass over the mini-batch."""
    cg_damping: Annotated[NonNegativeFloat, WITH_TRPO] = 0.1
    """trpo: multiple of the identity that is added to the Fisher matrix."""


class Fsdp(Section):
    fsdp_size: CountOrMinusOne = -1
    """Ranks that share one copy of the model, e.g. the GPUs of a node; the other ranks hold further copies and exchange
    gradients once per optimizer step (HSDP). Must divide the number of ranks; -1 = on several GPU nodes a copy on each
    node, if the memory plan fits, otherwise one copy over all ranks."""
    ep_size: PositiveInt = 1
    """Ranks that split the experts of each layer of a mixture of experts and exchange tokens (docs/parallelism.md).
    Must divide fsdp_size and the number of experts; 1 = every rank gathers all experts."""
    sync_each_micro_batch: Annotated[bool, WHEN_SHARDED] = True
    """Reduce gradients after every micro-batch; false = once per optimizer step: less traffic, but each rank then holds
    a full float32 gradient (4 bytes per parameter)."""
    optimizer_offload: Annotated[bool, NEEDS_GPU, INACTIVE_WITH_OFFLOAD_POLICY] = False
    """Keep the optimizer state in host memory between updates (GPU only)."""
    offload_policy: Annotated[bool, NEEDS_GPU] = False
    """FSDP2's CPU offload: parameters, gradients and optimizer step stay on the CPU; slow (GPU only)."""
    full_determinism: Annotated[bool, WHEN_NONDETERMINISTIC] = False
    """Use only deterministic GPU kernels, so that equal updates are equal bit for bit; slower. An operation without
    such a kernel ends the run with torch's error. See docs/reliability.md."""

    def count_shards(self, num_ranks: int) -> int:
        """Return the number of ranks that share one copy of the model."""
        return num_ranks if self.fsdp_size == -1 else self.fsdp_size


class RoleFsdp(Fsdp):
    param_offload: Annotated[bool, NEEDS_GPU, INACTIVE_WITH_OFFLOAD_POLICY] = False
    """Keep parameters in host memory while the role is idle (GPU only)."""


class FrozenFsdp(Section):
    param_offload: Annotated[bool, NEEDS_GPU, INACTIVE_WITH_OFFLOAD_POLICY] = False
    """Keep parameters in host memory while the role is idle (GPU only)."""
    offload_policy: Annotated[bool, NEEDS_GPU] = False
    """FSDP2's CPU offload: parameters stay in host memory and are loaded layer by layer; slow (GPU only)."""


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


ArgumentName = Annotated[str, AfterValidator(lambda name: name.replace("-", "_"))]  # a-b means a_b
EngineArguments = dict[ArgumentName, Scalar | list[Scalar] | dict[str, Scalar | list[Scalar]]]


class EngineKwargs(Section):
    vllm: Annotated[
        EngineArguments, ActiveWhen("/actor_rollout_ref.rollout.name", "vllm"), ActiveWhen("/rollout.name", "vllm")
    ] = {}
    """Further arguments of vLLM's engine (EngineArgs) by name, e.g. {max_cudagraph_capture_size: 64}."""
    sglang: Annotated[
        EngineArguments, ActiveWhen("/actor_rollout_ref.rollout.name", "sglang"), ActiveWhen("/rollout.name", "sglang")
    ] = {}
    """Further arguments of SGLang's engine (ServerArgs) by name, e.g. {schedule_policy: fcfs}."""


ENGINES = ("vllm", "hf", "fake")


class Rollout(Section):
    name: Annotated[str, make_name_check("engine", "engines", ENGINES)] = "vllm"
    """Engine: vllm; sglang (docs/engines.md); hf = slow reference implementation with transformers; fake =
    mock for tests of the loop; or an engine of an installed package (docs/plugins.md)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts; the trainer's log-probs use the same temperature."""
    top_p: PositiveRatio = 1.0
    """Nucleus sampling."""
    top_k: CountOrMinusOne = -1
    """Top-k sampling; -1 or 0 = all tokens."""
    min_p: Ratio = 0.0
    """Sample only tokens with at least this share of the largest probability (arXiv 2407.01082); 0 = all tokens."""
    sampling_mask: Annotated[bool | Literal["auto"], ActiveWhen("is_truncated", shown_key="top_p")] = "auto"
    """With top_p, top_k or min_p, the engine returns the tokens that its sampler kept, and the trainer's log-probs and
    entropy are those of the truncated distribution; auto = true; false = of the full distribution, which biases the
    gradients (docs/algorithms/loss_parts.md#truncated-sampling)."""
    stop: Annotated[str | list[NonEmptyText], ActiveUnless("name", "fake")] = []
    """Strings that end an answer like a stop token, for models without an end of turn, e.g. ["\\n\\nQuestion:"].
    Training includes the tokens of the string."""
    include_stop_str_in_output: Annotated[bool, ActiveWhen("stop")] = False
    """Graders and environments see the stop string at the end of the answer; false = only the text before it."""
    tensor_model_parallel_size: Annotated[PositiveInt, Requires(ActiveWhen("name", "vllm", "sglang"))] = 1
    """GPUs (on a CPU: processes) per engine."""
    expert_parallel_size: Annotated[PositiveInt, NEEDS_GPU] = 1
    """Mixture of experts: 1 = each GPU of an engine has a part of every expert; tensor_model_parallel_size = each GPU
    has complete experts (vLLM's enable_expert_parallel; GPU only)."""
    num_engines: PositiveInt | None = None
    """Number of engines; null = GPUs of the run / tensor_model_parallel_size, 1 on a CPU."""
    colocate: Annotated[bool, NEEDS_GPU] = True
    """Engines share the training GPUs; false = engines get their own GPUs, as they always do with nnodes > 0."""
    nnodes: NonNegativeInt = 0
    """Nodes for engines only, in addition to the trainer.nnodes nodes; 0 = engines run on the training nodes."""
    n_gpus_per_node: Annotated[PositiveInt | None, NEEDS_GPU, ActiveWhen("nnodes")] = None
    """GPUs of an engine node; null = trainer.n_gpus_per_node."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
    """Precision of the engine; auto = the model's dtype, fastest as in model.dtype."""
    gpu_memory_utilization: Annotated[PositiveRatio | Literal["auto"], NEEDS_GPU] = "auto"
    """Share of a GPU's memory that an engine may use; auto = what training leaves free, at most 0.9."""
    kv_cache_gib: Annotated[PositiveFloat, CPU_ONLY] = 0.5
    """KV cache of an engine, in GiB (CPU only)."""
    cpu_threads: Annotated[PositiveInt | None, CPU_ONLY, ActiveWhen("has_engine_process", shown_key="name")] = None
    """Threads per engine process (CPU only); null = an equal share of the node's cores. A resumed run keeps its number
    of threads."""
    max_num_seqs: PositiveInt | Literal["auto"] = "auto"
    """Sequences that an engine decodes at a time; auto = 256 on a CPU; on a GPU 1024, or less (256 at least) if an
    engine has fewer trajectories at a time."""
    max_num_batched_tokens: PositiveInt = 8192
    """Maximum tokens per engine step."""
    enforce_eager: Annotated[bool | None, ActiveWhen("name", "vllm")] = None
    """Run the engine without compilation and CUDA graphs; null = true on a CPU, false on a GPU."""
    full_determinism: Annotated[bool, NEEDS_VLLM, WHEN_NONDETERMINISTIC] = False
    """Use vLLM's batch-invariant kernels (Hopper or newer): the tokens of a request do not depend on other requests in
    the batch; slower."""
    lora: Annotated[
        LoraForm,
        Requires(ActiveWhen("name", "vllm", "sglang")),
        Requires(ActiveWhen("tensor_model_parallel_size", 1)),
        Requires(ActiveWhen("/actor_rollout_ref.model.lora_rank", *range(1, 513)), fix="a rank from 1 to 512"),
    ] = "merged"
    """Weight sync of a policy with LoRA: merged = full weights; adapter = adapters only, which the engine serves."""
    max_loras: Annotated[PositiveInt, NEEDS_VLLM, ActiveWhen("lora", "adapter")] = 2
    """Adapters that vLLM applies in one step, e.g. of running and of new requests. Requests of other adapters wait."""
    enable_prefix_caching: bool = True
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
    val_kwargs: ValSampling = ValSampling()
    engine_kwargs: Annotated[EngineKwargs, NAMES_CODE, ActiveWhen("has_engine_process", shown_key="name")] = (
        EngineKwargs()
    )
    plugins: Annotated[Sections, PluginSections("rollout", "name", "vllm"), Field(validate_default=True)] = {}
    """Settings of engines of installed packages by name, e.g. {maze: {delay: 0}} (docs/plugins.md)."""

    @property
    def has_engine_process(self) -> bool:
        """Whether the engine has processes of its own, with a KV cache."""
        return self.name in EngineKwargs.model_fields

    @property
    def is_truncated(self) -> bool:
        """Whether the sampler leaves out tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def returns_kept_tokens(self) -> bool:
        """Whether engines return the tokens that the sampler kept."""
        return self.is_truncated and self.sampling_mask is not False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))
