"""Engine failures: no process is left, and pending calls raise an error."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from unittest import mock

import psutil
import pytest

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.types import EngineDied, EngineError, EngineSpec
from alphaapollo.engines.vllm.process import EngineProcess
from alphaapollo.types import Sampling
from tests.loop.engine_kit import ENGINES_AT_NIGHT, PROBE, make_model, start_engine


@pytest.mark.parametrize("name", ENGINES_AT_NIGHT)
def test_kill_of_the_core_is_an_error_that_names_the_engine(tmp_path: Path, name: str) -> None:
    with start_engine(make_model("Qwen3", 0), tmp_path, name=name) as session:
        engine, title = session.engine, "EngineCore" if name == "vllm" else f"{name}::scheduler"
        (core,) = [pid for pid in engine.list_pids() if title in " ".join(psutil.Process(pid).cmdline())]

        async def die() -> list[BaseException]:
            await engine.generate(PROBE, Sampling(1), "first")  # asks the core what it supports
            os.kill(core, signal.SIGSTOP)  # from now on it answers nothing
            calls = [engine.generate(PROBE, Sampling(200, seed=seed), f"r{seed}") for seed in range(64)]
            calls += [engine._call_workers("alphaapollo_compute_weight_digest")] if name == "vllm" else []
            waiting = [asyncio.ensure_future(call) for call in calls]
            while name == "vllm" and engine._running_llm.get_num_unfinished_requests() < 64:
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            os.kill(core, signal.SIGKILL)
            return await asyncio.gather(*waiting, return_exceptions=True)

        ends = session.run(die())  # pending calls fail
        assert all(isinstance(end, EngineError) for end in ends), ends
        assert "rollout engine 0" in str(ends[0]) and f"{tmp_path}/engine.log" in str(ends[0])
        with pytest.raises(EngineError, match="core process died"):
            session.run(engine.generate(PROBE, Sampling(1), "late"))


HEADER = "header too large"
UNKNOWN = '{"model_type": "nonsense", "architectures": ["Nonsense"]}'


@pytest.mark.parametrize(
    ("sizes", "damaged_file", "content", "error", "facts"),
    [
        ({}, "config.json", UNKNOWN, ValueError, "vLLM .*{folder}/model"),
        ({}, "model.safetensors", "nonsense", EngineError, f"engine 3 .*{HEADER}.*{{folder}}/e.log"),
        ({}, "", "", EngineDied, "engine 3 .*{folder}/e.log"),  # the core is killed
    ],
    ids=["unknown_model", "unreadable_weights", "killed"],
)
def test_failed_start_is_explained(
    sizes: dict[str, int],
    damaged_file: str,
    content: str,
    error: type[Exception],
    facts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only after EngineDied, a new engine is started."""
    start = EngineProcess.start

    def start_and_kill(core: EngineProcess) -> None:
        start(core)
        core.kill()

    make_model("Qwen3", 0, **sizes).save_pretrained(tmp_path / "model")
    if damaged_file:
        (tmp_path / "model" / damaged_file).write_text(content)
    if error is EngineDied:
        monkeypatch.setattr(EngineProcess, "start", start_and_kill)
    rollout = Rollout(kv_cache_gib=0.1, max_num_seqs=256, enforce_eager=True)
    spec = EngineSpec(3, str(tmp_path / "model"), False, rollout, "cpu", "float32", 64, str(tmp_path / "e.log"))
    with mock.patch.dict(os.environ), pytest.raises(error, match=facts.format(folder=tmp_path)) as raised:
        asyncio.run(make_engine(spec).start())
    assert raised.type is error
