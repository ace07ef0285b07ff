from pathlib import Path

import pytest

from alphaapollo.config.check import check
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_counts import Machine, make_placement

CORRECTED = "algorithm.rollout_correction.method=tis"
CARRY, SEPARATE = "trainer.async_mode=carry", "trainer.async_mode=separate"
OWN_GPUS = ("actor_rollout_ref.rollout.colocate=false", "trainer.n_gpus_per_node=4")


@pytest.fixture
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()
    return ["actor_rollout_ref.model.path=some/model", "data.train_files=train.jsonl"]


def outcome(argv: list[str], num_gpus: int = 0, num_cores: int = 8) -> list[str]:
    return check(load_config(Config, "ppo", argv), num_gpus, num_cores)


@pytest.mark.parametrize(
    ("overrides", "gpus", "cores"),
    [
        ((CARRY, CORRECTED), 0, 1),
        ((CARRY, CORRECTED), 8, 8),
        ((SEPARATE, CORRECTED), 0, 2),
        ((SEPARATE, CORRECTED, *OWN_GPUS), 8, 8),
        ((SEPARATE, CORRECTED, *OWN_GPUS, "trainer.keep_kv_cache=true"), 8, 8),
        ((CARRY, "trainer.max_staleness=0"), 0, 1),  # nothing is stale
    ],
)
def test_what_works(needed: list[str], overrides: tuple[str, ...], gpus: int, cores: int) -> None:
    assert outcome([*needed, *overrides], gpus, cores) == []


@pytest.mark.parametrize(
    ("overrides", "gpus", "cores", "says"),
    [
        ((CARRY,), 0, 8, "nothing corrects for that .* Set algorithm.rollout_correction.method=tis"),
        ((SEPARATE,), 0, 8, "trainer.max_staleness=1: .* Set algorithm.rollout_correction.method=tis"),
        ((CARRY, "algorithm.rollout_correction.bypass=true"), 0, 8, "Set algorithm.rollout_correction.bypass=false"),
        ((SEPARATE, CORRECTED), 0, 1, "cores of their own, 1 and 1 a node, and there are 1. .*async_mode=carry"),
        ((SEPARATE, CORRECTED, "trainer.cpu_threads=2"), 0, 2, "cores of their own, 1 and 2 a node.*cpu_threads"),
        ((SEPARATE, CORRECTED), 8, 8, "Set actor_rollout_ref.rollout.colocate=false"),
        ((CARRY, CORRECTED, "trainer.keep_kv_cache=true"), 8, 8, "keep_kv_cache=true: engines that share"),
        (
            (CARRY, CORRECTED, "actor_rollout_ref.rollout.name=hf", "trainer.keep_kv_cache=true"),
            0,
            8,
            "name=hf keeps no cache",
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


def test_keys_of_a_mode_that_is_off_are_noticed(needed: list[str]) -> None:
    (line,) = outcome([*needed, "trainer.max_staleness=4"])
    assert line == "trainer.max_staleness=4 has no effect: trainer.async_mode is null."
    (line,) = outcome([*needed, CARRY, "trainer.max_staleness=0", "trainer.keep_kv_cache=true"])
    assert line == "trainer.keep_kv_cache=true has no effect: trainer.max_staleness=0: nothing is in flight."


@pytest.mark.parametrize(("mode", "threads"), [("carry", 8), ("separate", 6)])
def test_separate_engines_have_their_own_cores(needed: list[str], mode: str, threads: int) -> None:
    config = load_config(Config, "ppo", [*needed, f"trainer.async_mode={mode}"])
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"num_engines": 2})
    placement = make_placement(config.trainer, rollout, "cpu", Machine(8, 0), 1, False, False)
    assert placement.threads == threads
