"""Gradients of TRL's preference trainers on one batch: run by preference_gradients.py in an environment of its own.

    python _trl_gradients.py '{"policy": "...", "reference": "...", "pairs": "...jsonl", "cases": {...}, "out": "..."}'

Of each case, <out>/<name>.npz: the gradient of each parameter by its name, and the loss.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def gradients(given: dict[str, Any], case: dict[str, Any], folder: str) -> dict[str, np.ndarray]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in Path(given["pairs"]).read_text().splitlines()]
    load = AutoModelForCausalLM.from_pretrained
    trainer = DPOTrainer(
        model=load(given["policy"], dtype=torch.float32),
        ref_model=load(given["reference"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given["policy"]),
        train_dataset=Dataset.from_list(rows),
        args=DPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            per_device_train_batch_size=len(rows),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **case,
        ),
    )
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
