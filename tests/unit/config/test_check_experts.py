import pytest

from tests.unit.config.test_check import needed, outcome, problems  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor_rollout_ref.rollout.name=hf"], "only vllm returns the experts that it chose, not hf"),
        (["actor_rollout_ref.rollout.enable_prefix_caching=False"], "Set actor_rollout_ref.rollout.enable_prefix_cach"),
        (
            ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.lora=adapter"],
            "router_replay=true with actor_rollout_ref.rollout.lora=adapter was never tried",
        ),
    ],
)
def test_replay_needs_an_engine_that_returns_experts(needed: list[str], overrides: list[str], says: str):  # noqa: F811
    replay = "actor_rollout_ref.rollout.router_replay=True"
    (text,) = problems([*needed, replay, *overrides])
    assert says in text and text.endswith(".")
    assert "many times slower" in outcome([*needed, replay])[0]
