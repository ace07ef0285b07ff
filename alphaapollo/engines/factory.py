"""Build the engine that `rollout.name` selects."""

from __future__ import annotations

import json
from pathlib import Path

from alphaapollo.config.schema.model import ENGINES
from alphaapollo.engines.protocol import Engine, EngineSpec
from alphaapollo.utils.plugins import find_plugins, load_plugin


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the config key rollout.name selects, without starting it: vllm, sglang, hf, fake, or an
    engine of an installed package."""
    name = spec.rollout.name
    if name in find_plugins("engines", ENGINES):
        engine: Engine = load_plugin("engines", name)(spec)
        return engine
    match name:
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
    raise ValueError(f"rollout.name={name}: no installed package has this engine. Install it on every node.")
