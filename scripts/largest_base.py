"""Print the largest base model for GRPO with LoRA on one GPU, in bfloat16 and with weights of 4 bits.

.venv/bin/python -m scripts.largest_base [KEY=VALUE ...]    e.g. data.max_response_length=16384
.venv/bin/python -m scripts.largest_base --write            write the table of docs/lora.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory

from alphaapollo.config.load import load_config
from alphaapollo.config.resolve import resolve_model, resolve_rollout
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.planned_device import get_planned_gpu_memory
from alphaapollo.planning.memory_fit import BUDGET, MAX_TOKENS, Settings, list_memory_saving_settings, replace_values
from alphaapollo.planning.memory_plan import plan_memory
from alphaapollo.plugins.quantize.write import make_quantization_config

ROOT = Path(__file__).resolve().parents[1]
PAGE, PUBLISHED = ROOT / "docs" / "lora.md", ROOT / "scripts" / "published_models"
BEGIN = "<!-- largest-base: written by python -m scripts.largest_base --write -->\n"
END = "<!-- end of largest-base -->\n"
MODELS = {f"qwen2.5-{size}": f"{size[:-1]}B" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")}
MODELS |= {"llama3.1-405b": "405B"}
GPUS = {"rtx4090": "24 GB", "l40s": "48 GB", "h100": "80 GB"}
LENGTHS = ((1024, 7168), (1024, 31744))  # of prompts and answers
ROWS = 8  # of full length in the engine's KV cache
GROUP_SIZE = 128
ROLE = "actor_rollout_ref"
COMMON = ("algorithm=grpo", f"{ROLE}.model.lora_rank=32", f"{ROLE}.rollout.lora=adapter")


def fits(folder: Path, gpu: str, words: Sequence[str]) -> bool:
    """Whether settings that save memory let a model train on one GPU, and its engine hold ROWS."""
    planned = (f"{ROLE}.model.path={folder}", "trainer.dry_run=true", f"trainer.planned_device={gpu}")
    config = load_config(Config, "ppo", [*COMMON, *words, *planned])
    # The installed kernels do not matter: memory is the same for all kinds that store no scores.
    config = replace_values(config, {f"{ROLE}.model.attention": "varlen", BUDGET: MAX_TOKENS})
    role = config.actor_rollout_ref
    model = resolve_model(role.model, "cuda")
    rollout = resolve_rollout(role.rollout, model, "cuda", 1, config.trajectories_per_batch)
    config = replace_values(config, {f"{ROLE}.model": model, f"{ROLE}.rollout": rollout})

    def is_acceptable(settings: Settings) -> bool:
        plan = plan_memory(replace_values(config, settings), "cuda", get_planned_gpu_memory(gpu))
        return not plan.describe_shortage() and plan.kv_cache_tokens >= ROWS * config.data.max_length

    options = list_memory_saving_settings(config, "cuda", 1, adds_devices=False)
    return any(is_acceptable(settings) for settings in reversed([*accumulate(options, or_)]))


def write_models(folder: Path) -> None:
    """Write folders without weights: bfloat16/NAME and 4 bits/NAME."""
    for name in MODELS:
        config = json.loads((PUBLISHED / name / "config.json").read_text())
        for kind, section in (("bfloat16", None), ("4 bits", make_quantization_config("lm_head", GROUP_SIZE))):
            (folder / kind / name).mkdir(parents=True)
            (folder / kind / name / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def find_largest(folder: Path, words: Sequence[str]) -> Iterator[str]:
    """Yield the largest model of a folder on each of GPUS. Each was planned, and so was the next larger one, which does
    not fit."""
    names = list(MODELS)
    number = 0
    for gpu in GPUS:
        while number < len(names) and fits(folder / names[number], gpu, words):
            number += 1
        yield MODELS[names[number - 1]] if number else "none"
        number = max(number - 1, 0)  # is planned again for the next GPU


def lines(given: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table with two rows for each list of words."""
    yield f"| prompt + answer | weights | {' | '.join(f'{size} (`{gpu}`)' for gpu, size in GPUS.items())} |\n"
    yield f"|---|---|{'---|' * len(GPUS)}\n"
    with TemporaryDirectory() as folder:
        write_models(Path(folder))
        for words in given:
            data = load_config(Config, "ppo", [*COMMON, *words]).data
            lengths = f"{data.max_prompt_length:,} + {data.max_response_length:,}"
            for kind in ("bfloat16", "4 bits"):
                yield f"| {lengths} | {kind} | {' | '.join(find_largest(Path(folder, kind), words))} |\n"


def page(text: str) -> str:
    """Return the page with an updated table."""
    before, rest = text.split(BEGIN)
    words = [[f"data.max_prompt_length={one}", f"data.max_response_length={other}"] for one, other in LENGTHS]
    return before + BEGIN + "\n" + "".join(lines(words)) + "\n" + END + rest.split(END)[1]


def main(words: Sequence[str]) -> None:
    if [*words] == ["--write"]:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        sys.stdout.writelines(lines([words]))


if __name__ == "__main__":
    main(sys.argv[1:])
