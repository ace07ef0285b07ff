"""Values that the checks are expected to measure on one GPU, each with its source: memory from the memory planner, host
synchronizations as counted on the fake GPU (tests/simulated_gpu), and estimated times of an H100.

A value is (lowest, highest, source). An estimate is not a measurement: see docs/benchmark_details.md.
"""

from __future__ import annotations

from alphaapollo.config.schema.planned_device import find_gpu
from scripts.gpu_check.device import GIB
from scripts.gpu_check.kit import PUBLISHED

Expectation = tuple[float, float, str]
PLANNER, SIMULATION, DATA_SHEET = "memory planner", "simulated GPU", "data sheet, upper limit"
ESTIMATE = "estimate for an H100"
H100, H100_MEMORY = "NVIDIA H100 80GB HBM3", 85_520_809_984  # name and bytes, as CUDA reports them
STEP_TOKENS = 128 * 8 * 1800
STEP_SECONDS = (70.0, 105.0)
ESTIMATES = {  # check: {measurement: (lowest, highest)}
    "step:0.5b": {
        "seconds": STEP_SECONDS,
        "tokens_per_s": (STEP_TOKENS / STEP_SECONDS[1], STEP_TOKENS / STEP_SECONDS[0]),
    },
    "throughput:7b": {"mfu": (0.25, 0.5)},
}


def list_expectations(check: str, gpu: str = H100, gpu_memory: int = H100_MEMORY) -> dict[str, Expectation]:
    """Return the expected values of a check's measurements on a GPU of this name and size in bytes."""
    module, _, part = check.partition(":")
    planned = {"memory": _plan_memory, "throughput": _plan_throughput, "step": _plan_step}
    found = planned[module](part, gpu_memory) if module in planned else {}
    if module == "throughput" and part != "compiled":
        from scripts.gpu_check.check_throughput import MICRO_BATCHES
        from tests.simulated_gpu.counts import count_update

        waits = sum(count_update().values()) / MICRO_BATCHES
        found["waits_per_micro_batch"] = (waits, waits, SIMULATION)
    if module == "versions" and (known := find_gpu(gpu)):
        found["matmul_tflops"] = (0.0, known.tflops, DATA_SHEET)
    if "H100" in gpu:
        found |= {name: (*values, ESTIMATE) for name, values in ESTIMATES.get(check, {}).items()}
    return found


def _plan(size: float) -> Expectation:
    return size / GIB, size / GIB, PLANNER


def _plan_memory(part: str, gpu_memory: int) -> dict[str, Expectation]:
    from alphaapollo.planning.model_memory import estimate_idle, estimate_update
    from scripts.gpu_check.check_memory import LENGTHS, VARIANTS, plan_variant

    found = {}
    for name, settings in VARIANTS.items():
        plan = plan_variant("cuda", PUBLISHED / "qwen2.5-0.5b", settings, LENGTHS["cuda"])
        found[f"{name} peak_gib"] = _plan(estimate_update(plan).total())
        found[f"{name} idle_gib"] = _plan(estimate_idle(plan).total())
    return found


def _plan_throughput(part: str, gpu_memory: int) -> dict[str, Expectation]:
    from scripts.gpu_check.check_throughput import SHAPES, choose_checkpointing, write_config

    shape = SHAPES["0.5b" if part == "compiled" else part]
    with write_config(shape) as folder:
        _, planned = choose_checkpointing("cuda", folder, (shape.tokens // 1024, 1024), gpu_memory)
    return {"peak_gib": _plan(planned)}


def _plan_step(part: str, gpu_memory: int) -> dict[str, Expectation]:
    from alphaapollo.config.load import load_config_and_user_settings
    from alphaapollo.config.schema import Config
    from scripts.gpu_check.check_step import FEW, MODELS, WORDS
    from scripts.recipes import plan_recipe

    words = [*WORDS[part], *FEW, "data.train_files=train.jsonl"]
    words += [f"actor_rollout_ref.model.path={MODELS[part]}"] * bool(MODELS[part])
    plan = plan_recipe(load_config_and_user_settings(Config, "ppo", words)[0]).memory
    assert plan is not None
    usage = plan.phases["update of the policy"]
    reserved = usage.total() - usage["engine buffers"] - usage["runtime"]  # by torch's allocator in the trainer
    return {"policy_peak_gib": _plan(reserved)}
