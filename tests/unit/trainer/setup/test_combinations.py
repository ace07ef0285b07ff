"""Combinations of estimator, loss and keys: errors, warnings, and notices about keys without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.algorithms.advantages import Estimator, estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss_names
from alphaapollo.config.build import build_config
from alphaapollo.config.keys import format_value
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.launch.plan import can_skip_rows_without_advantage
from alphaapollo.trainer.setup.combinations import check_setting_combinations
from alphaapollo.trainer.setup.preparation import RlPreparation
from tests.unit.session.steps import prepare_plan

ACTOR, ESTIMATOR = "actor_rollout_ref.actor", "algorithm.adv_estimator"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
METHOD, LEVEL, BYPASS = f"{CORRECTION}.method", f"{CORRECTION}.level", f"{CORRECTION}.bypass"
ROLLOUT = "actor_rollout_ref.rollout"
SERVED = {f"{ROLLOUT}.lora": "adapter", "actor_rollout_ref.model.lora_rank": 8}
MASK = {f"{CORRECTION}.off_policy_mask_threshold": 0.1}
ANCHORED = ["dppo_kl", "dppo_tv", "vespo"]
SEQUENCE_LOSSES = [name for name in policy_loss_names() if get_policy_loss(name).level == "sequence"]
STALE = [{"trainer.async_mode": mode, "trainer.max_staleness": 1} for mode in ("carry", "separate")]
MEMORY = {"env.context": "memory", "env.max_steps": 3, "data.max_prompt_length": 100, "data.max_response_length": 50}
AGGREGATION = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 100.0}
TAUGHT, SAMPLED_TEACHER = {"teacher.divergence": "reverse"}, {"teacher.divergence": "sampled"}
TIS, REUSED, TRPO = {METHOD: "tis"}, {"data.reuse.groups": 2}, {f"{ACTOR}.optim.name": "trpo"}
TWO_REWARDS, ONE_WEIGHT = {"algorithm.gdpo_rewards": ["a", "b"]}, {"algorithm.gdpo_weights": [1.0]}
OTHER_CONDITION = {"algorithm.gdpo_rewards": ["a"], "algorithm.gdpo_conditions": {"b": ["a", 1.0]}}
FILTRATION = "algorithm.filtration"
SELECTED = {f"{FILTRATION}.method": "random", f"{FILTRATION}.size": 2, f"{FILTRATION}.baseline": "all"}


def config(values: dict[str, Any]) -> Config:
    """Dotted keys -> the configuration; 4 samples a prompt, one optimizer step per iteration."""
    nested: dict[str, Any] = {}
    for key, value in ({"env.rollout.n": 4} | values).items():
        *path, last = key.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return build_config(Config, nested)


def notices(estimator: str, loss: str, values: dict[str, Any]) -> list[str]:
    given = config({ESTIMATOR: estimator, LOSS: loss} | values)
    return check_setting_combinations(given, get_estimator(estimator), get_policy_loss(loss))


def check_refused(estimator: str, loss: str, values: dict[str, Any], *facts: str) -> None:
    """There is one error, which has all facts and ends as a sentence."""
    with pytest.raises(ValueError) as caught:
        notices(estimator, loss, values)
    (text,) = str(caught.value).splitlines()
    assert text.endswith(".") and all(fact in text for fact in facts), text


@pytest.mark.parametrize("loss", policy_loss_names())
@pytest.mark.parametrize("estimator", estimator_names())
def test_every_pair_works_silently_or_fails_with_a_reason(estimator: str, loss: str):
    if estimator == "none":
        check_refused(estimator, loss, {}, f"{ESTIMATOR}=none", "Set teacher.divergence and teacher.model.path.")
    elif get_estimator(estimator).per_token and loss in SEQUENCE_LOSSES:
        facts = (f"{LOSS}={loss}", f"{ESTIMATOR}={estimator}", f"Set {LOSS}=ppo or gspo_token.")
        check_refused(estimator, loss, {}, *facts)
    else:
        assert notices(estimator, loss, {}) == []


@pytest.mark.parametrize("name", estimator_names())
def test_group_estimators_refuse_a_group_of_one(name: str):
    values = {"env.rollout.n": 1}
    if get_estimator(name).group:
        values["algorithm.passk_k"] = 1
        check_refused(name, "ppo", values, f"{ESTIMATOR}={name}", "the group size is 1", "Set env.rollout.n=8")
    else:
        assert notices(name, "ppo", values | TAUGHT) == []


@pytest.mark.parametrize(
    ("estimator", "loss", "values", "cause"),
    [
        ("grpo", "ppo", {"algorithm.lam": 0.9, "algorithm.gamma": 0.5}, "adv_estimator=grpo does"),
        ("grpo", "ppo", {"critic.optim.lr": 0.1, "critic.ppo_epochs": 2}, "adv_estimator=grpo needs no critic"),
        ("rloo", "ppo", {"algorithm.gigpo_step_weight": 2.0}, "adv_estimator=rloo does"),
        ("grpo_passk", "ppo", {"algorithm.passk_k": 2}, "adv_estimator=grpo_passk does"),
        ("dr_grpo", "ppo", {"algorithm.norm_adv_by_std_in_grpo": False}, "adv_estimator=dr_grpo does"),
        ("magistral", "ppo", {"algorithm.gdpo_rewards": ["accuracy"]}, "adv_estimator=magistral does"),
        ("gdpo", "ppo", {"reward_model.weight": 2.0}, "adv_estimator=gdpo reads reward components"),
        ("grpo", "ppo", {f"{ACTOR}.tau_pos": 2.0}, f"{LOSS}=ppo does"),
        ("grpo", "sapo", {f"{ACTOR}.clip_ratio": 2.0}, f"{LOSS}=sapo does"),
        ("grpo", "gspo", {f"{ACTOR}.clip_ratio_c": 2.0}, f"{LOSS}=gspo does"),
        ("grpo", "gspo", AGGREGATION, f"{LOSS}=gspo has one value per row"),
        ("grpo", "kl_cov", {f"{ACTOR}.clip_ratio_high": 2.0}, f"{LOSS}=kl_cov does"),
        ("grpo", "clip_cov", {f"{ACTOR}.policy_loss.ppo_kl_coef": 2.0}, f"{LOSS}=clip_cov does"),
        ("grpo", "reinforce", {f"{ACTOR}.clip_ratio_low": 2.0}, f"{LOSS}=reinforce does"),
        ("grpo", "reinforce", {BYPASS: True}, f"{LOSS}=reinforce has no ratio"),
        *(("dr_grpo", loss, {BYPASS: True}, f"{LOSS}={loss} always") for loss in ANCHORED),
    ],
)
def test_keys_that_are_not_read_have_no_effect(estimator: str, loss: str, values: dict[str, Any], cause: str):
    lines = sorted(notices(estimator, loss, values))
    expected = sorted(f"{key}={format_value(value)} has no effect: " for key, value in values.items())
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected))
    assert all(cause in line for line in lines)


@pytest.mark.parametrize(
    ("estimator", "loss", "values"),
    [
        ("gae", "ppo", {"critic.optim.lr": 0.1, "critic.ppo_epochs": 2, "trainer.critic_warmup": 3}),
        ("grpo_passk_analytic", "ppo", {"algorithm.passk_k": 3}),
        ("gdpo", "ppo", TWO_REWARDS | {"algorithm.gdpo_weights": [1.0, 2.0]}),
        ("gdpo", "ppo", TWO_REWARDS | {"algorithm.gdpo_conditions": {"b": ["c", 1.0]}}),
        ("gdpo", "ppo", {"reward.components": {"format": 0.5}}),  # another name
        ("grpo_passk_analytic", "ppo", {"reward.required": ["task"]}),  # keeps a reward of 0 or 1 in this set
        ("grpo_passk_analytic", "ppo", {"reward.components": {"format": 0.0, "task": 1.0}}),
        ("grpo", "ppo", {"reward.components": {"format": 0.5}, "reward.required": ["task"]}),
        ("grpo_passk_analytic", "ppo", {"reward_model.enable": True, "reward_model.weight": 0.0}),
        ("gdpo", "ppo", {"reward_model.enable": True}),
        ("grpo", "ppo", {"reward_model.enable": True}),
        ("grpo", "gspo_token", AGGREGATION),
        ("grpo", "gspo", AGGREGATION | {f"{ACTOR}.entropy_coeff": 0.1}),  # weighed by token, like the next
        ("grpo", "gspo", AGGREGATION | {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "k2"}),
        ("none", "ppo", TAUGHT),
        ("grpo", "gspo", {"teacher.divergence": "jsd"}),
        ("grpo", "ppo", MEMORY),
        ("grpo", "ppo", {BYPASS: True}),
        ("grpo", "ppo", TIS),
        ("rloo", "surrogate", TRPO),
        ("grpo", "ppo", STALE[0] | TIS | {LEVEL: "sequence"}),
        *(("grpo", "ppo", stale | more) for stale in STALE for more in (TIS, {"trainer.max_staleness": 0})),
        *(("grpo", "ppo", stale | TIS | SERVED) for stale in STALE),
        *(("dr_grpo", loss, values) for loss in ANCHORED for values in (*STALE, MASK, SAMPLED_TEACHER)),
        *(("grpo", loss, TIS | {LEVEL: level}) for loss in SEQUENCE_LOSSES for level in ("sequence", "geometric")),
    ],
)
def test_valid_combinations_have_no_notices(estimator: str, loss: str, values: dict[str, Any]):
    assert notices(estimator, loss, values) == []


@pytest.mark.parametrize(
    ("estimator", "loss", "values", "facts"),
    [
        ("grpo_passk_analytic", "ppo", {"algorithm.passk_k": 5}, ("algorithm.passk_k=5", "env.rollout.n=4")),
        ("grpo_passk_analytic", "ppo", {"reward.components": {"format": 0.5}}, ("weights of reward.components to 0.",)),
        ("grpo_passk_analytic", "ppo", {"reward_model.enable": True}, ("Set reward_model.weight=0.",)),
        ("gdpo", "ppo", TWO_REWARDS | ONE_WEIGHT, ("gdpo_weights has 1", "gdpo_rewards has 2")),
        ("gdpo", "ppo", ONE_WEIGHT, ("gdpo_weights has 1", "gdpo_rewards has 0")),
        ("gdpo", "ppo", OTHER_CONDITION, ("algorithm.gdpo_conditions", "[b]", "gdpo_rewards is only [a]")),
        ("gdpo", "ppo", {"reward.required": ["task"]}, ("Set reward.required=[]",)),
        ("grpo", "ppo", {"trainer.critic_warmup": 3}, ("=grpo", "Set trainer.critic_warmup=0.")),
        ("grpo", "gspo", SAMPLED_TEACHER, (f"{LOSS}=gspo", "teacher.divergence=sampled")),
        ("grpo", "ppo", REUSED, ("data.reuse.groups=2 ", f"Set {METHOD}=tis")),
        ("reinforce_plus_plus", "ppo", REUSED | TIS, (f"groups=2, {ESTIMATOR}=reinforce_plus_plus", "estimator=grpo")),
        ("gae", "ppo", SELECTED, ("algorithm.filtration.baseline=all", f"{ESTIMATOR}=gae", "baseline=selected")),
        *(("grpo", "ppo", stale, ("trainer.max_staleness=1 ", f"Set {METHOD}=tis")) for stale in STALE),
        *(("grpo", "ppo", stale | {BYPASS: True}, ("bypass=false",)) for stale in STALE),
        *(("dr_grpo", loss, TIS, (f"{METHOD}=tis", f"{LOSS}={loss}", f"Set {METHOD}=null.")) for loss in ANCHORED),
        *(("grpo", loss, TIS, (f"{LOSS}={loss}", f"{LEVEL}=token ", f"Set {LOSS}=ppo")) for loss in SEQUENCE_LOSSES),
        # a teacher is compared with the trained policy, which the engine is not if groups are reused
        *(("grpo", loss, SAMPLED_TEACHER | REUSED, ("groups=2 ", "divergence=reverse")) for loss in ANCHORED),
        ("rloo", "ppo", TRPO, ("optim.name=trpo", f"{LOSS}=ppo", "not ratio times advantage")),
        ("rloo", "reinforce", TRPO, ("no ratio", f"{LOSS}=surrogate")),
        ("rloo", "gspo", TRPO, ("a ratio per sequence",)),
        ("rloo", "dppo_tv", TRPO, ("ratio to the engine",)),
        ("none", "surrogate", TRPO | SAMPLED_TEACHER, (f"{ESTIMATOR}=none", "needs advantages")),
        ("rloo", "surrogate", TRPO | {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"}, ("=full",)),
    ],
)
def test_invalid_combinations_are_refused(estimator: str, loss: str, values: dict[str, Any], facts: tuple[str, ...]):
    check_refused(estimator, loss, values, *facts)


SHAPING = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.overlong_penalty.enable": True,
    "algorithm.length_budget.mode": "exact",
    f"{ACTOR}.use_invalid_action_penalty": True,
}


@pytest.mark.parametrize("key", SHAPING)
def test_estimators_that_refuse_reward_shaping(key: str):
    values = {key: SHAPING[key]}
    for name in ("gdpo", "grpo_passk_analytic", "maxrl"):
        reason = get_estimator(name).no_shaping_reason
        assert reason
        check_refused(name, "ppo", values, f"{ESTIMATOR}={name}", f": {reason}. Set {key}=")
    assert notices("grpo", "ppo", values) == []


@pytest.mark.parametrize(
    ("estimator", "loss", "name"), [("grpo", "reinforce", "reinforce"), ("gpg", "gpg", "gpg"), ("opo", "ppo", "opo")]
)
def test_several_optimizer_steps_and_reused_groups_warn_on_policy_methods(estimator: str, loss: str, name: str):
    batch = {"data.train_batch_size": 8}  # 32 trajectories
    assert notices(estimator, loss, batch) == []
    for steps, shown in (
        ({f"{ACTOR}.ppo_mini_batch_size": 16}, "2 optimizer steps (2 mini-batches x 1 epochs)"),
        ({f"{ACTOR}.ppo_epochs": 3}, "3 optimizer steps (1 mini-batches x 3 epochs)"),
    ):
        (line,) = notices(estimator, loss, batch | steps)
        assert line.startswith(f"{LOSS}={loss}, {ESTIMATOR}={estimator}: {name} ") and shown in line
        assert f"{ACTOR}.ppo_mini_batch_size=32 and {ACTOR}.ppo_epochs=1" in line
        assert notices("grpo", "ppo", batch | steps) == []
    (line,) = notices("opo", "ppo", REUSED | TIS)
    assert line.startswith(f"{ESTIMATOR}=opo") and "data.reuse.groups=2 " in line


def test_custom_estimator_and_loss_are_not_checked_for_keys():
    own = Estimator("mine", lambda inputs, algorithm: None)  # type: ignore[arg-type, return-value]
    loss = PolicyLoss("mine", lambda inputs, actor: None)  # type: ignore[arg-type, return-value]
    values = {"algorithm.lam": 0.9, "algorithm.passk_k": 2, f"{ACTOR}.tau_pos": 2.0}
    assert check_setting_combinations(config(values), own, loss) == []


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError) as caught:
        notices("gdpo", "ppo", {"trainer.critic_warmup": 3, "env.rollout.n": 1, "algorithm.use_kl_in_reward": True})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("values", "reference", "columns"),
    [
        ({}, False, False),
        ({f"{ACTOR}.use_kl_loss": True}, True, True),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "full"}, True, False),
        ({"algorithm.use_kl_in_reward": True}, True, True),
    ],
)
def test_kl_requires_a_reference(values: dict[str, Any], reference: bool, columns: bool):
    given = config(values)
    assert (given.needs_reference, given.needs_ref_log_probs) == (reference, columns)


def prepare(folder: Path, values: dict[str, Any]) -> RlPreparation:
    (folder / "train.jsonl").touch()
    needed = {"actor_rollout_ref.model.path": "some/model", "data.train_files": str(folder / "train.jsonl")}
    return prepare_plan(config(needed | {"algorithm.adv_estimator": "grpo"} | values), Machine(num_cores=2, num_gpus=0))


def test_a_plan_has_the_notices_of_its_checks(tmp_path: Path):
    (notice,) = prepare(tmp_path, {"algorithm.lam": 0.9}).notices
    assert notice.startswith("algorithm.lam=0.9 has no effect")
    with pytest.raises(ValueError, match="the group size is 1"):
        prepare(tmp_path, {"env.rollout.n": 1})


@pytest.mark.parametrize(
    ("values", "expected"), [({}, False), ({BYPASS: True}, True), ({LOSS: "dppo_tv"}, True), ({LOSS: "vespo"}, True)]
)
def test_old_log_probs_of_a_plan(tmp_path: Path, values: dict[str, Any], expected: bool):
    assert prepare(tmp_path, values).plan.uses_rollout_logprobs == expected


def test_reward_keys_that_an_environment_uses(tmp_path: Path):
    scored = {"reward.components": {"format": 0.1}, "reward.required": ["format"], "env.max_steps": 5}
    maths = {"custom_reward_function.path": __file__, "env.env_name": "informal_math", "env.tool_limits.timeout": 20}
    assert prepare(tmp_path, scored | maths).notices == []


def test_a_trust_region_covers_rows_without_advantage():
    given = config(TRPO | {ESTIMATOR: "rloo", LOSS: "surrogate"})
    assert not can_skip_rows_without_advantage(given, get_policy_loss("surrogate"))
