"""Build the engine that `rollout.name` selects."""

from __future__ import annotations

import json
from pathlib import Path

from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.spec import EngineSpec


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that `rollout.name` selects, not started. Imports only what this engine needs."""
    match spec.rollout.name:
        case "vllm":
            from alphaapollo.engines.vllm.engine import VllmEngine

            return VllmEngine(spec)
        case "hf":
            from alphaapollo.engines.hf import HFEngine

            return HFEngine(spec)
        case "fake":
            from alphaapollo.engines.fake import FakeEngine

            return FakeEngine(vocab_size=read_vocab_size(spec.model_path))


def read_vocab_size(model_path: str) -> int:
    """Read vocab_size from the config.json of a local model folder."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        raise ValueError(f"{model_path} has no config.json. rollout.name=fake needs a local model folder.")
    return int(json.loads(config.read_text())["vocab_size"])
