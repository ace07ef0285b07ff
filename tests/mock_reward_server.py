"""Mock reward server of OpenRLHF on the loopback interface, whose replies a function chooses."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


@contextmanager
def open_reward_server(answer: Callable[..., Any]) -> Iterator[SimpleNamespace]:
    """Context manager with `url` and the `requests` so far. answer: from query, prompts and labels to the reply."""
    found = SimpleNamespace(requests=[], url="")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.requests.append(request)
            body = json.dumps(answer(**request)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}/get_reward"
        yield found
        server.shutdown()
