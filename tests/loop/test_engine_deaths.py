"""Engine failures: no process is left, and pending calls raise an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.protocol import EngineDied, EngineError, EngineSpec
from alphaapollo.engines.vllm.process import EngineProcess
from alphaapollo.types import Sampling
from tests.loop.engine_kit import PROBE, make_model, start_engine
from tests.processes import is_running, wait_until

FRONT_END = """
import asyncio, multiprocessing.forkserver as forkserver, sys
from alphaapollo.config.schema import Rollout
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.engines.vllm.engine import VllmEngine

async def main(model, log, shared, ranks):
    rollout = Rollout(kv_cache_gib=0.1, max_num_seqs=256, tensor_model_parallel_size=int(ranks), enforce_eager=True)
    engine = VllmEngine(EngineSpec(0, model, False, rollout, "cpu", "float32", 256, log, cleanup_folders=(shared,)))
    await engine.start()
    print(*engine.list_pids(), forkserver._forkserver._forkserver_pid, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


def shared_memory_of(pids: list[int]) -> set[str]:
    """Shared-memory files that the processes have mapped and that are not unlinked."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    found = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
    return {path for path in found if Path(path).exists()}


def test_kill_of_the_parent_leaves_no_process(tmp_path: Path) -> None:
    make_model("Qwen3", 0).save_pretrained(tmp_path / "model")
    (tmp_path / "front_end.py").write_text(FRONT_END)
    shared = Path(f"/dev/shm/alphaapollo-test-{os.getpid()}-dead")
    (shared / "v1").mkdir(parents=True)
    words = [tmp_path / "front_end.py", tmp_path / "model", tmp_path / "engine.log", shared, 2]
    parent = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) >= 4 and all(map(is_running, pids))  # core, two ranks, fork server
    left = {str(shared), *shared_memory_of(pids)}
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(map(is_running, pids)) and not any(map(os.path.exists, left)), seconds=30)
    assert [pid for pid in pids if is_running(pid)] == []
    assert [path for path in left if os.path.exists(path)] == []


def test_kill_of_the_core_is_an_error_that_names_the_engine(tmp_path: Path) -> None:
    with start_engine(make_model("Qwen3", 0), tmp_path) as session:

        async def die() -> list[BaseException]:
            await session.engine.generate(PROBE, Sampling(1), "first")  # asks the core what it supports
            os.kill(session.engine.list_pids()[0], signal.SIGSTOP)  # from now on it answers nothing
            waiting = [
                asyncio.ensure_future(session.engine.generate(PROBE, Sampling(200, seed=seed), f"r{seed}"))
                for seed in range(64)
            ]
            while session.engine._running_llm.get_num_unfinished_requests() < 64:
                await asyncio.sleep(0)
            waiting.append(asyncio.ensure_future(session.engine._call_workers("alphaapollo_compute_weight_digest")))
            await asyncio.sleep(0.1)
            os.kill(session.engine.list_pids()[0], signal.SIGKILL)
            return await asyncio.gather(*waiting, return_exceptions=True)

        ends = session.run(die())  # pending calls fail
        assert all(isinstance(end, EngineError) for end in ends), ends
        assert "rollout engine 0" in str(ends[0]) and f"{tmp_path}/engine.log" in str(ends[0])
        with pytest.raises(EngineError, match="core process died"):
            session.run(session.engine.generate(PROBE, Sampling(1), "late"))


def start_and_fail(model: Path, error: type[Exception], facts: str) -> str:
    """Start an engine that must fail. Returns its log."""
    log, before = model.parent / "e.log", dict(os.environ)
    rollout = Rollout(kv_cache_gib=0.1, max_num_seqs=256, enforce_eager=True)
    with pytest.raises(error, match=facts) as raised:
        asyncio.run(make_engine(EngineSpec(3, str(model), False, rollout, "cpu", "float32", 64, str(log))).start())
    os.environ.clear()
    os.environ.update(before)
    assert raised.type is error  # after EngineDied, a new engine is started
    return log.read_text() if log.exists() else ""


def test_unsupported_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "nonsense", "architectures": ["Nonsense"]}')
    start_and_fail(tmp_path / "model", ValueError, f"vLLM .*{tmp_path}/model")


def test_head_size_that_a_cpu_does_not_support_is_named(tmp_path: Path) -> None:
    make_model("Qwen3", 0, head_dim=48).save_pretrained(tmp_path / "model")
    start_and_fail(tmp_path / "model", ValueError, "size 48")


def test_core_that_does_not_start_is_named(tmp_path: Path) -> None:
    make_model("Qwen3", 0).save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"nonsense")
    log = start_and_fail(tmp_path / "model", EngineError, f"engine 3 .*{tmp_path}/e.log")
    assert "header too large" in log


def test_core_killed_during_start_is_reported_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("Qwen3", 0).save_pretrained(tmp_path / "model")
    start = EngineProcess.start

    def start_and_kill(core: EngineProcess) -> None:
        start(core)
        core.kill()

    monkeypatch.setattr(EngineProcess, "start", start_and_kill)
    start_and_fail(tmp_path / "model", EngineDied, f"engine 3 .*{tmp_path}/e.log")
