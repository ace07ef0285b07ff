"""`algorithm`: advantages, KL, and which samples count."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.base import Ratio, Section


class KLController(Section):
    type: Literal["fixed", "adaptive", "doubling", "dual"] = "fixed"
    """How kl_coef moves with the per-sequence KL: not, adaptive (arXiv 1909.08593), PPO's doubling, or dual ascent."""
    kl_coef: NonNegativeFloat = 0.001
    """The (initial) coefficient of the KL in the reward."""
    target_kl: PositiveFloat = 6.0
    """The per-sequence KL in nats to steer to (not for fixed)."""
    horizon: PositiveFloat = 10000.0
    """Adaptive: how slowly to steer, in trajectories."""
    dual_step_size: PositiveFloat = 0.01
    """Dual: how much the coefficient grows a nat above target_kl."""


class FilterGroups(Section):
    enable: bool = False
    """DAPO's dynamic sampling: drop groups whose samples all have the same metric; generate until the batch is full."""
    metric: str = "accuracy"
    """The reward component to look at, or `reward`."""
    max_num_gen_batches: PositiveInt = 10
    """Generation rounds an iteration at most; then it trains on the groups it has."""


class RolloutCorrection(Section):
    method: Literal["tis", "mask"] | None = None
    """Weigh the policy loss by rho = pi_old / pi_engine: tis cuts rho to the bounds, mask zeroes it outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """rho of each token, or of the whole row: the product over its tokens, or their geometric mean."""
    low: NonNegativeFloat | None = None
    """Lower bound of rho; null = none."""
    high: PositiveFloat | None = 2.0
    """Upper bound of rho; null = none."""
    bypass: bool = False
    """Take the engine's log-probs as the old ones: the ratio of the loss then corrects by itself."""


class OverlongPenalty(Section):
    enable: bool = False
    """DAPO's soft punishment of responses near data.max_response_length (arXiv 2503.14476, Eq. 13)."""
    cache: PositiveInt | None = None
    """It starts so many tokens before data.max_response_length; null = a fifth of it, the paper's share."""
    factor: PositiveFloat = 1.0
    """It falls to minus this."""


class LengthBudget(Section):
    mode: Literal["exact", "max"] | None = None
    """L1's reward for keeping to a row's own extra_info.length_budget (arXiv 2503.04697); null = none."""
    coef: PositiveFloat = 3e-4
    """What a token away from the budget costs (the paper's alpha)."""
    slack: Ratio = 0.5
    """max: the share of the reward left when the budget is just met (the paper's delta)."""


class Filtration(Section):
    method: Literal["best", "best_random", "best_worst"] | None = None
    """PF-PPO (arXiv 2409.06957): learn from a group's best sample, from it and others, or it and the worst."""


class ReferenceReset(Section):
    every: PositiveInt | None = None
    """ProRL (arXiv 2505.24864): every so many iterations the policy becomes the reference and the optimiser forgets."""
    patience: PositiveInt | None = None
    """The same after so many validations in a row without a better val/accuracy; null = never."""
    min_gain: NonNegativeFloat = 0.0
    """A validation is better if it gains more than this."""


class Algorithm(Section):
    adv_estimator: str = "gae"
    """The advantage estimator alone, by name in the registry (docs/algorithms); algorithm=NAME takes a whole recipe."""
    gamma: Ratio = 1.0
    """Discount."""
    lam: Ratio = 1.0
    """GAE's lambda."""
    whiten_advantages: bool = True
    """gae: whiten the advantages over the action tokens of the batch."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the group's standard deviation; false = Dr. GRPO's advantage."""
    adv_ddof: Literal[0, 1] = 1
    """Standard deviations of the estimators divide by N - this."""
    adv_eps: NonNegativeFloat | None = None
    """Added to those deviations; null = the estimator's own (grpo 1e-6)."""
    adv_singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a group that has one sample left: zero, or its raw reward."""
    reinforce_pp_level: Literal["sequence", "token"] = "sequence"
    """reinforce_plus_plus_baseline: batch statistics over samples, or over tokens (long answers weigh more)."""
    gpg_std_norm: bool = False
    """gpg: divide by the group's standard deviation."""
    gdpo_rewards: list[str] = []
    """gdpo: the named rewards to sum; empty = all, but not `accuracy` where `task` tells the same."""
    gdpo_weights: list[float] = []
    """gdpo: their weights, one each in the order of gdpo_rewards; empty = 1."""
    gdpo_conditions: dict[str, tuple[str, float]] = {}
    """gdpo: pay a reward only where another one reaches a threshold, e.g. {length: [accuracy, 1.0]}."""
    gigpo_step_weight: NonNegativeFloat = 1.0
    """gigpo: weight of the turns' advantages beside the episode's (the paper's omega)."""
    gigpo_std_norm: bool = True
    """gigpo: divide both by their standard deviations."""
    passk_std_norm: bool = False
    """grpo_passk: divide by the group's standard deviation."""
    passk_k: PositiveInt = 4
    """grpo_passk_analytic: the k of pass@k; at most the group size."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference model from the token rewards."""
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3"] = "kl"
    """The estimator of the KL in the reward."""
    kl_ctrl: KLController = KLController()
    filter_groups: FilterGroups = FilterGroups()
    overlong_filter: bool = False
    """DAPO: no loss on trajectories cut by the token limit; they stay in their group's statistics."""
    overlong_penalty: OverlongPenalty = OverlongPenalty()
    length_budget: LengthBudget = LengthBudget()
    filtration: Filtration = Filtration()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    reference_reset: ReferenceReset = ReferenceReset()
    custom_module: str = ""
    """Python file that registers your own estimators or losses."""
