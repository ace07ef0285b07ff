"""`model`, `optim` and `fsdp_config`: the sections of every role that has a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_ADAPTERS,
    CHANGES_MODEL,
    CHANGES_OPTIMIZER,
    CHANGES_ROUNDING,
    NEEDS_GPU,
    ActiveUnless,
    ActiveWhen,
    CountOrMinusOne,
    DecayRate,
    FilePath,
    Ratio,
    Requires,
    ResumeRule,
    Section,
)

OptimizerName = Literal["adamw", "muon", "adamw_8bit"]
LoraForm = Literal["merged", "adapter"]
"""Weights that the trainer exports or syncs: full weights with the adapters merged in, or the adapters alone."""
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
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], CHANGES_ROUNDING] = "auto"
    """Precision of the forward and backward pass; master weights are always float32. auto = bfloat16 on a GPU, float32
    on a CPU."""
    attention: Annotated[Literal["auto", "varlen", "flash", "sdpa", "padded"], CHANGES_ROUNDING] = "auto"
    """Attention kernel. auto = on a GPU flash if flash-attn 2 is installed, otherwise varlen (part of torch), or
    sdpa in float32; on a CPU padded, over sequences sorted by length."""
    enable_gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto = only if the memory plan
    does not fit without it."""
    use_torch_compile: Annotated[bool, CHANGES_ROUNDING] = False
    """Compile each layer except its attention (torch.compile). The first batches take about a minute longer. Not yet
    measured on GPUs."""
    use_liger: Annotated[bool | Literal["auto"], CHANGES_ROUNDING] = "auto"
    """Use Liger's fused kernels for norms, rotary embeddings and gates (docs/install.md). auto = on a GPU in bfloat16,
    if liger-kernel is installed, the architecture is granite, llama, qwen2 or qwen3, and use_torch_compile is off."""
    freeze_vision: Annotated[bool, Requires(ActiveWhen("lora_rank", 0)), CHANGES_MODEL] = True
    """Vision-language models: train the language part only. false = also train the vision tower (docs/vision.md)."""
    router_aux_loss_coef: Annotated[NonNegativeFloat, Requires(ActiveWhen("lora_rank", 0))] = 0.0
    """Weight of the load-balancing loss of a mixture of experts (docs/parallelism.md); 0 = off, as usual in RL."""

    _max_length: int = 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest row of the run, which resolve_model sets; 0 = unknown."""
        return self._max_length


class Optimizer(Section):
    name: Annotated[OptimizerName, CHANGES_OPTIMIZER] = "adamw"
    """adamw; muon = Muon for the matrices of the decoder layers, AdamW for all other parameters; adamw_8bit = AdamW
    with moments of 8 bits (needs torchao). See docs/lora.md."""
    lr: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    """Peak learning rate; 1e-6 to 1e-3 are usual. Muon's updates are scaled to the size of AdamW's."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices; norms and biases have none."""
    lr_warmup_steps: CountOrMinusOne = -1
    """Linear warmup in optimizer steps; -1 = use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Annotated[Ratio, ActiveWhen("lr_warmup_steps", -1)] = 0.0
    """Linear warmup as a share of all optimizer steps."""
    warmup_style: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warmup."""
    min_lr_ratio: Annotated[Ratio, ActiveWhen("warmup_style", "cosine")] = 0.0
    """Final learning rate of the cosine schedule, as a share of lr."""

    def find_problems(self) -> Iterator[str]:
        if self.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
            yield "name=adamw_8bit needs torchao. Run `pip install -e '.[torchao]'` in the clone, or set name=adamw."


class Fsdp(Section):
    fsdp_size: Annotated[CountOrMinusOne, CHANGES_ROUNDING] = -1
    """Ranks that share one copy of the model, e.g. the GPUs of a node; the other ranks hold further copies and exchange
    gradients once per optimizer step (HSDP). Must divide the number of ranks; -1 = one copy over all ranks."""
    ep_size: Annotated[PositiveInt, CHANGES_ROUNDING] = 1
    """Ranks that split the experts of each layer of a mixture of experts and exchange tokens (docs/parallelism.md).
    Must divide fsdp_size and the number of experts; 1 = every rank gathers all experts."""
    sync_each_micro_batch: Annotated[bool, WHEN_SHARDED] = True
    """Reduce gradients after every micro-batch; false = once per optimizer step: less traffic, but each rank then holds
    a full float32 gradient (4 bytes per parameter)."""
    optimizer_offload: Annotated[bool, NEEDS_GPU, INACTIVE_WITH_OFFLOAD_POLICY] = False
    """Keep the optimizer state in host memory between updates (GPU only)."""
    offload_policy: Annotated[bool, NEEDS_GPU] = False
    """FSDP2's CPU offload: parameters, gradients and optimizer step stay on the CPU; slow (GPU only)."""

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
