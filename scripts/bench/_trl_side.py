"""Time GRPO steps of TRL (generation by Hugging Face's generate): run by step.py in TRL's virtual environment.

    python _trl_side.py '{"model": "...", "prompts": "...parquet", "num_prompts": 16, "group": 8, ...}'

The last line of the output is a JSON object: seconds of each step after the warm-up, and tokens per completion.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any


def digits_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Reward of both sides, of negligible cost."""
    return [sum(letter.isdigit() for letter in completion[0]["content"]) / 10 for completion in completions]


def grpo_config(given: dict[str, Any], folder: str) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        seed=0,
        num_generations=given["group"],
        per_device_train_batch_size=given["micro_batch"],
        gradient_accumulation_steps=given["num_prompts"] * given["group"] // given["micro_batch"],
        max_completion_length=given["max_tokens"],
        max_steps=given["warmup"] + given["steps"],
        temperature=1.0,
        beta=0.0,
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        gradient_checkpointing=given["gradient_checkpointing"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(given: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(given["threads"])
    completions = given["num_prompts"] * given["group"]

    class Stopwatch(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.lengths: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "completions/mean_length" in logs:
                self.lengths.append(logs["completions/mean_length"])

    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, given["dtype"])),
            processing_class=AutoTokenizer.from_pretrained(given["model"]),
            reward_funcs=digits_reward,
            train_dataset=Dataset.from_parquet(given["prompts"]).select_columns(["prompt"]),
            callbacks=[stopwatch],
            args=grpo_config(given, folder),
        )
        trainer.train()
    print(
        json.dumps(
            {
                "step_seconds": stopwatch.seconds[given["warmup"] :],
                "tokens_per_completion": sum(stopwatch.lengths) / len(stopwatch.lengths),
                "completions": completions,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
