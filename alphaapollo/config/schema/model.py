"""`model`, `optim` and `fsdp_config`: what every role that holds a model has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Ratio, Section

LoraForm = Literal["merged", "adapter"]
"""What leaves the trainer: whole weights with the adapters merged into them, or the adapters alone."""


class Lora(Section):
    """LoRA of one model that is trained; see docs/lora.md."""

    lora_rank: NonNegativeInt = 0
    """Rank of the LoRA adapters that are trained in place of the weights; 0 = train the weights."""
    lora_alpha: PositiveInt | None = None
    """An adapter's output counts lora_alpha / lora_rank; null = 16."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The linear layers that get an adapter: all but the output head, or those of these names, e.g. [q_proj,v_proj]."""

    @property
    def alpha(self) -> int:
        return 16 if self.lora_alpha is None else self.lora_alpha

    @property
    def lora_words(self) -> str:
        """For the plan: `, LoRA of rank 16, alpha 32, on all-linear`; nothing without."""
        where = self.target_modules if isinstance(self.target_modules, str) else ", ".join(self.target_modules)
        return f", LoRA of rank {self.lora_rank}, alpha {self.alpha}, on {where}" if self.lora_rank else ""


class Model(Lora):
    path: str = ""
    """Hugging Face hub id or a local folder with config, weights and tokenizer (required)."""
    tokenizer_path: str = ""
    """Where the tokenizer lies, when not with the model."""
    trust_remote_code: bool = False
    """Run the Python code that a model's folder brings along."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward and backward; auto = bfloat16 on GPU, float32 on CPU. Master weights stay float32."""
    attention: Literal["auto", "varlen", "flex", "flash", "sdpa", "padded"] = "auto"
    """Attention over unpadded rows. auto = on a GPU flash if flash-attn 2 is installed, else varlen, which is torch's
    own (sdpa in float32); on a CPU padded, over rows sorted by length."""
    enable_gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto = where the
    plan finds that the token budget would not fit without."""
    use_torch_compile: bool = False
    """Compile each layer but for its attention (torch.compile): norms, rotations and gates in few kernels. The first
    batches take a minute longer. For GPUs; not measured there yet."""
    use_liger: bool | Literal["auto"] = "auto"
    """Compute norms, rotations and gates by Liger's fused kernels (liger-kernel, docs/install.md); losses are this
    project's own. auto = on a GPU, in bfloat16, where it is installed, for the architectures that it was compared on
    (granite, llama, qwen2, qwen3), and without use_torch_compile, which fuses the same parts. Not measured yet."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that evens out the load of a mixture of experts (docs/moe.md), beside the policy's or the
    next-token loss; 0 = none, as is usual in RL. config.json names the one of pre-training, e.g. 0.001."""


class Optimizer(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Ratio, Ratio] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of the matrices (norms and biases are left alone)."""
    lr_warmup_steps: int = Field(default=-1, ge=-1)
    """Linear warm-up in optimiser steps; -1 = lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: Ratio = 0.0
    """Linear warm-up as a share of all optimiser steps."""
    warmup_style: Literal["constant", "cosine"] = "constant"
    """The schedule after the warm-up."""
    min_lr_ratio: Ratio = 0.0
    """Where the cosine ends, as a share of lr."""


class Fsdp(Section):
    fsdp_size: int = Field(default=-1, ge=-1)
    """Ranks that share one copy of the model, e.g. the GPUs of a node; the others hold further copies and add up
    gradients with it once an optimiser step (HSDP). Must divide the ranks; -1 = all share one copy."""
    sync_each_micro_batch: bool = True
    """Add up gradients over the ranks after every micro-batch; false = once an optimiser step: less traffic, but every
    rank then holds the whole model's gradient in float32 (4 bytes a parameter)."""
    optimizer_offload: bool = False
    """Between updates (with main_sft but for its own step) the optimiser's state lies in host memory (GPU only; void on
    a CPU)."""
    offload_policy: bool = False
    """FSDP2's CPU offload, for what does not fit: parameters, gradients and the optimiser's step stay in host memory
    and on the CPU; slow (GPU only; void on a CPU)."""


class RoleFsdp(Fsdp):
    param_offload: bool = False
    """Between this role's phases its parameters lie in host memory (GPU only; void on a CPU)."""


class FrozenFsdp(Section):
    param_offload: bool = False
    """Between this model's phases its parameters lie in host memory (GPU only; void on a CPU)."""
    offload_policy: bool = False
    """FSDP2's CPU offload: parameters stay in host memory and come layer by layer; slow (GPU only; void on a CPU)."""
