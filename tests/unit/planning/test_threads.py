"""Number of threads on a CPU: set by the cores at the first start, and kept when a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.controller.placement import Machine
from alphaapollo.planning.threads import choose_cpu_threads
from alphaapollo.runs.checkpoint_folder import write_manifest, write_progress
from alphaapollo.runs.resume import find_start_point
from alphaapollo.runs.run_plan import RunPlan


def configured(out: Path, trainer: dict[str, Any] | None = None, **rollout: Any) -> Config:
    return Config(
        trainer={"output_dir": str(out), "experiment_name": "run", "max_staleness": 0} | (trainer or {}),
        actor_rollout_ref={"rollout": rollout},
        algorithm={"rollout_correction": {"method": "tis"}},
    )


def counts(config: Config) -> tuple[int | None, int | None]:
    return config.trainer.cpu_threads, config.actor_rollout_ref.rollout.cpu_threads


def settled(config: Config, cores: int, gpus: int = 0) -> tuple[int | None, int | None]:
    return counts(choose_cpu_threads(config, Machine(cores, gpus))[0])


def begun(config: Config, cores: int) -> None:
    """Make the folder of a run of one iteration with this number of cores."""
    config, _ = choose_cpu_threads(config, Machine(cores, 0))
    find_start_point(config).prepare_folder(config, RunPlan({}))
    checkpoint = config.trainer.folder / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    write_progress(checkpoint, {"step": 1})
    write_manifest(checkpoint)


THREADS = [
    (8, {}, {}, (8, 8)),
    (8, {"n_gpus_per_node": 2}, {"num_engines": 2, "tensor_model_parallel_size": 2}, (4, 2)),
    (2, {"n_gpus_per_node": 4}, {"num_engines": 3}, (1, 1)),
    (8, {"cpu_threads": 3}, {"cpu_threads": 1}, (3, 1)),
    (8, {}, {"name": "fake"}, (8, None)),
    (8, {"async_mode": "carry"}, {}, (8, 8)),
    (8, {"async_mode": "separate"}, {"num_engines": 2}, (6, 1)),
    (8, {"async_mode": "separate", "n_gpus_per_node": 2}, {"cpu_threads": 4}, (2, 4)),
]


@pytest.mark.parametrize(("cores", "trainer", "rollout", "expected"), THREADS)
def test_each_side_has_all_cores_and_on_gpus_nothing_is_settled(tmp_path, cores, trainer, rollout, expected):
    assert settled(configured(tmp_path, trainer, **rollout), cores) == expected
    assert settled(configured(tmp_path), 8, gpus=1) == (None, None)


def test_a_resumed_run_keeps_its_numbers_on_another_machine(tmp_path: Path) -> None:
    begun(configured(tmp_path), cores=2)
    config, notices = choose_cpu_threads(configured(tmp_path), Machine(16, 0))
    assert counts(config) == (2, 2)
    assert notices[0].startswith("actor_rollout_ref.rollout.cpu_threads=2 is taken from the earlier start of the run")
    assert "this machine's cores, 16," in notices[1]
    assert find_start_point(config).config_changes == ()
    assert choose_cpu_threads(configured(tmp_path), Machine(2, 0))[1] == []


def test_other_numbers_of_processes_choose_again(tmp_path: Path) -> None:
    begun(configured(tmp_path), cores=8)
    assert settled(configured(tmp_path, {"n_gpus_per_node": 2}, num_engines=4), 8) == (4, 2)


def test_run_from_scratch_and_run_from_a_given_checkpoint(tmp_path: Path) -> None:
    begun(configured(tmp_path), cores=2)
    assert settled(configured(tmp_path, {"resume_mode": "disable"}), 8) == (8, 8)
    assert settled(configured(tmp_path, {"experiment_name": "other"}), 8) == (8, 8)
    checkpoint = tmp_path / "alphaapollo/run/checkpoints/step_000001"
    from_it = {"experiment_name": "other", "resume_mode": "resume_path", "resume_from_path": str(checkpoint)}
    assert settled(configured(tmp_path, from_it), 8) == (2, 2)


def test_fine_tuning_shares_the_cores_among_its_ranks(tmp_path: Path) -> None:
    config = SftConfig(trainer={"output_dir": str(tmp_path), "n_gpus_per_node": 2})
    assert choose_cpu_threads(config, Machine(8, 0))[0].trainer.cpu_threads == 4
