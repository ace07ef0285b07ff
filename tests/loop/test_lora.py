"""main_ppo with LoRA: both weight syncs and both exports. test_resume.py resumes a run."""

from __future__ import annotations

import json

import pytest

from tests.loop.conftest import Runner
from tests.loop.replays import check_verified
from tests.loop.stack import StackRunner

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


RECORD_PAUSES = """
from pathlib import Path
from alphaapollo.engines.protocol import Engine

async def pause(self):
    Path({path!r}).touch()
    await call(self)

call, Engine.pause = Engine.pause, pause
"""


@pytest.mark.parametrize("mode", ["separate", "carry"])
def test_adapters_arrive_while_requests_run(ppo: Runner, mode: str) -> None:
    """Requests keep their version to the end. They are not paused for a weight sync; with carry, for the update."""
    paused, module = ppo.out / "paused", ppo.out / "record.py"
    module.write_text(RECORD_PAUSES.format(path=str(paused)))
    late = (f"trainer.async_mode={mode}", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")
    sizes = ("data.max_response_length=48", "actor_rollout_ref.rollout.max_num_seqs=24", "data.val_files=")
    served = ("actor_rollout_ref.rollout.lora=adapter", "trainer.total_training_steps=3", *LORA[:3:2])
    done = ppo.run("trainer.controller=local", *served, *late, *sizes, f"algorithm.custom_module={module}")
    lines = done.metrics[1:]
    assert len(lines) == 3 and max(line["staleness/max"] for line in lines) > 0
    assert paused.exists() == (mode == "carry")
    assert all(line["sync/probe_gap"] < 5e-5 and line["staleness/mixed"] == 0 for line in lines)
    rows = [record["rows"][0] for line in lines for record in done.rollouts(int(line["step"]))]
    assert {len(row["weight_versions"]) for row in rows} == {1}
    assert len({row["weight_versions"][0][0] for row in rows}) > 1
