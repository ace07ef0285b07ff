"""`algorithm`: advantages, KL, and which samples are trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from alphaapollo.config.schema.actor import KLEstimator
from alphaapollo.config.schema.base import (
    CHANGES_ALGORITHM,
    CHANGES_CODE,
    CODE,
    ActiveUnless,
    ActiveWhen,
    Ratio,
    Requires,
    ResumeRule,
    Section,
)

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
    """DAPO's dynamic sampling: drop groups in which all samples have the same metric, and generate until the batch is
    full."""
    metric: Annotated[str, WHEN_ENABLED] = "accuracy"
    """Reward component to compare, or `reward`."""
    max_num_gen_batches: Annotated[PositiveInt, WHEN_ENABLED] = 10
    """Maximum generation rounds per iteration. After them, the iteration trains on the groups found so far."""


class RolloutCorrection(Section):
    method: Annotated[Literal["tis", "mask"] | None, Requires(ActiveWhen("bypass", False))] = None
    """Weight the policy loss by rho = pi_old / pi_engine: tis truncates rho to the bounds, mask sets it to 0 outside;
    null = off."""
    level: Annotated[Literal["token", "sequence", "geometric"], WHEN_CORRECTED] = "token"
    """rho per token, or per trajectory: the product over its tokens, or their geometric mean."""
    low: Annotated[NonNegativeFloat | None, WHEN_CORRECTED] = None
    """Lower bound of rho; null = no lower bound."""
    high: Annotated[PositiveFloat | None, WHEN_CORRECTED] = 2.0
    """Upper bound of rho; null = no upper bound."""
    bypass: bool = False
    """Use the engine's log-probs as the old log-probs, so that the ratio of the loss includes the correction."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """DeepSeek-V3.2 (arXiv 2512.02556, Eq. 9): no policy loss on tokens with a negative advantage in trajectories whose
    mean log(pi_engine / pi) per token exceeds this, in nats; null = off."""

    def find_problems(self) -> Iterator[str]:
        if not self.method:
            return
        if self.low is None and self.high is None:
            yield f"method={self.method} needs low or high. Set high=2.0."
        elif self.low is not None and self.high is not None and self.low >= self.high:
            yield f"low={self.low:g} must be below high={self.high:g}. Set low below 1 and high above 1."

    def find_warnings(self) -> Iterator[str]:
        low, high = self.low or 0.0, self.high or math.inf
        if self.method and self.level == "geometric" and low < 0.9 and high > 1.1:
            bounds = f"bounds {low:g} and {high:g}"
            yield f"level=geometric with {bounds} has no effect: the mean stays near 1. Set low=0.99 and high=1.01."


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


class Filtration(Section):
    method: Annotated[Literal["best", "best_random", "best_worst"] | None, NEEDS_GROUPS] = None
    """PF-PPO (arXiv 2409.06957): weights of a group's samples. best = all weight on the best sample; best_random = half
    on the best, half on all remaining samples; best_worst = half on the best, half on the worst; null = off."""


class ReferenceReset(Section):
    every: Annotated[PositiveInt | None, NEEDS_REFERENCE, NEEDS_WEIGHTS] = None
    """ProRL (arXiv 2505.24864): replace the reference by the policy and reset the optimizer every so many iterations;
    null = never."""
    patience: Annotated[PositiveInt | None, NEEDS_REFERENCE, NEEDS_WEIGHTS] = None
    """Reset also after so many validations without a better val/accuracy; null = never."""


class Algorithm(Section):
    adv_estimator: Annotated[str, CHANGES_ALGORITHM] = "gae"
    """Advantage estimator, by its registered name (docs/algorithms). algorithm=NAME sets a complete recipe."""
    gamma: Ratio = 1.0
    """Discount factor, per token; gigpo, turn_gae, turn_group: per turn."""
    lam: Ratio = 1.0
    """Lambda of GAE; gae: per token, turn_gae: per turn."""
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
    """Python file that registers your own estimators or losses."""

    def find_problems(self) -> Iterator[str]:
        starts_at_zero = self.kl_ctrl.type == "dual"  # dual ascent raises it when the KL exceeds its target
        if self.use_kl_in_reward and self.kl_ctrl.kl_coef == 0 and not starts_at_zero:
            yield "kl_ctrl.kl_coef=0 runs the reference model without effect. Raise it, or set use_kl_in_reward=false."
