from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from alphaapollo.cli import serve
from alphaapollo.cli.main import main
from alphaapollo.processes.network import find_free_port
from tests.unit.tiny import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("served"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments with which a server would start."""
    arguments: list[Any] = []
    monkeypatch.setattr(serve, "run_server", lambda *given: arguments.extend(given) or 0)
    return arguments


def test_serve_starts_the_server(model: Path, started: list[Any]) -> None:
    port = find_free_port()
    keys = ["trainer.device=cpu", "rollout.kv_cache_gib=0.25", "--api-key", "x"]
    assert main(["serve", str(model), "--port", str(port), "--shutdown-timeout", "9", *keys]) == 0
    words, variables, address, message, grace_seconds = started
    assert "VLLM_API_KEY" not in message and f"vllm chat --url http://127.0.0.1:{port}/v1" in message
    assert words[words.index("--model") + 1] == str(model)
    assert words[words.index("--port") + 1] == str(port) and address == ("127.0.0.1", port)
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2**28)
    assert words[words.index("--shutdown-timeout") + 1] == "9" and grace_seconds == 9
    assert words[-2:] == ["--api-key", "x"]  # vLLM's own
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("key", "is_warned"), [("", True), ("secret", False)])
def test_serving_to_other_machines_without_a_key(
    key: str, is_warned: bool, model: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    words = ["--host", "0.0.0.0", "--port", str(find_free_port()), "trainer.device=cpu"]
    assert main(["serve", str(model), *words]) == 0
    assert ("VLLM_API_KEY" in started[3]) == is_warned


def test_taken_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no_run", "--port", port]) == 2
    error = capsys.readouterr().err
    assert "Address already in use" in error and port in error and "no_run" not in error


SERVE = """
import sys
from alphaapollo.cli.serve import run_server
from alphaapollo.processes.entry_point import entry_point

@entry_point
def main(argv=None):
    port, grace, *command = sys.argv[1:]
    return run_server([*command, port], {}, ("127.0.0.1", int(port)), "it listens", float(grace))

sys.exit(main())
"""
STUCK_SERVER = """
import os, signal, socket, sys, time
os.fork()
signal.signal(signal.SIGTERM, lambda *_: print("it stays", flush=True))
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True)
time.sleep(300)
"""


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM, signal.SIGINT], [signal.SIGKILL]], ids=["second signal", "killed parent"]
)
def test_no_process_of_a_stuck_server_is_left(signals: list[signal.Signals], tmp_path: Path) -> None:
    """The server and its child process do not end at SIGTERM. The grace period is longer than the test's timeout."""
    (tmp_path / "serve.py").write_text(SERVE)
    command = [sys.executable, str(tmp_path / "serve.py"), str(find_free_port()), "1000"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", STUCK_SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "it listens\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2
        process.send_signal(signals[0])
        for number in signals[1:]:  # two signals of one moment are one KeyboardInterrupt
            assert process.stdout.readline() == "it stays\n"
            process.send_signal(number)
        assert process.wait(60) == (-signal.SIGKILL if signal.SIGKILL in signals else 130)
        assert not psutil.wait_procs(started, timeout=30)[1]
    finally:
        process.kill()
