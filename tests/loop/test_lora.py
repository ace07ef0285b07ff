"""main_ppo with LoRA end to end: reference without a second model, both weight syncs, resume, both exports."""

from __future__ import annotations

import json

import pytest

from tests.loop.conftest import Runner

pytest.importorskip("peft")

LORA = (
    "trainer.controller=local",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_type=full",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "trainer.save_freq=1",
)
SERVED = ("actor_rollout_ref.rollout.lora=adapter", "trainer.export_lora=adapter")


@pytest.mark.core
def test_resumed_run_equals_uninterrupted_run(ppo: Runner) -> None:
    whole = ppo.run(*LORA, name="whole")
    ppo.run(*LORA, "trainer.total_training_steps=1", name="parts")
    parts = ppo.run(*LORA, name="parts")
    said = " ".join(parts.output.split())  # the plan's lines are folded
    assert "resumed from" in said and "LoRA of rank 4, alpha 16, on all-linear" in said
    for one, other in zip(whole.metrics, parts.metrics, strict=True):
        assert one["sync/probe_gap"] < 5e-5
        for name in ("critic/score/mean", "actor/loss", "actor/grad_norm", "actor/ref_kl"):
            assert one.get(name) == other.get(name), (one["step"], name)
    assert whole.metrics[-1]["actor/ref_kl"] > 0
    first, second = ((run.folder / "model/model.safetensors").read_bytes() for run in (whole, parts))
    assert first == second


def test_engine_with_served_adapters(ppo: Runner) -> None:
    merged = ppo.run(*LORA, "trainer.total_training_steps=1", name="merged")
    served = ppo.run(*LORA, *SERVED, name="served")
    assert all(line["sync/probe_gap"] < 5e-5 for line in served.metrics)
    for name in ("critic/score/mean", "actor/loss", "actor/ref_kl"):  # fresh adapters add zeros: the same rollouts
        assert served.metrics[1][name] == pytest.approx(merged.metrics[1][name], rel=1e-4), name

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = served.folder / "model"
    written = json.loads((model / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(ppo.task.model)
    assert (written["r"], written["lora_alpha"]) == (4, 16) and not (model / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(ppo.task.model), str(model))
    assert any(".lora_B." in name and tensor.abs().max() > 0 for name, tensor in loaded.state_dict().items())

    start = f"actor_rollout_ref.model.path={served.folder}"  # a run folder: its newest checkpoint, merged
    continued = ppo.run(*LORA, start, "trainer.total_training_steps=1", name="continued")
    assert (served.folder / "exported/step_000002/config.json").is_file()
    assert all(line["sync/probe_gap"] < 5e-5 for line in continued.metrics)
