from pathlib import Path

import pytest

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine, make_placement
from alphaapollo.trainer.setup.plan import make_plan

CORRECTED = "algorithm.rollout_correction.method=tis"
CARRY, SEPARATE = "trainer.async_mode=carry", "trainer.async_mode=separate"
OWN_GPUS = ("actor_rollout_ref.rollout.colocate=false", "trainer.n_gpus_per_node=4")


@pytest.fixture
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    return ["actor_rollout_ref.model.path=some/model", "data.train_files=train.jsonl"]


def outcome(argv: list[str], num_gpus: int = 0, num_cores: int = 8) -> list[str]:
    return check_config_and_get_notices(load_config(Config, "ppo", argv), num_gpus, num_cores)


@pytest.mark.parametrize(
    ("overrides", "gpus", "cores"),
    [
        ((CARRY, CORRECTED), 0, 1),
        ((CARRY, CORRECTED), 8, 8),
        ((SEPARATE, CORRECTED), 0, 2),
        ((SEPARATE, CORRECTED, *OWN_GPUS), 8, 8),
        ((CARRY, "trainer.max_staleness=0"), 0, 1),  # nothing is stale
    ],
)
def test_what_works(needed: list[str], overrides: tuple[str, ...], gpus: int, cores: int) -> None:
    assert outcome([*needed, *overrides], gpus, cores) == []


@pytest.mark.parametrize(
    ("overrides", "gpus", "cores", "says"),
    [
        (
            (SEPARATE, CORRECTED),
            0,
            1,
            "1 cores for engines and 1 for training per node, but a node has 1. .*async_mode=carry",
        ),
        (
            (SEPARATE, CORRECTED, "trainer.cpu_threads=2"),
            0,
            2,
            "1 cores for engines and 2 for training per node.*cpu_threads",
        ),
        ((SEPARATE, CORRECTED), 8, 8, "Set actor_rollout_ref.rollout.colocate=false"),
        (
            (CARRY, CORRECTED, "actor_rollout_ref.rollout.router_replay=true"),
            0,
            8,
            "router_replay=true needs trainer.max_staleness=0",
        ),
        (
            (CARRY, CORRECTED, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.lora=adapter"),
            0,
            8,
            "Set actor_rollout_ref.rollout.lora=merged",
        ),
    ],
)
def test_what_cannot_work_names_the_key_to_turn(
    needed: list[str], overrides: tuple[str, ...], gpus: int, cores: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        outcome([*needed, *overrides], gpus, cores)


def test_a_negative_staleness_is_refused(needed: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_staleness.*-1"):
        outcome([*needed, CARRY, CORRECTED, "trainer.max_staleness=-1"])


@pytest.mark.parametrize(("mode", "threads"), [("carry", 8), ("separate", 6)])
def test_separate_engines_have_their_own_cores(needed: list[str], mode: str, threads: int) -> None:
    config = load_config(Config, "ppo", [*needed, CORRECTED, f"trainer.async_mode={mode}"])
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"num_engines": 2})
    placement = make_placement(config, rollout, "cpu", Machine(8, 0), has_critic=False)
    assert placement.threads == threads


REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.log_probs_ahead=true")


@pytest.mark.parametrize(
    ("overrides", "gpus", "says"),
    [
        ((), 8, r"log_probs_ahead=true needs engines with their own GPUs.*Set actor_rollout_ref.rollout.colocate="),
        ((CARRY, CORRECTED), 0, r"log_probs_ahead=true needs synchronous training, got trainer.async_mode=carry"),
    ],
)
def test_a_reference_that_cannot_work_beside_engines(
    needed: list[str], overrides: tuple[str, ...], gpus: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        outcome([*needed, *REFERENCE, *overrides], gpus)


@pytest.mark.parametrize(
    ("overrides", "gpus", "ahead"),
    [
        (OWN_GPUS, 8, True),
        ((), 8, False),
        ((), 0, False),
        ((*OWN_GPUS, SEPARATE, CORRECTED), 8, False),
        (("actor_rollout_ref.ref.log_probs_ahead=true",), 0, True),
        ((*OWN_GPUS, "actor_rollout_ref.ref.log_probs_ahead=false"), 8, False),
        ((*OWN_GPUS, "actor_rollout_ref.actor.kl_loss_type=full"), 8, False),
    ],
)
def test_where_the_reference_is_ahead(needed: list[str], overrides: tuple[str, ...], gpus: int, ahead: bool) -> None:
    """Where training GPUs would be idle while engines generate on others."""
    argv = [*needed, "algorithm.adv_estimator=grpo", "env.rollout.n=4", REFERENCE[0], *overrides]
    plan = make_plan(load_config(Config, "ppo", argv), Machine(num_cores=8, num_gpus=gpus))
    assert plan.prefetches_reference_logprobs is ahead
