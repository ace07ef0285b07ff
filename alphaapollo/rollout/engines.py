"""Which engine, and what it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alphaapollo.config.schema import Model, Rollout
from alphaapollo.rollout.engine import Engine

Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine replica is built from."""

    index: int  # among the replicas; names it in errors
    model_path: str
    trust_remote_code: bool
    rollout: Rollout
    device: Device
    dtype: Dtype
    max_model_len: int  # tokens of prompt and response together
    log_path: str  # where the engine's own log goes
    cleanup: tuple[str, ...] = ()  # shared-memory folders that must not outlive the run

    @property
    def name(self) -> str:
        return f"rollout engine {self.index}"

    def check_fits(self, num_tokens: int, max_tokens: int) -> None:
        """ValueError for a request that is longer than the engine's sequences."""
        if num_tokens + max_tokens > self.max_model_len:
            raise ValueError(
                f"{self.name}: {num_tokens} tokens and up to {max_tokens} more do not fit into {self.max_model_len} "
                "(data.max_prompt_length + data.max_response_length)."
            )

    @property
    def transfer(self) -> Literal["shared_memory", "ipc", "nccl"]:
        """How weights reach it."""
        if self.device == "cpu":
            return "shared_memory"
        return "ipc" if self.rollout.colocate else "nccl"


def engine_dtype(rollout: Rollout, model: Model, device: Device) -> Dtype:
    """The engine's arithmetic: its own, else the trainer's, else bfloat16 on a GPU and float32 on a CPU."""
    for choice in (rollout.dtype, model.dtype):
        if choice != "auto":
            return choice
    return "bfloat16" if device == "cuda" else "float32"


def make_engine(spec: EngineSpec) -> Engine:
    """The engine that `rollout.name` picks, still to be started. Imports only what that one needs."""
    match spec.rollout.name:
        case "vllm":
            from alphaapollo.rollout.vllm_engine import VllmEngine

            return VllmEngine(spec)
        case "hf":
            from alphaapollo.rollout.hf_engine import HFEngine

            return HFEngine(spec)
        case "fake":
            from alphaapollo.rollout.fake_engine import FakeEngine

            return FakeEngine(vocab_size=read_vocab_size(spec.model_path))


def read_vocab_size(model_path: str) -> int:
    """From the config.json of a local model folder."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        raise ValueError(f"{model_path}: has no config.json; rollout.name=fake needs a local model folder.")
    return int(json.loads(config.read_text())["vocab_size"])
