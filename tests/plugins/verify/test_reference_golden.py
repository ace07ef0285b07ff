"""The reference of `alphaapollo verify` computes the golden vectors in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.golden.check import FUNCTIONS, ITEMS, TOLERANCES, compare, to_tensors
from tests.plugins.verify.golden_functions import (
    Given,
    compute_correction,
    compute_divergence,
    compute_loss,
    compute_of_samples,
    compute_of_tokens,
    compute_rewards,
    compute_value_loss,
    compute_weights,
)
from tests.plugins.verify.reference_batches import ACTOR, AGGREGATION, CORRECTION, LOSS, make_config

OPTIONS, KL, BETA = f"{ACTOR}policy_loss.", f"{ACTOR}kl_loss_type", f"{ACTOR}kl_loss_coef"
OVERLONG = "algorithm.overlong_penalty."
KEYS = {  # parameter of several kinds -> configuration
    **dict.fromkeys(("agg", "mode"), AGGREGATION),
    **dict.fromkeys(("eps_low", "log_eps_low", "delta_low"), f"{ACTOR}clip_ratio_low"),
    **dict.fromkeys(("eps_high", "log_eps_high", "delta_high"), f"{ACTOR}clip_ratio_high"),
    **dict.fromkeys(("dual_clip", "ratio_cap"), f"{ACTOR}clip_ratio_c"),
    **dict.fromkeys(("f_norm", "std_norm"), "algorithm.norm_adv_by_std_in_grpo"),
    **{name: f"algorithm.{name}" for name in ("gamma", "lam")},
    "horizon": f"{ACTOR}loss_scale_factor",
    "delta": f"{CORRECTION}off_policy_mask_threshold",
    "beta": BETA,
}
CHOICES = {  # parameter -> values that a run can have; further ones are inputs of the functions
    "agg_kw": None,
    "index": None,
    "minibatch": None,
    "batch_normalise": (False,),
    "count": ("nonempty",),
    "ddof": (1,),
    "eps": (1e-6,),
    "offmask": ("drop",),
    "ratio": (0.2,),
    "singleton": ("zero",),
}
VALUES = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl", "std": True}


class Unsupported(Exception):
    """Parameter of an item that no run has."""


@dataclass(frozen=True)
class Kind:
    """How the reference computes a kind of vectors."""

    compute: Callable[[Given, Any], Given]  # of inputs and configuration
    config: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def configure(self, params: dict[str, Any]) -> dict[str, Any]:
        keys, choices = KEYS | self.keys, CHOICES | self.choices
        config = {"data.max_response_length": 6, **self.config}  # the width of the matrices
        for name, value in params.items():
            allowed = choices.get(name)
            if name not in {*keys, *choices} or (allowed and value not in allowed):
                raise Unsupported(f"{name}={value}")
            if name in keys:
                config[keys[name]] = VALUES.get(value, value) if isinstance(value, str) else value
        return config


def of_loss(name: str, *config: dict[str, Any], choices: Any = None, **keys: str) -> Kind:
    merged = {key: value for one in config for key, value in one.items()}
    return Kind(compute_loss, {LOSS: name, AGGREGATION: "token-mean", **merged}, keys, choices or {})


def of_samples(name: str, config: dict[str, Any] | None = None, choices: Any = None, **keys: str) -> Kind:
    choices = {"level": ("sequence",), **(choices or {})}
    return Kind(compute_of_samples, {"algorithm.adv_estimator": name, **(config or {})}, keys, choices)


def of_tokens(name: str, config: dict[str, Any] | None = None, choices: Any = None, **keys: str) -> Kind:
    config = {"algorithm.adv_estimator": name, "algorithm.whiten_advantages": False, **(config or {})}
    return Kind(compute_of_tokens, config, keys, choices or {})


PER_SEQUENCE, WITH_KL = {AGGREGATION: "seq-mean-token-mean"}, {f"{ACTOR}use_kl_loss": True, BETA: 0.0}
UNBIASED, KL_ALONE, DPPO = {**WITH_KL, KL: "unbiased"}, {BETA: 1.0}, {"kind": ("binary_tv", "binary_kl")}
METHODS = {"method": ("return_all", "return_alive")}
IN_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.gamma": 0.0}  # the returns are the rewards
TEACHER = {name: f"teacher.{name}" for name in ("divergence", "beta", "top_k")}
KINDS = {
    "ppo_clip": of_loss("ppo", {f"{CORRECTION}method": "tis", f"{CORRECTION}high": None}),
    "grpo_total": of_loss("ppo", WITH_KL, kl_kind=KL),
    "deepseek_v32": of_loss("ppo", UNBIASED, PER_SEQUENCE),
    "kl_loss": of_loss("ppo", WITH_KL, KL_ALONE, kind=KL, coef=BETA),
    "unbiased_kl": of_loss("ppo", UNBIASED, KL_ALONE, coef=BETA),
    "policy_gradient": of_loss("reinforce"),
    "gspo_sequence": of_loss("gspo"),
    "gspo_token": of_loss("gspo_token", PER_SEQUENCE),
    "sequence_ppo": of_loss("sequence_ppo"),
    "gmpo": of_loss("gmpo"),
    "cispo": of_loss("cispo", mask_eps_low=f"{OPTIONS}cispo_mask_low", mask_eps_high=f"{OPTIONS}cispo_mask_high"),
    "sapo": of_loss("sapo", PER_SEQUENCE, tau_pos=f"{ACTOR}tau_pos", tau_neg=f"{ACTOR}tau_neg"),
    "dppo": of_loss("dppo_tv", choices=DPPO, kind=LOSS),
    "vespo": of_loss("vespo", negative=f"{OPTIONS}vespo_negative"),
    "clip_cov": of_loss("clip_cov"),
    "kl_cov": of_loss("kl_cov", coef=f"{OPTIONS}ppo_kl_coef"),
    "kl_full": Kind(compute_divergence, {"teacher.divergence": "reverse"}),
    "self_distillation": Kind(
        compute_divergence, {"teacher.self_teacher.context": "successes"}, TEACHER, {"tail": (True,)}
    ),
    "value_loss": Kind(compute_value_loss, {}, {"clip": "critic.cliprange_value"}),
    "aggregate": Kind(compute_weights, {}),
    "overlong_filter": Kind(compute_weights, {"algorithm.overlong_filter": True}),
    "mismatch_weights": Kind(compute_correction, {}, {n: CORRECTION + n for n in ("method", "level", "low", "high")}),
    "off_policy_sequence_mask": Kind(compute_correction, {}),
    **{name: of_samples(name) for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "magistral")},
    "maxrl": of_samples("maxrl", choices={"eps": (0.0,)}),
    "gdpo": of_samples("gdpo", {"algorithm.gdpo_rewards": [*"abc"]}, weights="algorithm.gdpo_weights"),
    "passk_leave_one_out": of_samples("grpo_passk"),
    "passk_analytic": of_samples("grpo_passk_analytic", k="algorithm.passk_k"),
    "reinforce_pp_baseline": of_samples("reinforce_plus_plus_baseline"),
    "gae": of_tokens("gae", whiten_adv="algorithm.whiten_advantages"),
    "turn_gae": of_tokens("turn_gae"),
    "reinforce_pp": of_tokens("reinforce_plus_plus"),
    "remax": of_tokens("remax"),
    "turn_group_advantage": of_tokens("turn_group", choices=METHODS, method="algorithm.turn_baseline"),
    "kl_in_reward": of_tokens("reinforce", IN_REWARD, beta="algorithm.kl_ctrl.kl_coef", kind="algorithm.kl_penalty"),
    "place_outcome_reward": Kind(compute_rewards, {}),
    "soft_overlong_punishment": Kind(
        compute_rewards,
        {f"{OVERLONG}enable": True},
        {"max_len": "data.max_response_length", "cache": f"{OVERLONG}cache", "factor": f"{OVERLONG}factor"},
    ),
}
CLAMP, ENGINE = "runs clamp log-ratios at 20 (D8)", "a run's unbiased KL is for samples of the engine"
EXCEPTIONS = {
    **dict.fromkeys(("vectors-9", "vectors-10", "vectors-32", "vectors_2026-61"), CLAMP),
    **dict.fromkeys(("vectors_2026-7", "vectors_2026-24"), ENGINE),
    "vectors_2026-70": "a negative reward is an error of maxrl (D22)",
    "vectors_2026-87": "the vectors give a group of one its returns (D11)",
}


def configure(item: dict[str, Any]) -> dict[str, Any] | None:
    """Configuration of an item; None if no run has its parameters, or if the reference does not have its kind."""
    params = item["params"] | item["params"].get("agg_kw", {})
    if "k_neg" in params:
        params["negative"] = params.pop("k_neg"), params.pop("lambda_neg")
    if item["function"] == "self_distillation":
        params |= {"beta": (alpha := params.pop("alpha")), "top_k": params.pop("topk", None)}
        params["divergence"] = {0.0: "forward", 1.0: "reverse"}.get(alpha, "jsd")
    try:
        return KINDS[item["function"]].configure(params) if item["function"] in KINDS else None
    except Unsupported:
        return None


CONFIGS = {name: config for name, item in ITEMS.items() if (config := configure(item)) is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_reference_equals_golden_vectors(name: str) -> None:
    item = ITEMS[name]
    given = item["expected"] | item["params"] | item["params"].get("agg_kw", {}) | to_tensors(item["inputs"])
    results = KINDS[item["function"]].compute(given, make_config(CONFIGS[name]))
    compared = results.keys() & item["expected"].keys()
    problems = {key: compare(results[key], item["expected"][key], TOLERANCES["float64"]) for key in compared}
    assert compared and any(problems.values()) == (name in EXCEPTIONS), problems


def test_all_kinds_have_one_binding() -> None:
    """The project does not offer the others."""
    assert not FUNCTIONS.keys() & KINDS.keys()
    kinds = {item["function"] for item in ITEMS.values()}
    not_offered = {"dppo_topk", "dppo_topk_divergence", "ref_kl_policy_gradient", "trust_region_teacher"}
    assert kinds - {*FUNCTIONS, *KINDS} == not_offered
    assert len(CONFIGS) == 216
