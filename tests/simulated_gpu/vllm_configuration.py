"""vLLM's own configuration code for the engines of every recipe, on a machine that answers as eight H100s.

    python -m tests.simulated_gpu.vllm_configuration

Prints {"task/size": {"graphs": largest captured batch, ...}} as JSON. A configuration that vLLM rejects is an error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch

from alphaapollo.config.schema import Config
from alphaapollo.engines.types import EngineSpec
from alphaapollo.engines.vllm.settings import build_engine_arguments
from scripts.recipes import RECIPES, SIZES, find_published_config, load_recipe, plan_recipe

EXTENSIONS = ("vllm._C", "vllm._moe_C", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
OPERATORS = ("_C", "_moe_C", "_C_cache_ops", "vllm")  # libraries of operators in vLLM's CUDA build


class MockExtension(types.ModuleType):
    """Module of vLLM's CUDA build."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def mock_cuda_build() -> None:
    """Replace what only vLLM's CUDA build has, in this process."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    from triton.backends import backends

    backends.clear()
    backends["nvidia"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    sys.modules.setdefault("vllm.cumem_allocator", types.ModuleType("vllm.cumem_allocator"))
    platforms = importlib.import_module("vllm.platforms")
    platforms.vllm_version_matches_substr = lambda text: False  # not the CPU build
    for name in EXTENSIONS:
        sys.modules[name] = MockExtension(name)
    flash_attention: Any = sys.modules["vllm.vllm_flash_attn"]
    flash_attention.is_fa_version_supported = lambda *_, **__: True
    flash_attention.fa_version_unsupported_reason = lambda *_, **__: None
    mock_operators()
    platforms._current_platform = make_platform()
    importlib.import_module("vllm.utils.torch_utils")
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 8)
    torch.cuda._is_compiled = lambda: True


def mock_operators() -> None:
    get_operator, register_fake = torch._ops._OpNamespace.__getattr__, torch.library.register_fake

    def get_or_mock(self: Any, name: str) -> Any:
        try:
            return get_operator(self, name)
        except AttributeError:
            if self.name in OPERATORS and not name.startswith("__"):
                return MagicMock(name=name)
            raise

    def register_or_skip(operator: Any, function: Callable[..., Any] | None = None, /, **kwargs: Any) -> Any:
        if function is None:
            return lambda later: register_or_skip(operator, later, **kwargs)
        try:
            return register_fake(operator, function, **kwargs)
        except RuntimeError:  # an operator of the CUDA build
            return function

    torch._ops._OpNamespace.__getattr__ = get_or_mock
    torch.library.register_fake = register_or_skip


def make_platform() -> Any:
    """vLLM's platform of a machine with eight H100s."""
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": 85520809984,
        "device_count": 8,
        "num_compute_units": 132,
        "is_fully_connected": True,
        "is_cumem_allocator_available": True,
        "is_sleep_mode_available": True,
        "is_arch_support_pdl": True,
        "import_kernels": None,
    }

    def answer(value: Any) -> Any:
        return classmethod(lambda *_, **__: value)

    methods = {name: answer(value) for name, value in answers.items()}
    return type("H100", (NonNvmlCudaPlatform,), methods)()


def make_spec(config: Config) -> EngineSpec:
    """The engine of a recipe, as its rollout worker makes it."""
    role, plan = config.actor_rollout_ref, plan_recipe(config)
    return EngineSpec(
        index=0,
        model_path=str(find_published_config(role.model.path)),
        trust_remote_code=False,
        rollout=plan.rollout,
        device="cuda",
        dtype=plan.rollout.dtype,
        max_model_len=config.data.max_length,
        log_path="",
        transport="ipc" if plan.rollout.colocate else "nccl",
    )


def describe_configuration(spec: EngineSpec) -> dict[str, Any]:
    """Build vLLM's configuration, and return what a run relies on."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    made = AsyncEngineArgs(**build_engine_arguments(spec)).create_engine_config()
    return {
        "sequences": made.scheduler_config.max_num_seqs,
        "largest graph": made.compilation_config.max_cudagraph_capture_size,
        "sleep": made.model_config.enable_sleep_mode,
        "ranks": made.parallel_config.tensor_parallel_size,
        "transfer": made.weight_transfer_config.backend,
        "prefix caching": made.cache_config.enable_prefix_caching,
    }


def main() -> None:
    tasks = sorted(folder.name for folder in RECIPES.iterdir() if (folder / f"{SIZES[0]}.yaml").exists())
    specs = {f"{task}/{size}": make_spec(load_recipe(task, size)) for task in tasks for size in SIZES}
    mock_cuda_build()
    print(json.dumps({name: describe_configuration(spec) for name, spec in specs.items()}, indent=1))


if __name__ == "__main__":
    main()
