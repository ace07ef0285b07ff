"""`algorithm`, `actor_rollout_ref.actor`, `.ref` and `critic`: advantages, KL, losses, and what they train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import (
    CHANGES_ALGORITHM,
    CHANGES_CODE,
    CHANGES_MODEL,
    CODE,
    ActiveUnless,
    ActiveWhen,
    DecayRate,
    FilePath,
    Ratio,
    RegisteredName,
    Requires,
    ResumeRule,
    Section,
)
from alphaapollo.config.schema.model import FrozenFsdp, Lora, Optimizer, PolicyOptimizer, RoleFsdp

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

WHEN_PPO_KL = ActiveWhen("loss_mode", "ppo_kl")


class PolicyLossOptions(Section):
    loss_mode: Annotated[str, CHANGES_ALGORITHM, RegisteredName("algorithms.policy_losses:get_policy_loss")] = "ppo"
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
    ppo_kl_coef: Annotated[
        NonNegativeFloat,
        ResumeRule("kept", "the coefficient in the checkpoint continues", when=ActiveWhen("adapts_kl_coef")),
    ] = 1.0
    """kl_cov, ppo_kl: coefficient of the KL penalty; with ppo_kl the initial one, unless ppo_kl_type=fixed."""
    ppo_kl_type: Annotated[Literal["fixed", "doubling", "dual"], WHEN_PPO_KL] = "doubling"
    """ppo_kl: coefficient after each iteration (arXiv 1707.06347, section 4). doubling = halved below
    ppo_kl_target / 1.5, doubled above 1.5 ppo_kl_target; dual = dual ascent on KL <= ppo_kl_target."""
    ppo_kl_target: Annotated[PositiveFloat, WHEN_PPO_KL, ActiveUnless("ppo_kl_type", "fixed")] = 0.01
    """ppo_kl: the paper's d_targ, the KL of an iteration's update in nats per token."""
    ppo_kl_rate: Annotated[PositiveFloat, WHEN_PPO_KL, ActiveWhen("ppo_kl_type", "dual")] = 1.0
    """ppo_kl: step size of dual ascent, the change of the coefficient per nat."""
    vespo_positive: tuple[PositiveFloat, NonNegativeFloat] = (2.0, 3.0)
    """vespo: (k, lambda) of the weight W^k exp(lambda (1 - W)) for positive and zero advantages."""
    vespo_negative: tuple[PositiveFloat, NonNegativeFloat] = (3.0, 2.0)
    """vespo: (k, lambda) of the weight for negative advantages."""

    @property
    def adapts_kl_coef(self) -> bool:
        """Whether the coefficient of the penalty changes after each iteration."""
        return self.loss_mode == "ppo_kl" and self.ppo_kl_type != "fixed"


class Actor(Section):
    ppo_mini_batch_size: PositiveInt = 256
    """Trajectories (not rows or turns) per optimizer step, over all ranks."""
    ppo_max_token_len_per_gpu: PositiveInt | Literal["auto"] = "auto"
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
    kl_loss_type: Annotated[
        KLKind,
        ActiveWhen("use_kl_loss"),
        Requires(ActiveWhen("/teacher.divergence", None, "sampled"), when="full", fix="kl_loss_type=low_var_kl+"),
    ] = "low_var_kl"
    """KL estimator on sampled tokens, or full = over the whole vocabulary. low_var_kl (k3, as in GRPO) has the gradient
    of KL(ref||policy). k2, and any estimator with a trailing +, have the gradient of KL(policy||ref). unbiased = k3
    weighted by the ratio to the engine's probability (DeepSeek-V3.2), correct also for samples of older weights."""
    use_invalid_action_penalty: bool = False
    """Subtract a penalty from the reward of each turn that the environment cannot parse, at the turn's last token."""
    invalid_action_penalty_coef: Annotated[
        NonNegativeFloat, ActiveWhen("use_invalid_action_penalty", silent_value=0.0)
    ] = 0.1
    """Penalty per invalid turn."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (Ulysses sequence parallelism), for sequences that do not fit one rank. Must
    divide the ranks and the attention heads. Critic, reference, teacher and reward model use the same size."""
    use_prefix_grouper: bool | Literal["auto"] = "auto"
    """Compute the forward pass of a prompt once for all its samples, in every role (docs/parallelism.md; arXiv
    2506.05433). auto = if the model supports it, in iterations where it saves enough tokens."""
    optim: PolicyOptimizer = PolicyOptimizer()
    fsdp_config: RoleFsdp = RoleFsdp()

    @property
    def uses_clip_ratio(self) -> bool:
        """Whether clip_ratio_low or clip_ratio_high is null, so that clip_ratio is used."""
        return self.clip_ratio_low is None or self.clip_ratio_high is None

    @property
    def uses_full_kl(self) -> bool:
        """Whether the KL loss is over the full vocabulary instead of the sampled tokens."""
        return self.use_kl_loss and self.kl_loss_type == "full"


