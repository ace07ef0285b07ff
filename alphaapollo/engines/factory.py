"""Build the engine that `rollout.name` selects."""

from __future__ import annotations

import pkgutil

from alphaapollo.engines.protocol import Engine, EngineSpec

ENGINES = {
    "vllm": "alphaapollo.engines.vllm.engine:VllmEngine",
    "sglang": "alphaapollo.engines.sglang.settings:make_engine",
    "hf": "alphaapollo.engines.hf:HFEngine",
    "fake": "alphaapollo.engines.fake:make_engine",
}
"""`rollout.name` -> class or function that builds the engine from its EngineSpec, as `module:name`. Only the chosen
engine's library is imported."""


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the config key rollout.name selects, without starting it."""
    engine: Engine = pkgutil.resolve_name(ENGINES[spec.rollout.name])(spec)
    return engine
