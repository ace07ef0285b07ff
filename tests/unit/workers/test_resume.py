"""Workers of every role: a resumed one trains the same bits, bad steps stop or are skipped, and damaged weights are not
written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.models.sharding import full_tensor, local_tensor
from tests.unit.workers.training import Case, assert_close, make_batch, make_columns, make_worker, parameters
from tests.vision.models import FAMILIES

FAST = {"optim": {"lr": 1e-2, "lr_warmup_steps": 2}}
SELF_TEACHER = {"divergence": "jsd", "coef": 0.7, "self_teacher": {"context": "feedback", "ema_rate": 0.25}}
TRPO = {"name": "trpo", "delta": 0.01, "cg_damping": 2.0, "cg_steps": 5}
IMAGES = {"images": True, "num_rows": 5, "mini_batch_size": 3}
CASES = {
    "policy": Case("qwen3", FAST, mini_batch_size=5),
    "adapters": Case("qwen3", FAST, mini_batch_size=5, lora_rank=4),
    "Muon and a reference": Case(
        "qwen3", {"optim": {"name": "muon", "lr": 1e-2}, "use_kl_loss": True}, needs_reference=True
    ),
    "TRPO": Case("three_layers", {"policy_loss": {"loss_mode": "surrogate"}, "optim": TRPO}, mini_batch_size=5),
    "self-teacher": Case("qwen3", FAST, teacher=SELF_TEACHER, contexts=True),
    "self-teacher with adapters": Case("qwen3", FAST, teacher=SELF_TEACHER, contexts=True, lora_rank=4),
    "critic": Case("qwen3", role="critic", settings=FAST),
    "critic with adapters": Case("llama", role="critic", lora_rank=4, settings=FAST),
    "SFT": Case("qwen3", role="sft", settings=FAST),
    **{family: Case(family, FAST, freeze_vision=False, **IMAGES) for family in FAMILIES},
    "frozen tower": Case("internvl", FAST, **IMAGES),
}


def take_step(worker: Any, case: Case, skip_bad_step: bool = False) -> dict[str, float]:
    layout = make_batch(case)
    if case.role == "sft":
        done = worker.step(layout.rank_batches[0], skip_bad_step)
        return done.metric_sums | done.metrics
    worker.load_batch(layout.rank_batches[0])
    return worker.update(make_columns(case, layout, old=False), skip_bad_step=skip_bad_step)


def copy_weights(worker: Any, case: Case) -> dict[str, np.ndarray]:
    """Weights of the trained model and of those beside it."""
    found = parameters(worker)
    roles = ["reference"] * case.needs_reference + ["teacher"] * bool(case.teacher)
    for role in roles:
        named = worker.find_plugin(role).model.named_parameters()
        found |= {f"{role} {name}": full_tensor(p.detach()).clone().numpy() for name, p in named}
    return found


def draw() -> tuple[list[float], float]:
    return torch.rand(3).tolist(), np.random.rand()


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_worker_trains_the_same_bits(locate, close_later, tmp_path: Path, name: str):
    """The checkpoint may be written while the next step trains. Random numbers continue, too."""
    case = locate(CASES[name])
    worker = close_later(make_worker(case, saves_in_background=True))
    before = parameters(worker)
    for _ in range(2):  # at the first step of new adapters one half of them has no gradient
        metrics = take_step(worker, case)
    assert any((before[name] != value).any() for name, value in parameters(worker).items())
    if case.actor == FAST:
        assert metrics["actor/lr"] == pytest.approx(0.01)  # after the warm-up
    worker.save(str(tmp_path / "saved"))
    numbers, expected = draw(), take_step(worker, case)
    assert worker.get_save_future().result() > 0

    seed = {"seed": 5} if case.role in ("policy", "critic") else {}
    resumed = close_later(make_worker(case, **seed))
    torch.manual_seed(99)
    np.random.seed(99)
    resumed.load(str(tmp_path / "saved"))
    assert draw() == numbers
    assert take_step(resumed, case) == expected
    assert resumed.state.num_steps == worker.state.num_steps
    assert_close(copy_weights(resumed, case), copy_weights(worker, case), atol=0, rtol=0)


BAD_STEPS: dict[str, tuple[str, type, str]] = {  # name of the model, configuration, suggested learning rate
    "policy": ("policy", Config, "actor_rollout_ref.actor.optim.lr=1e-07"),
    "critic": ("critic", Config, "critic.optim.lr=1e-06"),
    "sft": ("model", SftConfig, "optim.lr=0.001"),
}


def scale_loss(worker: Any, factor: float) -> Any:
    """Context manager in which the losses of a worker are multiplied by a factor."""
    accumulate = worker.accumulate_gradients

    def run(rows: Any, mini_batch: Any, compute_loss: Any) -> None:
        accumulate(rows, mini_batch, lambda row_indices: compute_loss(row_indices) * factor)

    return mock.patch.object(worker, "accumulate_gradients", run)


@pytest.mark.parametrize("role", BAD_STEPS)
def test_bad_steps_stop_or_are_skipped_and_damaged_weights_are_not_written(start, tmp_path: Path, role: str):
    (model, config_class, learning_rate), case = BAD_STEPS[role], Case("qwen3", role=role)
    worker, _ = start(case, settings={"optim": {"lr": 0.01}} if role == "sft" else {})
    before = parameters(worker)
    with scale_loss(worker, np.inf):
        with pytest.raises(
            FloatingPointError, match=rf"{model}.* gradient norm is (nan|inf) at optimizer step 1"
        ) as error:
            take_step(worker, case)
        skipped = take_step(worker, case, skip_bad_step=True)
    keys = re.findall(r"[a-z_.]+=[\w.-]+", str(error.value))
    assert keys == ["data.seed=1000", "trainer.on_bad_step=skip", learning_rate]
    config: Any = load_config(config_class, "sft" if role == "sft" else "ppo", keys)
    assert (config.data.seed, config.trainer.on_bad_step) == (1000, "skip")
    assert_close(parameters(worker), before, atol=0, rtol=0)
    done = take_step(worker, case)  # nothing is left of the bad gradients
    prefix = {"policy": "actor/", "critic": "critic/", "sft": ""}[role]
    assert (skipped[f"{prefix}steps_skipped"], done[f"{prefix}steps_skipped"], worker.state.num_steps) == (1, 0, 1)
    assert np.isfinite(done[f"{prefix}grad_norm"])

    (*_, (name, parameter)) = worker.state.module.named_parameters()
    local_tensor(parameter.data).view(-1)[-1] = np.inf
    for write in (worker.save, worker.export):
        with pytest.raises(FloatingPointError, match=rf"1 of the {model}'s .*not finite.*{re.escape(name)}"):
            write(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
