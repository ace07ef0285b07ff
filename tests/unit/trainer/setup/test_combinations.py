"""Combinations of estimator, loss and keys: errors, and notices about keys without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.algorithms.advantages import Estimator, estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss_names
from alphaapollo.config.schema import Env, GenerationConfig
from alphaapollo.controller.placement import Machine
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.input_checks import collect_environment_notices
from alphaapollo.trainer.setup.combinations import check_setting_combinations
from alphaapollo.trainer.setup.plan import make_plan
from tests.unit.trainer.setup.combining import ACTOR, CORRECTION, LOSS, actor, config, notices, problem


@pytest.mark.parametrize("loss", policy_loss_names())
@pytest.mark.parametrize("estimator", estimator_names())
def test_every_pair_works_silently_or_fails_with_a_reason(estimator: str, loss: str):
    one, other = get_estimator(estimator), get_policy_loss(loss)
    if estimator == "none":
        assert "ignores the reward, and there is no teacher" in problem(estimator, loss)
    elif one.per_token and other.level == "sequence":
        text = problem(estimator, loss)
        assert text == (
            f"{LOSS}={loss} takes one advantage per row, but algorithm.adv_estimator={estimator} computes one per "
            f"token. Set {LOSS}=gspo_token or ppo."
        )
    else:
        assert notices(estimator, loss) == []


@pytest.mark.parametrize(
    ("estimator", "key", "value", "shown"),
    [
        ("grpo", "lam", 0.9, "0.9"),
        ("grpo", "gamma", 0.5, "0.5"),
        ("rloo", "gigpo_step_weight", 2.0, "2.0"),
        ("grpo_passk", "passk_k", 2, "2"),
        ("dr_grpo", "norm_adv_by_std_in_grpo", False, "false"),
        ("magistral", "gdpo_rewards", ["accuracy"], "[accuracy]"),
    ],
)
def test_keys_of_other_estimators_have_no_effect(estimator: str, key: str, value: Any, shown: str):
    assert notices(estimator, **{key: value}) == [
        f"algorithm.{key}={shown} has no effect: algorithm.adv_estimator={estimator} does not read it."
    ]


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ("ppo", "tau_pos"),
        ("sapo", "clip_ratio"),
        ("gspo", "clip_ratio_c"),
        ("kl_cov", "clip_ratio_high"),
        ("clip_cov", "policy_loss.ppo_kl_coef"),
        ("reinforce", "clip_ratio_low"),
    ],
)
def test_keys_of_other_losses_have_no_effect(loss: str, key: str):
    line = f"{ACTOR}.{key}=2.0 has no effect: {LOSS}={loss} does not read it."
    assert notices("grpo", loss, **actor(**{key: 2.0})) == [line]


def test_custom_estimator_and_loss_are_not_checked_for_keys():
    own = Estimator("mine", lambda inputs, algorithm: None)  # type: ignore[arg-type, return-value]
    loss = PolicyLoss("mine", lambda inputs, actor: None)  # type: ignore[arg-type, return-value]
    values = {"algorithm.lam": 0.9, "algorithm.passk_k": 2, f"{ACTOR}.tau_pos": 2.0}
    assert check_setting_combinations(config(values), own, loss) == []


@pytest.mark.parametrize("name", [name for name in estimator_names() if get_estimator(name).group])
def test_group_estimators_refuse_a_group_of_one(name: str):
    assert problem(name, env__rollout__n=1, passk_k=1) == (
        f"algorithm.adv_estimator={name} compares the samples of a prompt, but the group size is 1. Set "
        "env.rollout.n=8, or at least 2."
    )


@pytest.mark.parametrize("name", [name for name in estimator_names() if not get_estimator(name).group])
def test_estimators_without_groups_accept_a_group_of_one(name: str):
    taught = {"teacher.divergence": "reverse"} if name == "none" else {}
    assert notices(name, env__rollout__n=1, **taught) == []


def test_passk_k_is_at_most_the_group_size():
    assert problem("grpo_passk_analytic", passk_k=5) == (
        "algorithm.passk_k=5 must not exceed the group size, env.rollout.n=4. Raise env.rollout.n or lower "
        "algorithm.passk_k."
    )
    assert notices("grpo_passk_analytic", passk_k=3) == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gdpo_rewards": ["a", "b"], "gdpo_weights": [1.0]}, "has 1 entries, but algorithm.gdpo_rewards has 2"),
        ({"gdpo_weights": [1.0]}, "has 1 entries, but algorithm.gdpo_rewards has 0"),
        ({"gdpo_rewards": ["a", "a"]}, "algorithm.gdpo_rewards=[a, a] repeats a name"),
        (
            {"gdpo_rewards": ["a"], "gdpo_conditions": {"b": ["a", 1.0]}},
            "algorithm.gdpo_conditions sets conditions for [b], but algorithm.gdpo_rewards is only [a]",
        ),
    ],
)
def test_invalid_gdpo_rewards_are_refused(values: dict[str, Any], says: str):
    assert says in problem("gdpo", **values)


def test_valid_gdpo_rewards():
    values = {"gdpo_rewards": ["a", "b"], "gdpo_weights": [1.0, 2.0], "gdpo_conditions": {"b": ["c", 1.0]}}
    assert notices("gdpo", **values) == []


SHAPING = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.overlong_penalty.enable": True,
    "algorithm.length_budget.mode": "exact",
    f"{ACTOR}.use_invalid_action_penalty": True,
}


@pytest.mark.parametrize("key", SHAPING)
def test_estimators_that_refuse_reward_shaping(key: str):
    reasons = {
        "gdpo": "it sums the named rewards",
        "grpo_passk_analytic": "rewards of 0 or 1",
        "maxrl": "mean reward, which must be a success rate",
    }
    for name, why in reasons.items():
        text = problem(name, **{key: SHAPING[key]})
        assert text.startswith(f"algorithm.adv_estimator={name} does not support changes of the reward: ")
        assert why in text and f". Set {key}=" in text
    assert notices("grpo", **{key: SHAPING[key]}) == []


def test_reward_components_of_estimators_that_refuse_shaping():
    """For gdpo another component is another name; `required` keeps a reward of 0 or 1 in this set."""
    added, required = {"reward.components": {"format": 0.5}}, {"reward.required": ["task"]}
    assert problem("grpo_passk_analytic", **added).endswith("Set the weights of reward.components to 0.")
    assert "Set reward.required=[]" in problem("gdpo", **required)
    assert notices("gdpo", **added) == notices("grpo_passk_analytic", **required) == []
    shown = {"reward.components": {"format": 0.0, "task": 1.0}}
    assert notices("grpo_passk_analytic", **shown) == notices("grpo", **added, **required) == []


def test_reward_model_of_estimators_that_refuse_shaping():
    model = {"reward_model.enable": True}
    assert problem("grpo_passk_analytic", **model).endswith("Set reward_model.weight=0.")
    shown = model | {"reward_model.weight": 0.0}
    assert notices("grpo_passk_analytic", **shown) == notices("gdpo", **model) == notices("grpo", **model) == []
    (text,) = notices("gdpo", **model, **{"reward_model.weight": 2.0})
    assert text == (
        "reward_model.weight=2.0 has no effect: algorithm.adv_estimator=gdpo reads reward components without weights."
    )


def test_aggregation_modes_have_no_effect_on_sequence_losses():
    mode = actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=100.0)
    because = f"has no effect: {LOSS}=gspo has one value per row, and the loss is their mean."
    assert notices("grpo", "gspo", **mode) == [
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {because}",
        f"{ACTOR}.loss_scale_factor=100.0 {because}",
    ]
    assert notices("grpo", "gspo_token", **mode) == []
    for values in (actor(entropy_coeff=0.1), actor(use_kl_loss=True, kl_loss_type="k2")):  # these are weighed by token
        assert notices("grpo", "gspo", **mode, **values) == []


@pytest.mark.parametrize(
    ("estimator", "loss", "says"),
    [
        ("grpo", "reinforce", f"{LOSS}=reinforce has no importance ratio, but an iteration has"),
        ("gpg", "gpg", f"{LOSS}=gpg has no importance ratio, but an iteration has"),
        ("opo", "ppo", "algorithm.adv_estimator=opo is derived for samples of the current policy"),
    ],
)
def test_several_optimizer_steps_warn_on_policy_methods(estimator: str, loss: str, says: str):
    batch = {"data.train_batch_size": 8}  # 32 trajectories
    assert notices(estimator, loss, **batch) == []
    for steps, text in (
        (actor(ppo_mini_batch_size=16), "2 optimizer steps (2 mini-batches x 1 epochs)"),
        (actor(ppo_epochs=3), "3 optimizer steps (1 mini-batches x 3 epochs)"),
    ):
        (line,) = notices(estimator, loss, **batch, **steps)
        assert line.startswith(says)
        assert text in line
        assert f"{ACTOR}.ppo_mini_batch_size=32 and {ACTOR}.ppo_epochs=1" in line
        assert notices("grpo", "ppo", **batch, **steps) == []


def test_critic_keys_have_no_effect_without_a_critic():
    values = {"critic.optim.lr": 0.1, "critic.ppo_epochs": 2}
    assert notices("gae", **values) == []
    assert sorted(notices("grpo", **values)) == [
        "critic.optim.lr=0.1 has no effect: algorithm.adv_estimator=grpo needs no critic.",
        "critic.ppo_epochs=2 has no effect: algorithm.adv_estimator=grpo needs no critic.",
    ]


def test_critic_warmup_needs_a_critic():
    assert notices("gae", trainer__critic_warmup=3) == []
    assert problem("grpo", trainer__critic_warmup=3) == (
        "trainer.critic_warmup=3 needs a critic, but algorithm.adv_estimator=grpo has none. Set "
        "trainer.critic_warmup=0."
    )


def test_all_problems_are_reported_at_once():
    values = {"trainer.critic_warmup": 3, "env.rollout.n": 1, "algorithm.use_kl_in_reward": True}
    with pytest.raises(ValueError) as caught:
        notices("gdpo", **values)
    assert len(str(caught.value).splitlines()) == 3


@pytest.fixture
def needed(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "train.jsonl"
    file.touch()
    return {"actor_rollout_ref.model.path": "some/model", "data.train_files": str(file)}


MACHINE = Machine(num_cores=2, num_gpus=0)


@pytest.mark.parametrize(
    ("values", "reference", "columns"),
    [
        ({}, False, False),
        (actor(use_kl_loss=True), True, True),
        (actor(use_kl_loss=True, kl_loss_type="full"), True, False),
        ({"algorithm.use_kl_in_reward": True}, True, True),
    ],
)
def test_kl_requires_a_reference(needed: dict[str, Any], values: dict[str, Any], reference: bool, columns: bool):
    given = config(needed | values)
    assert (given.needs_reference, given.needs_ref_log_probs) == (reference, columns)


def test_a_plan_has_the_notices_of_its_checks(needed: dict[str, Any]):
    grpo = needed | {"algorithm.adv_estimator": "grpo"}
    assert make_plan(config(grpo | {"algorithm.lam": 0.9}), MACHINE).notices == [
        "algorithm.lam=0.9 has no effect: algorithm.adv_estimator=grpo does not read it."
    ]
    with pytest.raises(ValueError, match="the group size is 1"):
        make_plan(config(grpo | {"env.rollout.n": 1}), MACHINE)


SCORED = {"reward.components": {"format": 0.1}, "reward.required": ["format"], "custom_reward_function.path": __file__}
COMPONENTS = "reward.components={format:0.1} has no effect: env.env_name is openenv, which scores itself."


def test_keys_that_an_environment_does_not_use_are_noted(needed: dict[str, Any]):
    game = needed | {
        "algorithm.adv_estimator": "grpo",
        "env.env_name": "openenv",
        "env.openenv.url": "http://localhost:1",
        "env.max_steps": 5,
    }
    assert make_plan(config(game), MACHINE).notices == []
    assert make_plan(config(game | SCORED | {"env.tool_limits.timeout": 5}), MACHINE).notices == [
        f"custom_reward_function.path={__file__} has no effect: env.env_name is openenv, which scores itself.",
        COMPONENTS,
        "reward.required=[format] has no effect: env.env_name is openenv, which scores itself.",
        "env.tool_limits.timeout=5.0 has no effect: env.env_name is openenv, and no tools are given to it.",
    ]
    maths = needed | SCORED | {"algorithm.adv_estimator": "grpo", "env.env_name": "informal_math", "env.max_steps": 5}
    maths |= {"env.tool_limits.timeout": 20}
    assert make_plan(config(maths), MACHINE).notices == []


def test_reward_keys_that_an_environment_uses():
    components = {"reward": {"components": {"format": 0.1}}}
    for name in ("single_turn", "informal_math", "reasoning_gym"):
        env = Env(env_name=name, max_steps=4 if name == "informal_math" else 1)
        assert collect_environment_notices(GenerationConfig(env=env, **components), get_environment_spec(name)) == []
    for name in ("verifiers", "openenv"):
        said = collect_environment_notices(
            GenerationConfig(env=Env(env_name=name), **components), get_environment_spec(name)
        )
        assert said == [COMPONENTS.replace("openenv", name)]


def test_rows_of_a_trajectory_share_a_micro_batch():
    memory = {
        "env__context": "memory",
        "env__max_steps": 3,
        "data__max_prompt_length": 100,
        "data__max_response_length": 50,
    }
    for loss in ("gspo", "gspo_token", "gmpo", "sequence_ppo"):
        (line,) = notices("grpo", loss, **memory)
        assert line.startswith(f"{LOSS}={loss} has one ratio per trajectory")
        assert "at most 350 tokens" in line
    level = {f"{CORRECTION}.method": "mask", f"{CORRECTION}.level": "sequence"}
    assert notices("grpo", **memory, **level)[0].startswith(f"{CORRECTION} has one ratio per trajectory")
    mask = {f"{CORRECTION}.off_policy_mask_threshold": 0.1}
    assert notices("grpo", **memory, **mask)[0].startswith(f"{CORRECTION} has one ratio per trajectory")
    assert notices("grpo", "ppo", **memory) == []
    assert "turns are compared only if their full prompts" in notices("gigpo", **memory)[0]


def test_without_advantages_a_teacher_is_enough():
    assert notices("none", **{"teacher.divergence": "reverse"}) == []


def test_sampled_divergence_needs_a_token_level_loss():
    assert "computes one per token" in problem("grpo", "gspo", **{"teacher.divergence": "sampled"})
    assert notices("grpo", "gspo", **{"teacher.divergence": "jsd"}) == []
