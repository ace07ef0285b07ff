"""GRPO with LoRA: constants, options of argparse, a value that is known only at run time."""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

SAMPLES = 8


def short(completions, **kwargs):
    return [1.0 / (1 + len(one[0]["content"])) for one in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--out")
    args = parser.parse_args()
    config = GRPOConfig(
        output_dir=args.out,
        learning_rate=args.learning_rate,
        num_generations=SAMPLES,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        steps_per_generation=16,
        max_completion_length=256,
        beta=0.01,
        loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=0.1,
        epsilon_high=0.3,
        warmup_steps=0.05,
        report_to=["wandb", "clearml"],
        chat_template_kwargs={"enable_thinking": False},
        use_vllm=True,
        top_k=0,
    )
    lora = LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"])
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=[short],
        args=config,
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        peft_config=lora,
    ).train()


main()
