from __future__ import annotations

import re

import pytest

from alphaapollo.config.keys import accepted_keys
from alphaapollo.config.schema import Config
from alphaapollo.observability.time_spent import TimeSpent, suggest_key


def test_time_summary() -> None:
    spent = TimeSpent()
    assert spent.lines() == []
    spent.add({"timing/start": 10.0, "timing/validate": 2.0, "timing/step": 2.0, "val/accuracy": 0.5})
    for _ in range(2):
        spent.add({"timing/generate": 5.0, "timing/update": 3.0, "timing/other": 1.0, "timing/step": 9.0})
    shares, advice = spent.lines()
    assert shares == "time: start 33%, generate 33%, update 20%, validate 7%, other 7% of 30.0 s"
    assert advice.startswith("to speed up: a larger actor_rollout_ref.rollout.num_engines")
    assert advice.endswith("(generate takes 50%)")


@pytest.mark.parametrize(
    ("shares", "figures", "key"),
    [
        ({"generate": 0.6, "update": 0.4}, {}, "actor_rollout_ref.rollout.num_engines"),
        (
            {"generate": 0.6},
            {"response_length/p50": 100.0, "response_length/p99": 900.0},
            "trainer.async_mode=carry",
        ),
        (
            {"generate": 0.6},
            {"tool/calls_per_turn": 1.0, "num_turns/mean": 3.0, "tool/seconds": 2.0, "timing/generate": 8.0},
            "env.tool_limits",
        ),
        (
            {"update": 0.5, "generate": 0.4},
            {"batch/micro_batches": 8.0, "actor/optimizer_steps": 2.0},
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        ),
        (
            {"update": 0.5, "generate": 0.4},
            {"batch/micro_batches": 2.0, "actor/optimizer_steps": 2.0},
            "trainer.n_gpus_per_node",
        ),
        ({"columns": 0.5}, {"actor/ref_kl": 0.1}, "actor_rollout_ref.actor.use_kl_loss"),
        ({"columns": 0.5}, {}, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ({"reward_model": 0.4, "generate": 0.3}, {}, "reward_model.forward_max_token_len_per_gpu"),
        ({"other": 0.5, "publish": 0.2}, {}, "data.train_batch_size"),
        ({"start": 0.5, "validate": 0.2}, {}, "trainer.test_freq"),
        ({"start": 0.5, "checkpoint": 0.2, "validate": 0.15}, {}, "trainer.save_freq"),
    ],
)
def test_suggested_key(shares: dict[str, float], figures: dict[str, float], key: str) -> None:
    advice = str(suggest_key(shares, figures))
    assert advice.removeprefix("a larger ").startswith(key)
    named = re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", advice.split(" (")[0])
    assert named and all(
        any(own == name or own.startswith(f"{name}.") for own in accepted_keys(Config)) for name in named
    )


def test_no_key_is_suggested_without_a_dominant_phase() -> None:
    assert suggest_key({"start": 0.7, "generate": 0.2, "update": 0.05, "validate": 0.05}, {}) is None
