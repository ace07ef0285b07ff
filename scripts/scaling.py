"""Write the table in docs/scaling.md: model sizes, machines and keys, computed by the memory planner.

.venv/bin/python scripts/scaling.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from alphaapollo.config.keys import format_value  # noqa: E402
from alphaapollo.config.resolve import resolve_model, resolve_rollout  # noqa: E402
from alphaapollo.config.schema import Config  # noqa: E402
from alphaapollo.planning.memory_fit import (  # noqa: E402
    BUDGET,
    MAX_TOKENS,
    Settings,
    find_cheapest_settings,
    list_memory_saving_settings,
    replace_values,
)
from alphaapollo.planning.memory_plan import MemoryPlan, plan_memory  # noqa: E402
from alphaapollo.planning.model_memory import GIB  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- scripts/scaling.py writes from here -->\n", "<!-- to here -->\n"
MODELS = {
    "0.5B": "qwen2.5-0.5b",
    "1.5B": "qwen2.5-1.5b",
    "7B": "qwen2.5-7b",
    "32B": "qwen2.5-32b",
    "235B-A22B": "qwen3-235b-a22b",
}
COMMON = {
    "algorithm.adv_estimator": "grpo",
    "data.max_prompt_length": 1024,
    "data.max_response_length": 7168,
    "env.rollout.n": 8,
}


@dataclass(frozen=True)
class Machine:
    nodes: int
    gpus: int  # per node
    gib: int  # per GPU

    @property
    def name(self) -> str:
        return f"{self.nodes * self.gpus} x {self.gib} GiB"


MACHINES = [Machine(1, 1, 24), Machine(1, 1, 80), Machine(1, 1, 140), Machine(1, 8, 24), Machine(1, 8, 80),
            Machine(1, 8, 140), Machine(2, 8, 80), Machine(8, 8, 80), Machine(8, 8, 140)]  # fmt: skip


def setting(model: str, machine: Machine) -> Config:
    given = {
        "actor_rollout_ref.model.path": str(ROOT / "scripts" / "published_models" / MODELS[model]),
        "trainer.nnodes": machine.nodes,
        "trainer.n_gpus_per_node": machine.gpus,
        # The installed kernels do not matter: memory is the same for all kinds that store no scores.
        "actor_rollout_ref.model.attention": "varlen",
        BUDGET: MAX_TOKENS,
    }
    config = replace_values(Config(), COMMON | given)
    role = config.actor_rollout_ref
    resolved, gpus = resolve_model(role.model, "cuda"), machine.nodes * machine.gpus
    rollout = resolve_rollout(role.rollout, resolved, "cuda", gpus, config.trajectories_per_batch)
    return replace_values(config, {"actor_rollout_ref.model": resolved, "actor_rollout_ref.rollout": rollout})


def search(model: str, machine: Machine) -> tuple[Settings, MemoryPlan] | None:
    """Find keys with which the model fits with a margin and an engine has KV cache for eight rows. On several nodes, a
    copy of the model is on each node or over all ranks, whichever needs fewer keys."""
    room, capacity, options = 8 * (1024 + 7168), machine.gib * GIB, []
    for size in dict.fromkeys([machine.gpus, machine.nodes * machine.gpus]):
        config = replace_values(setting(model, machine), {"actor_rollout_ref.actor.fsdp_config.fsdp_size": size})

        def make_plan(keys: Settings, config: Config = config) -> MemoryPlan:
            return plan_memory(replace_values(config, keys), "cuda", capacity)

        def is_acceptable(keys: Settings) -> bool:
            plan = make_plan(keys)
            return not plan.describe_shortage() and plan.kv_cache_tokens >= room

        settings = list_memory_saving_settings(config, "cuda", machine.gpus, adds_devices=False)
        keys = find_cheapest_settings(settings, is_acceptable)
        if keys is not None:
            options.append((keys, make_plan(keys)))
    return min(options, key=lambda option: len(option[0]), default=None)


def lines() -> Iterator[str]:
    yield "| model | GPUs | ranks per copy | keys besides the defaults | peak GiB | at | KV cache, tokens |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for model in MODELS:
        machines: dict[str, list[str]] = {}  # other cells of a row -> names of the machines
        for machine in MACHINES:
            result = search(model, machine)
            if result is None:
                machines.setdefault("| does not fit | | | |", []).append(machine.name)
                continue
            keys, plan = result
            moment, held = plan.peak
            words = "<br>".join(f"`{short(key)}={format_value(value)}`" for key, value in keys.items()) or "none"
            peak = f"{held.total() / GIB:.0f} | {moment.removeprefix('update of the ')}"
            cache = f"{plan.kv_cache_tokens // 1000:,} k"
            machines.setdefault(f"{plan.shards} | {words} | {peak} | {cache} |", []).append(machine.name)
        for cells, names in machines.items():
            yield f"| {model} | {', '.join(names)} | {cells}\n"


def short(key: str) -> str:
    return key.removeprefix("actor_rollout_ref.")


def page(text: str) -> str:
    """Return the page with an updated table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + "".join(lines()) + "\n" + END + rest.split(END)[1]


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
