"""Imports of the warm process, shared by all tests (see warm.py). Only the warm process imports this file."""

import gc
import importlib
import os
import sys
from contextlib import nullcontext, suppress

import setproctitle
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.types import EngineSpec
from alphaapollo.engines.vllm.process import CORE_MODULES
from alphaapollo.engines.vllm.settings import build_vllm_environment

setproctitle.getproctitle()  # before any variable is replaced, as in vllm/preload.py: engine cores keep their titles
os.environ.update(
    build_vllm_environment(EngineSpec(0, "", False, Rollout(enforce_eager=True), "cpu", "float32", 0, ""))
)
PLUGINS = "alphaapollo.plugins"
gc.disable()
sys.modules["ray"] = None  # type: ignore[assignment]  # as in vllm/preload.py: processes of Ray import it (ray_fork.py)
for module in (
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    *CORE_MODULES,
    "pyarrow.parquet",
    "alphaapollo.engines.hf",
    "alphaapollo.engines.vllm.engine",
    "alphaapollo.engines.weight_sync.vllm_import",
    "alphaapollo.rollout.worker",
    "alphaapollo.workers.critic",
    "alphaapollo.workers.policy",
    "alphaapollo.trainer.main_ppo",
    "alphaapollo.trainer.lifecycle",
    "alphaapollo.trainer.main_generation",
    "alphaapollo.trainer.replay.record",
    "alphaapollo.trainer.evaluation.generation",
    "alphaapollo.trainer.main_sft",
    "alphaapollo.finetuning.sft",
    "alphaapollo.finetuning.run",
    "alphaapollo.workers.finetuning_worker",
    "alphaapollo.trainer.main_dpo",
    "alphaapollo.finetuning.dpo",
    "alphaapollo.workers.preference",
    "alphaapollo.trainer.main_rm",
    "alphaapollo.evolving.main",
    *(f"{PLUGINS}.{name}" for name in ("evolving.main", "evolving.run", "verify.replay", "verify.stages")),
):
    with nullcontext() if not module.startswith(PLUGINS) else suppress(ModuleNotFoundError):
        importlib.import_module(module)
del sys.modules["ray"]
get_checkpoint_conversion_mapping("qwen3")  # compiles 700 patterns, once
gc.freeze()
gc.enable()
