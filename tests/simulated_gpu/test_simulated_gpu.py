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
from tests.simulated_gpu.scenarios import PARTS, SCENARIOS, UPDATES
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

BYTES = "bytes gathered", "bytes reduced"
Found = dict[str, dict[str, dict[str, int]]]
"""Host synchronizations by scenario and part, or kernels and bytes."""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def run_scenarios(guard: Path, models: Path, *names: str) -> dict[str, Found]:
    """Run scenarios (without names: all) in one process. Returns their counts."""
    output = run_preloaded(guard, "tests.simulated_gpu.scenarios", str(models), *names, timeout=1200)
    counts: dict[str, Found] = json.loads(output[output.index("{") :])
    return counts


@pytest.fixture(scope="module")
def found(guard: Path, models: Path) -> Found:
    """Host synchronizations of all scenarios."""
    return run_scenarios(guard, models)["waits"]


def check_waits(name: str, counted: dict[str, dict[str, int]]) -> None:
    """Compare the host synchronizations of an update and its parts with the expected ones."""
    row = UPDATES[name]
    if isinstance(row.expected, int):
        assert sum(counted["update"].values()) == sum(count_update().values()) + row.expected
    elif row.expected is not None:
        assert counted["update"] == row.expected
    assert counted.get("later update", count_update()) == count_update()
    expected = {part: PARTS[part][1] for part in row.parts}
    assert {part: counted[part] for part in row.parts if expected[part] is not None} == {
        part: counts for part, counts in expected.items() if counts is not None
    }


@pytest.mark.nightly
def test_kernels_and_bytes_of_an_update_and_a_publish(guard: Path, models: Path) -> None:
    """Each layer is gathered twice in bfloat16, for the forward and the backward pass, and reduced in float32."""
    names = "eight ranks", "five layers"
    work = run_scenarios(guard, models, *names)["work"]  # other scenarios before them would change the kernels
    shallow, deep = (work[name] for name in names)
    (kernels, gathered, reduced), (_, published, _) = (  # inner lists: generators would read the last `part` only
        [(deep[part].get(name, 0) - shallow[part].get(name, 0)) / 2 for name in ("kernels", *BYTES)]
        for part in ("update", "publish")
    )
    attention, mlp, norms = 256 * 64 * (2 * 4 + 2 * 2), 3 * 256 * 512, 2 * 256 + 2 * 64
    assert (gathered, reduced, published) == tuple(size * (attention + mlp + norms) for size in (4, 4, 2))
    assert kernels <= 220 and shallow["update"]["kernels"] - 3 * kernels <= 270


@pytest.mark.nightly
def test_every_update_waits_for_the_gpu_as_often_as_expected(found: Found) -> None:
    """Towers of images wait as often with any number of layers."""
    assert found.keys() == SCENARIOS.keys() and all(found.values())
    for name in UPDATES:
        check_waits(name, found[name])


@pytest.mark.nightly
def test_no_loss_waits_for_the_gpu_in_a_micro_batch(found: Found) -> None:
    assert len(found["losses"]) > 15
    measures_kl = count_update(old=2) | {"tolist in workers/model_worker.py reduce": 3}  # after the update
    expected = dict.fromkeys(found["losses"], count_update()) | {"ppo_kl": measures_kl}
    expected["given old log-probs"] = {name: one for name, one in count_update().items() if "merge" not in name}
    assert {title: counts for title, counts in found["losses"].items() if counts != expected[title]} == {}


@pytest.mark.nightly
def test_experts_wait_for_the_gpu_once_per_layer_also_with_checkpointing(found: Found) -> None:
    counts = found["expert_parallelism"]
    assert counts["update"] == count_update(expert_metrics=1, expert_layers=2)
    assert counts["publish"] == found["eight ranks"]["publish"]


@pytest.mark.nightly
def test_other_workers_wait_for_the_gpu_at_the_end_of_a_step(found: Found) -> None:
    clip, reduce = "item in models/train_state.py clip_gradients", "tolist in workers/model_worker.py reduce"
    assert found["critic"] == {"values": found["dense"]["log-probs"], "update": {clip: 1, reduce: 1}}
    steps = [found["sft"]["step"], *found["preferences"].values(), *found["reward_models"].values()]
    assert steps == [{clip: 1, reduce: 2}] * 4


def test_the_kernel_of_the_digest_computes_what_torch_computes_and_compiles_for_an_h100() -> None:
    interpreted = json.loads(run_preloaded(None, "tests.simulated_gpu.kernels", TRITON_INTERPRET="1"))
    assert len(interpreted) == 5 and all(kernel == expected for kernel, expected in interpreted)
    assert int(run_preloaded(None, "tests.simulated_gpu.kernels")) > 1000


MEMORY: dict[str, dict[str, Any]] = {
    "0.5B on one GPU": {"model": "qwen2.5-0.5b", "world_size": 1, "max_tokens": 16384},
    "0.5B, selective": {"model": "qwen2.5-0.5b", "world_size": 1, "max_tokens": 16384, "checkpointing": "selective"},
    "0.5B, every third layer": {"model": "qwen2.5-0.5b", "world_size": 1, "max_tokens": 16384, "checkpointing": 3},
    "8B on eight, inputs offloaded": {
        "model": "qwen3-8b",
        "world_size": 8,
        "max_tokens": 16384,
        "checkpointing": True,
        "offloads": True,
    },
    "8B on eight": {"model": "qwen3-8b", "world_size": 8, "max_tokens": 4096},
    "30B-A3B on eight, expert parallelism": {
        "model": "qwen3-30b-a3b",
        "world_size": 8,
        "max_tokens": 16384,
        "checkpointing": True,
        "actor": {"fsdp_config": {"ep_size": 8}},
    },
}


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_the_planned_memory_of_a_publish_is_enough(guard: Path, tmp_path: Path) -> None:
    """Qwen3-30B-A3B with six layers: the buffers do not depend on the number of layers."""
    config = json.loads((PUBLISHED / "qwen3-30b-a3b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    case = {"model": str(tmp_path), "world_size": 8, "actor": {"fsdp_config": {"ep_size": 8}}, "publishes": True}
    output = run_preloaded(guard, "tests.simulated_gpu.memory", json.dumps(case), timeout=1200)
    sizes = json.loads(output.strip().splitlines()[-1])
    assert 0.95 * sizes["reserved"] <= sizes["planned"] <= 1.2 * sizes["reserved"], sizes


@pytest.mark.nightly
def test_vllm_accepts_the_engines_of_every_recipe() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    output = run_preloaded(None, "tests.simulated_gpu.vllm_configuration", timeout=900)
    engines = json.loads(output[output.index("{") :])
    assert len(engines) == 21
    assert all(one["sleep"] is (one["transfer"] == "ipc") for one in engines.values())
    assert all(one["largest graph"] == one["sequences"] for one in engines.values()), engines
