"""Closing a vLLM engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm")

from alphaapollo.engines.vllm.engine import VllmEngine


class Resources:
    """What vLLM frees after its core has ended."""

    engine_manager = SimpleNamespace(processes=[])
    is_freed = False

    def __call__(self) -> None:
        self.is_freed = True


def test_a_core_that_ends_just_before_it_is_killed_is_closed():
    def shutdown() -> None:
        raise psutil.NoSuchProcess(1)

    spec: Any = SimpleNamespace(name="engine 0")
    engine, resources = VllmEngine(spec), Resources()
    llm: Any = SimpleNamespace(shutdown=shutdown, engine_core=SimpleNamespace(resources=resources))
    engine._engine = llm
    asyncio.run(engine.close())
    assert resources.is_freed and engine.list_pids() == []
