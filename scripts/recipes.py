"""Write the numbers in docs/recipes.md that the memory planner computes for examples/recipes.

.venv/bin/python -m scripts.recipes
"""

from __future__ import annotations

import re
from pathlib import Path

from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.launch.plan import Plan, add_memory_plan, resolve_plan
from alphaapollo.planning.memory_fit import replace_values
from alphaapollo.planning.model_memory import GIB

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECIPES = ROOT / "docs" / "recipes.md", ROOT / "examples" / "recipes"
SIZES = ("one_gpu", "eight_gpus", "two_nodes")
NODE = Machine(num_cores=128, num_gpus=8, gpu_memory=80 * GIB, memory=1024 * GIB)
# | [eight GPUs](../examples/recipes/gsm8k/eight_gpus.yaml) | computed | computed | computed | other cells
ROW = re.compile(r"^(\| \[[\w ]+\]\(\.\./examples/recipes/(\w+)/(\w+)\.yaml\) \|)(?:[^|\n]*\|){4}", re.MULTILINE)


def load_recipe(task: str, size: str, *overrides: str) -> Config:
    words = ["--config-dir", str(RECIPES / task), "--config-name", size, *overrides]
    return load_config_and_user_settings(Config, "ppo", words)[0]


def find_published_config(path: str) -> Path:
    """Return the folder with the config.json of a published model: qwen2.5-7b for Qwen/Qwen2.5-Coder-7B-Instruct."""
    name = re.sub(r"-(instruct|coder)", "", path.split("/")[-1].lower())
    return ROOT / "scripts" / "published_models" / name


def plan_recipe(config: Config) -> Plan:
    """Plan a recipe on nodes with eight 80 GiB GPUs, as trainer.dry_run does, from the config.json of its model."""
    known = {
        "actor_rollout_ref.model.path": str(find_published_config(config.actor_rollout_ref.model.path)),
        # The installed kernels do not matter: memory is the same for all kinds that store no scores.
        "actor_rollout_ref.model.attention": "varlen",
    }
    config = replace_values(config, known)
    return add_memory_plan(resolve_plan(config, NODE, []), config, NODE, [])


def describe_recipe(task: str, size: str) -> list[str]:
    """Return the computed cells of a recipe's row: model, peak memory of a GPU, KV cache of an engine, tokens."""
    config = load_recipe(task, size)
    role, memory = config.actor_rollout_ref, plan_recipe(config).memory
    assert memory is not None and not memory.problem, (task, size, memory)
    generation = memory.phases["generate"].total()
    rest = {name: usage.total() for name, usage in memory.phases.items() if name != "generate"}
    phase = max(rest, key=lambda name: rest[name])
    name = role.model.path.split("/")[-1]
    tokens = config.trajectories_per_batch * config.data.max_length / 1e6
    return [
        f"{name}, LoRA of rank {role.model.lora_rank}" if role.model.lora_rank else f"{name}, all weights",
        f"{generation / GIB:.0f} / {rest[phase] / GIB:.0f} ({phase.removeprefix('update of the ')})",
        f"{memory.kv_cache_tokens // 1000:,} k",
        f"{config.trajectories_per_batch:,} x {config.data.max_length:,} = {tokens:.1f} M",
    ]


def page(text: str) -> str:
    """Return the page with updated cells."""
    return ROW.sub(lambda row: f"{row[1]} {' | '.join(describe_recipe(row[2], row[3]))} |", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
