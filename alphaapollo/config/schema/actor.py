"""`actor_rollout_ref.actor` and `.ref`: the policy's update."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Ratio, Section
from alphaapollo.config.schema.model import FrozenFsdp, Optimizer, RoleFsdp

KLKind = Literal[
    "kl",
    "abs",
    "mse",
    "low_var_kl",
    "full",
    "k1",
    "k2",
    "k3",
    "kl+",
    "abs+",
    "mse+",
    "low_var_kl+",
    "k1+",
    "k2+",
    "k3+",
]
AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "group-mean-token-mean",
]


class PolicyLoss(Section):
    loss_mode: str = "ppo"
    """The policy loss, by name in the registry."""
    cispo_mask_low: PositiveFloat | None = None
    """cispo, unified form: drop tokens with A < 0 and a ratio below 1 - this; null = none."""
    cispo_mask_high: PositiveFloat | None = None
    """cispo, unified form: drop tokens with A > 0 and a ratio above 1 + this; null = none."""
    clip_cov_ratio: Ratio = 2e-4
    """clip_cov: share of the tokens whose loss is dropped."""
    clip_cov_lb: float = 1.0
    """clip_cov: they are drawn from covariances above this."""
    clip_cov_ub: float = 5.0
    """clip_cov: they are drawn from covariances below this."""
    kl_cov_ratio: Ratio = 2e-4
    """kl_cov: share of the tokens, those of the largest covariance, that get a KL penalty."""
    ppo_kl_coef: NonNegativeFloat = 1.0
    """kl_cov: its coefficient."""


class Actor(Section):
    ppo_mini_batch_size: PositiveInt = 256
    """Trajectories (not rows, not turns) an optimiser step, over all ranks."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens of one micro-batch at most, on each rank (ranks that share sequences: together so many times more). A
    longer row is a micro-batch of its own, and so are the rows of a longer trajectory where the loss weighs it as a
    whole (gspo, gmpo)."""
    ppo_epochs: PositiveInt = 1
    """Passes over a batch."""
    shuffle: bool = True
    """Deal the trajectories into mini-batches at random (a function of trainer.seed and the step). Samples of a prompt
    are dealt together where something is normalised over a mini-batch: magistral, group-mean-token-mean."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    clip_ratio: PositiveFloat | None = None
    """Clip range, both sides; null = the loss's own (ppo 0.2)."""
    clip_ratio_low: PositiveFloat | None = None
    """Lower clip range; null = clip_ratio."""
    clip_ratio_high: PositiveFloat | None = None
    """Upper clip range (DAPO's clip-higher: 0.28); null = clip_ratio."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of the ratio where the advantage is negative (usually 3.0, must be > 1); null = off."""
    tau_pos: PositiveFloat = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: PositiveFloat = 1.05
    """sapo: temperature of the gate where it is not."""
    policy_loss: PolicyLoss = PolicyLoss()
    loss_agg_mode: AggregationMode = "token-mean"
    """How token losses become one number; see docs/algorithms."""
    loss_scale_factor: PositiveFloat | None = None
    """The constant of seq-mean-token-sum-norm; null = data.max_response_length."""
    loss_agg_count: Literal["all", "nonempty"] = "all"
    """What seq-mean and group-mean modes divide by: all trajectories (groups), or those with a token in the loss. They
    differ with algorithm.overlong_filter: with `all`, leaving one out does not change the weight of the others."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference model to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Its coefficient."""
    kl_loss_type: KLKind = "low_var_kl"
    """Its estimator; a trailing + takes the gradient of k2. low_var_kl (k3, GRPO's) has the value of KL(policy||ref)
    and the gradient of the other, KL(ref||policy); k2 and low_var_kl+ (k3+) have the gradient of KL(policy||ref)."""
    use_invalid_action_penalty: bool = False
    """Subtract the penalty from the reward on the last token of an invalid turn."""
    invalid_action_penalty_coef: NonNegativeFloat = 0.1
    """The penalty."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence, each with a part of its tokens and, in attention, of the heads (Ulysses): for
    rows that are too long for one. Must divide the ranks and the model's attention heads. Critic, reference and reward
    model do as the actor."""
    use_prefix_grouper: bool | Literal["auto"] = "auto"
    """Compute a prompt once for all its samples, in every role (docs/shared_prompts.md; arXiv 2506.05433). auto = where
    the model allows it, and in iterations in which it saves enough; the metric batch/sharing says what."""
    optim: Optimizer = Optimizer()
    fsdp_config: RoleFsdp = RoleFsdp()

    @property
    def full_kl(self) -> bool:
        """The KL in the loss compares whole distributions, inside the update, not log-probs of the sampled tokens."""
        return self.use_kl_loss and self.kl_loss_type == "full"


class Reference(Section):
    log_probs_ahead: bool | Literal["auto"] = "auto"
    """In the synchronous loop, compute the reference's log-probs of groups that have ended while others are still
    played: each group in micro-batches of its own, so that sums round otherwise than without, but alike whatever ends
    first. auto = where engines have GPUs of their own (rollout.colocate=false), for training GPUs idle then. Engines
    that share the training GPUs hold their memory, so true is refused; on a CPU they hold the cores."""
    ulysses_sequence_parallel_size: PositiveInt | None = None
    """null = the actor's, which it must be: the reference computes beside it."""
    fsdp_config: FrozenFsdp = FrozenFsdp()
