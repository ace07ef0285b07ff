import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from alphaapollo.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.weight_sync.shared_memory import SharedAdapterSender

LAYER = "base_model.model.model.layers.0.self_attn"


def adapter() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = {f"{LAYER}.{name}.lora_{part}.weight" for name in ("q_proj", "v_proj") for part in "AB"}
    return {name: torch.randn((4, 6) if ".lora_A." in name else (6, 4)) for name in sorted(names)}


def test_sent_folder_is_a_peft_adapter_with_scale_one(tmp_path: Path) -> None:
    sender = SharedAdapterSender(tmp_path / "w", torch.bfloat16)
    sender.send(adapter().items(), version=1)
    update = sender.send(adapter().items(), version=2)
    assert update is not None and update.version == 2
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v2"]
    read = load_file(tmp_path / "w" / update.folder / "adapter_model.safetensors")
    assert read.keys() == adapter().keys()
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in adapter().items())
    assert update.digest == format_digest(compute_joint_digest(read.values()))
    config = json.loads((tmp_path / "w" / update.folder / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 4 and config["target_modules"] == ["q_proj", "v_proj"]
    sender.release_sent_weights()
    assert not (tmp_path / "w").exists()
