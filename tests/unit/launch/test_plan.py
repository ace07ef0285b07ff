"""Memory plan of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.launch.specs import make_worker_specs
from alphaapollo.planning import memory_fit
from alphaapollo.planning.memory_fit import BUDGET, CHECKPOINTING, replace_values
from alphaapollo.planning.plan_table import describe_sharding
from alphaapollo.trainer.setup.preparation import RlPreparation
from tests.unit.session.steps import prepare_plan

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
MACHINE = Machine(num_cores=64, num_gpus=8, gpu_memory=80 * 2**30, memory=2**40)


def plan_memory(config: Config) -> RlPreparation:
    prepared = prepare_plan(config, MACHINE)
    prepared.plan_memory()
    return prepared


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "train.jsonl"
    file.touch()
    return replace_values(
        Config(),
        {
            "actor_rollout_ref.model.path": str(PUBLISHED / "qwen2.5-7b"),
            "data.train_files": str(file),
            "data.max_response_length": 6144,
            "algorithm.adv_estimator": "grpo",
            "env.rollout.n": 8,
            "trainer.n_gpus_per_node": 8,
        },
    )


def test_auto_gradient_checkpointing_follows_the_memory_plan(config: Config):
    def chosen(**keys: object) -> tuple[bool | str, int, bool]:
        prepared = plan_memory(replace_values(config, keys))
        plan, memory = prepared.plan, prepared.memory
        assert memory is not None and memory.problem == ""
        return plan.model.enable_gradient_checkpointing, plan.max_tokens, memory.warning in prepared.notices

    assert chosen() == (False, 6656, False)  # the longest row
    assert chosen(**{BUDGET: 16_384}) == (True, 16_384, False)
    assert chosen(**{BUDGET: 16_384, CHECKPOINTING: False}) == (False, 16_384, True)


def test_a_copy_on_each_node_reaches_plan_and_workers(config: Config):
    one = replace_values(config, {"trainer.nnodes": 2, "algorithm.adv_estimator": "gae"})
    plan = plan_memory(one).plan
    assert one.actor_rollout_ref.actor.fsdp_config.fsdp_size == -1
    assert plan.actor.fsdp_config.fsdp_size == plan.critic.fsdp_config.fsdp_size == 8
    builders = make_worker_specs(one, plan, "run", 1, True).rank_builders
    policy, critic = cast(Any, builders["policy"]).args[0].actor, cast(Any, builders["critic"]).args[1]
    assert policy.fsdp_config.fsdp_size == critic.fsdp_config.fsdp_size == 8
    rows = describe_sharding(plan.memory, 16)
    assert rows["copies of the model"] == "2, each over 8 ranks (HSDP)"
    assert describe_sharding(plan.memory, 1) == {}


def test_a_model_without_a_memory_plan_is_a_notice(config: Config, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise NotImplementedError("no data!\nmore")

    monkeypatch.setattr(memory_fit, "plan_memory", fail)
    prepared = plan_memory(config)
    assert prepared.memory is None and prepared.plan.model.enable_gradient_checkpointing is False
    assert "(NotImplementedError: no data)" in prepared.notices[-1]
