"""`actor_rollout_ref.actor` and `.ref`: the policy's update, and the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_ALGORITHM,
    CHANGES_ROUNDING,
    ActiveUnless,
    ActiveWhen,
    Ratio,
    Requires,
    Section,
)
from alphaapollo.config.schema.model import FrozenFsdp, Optimizer, RoleFsdp

KLEstimator = Literal["kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3"]
KLKind = Literal[KLEstimator, "full", "unbiased", "kl+", "abs+", "mse+", "low_var_kl+", "k1+", "k2+", "k3+"]
AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "group-mean-token-mean",
]


class PolicyLossOptions(Section):
    loss_mode: Annotated[str, CHANGES_ALGORITHM] = "ppo"
    """Policy loss, by its registered name (docs/algorithms)."""
    cispo_mask_low: PositiveFloat | None = None
    """cispo with a mask: drop tokens with a negative advantage and a ratio below 1 - cispo_mask_low; null = off."""
    cispo_mask_high: PositiveFloat | None = None
    """cispo with a mask: drop tokens with a positive advantage and a ratio above 1 + cispo_mask_high; null = off."""
    clip_cov_ratio: Ratio = 2e-4
    """clip_cov: share of tokens whose loss is dropped, drawn from tokens with a covariance between the bounds below."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance between log-prob and advantage."""
    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of the covariance between log-prob and advantage."""
    kl_cov_ratio: Ratio = 2e-4
    """kl_cov: share of tokens with a KL penalty: those with the largest covariance between log-prob and advantage."""
    ppo_kl_coef: NonNegativeFloat = 1.0
    """kl_cov: coefficient of the KL penalty."""
    vespo_positive: tuple[PositiveFloat, NonNegativeFloat] = (2.0, 3.0)
    """vespo: (k, lambda) of the weight W^k exp(lambda (1 - W)) for positive and zero advantages."""
    vespo_negative: tuple[PositiveFloat, NonNegativeFloat] = (3.0, 2.0)
    """vespo: (k, lambda) of the weight for negative advantages."""


class Actor(Section):
    ppo_mini_batch_size: PositiveInt = 256
    """Trajectories (not rows or turns) per optimizer step, over all ranks."""
    ppo_max_token_len_per_gpu: Annotated[PositiveInt | Literal["auto"], CHANGES_ROUNDING] = "auto"
    """Maximum tokens of a micro-batch per rank (times ulysses_sequence_parallel_size); auto = 16384, halved while the
    memory plan does not fit. A longer sequence is a micro-batch of its own. Losses with one ratio per trajectory (gspo,
    gmpo) never split a trajectory."""
    ppo_epochs: PositiveInt = 1
    """Passes over a batch."""
    shuffle: bool = True
    """Assign trajectories to mini-batches at random, reproducibly from trainer.seed and step. Samples of a prompt stay
    in one mini-batch if the algorithm normalizes over mini-batches (magistral, group-mean-token-mean)."""
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    clip_ratio: Annotated[
        PositiveFloat | None, ActiveWhen("uses_clip_ratio", reason="clip_ratio_low and clip_ratio_high are both set")
    ] = None
    """Clip range on both sides; null = the default of the loss (ppo 0.2). dppo_tv and dppo_kl: largest divergence."""
    clip_ratio_low: PositiveFloat | None = None
    """Lower clip range; null = clip_ratio."""
    clip_ratio_high: PositiveFloat | None = None
    """Upper clip range (0.28 for DAPO's clip-higher); null = clip_ratio."""
    clip_ratio_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: upper bound of the ratio for negative advantages (usually 3.0). dppo_tv and dppo_kl: upper bound of
    the importance weight of any token. null = off."""
    tau_pos: PositiveFloat = 1.0
    """sapo: temperature of the soft gate for positive advantages."""
    tau_neg: PositiveFloat = 1.05
    """sapo: temperature of the soft gate for negative and zero advantages."""
    policy_loss: PolicyLossOptions = PolicyLossOptions()
    loss_agg_mode: AggregationMode = "token-mean"
    """Aggregation of token losses (docs/algorithms/loss_parts.md)."""
    loss_scale_factor: Annotated[PositiveFloat | None, ActiveWhen("loss_agg_mode", "seq-mean-token-sum-norm")] = None
    """Constant of seq-mean-token-sum-norm; null = data.max_response_length."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    entropy_freq: PositiveInt = 1
    """Measure actor/entropy every so many iterations. An entropy bonus computes it in every iteration."""
    use_kl_loss: Annotated[bool, Requires(ActiveWhen("/algorithm.use_kl_in_reward", False))] = False
    """Add the KL to the reference model to the loss."""
    kl_loss_coef: Annotated[NonNegativeFloat, ActiveWhen("use_kl_loss", silent_value=0.0)] = 0.001
    """Coefficient of the KL loss."""
    kl_loss_type: Annotated[KLKind, ActiveWhen("use_kl_loss")] = "low_var_kl"
    """KL estimator on sampled tokens, or full = over the whole vocabulary. low_var_kl (k3, as in GRPO) has the gradient
    of KL(ref||policy). k2, and any estimator with a trailing +, have the gradient of KL(policy||ref). unbiased = k3
    weighted by the ratio to the engine's probability (DeepSeek-V3.2), correct also for samples of older weights."""
    use_invalid_action_penalty: bool = False
    """Subtract a penalty from the reward of each turn that the environment cannot parse, at the turn's last token."""
    invalid_action_penalty_coef: Annotated[
        NonNegativeFloat, ActiveWhen("use_invalid_action_penalty", silent_value=0.0)
    ] = 0.1
    """Penalty per invalid turn."""
    ulysses_sequence_parallel_size: Annotated[PositiveInt, CHANGES_ROUNDING] = 1
    """Ranks that share every sequence (Ulysses sequence parallelism), for sequences that do not fit one rank. Must
    divide the ranks and the attention heads. Critic, reference, teacher and reward model use the same size."""
    use_prefix_grouper: Annotated[bool | Literal["auto"], CHANGES_ROUNDING] = "auto"
    """Compute the forward pass of a prompt once for all its samples, in every role (docs/parallelism.md; arXiv
    2506.05433). auto = if the model supports it, in iterations where it saves enough tokens."""
    optim: Optimizer = Optimizer()
    fsdp_config: RoleFsdp = RoleFsdp()

    @property
    def uses_clip_ratio(self) -> bool:
        """Whether clip_ratio_low or clip_ratio_high is null, so that clip_ratio is used."""
        return self.clip_ratio_low is None or self.clip_ratio_high is None

    @property
    def uses_full_kl(self) -> bool:
        """Whether the KL loss is over the full vocabulary instead of the sampled tokens."""
        return self.use_kl_loss and self.kl_loss_type == "full"

    def find_problems(self) -> Iterator[str]:
        if self.use_kl_loss and self.kl_loss_coef == 0:
            yield "kl_loss_coef=0 runs the reference model without effect. Raise it, or set use_kl_loss=false."

    def find_warnings(self) -> Iterator[str]:
        if self.use_kl_loss and self.kl_loss_type in ("kl", "k1"):
            yield (
                f"kl_loss_type={self.kl_loss_type} has an expected gradient of zero, so this loss only adds noise. "
                "Append +, or set k2, for the gradient of KL(policy||reference)."
            )


class Reference(Section):
    fsdp_config: Annotated[
        FrozenFsdp,
        ActiveUnless(
            "/actor_rollout_ref.model.lora_rank", reason="with LoRA the reference is the policy without its adapters"
        ),
    ] = FrozenFsdp()
