"""What only a GPU selects, on a fake GPU: worker methods, host synchronizations, memory, and vLLM's configurations."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu.counts import count_update
from tests.simulated_gpu.fake_cuda import compile_guard, run_preloaded
from tests.simulated_gpu.scenarios import SCENARIOS
from tests.simulated_gpu.workers import QWEN3, make_models

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "scripts" / "published_models"
QWEN3_8B = QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the device guard of the fake GPU is compiled with g++"),
]

Counts = dict[str, int]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def found(guard: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Counts]]:
    """Host synchronizations of all scenarios, which run in one process."""
    models = tmp_path_factory.mktemp("models")
    make_models(models)
    output = run_preloaded(guard, "tests.simulated_gpu.scenarios", str(models), timeout=1200)
    parts: dict[str, dict[str, Counts]] = json.loads(output[output.index("{") :])
    return parts


def test_every_scenario_runs(found: dict[str, dict[str, Counts]]) -> None:
    assert found.keys() == SCENARIOS.keys() and all(found.values())


UPDATES = {
    "dense": {"update": count_update()},
    "reference": {"update": count_update(3, old=2)},
    "full_kl": {"update": count_update()},
    "shared_prompts": {"first update": count_update(prompts=1), "second update": count_update()},
    "offloads": {"first update": count_update(), "second update": count_update()},
    "lora": {"update": count_update()},
    "ulysses": {"update": count_update()},
    "hsdp": {"update": count_update()},
    "teacher": {"update": count_update()},
    "internvl": {"update": count_update()},
    "optimizers": {"muon": count_update(), "adamw": count_update()},
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_waits_for_the_gpu_once_per_step(found: dict[str, dict[str, Counts]], name: str) -> None:
    counted = {title.partition(":")[0]: counts for title, counts in found[name].items()}
    assert {title: counted[title] for title in UPDATES[name]} == UPDATES[name]


def test_no_loss_and_no_family_waits_for_the_gpu_in_a_micro_batch(found: dict[str, dict[str, Counts]]) -> None:
    parts = found["losses"] | found["other_models"]
    assert len(parts) > 15
    measures_kl = count_update(old=2) | {"tolist in workers/model_worker.py reduce": 3}  # after the update
    expected = {title: measures_kl if title.startswith("ppo_kl") else count_update() for title in parts}
    assert {title: counts for title, counts in parts.items() if counts != expected[title]} == {}


@pytest.mark.parametrize("name", ["preferences", "reward_models"])
def test_preference_training_waits_for_the_gpu_at_the_end_of_a_step(
    found: dict[str, dict[str, Counts]], name: str
) -> None:
    step = {"item in models/train_state.py clip_gradients": 1, "tolist in workers/model_worker.py reduce": 2}
    assert found[name] and all(counts == step for counts in found[name].values())


def test_experts_wait_for_the_gpu_once_per_layer_also_with_checkpointing(found: dict[str, dict[str, Counts]]) -> None:
    metrics = {"copy to cpu in models/moe_routing.py compute_metrics": 1}
    layers = {"tolist in models/sharding.py read_and_keep": 2}
    updates = {name: next(iter(found[name].values())) for name in ("experts", "expert_parallelism")}
    assert updates == {"experts": count_update() | metrics, "expert_parallelism": count_update() | metrics | layers}


def test_vision_towers_wait_for_the_gpu_as_often_with_any_number_of_layers(found: dict[str, dict[str, Counts]]) -> None:
    names = ("qwen2_5_vl", "qwen2_5_vl_with_trained_tower", "qwen3_vl")
    updates = [next(iter(found[name].values())) for name in names]
    waits = [sum(counts.values()) - sum(count_update().values()) for counts in updates]
    assert waits == [9, 9, 11]


def test_a_publish_waits_for_the_gpu_twice_per_bucket(found: dict[str, dict[str, Counts]]) -> None:
    bucket = {
        "event.synchronize in weight_sync/shared_memory.py prefetch_buckets": 1,
        "item in weight_sync/digest.py compute_joint_digest": 1,
    }
    assert found["publish_dense"]["publish"] == found["expert_parallelism"]["publish"] == bucket


def test_the_kernel_of_the_digest_computes_what_torch_computes_and_compiles_for_an_h100() -> None:
    interpreted = json.loads(run_preloaded(None, "tests.simulated_gpu.kernels", TRITON_INTERPRET="1"))
    assert len(interpreted) == 5 and all(kernel == expected for kernel, expected in interpreted)
    assert int(run_preloaded(None, "tests.simulated_gpu.kernels")) > 1000


def test_other_worker_methods_wait_for_the_gpu_once(found: dict[str, dict[str, Counts]]) -> None:
    merged = {"copy to cpu in workers/model_worker.py merge_token_values": 1}
    step = {"item in models/train_state.py clip_gradients": 1}
    assert found["dense"]["log-probs"] == found["reference"]["reference log-probs"] == merged
    assert found["dense"]["log-prob mismatch"] == found["lora"]["publish adapters"] == {}
    assert found["critic"] == {"values": merged, "update": step | {"tolist in workers/model_worker.py reduce": 1}}
    assert found["sft"]["step"] == step | {"tolist in workers/model_worker.py reduce": 2}
    assert found["optimizers"]["snapshot of adamw"] == found["optimizers"]["snapshot of muon"] == {}


MEMORY: dict[str, dict[str, Any]] = {
    "0.5B on one GPU": {"model": "qwen2.5-0.5b", "world_size": 1, "max_tokens": 16384},
    "8B on eight": {"model": "qwen3-8b", "world_size": 8, "max_tokens": 4096},
    "30B-A3B on eight, expert parallelism": {
        "model": "qwen3-30b-a3b",
        "world_size": 8,
        "max_tokens": 16384,
        "checkpointing": True,
        "actor": {"fsdp_config": {"ep_size": 8}},
    },
}


@pytest.mark.parametrize("name", MEMORY)
def test_the_planned_memory_of_an_update_is_within_10_percent(name: str, guard: Path, tmp_path: Path) -> None:
    case = MEMORY[name]
    folder = PUBLISHED / case["model"]
    if not folder.exists():
        folder = tmp_path
        (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    words = json.dumps({**case, "model": str(folder), "row_length": 2048})
    output = run_preloaded(guard, "tests.simulated_gpu.memory", words, timeout=1200)
    sizes = json.loads(output.strip().splitlines()[-1])
    assert sizes["allocated"] <= sizes["smallest"] <= sizes["reserved"]
    assert 0.9 * sizes["smallest"] <= sizes["planned"] <= 1.1 * sizes["smallest"], sizes


def test_the_planned_memory_of_a_publish_is_enough(guard: Path, tmp_path: Path) -> None:
    """Qwen3-30B-A3B with six layers: the buffers do not depend on the number of layers."""
    config = json.loads((PUBLISHED / "qwen3-30b-a3b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    case = {"model": str(tmp_path), "world_size": 8, "actor": {"fsdp_config": {"ep_size": 8}}, "publishes": True}
    output = run_preloaded(guard, "tests.simulated_gpu.memory", json.dumps(case), timeout=1200)
    sizes = json.loads(output.strip().splitlines()[-1])
    assert 0.95 * sizes["reserved"] <= sizes["planned"] <= 1.2 * sizes["reserved"], sizes


def test_vllm_accepts_the_engines_of_every_recipe() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    output = run_preloaded(None, "tests.simulated_gpu.vllm_configuration", timeout=900)
    engines = json.loads(output[output.index("{") :])
    assert len(engines) == 21
    assert all(one["sleep"] is (one["transfer"] == "ipc") for one in engines.values())
    assert all(one["largest graph"] == one["sequences"] for one in engines.values()), engines
