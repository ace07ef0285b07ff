"""Configurations of an estimator and a loss, and their notices and errors."""

from __future__ import annotations

from typing import Any

import pytest

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.build import build_config
from alphaapollo.config.schema import Config
from alphaapollo.trainer.setup.combinations import check_setting_combinations

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"


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


def notices(estimator: str, loss: str = "ppo", **values: Any) -> list[str]:
    keys = {name.replace("__", "."): value for name, value in values.items()}
    keys = {key if "." in key else f"algorithm.{key}": value for key, value in keys.items()}
    return check_setting_combinations(config(keys), get_estimator(estimator), get_policy_loss(loss))


def problem(estimator: str, loss: str = "ppo", **values: Any) -> str:
    with pytest.raises(ValueError) as caught:
        notices(estimator, loss, **values)
    (text,) = str(caught.value).splitlines()
    assert text.endswith(".")
    return text


def actor(**values: Any) -> dict[str, Any]:
    return {f"{ACTOR}.{name}": value for name, value in values.items()}
