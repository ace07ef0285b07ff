"""Tiny random models and a synchronous engine wrapper. Tests of the protocol run on each engine of ENGINES. With
ENGINES_AT_NIGHT, others than vLLM run in the nightly workflow only, because a start of SGLang takes 15 seconds."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.factory import load_engine_class, make_engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.engines.weight_sync.shared_memory import SharedAdapterSender, SharedMemorySender
from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.utils.plugins import find_plugins, is_available
from examples.quickstart.make_task import SHAPE
from tests.loop.conftest import DEADLINE
from tests.nightly import at_night
from tests.vision.models import save_model

T = TypeVar("T")
needs_suites = pytest.mark.skipif(
    not (is_available("suites", "lm-eval") and Path(sys.prefix, "suites").is_dir()),
    reason="needs the plug-in suites and make setup-suites",
)
PLUGIN_ENGINES = [  # that have their environment, e.g. that of make setup-sglang; without the plug-ins, there is none
    name
    for name in find_plugins("engines")
    if is_available("engines", name) and (python := load_engine_class(name).find_python()) and python.is_file()
]
ENGINES = ["vllm", *PLUGIN_ENGINES]
ENGINES_AT_NIGHT = at_night(ENGINES, PLUGIN_ENGINES)
PROBE = list(range(3, 40))
SIZES = {
    "vocab_size": 272,
    **SHAPE,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,  # wide, so that probabilities differ
}


def make_model(kind: str, seed: int, **sizes: Any) -> Any:
    """A Qwen3, Llama or Qwen3-MoE model with random weights."""
    import transformers

    if kind == "Qwen3Moe":
        sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2} | sizes
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """Parameters by their name in a checkpoint, each once."""
    from transformers.core_model_loading import revert_weight_conversion

    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return revert_weight_conversion(model, named)


@torch.inference_mode()
def logprobs_of(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each token after the first, computed by transformers."""
    tokens = torch.tensor([token_ids])
    logprobs = (model(tokens).logits[0, :-1].float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()


def mean_abs_difference(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


class Session:
    """A started engine and its event loop."""

    def __init__(self, engine: Any, runner: asyncio.Runner, shared: Path):
        self.engine, self.name = engine, engine.spec.rollout.name
        self._runner = runner
        self._shared = shared

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(call, DEADLINE))

    def generate(self, *requests: tuple[list[int], Any]) -> list[Any]:
        """Send all requests concurrently."""

        async def gather_all() -> list[Any]:
            calls = (self.engine.generate(tokens, how, f"r{i}") for i, (tokens, how) in enumerate(requests))
            return list(await asyncio.gather(*calls))

        return self.run(gather_all())

    def gap(self, model: Any) -> float:
        """Mean difference of the engine's log-probs of PROBE from those of a model."""
        return mean_abs_difference(self.run(self.engine.log_probs(PROBE)), logprobs_of(model, PROBE))

    async def receive(self, update: WeightUpdate) -> None:
        await self.engine.receive_weights(str(self._shared / update.folder), update.version)

    def publish(self, update: WeightUpdate) -> WeightReceipt:
        """Receive and confirm an update like the driver."""
        self.run(self.receive(update))
        return self.run(self.engine.confirm_weights(update.version))

    def publish_verified(self, update: WeightUpdate) -> None:
        """Publish an update and check that the engine has it."""
        receipt = self.publish(update)
        assert (receipt.version, receipt.digest) == (update.version, update.digest)

    def send_adapter(self, tensors: dict[str, torch.Tensor], version: int) -> WeightUpdate:
        """Send an adapter to an engine that serves adapters. Its folder is kept until the next one is sent."""
        update = SharedAdapterSender(self._shared, torch.float32).send(tensors.items(), version)
        assert update is not None
        return update

    @contextmanager
    def sent(self, weights: Any, version: int, dtype: torch.dtype = torch.float32) -> Iterator[WeightUpdate]:
        """Send the weights of a model (or a checkpoint's tensors) like a trainer, until they are released."""
        tensors = weights if isinstance(weights, dict) else checkpoint(weights)
        sender = SharedMemorySender(self._shared, dtype)
        update = sender.send(tensors.items(), version)
        assert update is not None
        yield update
        sender.release_sent_weights()


@contextmanager
def start_engine(
    model: Any, folder: Path, lora_rank: int = 0, max_model_len: int = 256, **rollout: Any
) -> Iterator[Session]:
    """Start an engine that serves `model`, or adapters of rank `lora_rank` on it, and restore the environment after."""
    save_model(model, folder / "model")
    spec = EngineSpec(
        index=0,
        model_path=str(folder / "model"),
        trust_remote_code=False,
        rollout=Rollout(**{"kv_cache_gib": 0.1, "max_num_seqs": 256, "enforce_eager": True} | rollout),
        device="cpu",
        dtype=rollout.get("dtype", "float32"),
        max_model_len=max_model_len,
        log_path=str(folder / "engine.log"),
        transport="adapter" if lora_rank else "shared_memory",
        lora_rank=lora_rank,
    )
    before = dict(os.environ)
    engine, shared = make_engine(spec), Path(f"/dev/shm/alphaapollo-test-{os.getpid()}")
    with asyncio.Runner() as runner:
        try:
            runner.run(asyncio.wait_for(engine.start(), DEADLINE))
            yield Session(engine, runner, shared)
        finally:
            runner.run(asyncio.wait_for(engine.close(), DEADLINE))
            shutil.rmtree(shared, ignore_errors=True)
            os.environ.clear()
            os.environ.update(before)
