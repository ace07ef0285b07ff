"""Find and build the engine that `rollout.name` selects."""

from __future__ import annotations

import pkgutil

from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineSpec
from alphaapollo.utils.plugins import load_plugin

ENGINES = {
    "vllm": "alphaapollo.engines.vllm.engine:VllmEngine",
    "hf": "alphaapollo.engines.hf:HFEngine",
    "fake": "alphaapollo.engines.fake:FakeEngine",
}
"""`rollout.name` -> class of the engine, as `module:name`. No class imports the library of its engine."""


def load_engine_class(name: str) -> type[Engine]:
    """Return the class of the engine `rollout.name`, which may be in a plug-in or in an installed package."""
    engine: type[Engine] | None
    engine = pkgutil.resolve_name(ENGINES[name]) if name in ENGINES else load_plugin("engines", name)
    if engine is None:
        raise ValueError(f"rollout.name={name}: no package has this engine. Install its package on every node.")
    return engine


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the config key rollout.name selects, without starting it."""
    return load_engine_class(spec.rollout.name).build(spec)
