"""What the warm process imports, once for all tests (see warm.py); nobody else imports this file."""

import gc
import importlib
import os

from alphaapollo.config.schema import Rollout
from alphaapollo.rollout.engines import EngineSpec
from alphaapollo.rollout.vllm_settings import environment

os.environ.update(environment(EngineSpec(0, "", False, Rollout(), "cpu", "float32", 0, "")))
gc.disable()
for module in (
    "ray",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "alphaapollo.rollout.vllm_patches",
    "alphaapollo.rollout.hf_engine",
    "alphaapollo.rollout.worker",
    "alphaapollo.workers.critic",
    "alphaapollo.workers.policy",
    "alphaapollo.workers.reward_model",
    "alphaapollo.trainer.main_ppo",
    "alphaapollo.trainer.setup",
    "alphaapollo.trainer.main_generation",
    "alphaapollo.trainer.generation",
    "alphaapollo.trainer.main_sft",
    "alphaapollo.trainer.sft",
):
    importlib.import_module(module)
gc.freeze()
gc.enable()
