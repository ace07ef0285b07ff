"""HTTP server with scripted replies, and the command line of a run against it."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from alphaapollo.plugins.evolving import run as evolving_run
from alphaapollo.plugins.evolving.pool import Pool
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from tests.builders import write_rows
from tests.unit.trainer.evaluation.small_run import SmallRun

Script = Callable[[list[dict[str, str]], dict[str, Any]], Any]
"""(messages, request) -> reply text, HTTP status, or response body."""
SUM = re.compile(r"What is (\d+) \+ (\d+)\?")


def role_of(text: str) -> str:
    for mark, role in (
        ("Judge a solution", "verifier"),
        ("Reviewers agree", "aggregator"),
        ("and a solution of it", "summariser"),
    ):
        if mark in text:
            return role
    return "proposer"


def arithmetic(messages: list[dict[str, str]], request: dict[str, Any]) -> str:
    """Right with probability 0.4 as proposer, 0.9 as verifier."""
    text, draws = messages[0]["content"], random.Random(request["seed"])
    left, right = map(int, SUM.search(text).groups())
    answers = [int(number) for number in re.findall(r"so (\d+)", text)]
    match role_of(text):
        case "proposer":
            total = left + right + (0 if draws.random() < 0.4 else draws.randint(1, 9))
            return f"I add {left} and {right}, so {total}.\n#### {total}"
        case "verifier":
            is_right = (answers[-1] == left + right) != (draws.random() < 0.1)
            return f"I added again.\nVERDICT: {'right' if is_right else 'wrong'}"
        case "summariser":
            return f"so {answers[-1]}"
    return "They added again."


class Server:
    """Replies by `script` and records `requests`."""

    def __init__(self, script: Script):
        self.script, self.requests = script, list[dict[str, Any]]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests.append(request)
                self.answer(server.script(request["messages"], request))

            def answer(self, said: Any) -> None:
                status, body = (said, {"error": {"message": "no"}}) if isinstance(said, int) else (200, said)
                if isinstance(said, str):
                    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
                    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
                    body = {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in (("content-type", "application/json"), ("retry-after-ms", "5")):
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            request_queue_size = 256  # connections at once

        self._http = Listener(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    server = Server(script)
    try:
        yield server
    finally:
        server.close()


class Command(SmallRun):
    def __init__(self, folder: Path, url: str, problems: int = 6):
        rows = [
            {
                "data_source": "gsm8k",
                "prompt": [{"role": "user", "content": f"What is {index + 11} + {index * 7 + 20}?"}],
                "reward_model": {"style": "rule", "ground_truth": str(index * 8 + 31)},
            }
            for index in range(problems)
        ]
        defaults = {
            "data.path": write_rows(folder / "problems.parquet", rows),
            "models.policy.base_url": url,
            "models.policy.name": "m",
            "models.policy.max_retries": 0,
            "env.env_name": "single_turn",
            "evolving.rounds": 2,
        }
        super().__init__(evolving_run, EvolvingConfig, "evolving", folder, defaults)

    def forget_server(self) -> None:
        for key in ("base_url", "name", "max_retries"):
            del self.defaults[f"models.policy.{key}"]

    @property
    def pool(self) -> Pool:
        return Pool(self.folder)

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())

    def problem(self, index: int) -> dict[str, Any]:
        return json.loads((self.folder / f"problems/{index:06}.json").read_text())
