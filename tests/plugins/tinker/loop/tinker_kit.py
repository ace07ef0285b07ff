"""Servers for clients of `tinker` in tests."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphaapollo.processes.network import find_free_port
from tests.loop.conftest import DEADLINE, MARK, ROOT, Runner
from tests.loop.warm import Program

KEYS = ("tml-one", "tml-two")
SIZES = ("rollout.kv_cache_gib=0.25", "trainer.cpu_threads=1", "rollout.cpu_threads=1")


@dataclass(frozen=True)
class TinkerServer:
    program: Program
    url: str
    runs: Path  # folder with a folder for each model

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        """Status and text of an answer. The key is the first one, unless headers name another."""
        named = {name.replace("_", "-"): value for name, value in ({"x_api_key": KEYS[0]} | headers).items()}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", body or None, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, content: dict[str, Any], **headers: str) -> tuple[int, str]:
        return self.request("POST", path, json.dumps(content).encode(), **headers)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        self.program.wait_for(condition, DEADLINE)

    def kill(self) -> None:
        os.killpg(self.program.pid, signal.SIGKILL)
        assert self.program.wait(DEADLINE) == -signal.SIGKILL


def start_program(runner: Runner, *words: object, keys: Sequence[str] = KEYS) -> Program:
    """Start `alphaapollo tinker`, forked from the warm process."""
    output = runner.out / f"server_{len(runner.programs)}.txt"
    environment = os.environ | {MARK: str(runner.out), "TINKER_API_KEY": ",".join(keys)}
    program = Program("alphaapollo.plugins.tinker.main", words, output, environment, ROOT, warm=True)
    runner.programs.append(program)
    return program


def start_server(runner: Runner, *words: object, model: Path | None = None) -> TinkerServer:
    """Start a server that accepts KEYS, and wait until it is ready. Its checkpoints are those of the last server."""
    port = find_free_port()
    options = ["--port", port, f"trainer.output_dir={runner.out}", *SIZES]
    program = start_program(runner, model or runner.task.model, *options, *words)
    program.wait_for(lambda: "stop with Ctrl-C" in program.printed, DEADLINE)
    return TinkerServer(program, f"http://127.0.0.1:{port}", runner.out / "tinker")
