"""main_ppo with LoRA: both weight syncs and both exports. test_resume.py resumes a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loop.replays import check_verified
from tests.loop.stack import StackRunner
from tests.quantized import save_quantized

pytest.importorskip("peft")
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "trainer.save_freq=1",
)
SERVED = ("actor_rollout_ref.rollout.lora=adapter", "trainer.export_lora=adapter")


def test_engine_with_served_adapters(stack: StackRunner) -> None:
    merged = stack.run(*LORA, "trainer.total_training_steps=1", "trainer.record_steps=[1]", name="merged")
    served = stack.run(*LORA, *SERVED, "trainer.record_steps=[2]", name="served")
    check_verified(merged, 1)
    check_verified(served, 2)
    assert all(line["sync/probe_gap"] < 5e-5 for line in served.metrics)
    for name in ("critic/score/mean", "actor/loss", "actor/ref_kl"):  # fresh adapters add zeros: the same rollouts
        assert served.metrics[1][name] == pytest.approx(merged.metrics[1][name], rel=1e-4), name

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = served.folder / "model"
    written = json.loads((model / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(stack.task.model)
    assert (written["r"], written["lora_alpha"]) == (4, 16) and not (model / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(stack.task.model), str(model))
    assert any(".lora_B." in name and tensor.abs().max() > 0 for name, tensor in loaded.state_dict().items())

    start = f"actor_rollout_ref.model.path={served.folder}"  # a run folder: its newest checkpoint, merged
    hf = ("actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1")
    continued = stack.run(*LORA, start, *hf, name="continued")
    assert (served.folder / "exported/step_000002/config.json").is_file()
    assert all(line["sync/probe_gap"] < 5e-5 for line in continued.metrics)


def test_adapters_on_weights_of_4_bits(stack: StackRunner, tmp_path: Path) -> None:
    folder, _ = save_quantized(stack.task.model, tmp_path, group_size=32)
    path = f"actor_rollout_ref.model.path={folder}"
    run = stack.run(*LORA, *SERVED, path, "trainer.record_steps=[1]", "trainer.total_training_steps=1", name="w4")
    check_verified(run, 1)
    assert all(line["sync/probe_gap"] < 5e-5 for line in run.metrics)  # vLLM dequantizes float32 models, too
    assert (run.folder / "model" / "adapter_config.json").is_file()
