"""Time GRPO steps of TRL, which generates with vLLM in its own process or with Hugging Face's generate.

step.py runs this script in TRL's virtual environment:

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

    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": given["max_model_len"],
        "vllm_importance_sampling_correction": False,  # one more forward pass, which our side does not have either
    }
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
        **(engine if given["engine"] == "vllm" else {}),
    )


def adapt_vllm(given: dict[str, Any]) -> None:
    """Let TRL work with vLLM on a CPU: the dtype and number of requests of our side, and a weight sync that packs the
    weights again. TRL's own sync fails, because vLLM frees the weight of a linear layer when it packs it."""
    import trl.generation.vllm_generation as generation
    import vllm
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    start = vllm.LLM.__init__
    completions = given["num_prompts"] * given["group"]

    def start_on_cpu(self: Any, *arguments: Any, **settings: Any) -> None:
        own = {"dtype": given["dtype"], "enforce_eager": True, "block_size": 32, "max_num_seqs": completions}
        start(self, *arguments, **settings | own)

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        named = ((name, weight.detach()) for name, weight in self._iter_named_params())
        runner.reload_weights(weights_iterator=named, is_checkpoint_format=True)
        for layer in runner.get_model().modules():
            if type(layer).__name__ == "VocabParallelEmbedding" and hasattr(layer, "cpu_linear"):  # tied to the head
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        self.llm.reset_prefix_cache()

    vllm.LLM.__init__ = start_on_cpu
    generation.VLLMGeneration.sync_weights = sync_weights


def main(given: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(given["threads"])
    if given["engine"] == "vllm":
        adapt_vllm(given)
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
