"""Build the engine that `rollout.name` selects."""

from __future__ import annotations

import json
from pathlib import Path

from alphaapollo.engines.protocol import Engine, EngineSpec


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the config key rollout.name selects (vllm, sglang, hf, fake), without starting it."""
    match spec.rollout.name:
        case "vllm":
            from alphaapollo.engines.vllm.engine import VllmEngine

            return VllmEngine(spec)
        case "sglang":
            from alphaapollo.engines.remote import RemoteEngine
            from alphaapollo.engines.sglang.settings import SERVER_MODULE, build_environment, find_python

            return RemoteEngine(spec, find_python(), SERVER_MODULE, build_environment(spec))
        case "hf":
            from alphaapollo.engines.hf import HFEngine

            return HFEngine(spec)
        case "fake":
            from alphaapollo.engines.fake import FakeEngine

            config = Path(spec.model_path) / "config.json"
            if not config.is_file():
                raise ValueError(f"model.path={spec.model_path} has no config.json. Set it to a local model folder.")
            return FakeEngine(vocab_size=int(json.loads(config.read_text())["vocab_size"]))
