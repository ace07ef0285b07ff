"""Two ranks, in forked processes or as Ray actors, and Ulysses sequence parallelism with model replicas (HSDP)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.loop.conftest import Runner
from tests.loop.replays import check_verified, recording, replay

ACTOR = "actor_rollout_ref.actor"
SAME = ("actor/", "critic/", "mismatch/", "kl/", "reward/", "advantage/", "val/", "batch/trajectories", "batch/tokens")


def test_two_ulysses_ranks_train_as_one(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    """PPO with a critic, a full KL and two optimizer steps per iteration. The fake engine's completions do not depend
    on weights, so both runs train on the same texts."""
    words = [
        "actor_rollout_ref.rollout.name=fake",
        "algorithm.adv_estimator=gae",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_type=full",
        f"{ACTOR}.ppo_max_token_len_per_gpu=100",
        "trainer.save_freq=-1",
        "trainer.export_hf=False",
        "trainer.controller=local",
    ]
    alone = ppo.run(*words, name="alone")
    shared = ppo.run(
        *words,
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.fsdp_size=1",
        f"{ACTOR}.fsdp_config.sync_each_micro_batch=False",
        "trainer.record_steps=[2]",
        name="shared",
    )
    again = replay(ppo, recording(shared, 2))  # on one rank
    assert again.code == 0 and "equal within 0.001: the largest difference is" in again.output, again.output
    assert "training ranks: the run had 2" in again.output
    check_verified(shared, 2)
    leaves_nothing()
    assert "sequence parallel 2" in shared.output
    for line, expected in zip(shared.metrics, alone.metrics, strict=True):
        names = [name for name in expected if name.startswith(SAME)]
        assert {name: line[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=2e-3, abs=1e-4
        )
    assert shared.metrics[-1]["actor/grad_norm"] > 0 and shared.metrics[-1]["critic/grad_norm"] > 0


@pytest.mark.nightly
def test_forked_workers_equal_ray_actors(ppo: Runner, leaves_nothing: Callable[[], None]) -> None:
    """Two ranks with a critic and two engines: metrics and weights are equal to the last bit. The engines sample one
    request at a time, because MKL rounds a row differently in another batch."""
    words = [
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        "algorithm.adv_estimator=gae",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.num_engines=2",
        "trainer.val_before_train=False",
        "trainer.record_steps=[2]",
    ]
    runs = {name: ppo.run(*words, f"trainer.controller={name}", name=name) for name in ("local", "ray")}
    leaves_nothing()
    check_verified(runs["ray"], 2)
    exact, models = [], []
    for done in runs.values():
        models.append((done.folder / "model/model.safetensors").read_bytes())
        exact.append([{name: line[name] for name in line if name.startswith(SAME)} for line in done.metrics])
    assert exact[0] == exact[1] and len(exact[0][-1]) > 20 and models[0] == models[1]
