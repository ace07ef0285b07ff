"""Build the engine that `rollout.name` selects."""

from __future__ import annotations

import pkgutil

from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.utils.plugins import load_plugin

ENGINES = {
    "vllm": "alphaapollo.engines.vllm.engine:VllmEngine",
    "sglang": "alphaapollo.engines.sglang.settings:make_engine",
    "hf": "alphaapollo.engines.hf:HFEngine",
    "fake": "alphaapollo.engines.fake:make_engine",
}
"""`rollout.name` -> class or function that builds the engine from its EngineSpec, as `module:name`. Only the chosen
engine's library is imported."""


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the config key rollout.name selects, or that of an installed package, without starting
    it."""
    name = spec.rollout.name
    make = pkgutil.resolve_name(ENGINES[name]) if name in ENGINES else load_plugin("engines", name)
    if make is None:
        raise ValueError(f"rollout.name={name}: no installed package has this engine. Install it on every node.")
    engine: Engine = make(spec)
    return engine
