"""Compute gradients of TRL's trainers on one batch: run by preference_gradients.py in TRL's virtual environment.

    python _trl_gradients.py '{"policy": "...", "reference": "...", "scorer": "...", "pairs": "...", ...}'

Writes <out>/<name>.npz for each case: the loss, and the gradient of each parameter by name.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def make_trainer(given: dict[str, Any], case: dict[str, Any], folder: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    own = {name: value for name, value in case.items() if name != "trainer"}
    kind = case.get("trainer", "dpo" if "loss_type" in case else "reward")
    rows = [json.loads(line) for line in Path(given["singles" if kind == "kto" else "pairs"]).read_text().splitlines()]
    if kind == "kto":
        rows = [{"prompt": row["prompt"], "completion": row["response"], "label": row["label"]} for row in rows]
    shared = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "per_device_train_batch_size": len(rows),
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    data = {
        "processing_class": AutoTokenizer.from_pretrained(given["policy"]),
        "train_dataset": Dataset.from_list(rows),
    }
    if kind == "reward":
        scorer = AutoModelForSequenceClassification.from_pretrained(given["scorer"], dtype=torch.float32)
        return RewardTrainer(model=scorer, args=RewardConfig(**shared, **own), **data)

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(given[name], dtype=torch.float32)

    trainers = {
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "cpo": (CPOTrainer, CPOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
    }
    trainer, config = trainers[kind]
    reference = {"ref_model": load("reference")} if kind in ("dpo", "kto") else {}
    return trainer(model=load("policy"), args=config(**shared, **own), **data, **reference)


def gradients(given: dict[str, Any], case: dict[str, Any], folder: str) -> dict[str, np.ndarray]:
    trainer = make_trainer(given, case, folder)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    found = {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}
    return found | {"loss": loss.detach().numpy()}


def main(given: dict[str, Any]) -> None:
    for name, case in given["cases"].items():
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(given["out"], f"{name}.npz"), **gradients(given, case, folder))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