class Reference(Section):
    fsdp_config: Annotated[
        FrozenFsdp,
        ActiveUnless(
            "/actor_rollout_ref.model.lora_rank", reason="with LoRA the reference is the policy without its adapters"
        ),
    ] = FrozenFsdp()


WHEN_CONTROLLED = ActiveWhen("type", "adaptive", "doubling", "dual")
WHEN_ENABLED = ActiveWhen("enable")
NEEDS_GROUPS = Requires(ActiveUnless("/group_size", 1, shown_key="/env.rollout.n"), fix="env.rollout.n=8")
NEEDS_REFERENCE = Requires(ActiveWhen("/needs_reference", shown_key="/actor_rollout_ref.actor.use_kl_loss"))
NEEDS_WEIGHTS = Requires(ActiveWhen("/actor_rollout_ref.model.lora_rank", 0))
WHEN_CORRECTED = ActiveWhen("method")


class KLControl(Section):
    type: Literal["fixed", "adaptive", "doubling", "dual"] = "fixed"
    """Controller of kl_coef: fixed, adaptive (arXiv 1909.08593), doubling (PPO's), or dual ascent."""
    kl_coef: Annotated[
        NonNegativeFloat,
        ActiveWhen("/algorithm.use_kl_in_reward", silent_value=0.0),
        ResumeRule("kept", "the controller continues from the coefficient in the checkpoint", when=WHEN_CONTROLLED),
    ] = 0.001
    """Coefficient of the KL in the reward; the initial value if a controller changes it."""
    target_kl: Annotated[PositiveFloat, WHEN_CONTROLLED] = 6.0
    """Target KL per sequence, in nats."""
    horizon: Annotated[PositiveFloat, ActiveWhen("type", "adaptive")] = 10000.0
    """adaptive: time scale, in trajectories."""


class FilterGroups(Section):
    enable: Annotated[bool, NEEDS_GROUPS] = False
    """DAPO's dynamic sampling: drop groups in which all samples have the same metric."""
    mode: Annotated[Literal["refill", "reweight"], WHEN_ENABLED] = "refill"
    """refill = generate until the batch is full (DAPO); reweight = generate one batch, and scale the loss of its
    remaining groups to that of a full batch."""
    metric: Annotated[str, WHEN_ENABLED] = "accuracy"
    """Reward component to compare, or `reward`."""
    max_num_gen_batches: Annotated[PositiveInt, WHEN_ENABLED, ActiveUnless("mode", "reweight")] = 10
    """Maximum generation rounds per iteration. After them, the iteration trains on the groups found so far."""

    @property
    def reweights(self) -> bool:
        """Whether the loss of the remaining groups is scaled to a full batch."""
        return self.enable and self.mode == "reweight"

    @property
    def max_rounds(self) -> int:
        """Maximum generation rounds per iteration."""
        return self.max_num_gen_batches if self.enable and self.mode == "refill" else 1


class RolloutCorrection(Section):
    method: Annotated[Literal["tis", "mask"] | None, Requires(ActiveWhen("bypass", False))] = None
    """Weight the policy loss by rho = pi_old / pi_engine: tis truncates rho to the bounds, mask sets it to 0 outside;
    null = off."""
    level: Annotated[Literal["token", "sequence", "geometric"], WHEN_CORRECTED] = "token"
    """rho per token, or per trajectory: the product over its tokens, or their geometric mean (bounds near 1, e.g.
    0.99 and 1.01)."""
    low: Annotated[NonNegativeFloat | None, WHEN_CORRECTED] = None
    """Lower bound of rho; null = no lower bound."""
    high: Annotated[PositiveFloat | None, WHEN_CORRECTED] = 2.0
    """Upper bound of rho; null = no upper bound."""
    bypass: bool = False
    """Use the engine's log-probs as the old log-probs, so that the ratio of the loss includes the correction."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """DeepSeek-V3.2 (arXiv 2512.02556, Eq. 9): no policy loss on tokens with a negative advantage in trajectories whose
    mean log(pi_engine / pi) per token exceeds this, in nats; null = off."""


class OverlongPenalty(Section):
    enable: bool = False
    """DAPO's soft penalty for responses near data.max_response_length (arXiv 2503.14476, Eq. 13)."""
    cache: Annotated[PositiveInt | None, WHEN_ENABLED] = None
    """Tokens before data.max_response_length at which the penalty begins; null = a fifth of it, as in the paper."""
    factor: Annotated[PositiveFloat, WHEN_ENABLED] = 1.0
    """Largest penalty."""


class LengthBudget(Section):
    mode: Literal["exact", "max"] | None = None
    """Reward answers that have exactly, or at most (max), as many tokens as extra_info.length_budget of the data row
    (L1, arXiv 2503.04697); null = off. With max, an answer that just meets the budget keeps half of its reward."""
    coef: Annotated[PositiveFloat, ActiveWhen("mode")] = 3e-4
    """Penalty per token away from the budget (the paper's alpha)."""


WHEN_SELECTED = ActiveWhen("method", "max_variance", "extremes", "random")


class Filtration(Section):
    method: Annotated[
        Literal["best", "best_random", "best_worst", "max_variance", "extremes", "random"] | None, NEEDS_GROUPS
    ] = None
    """Train on some samples of each group; null = on all. max_variance (PODS, arXiv 2504.13818) = the `size` samples
    with the largest variance of rewards; extremes = the size / 2 best and worst; random = any. PF-PPO (arXiv
    2409.06957) weights samples: best = all weight on the best one; best_random = half on the best, half on all others;
    best_worst = half on the best, half on the worst."""
    size: Annotated[Annotated[int, Field(ge=2)] | None, WHEN_SELECTED] = None
    """Samples of each group to train on, at most env.rollout.n; required by max_variance, extremes and random."""
    baseline: Annotated[Literal["selected", "all"], WHEN_SELECTED] = "selected"
    """Samples of which the estimator compares the rewards: those to train on, as in PODS, or all of the group."""

    @property
    def selects(self) -> bool:
        """Whether only `size` samples of each group are trained on."""
        return self.method in ("max_variance", "extremes", "random")


class ReferenceReset(Section):
    every: Annotated[PositiveInt | None, NEEDS_REFERENCE, NEEDS_WEIGHTS] = None
    """ProRL (arXiv 2505.24864): replace the reference by the policy and reset the optimizer every so many iterations;
    null = never."""
    patience: Annotated[PositiveInt | None, NEEDS_REFERENCE, NEEDS_WEIGHTS] = None
    """Reset also after so many validations without a better val/accuracy (or val/reward, if there is none); null =
    never."""


class Algorithm(Section):
    adv_estimator: Annotated[str, CHANGES_ALGORITHM, RegisteredName("algorithms.advantages:get_estimator")] = "gae"
    """Advantage estimator, by its registered name (docs/algorithms). algorithm=NAME sets a complete recipe."""
    gamma: Ratio = 1.0
    """Discount factor, per token; gigpo, turn_gae, turn_group: per turn."""
    lam: Ratio = 1.0
    """Lambda of GAE; gae: per token, turn_gae: per turn."""
    baseline_decay: DecayRate | None = None
    """reinforce: subtract a moving average of the mean returns of earlier iterations. The average before the newest of
    them has this weight (e.g. 0.9); null = no baseline."""
    whiten_advantages: bool = True
    """gae, turn_gae: whiten advantages over the action tokens of the batch."""
    norm_adv_by_std_in_grpo: bool | None = None
    """grpo, gigpo, gpg, grpo_passk: divide by the standard deviation; null = as in the paper: true for grpo and gigpo,
    false for gpg and grpo_passk. grpo with false is Dr. GRPO's advantage."""
    gdpo_rewards: list[str] = []
    """gdpo: reward components to sum; empty = all, except `accuracy` if it equals `task`."""
    gdpo_weights: list[float] = []
    """gdpo: weights in the order of gdpo_rewards; empty = 1 each."""
    gdpo_conditions: dict[str, tuple[str, float]] = {}
    """gdpo: count a component only if another component reaches a threshold, e.g. {length: [accuracy, 1.0]}."""
    gigpo_step_weight: NonNegativeFloat = 1.0
    """gigpo: weight of the per-turn advantages (the paper's omega)."""
    turn_baseline: Literal["return_all", "return_alive"] = "return_all"
    """turn_group: subtract the mean return of all other samples (0 once a sample has ended), or of those that reach the
    turn."""
    passk_k: PositiveInt = 4
    """grpo_passk_analytic: the k of pass@k; at most the group size."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference model from the token rewards."""
    kl_penalty: Annotated[KLEstimator, ActiveWhen("use_kl_in_reward")] = "kl"
    """Estimator of the KL in the reward."""
    kl_ctrl: Annotated[KLControl, ActiveWhen("use_kl_in_reward")] = KLControl()
    filter_groups: FilterGroups = FilterGroups()
    overlong_filter: bool = False
    """DAPO: no loss on trajectories cut by the token limit; they still count in their group's statistics."""
    overlong_penalty: OverlongPenalty = OverlongPenalty()
    length_budget: LengthBudget = LengthBudget()
    filtration: Filtration = Filtration()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    reference_reset: ReferenceReset = ReferenceReset()
    custom_module: Annotated[str, CHANGES_CODE, CODE] = ""
    """Python file, or installed module, that registers your own estimators or losses."""


class CriticModel(Lora):
    path: Annotated[str, CHANGES_MODEL, FilePath("model")] = ""
    """Model that the critic starts from, with a new value head; empty = actor_rollout_ref.model.path."""


class Critic(Section):
    model: CriticModel = CriticModel()
    optim: Optimizer = Optimizer(lr=1e-5)
    ppo_epochs: PositiveInt = 1
    """Passes of the critic over a batch."""
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    cliprange_value: PositiveFloat | None = 0.5
    """Clip range of values around the old values; null = off."""
    fsdp_config: RoleFsdp = RoleFsdp()
