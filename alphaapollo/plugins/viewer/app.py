"""Web application of the viewer: pages made on the server, and an event when a run has written something."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import plotly
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alphaapollo.plugins.viewer import pages, sample_pages
from alphaapollo.plugins.viewer.curves import make_histogram_traces, make_metric_traces, make_prompt_traces
from alphaapollo.plugins.viewer.experiments import group_runs
from alphaapollo.plugins.viewer.formats import FILTERS
from alphaapollo.plugins.viewer.index import RunIndex, read_version
from alphaapollo.plugins.viewer.query import Describe, Query
from alphaapollo.plugins.viewer.run_folders import RunState, read_run_state
from alphaapollo.runs.rollout_log import IMAGES as IMAGE_FOLDER

HERE = Path(__file__).parent
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"  # plotly adds an empty <style> and fills it
PLOTLY_STYLE = re.compile(r'getElementById\("([0-9a-f]{64})"\)')  # id of a style that plotly adds unless it exists
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"style-src 'self' {EMPTY_STYLE}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.([a-z]+)")
MAX_NOTE = 2000  # characters
POLL_SECONDS = 0.5
KEEPALIVE_SECONDS = 15.0


def add_headers(app: ASGIApp) -> ASGIApp:
    """Add HEADERS to every response."""
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await app(scope, receive, send_with_headers)

    return respond


def make_app(index: RunIndex, hosts: list[str]) -> Starlette:
    """Make the application. hosts: names under which browsers may address it; others are refused, so that no other
    web page can read it through a name of its own."""
    templates = Jinja2Templates(HERE / "templates")
    templates.env.filters |= FILTERS
    templates.env.globals |= {"plotly_style_ids": find_plotly_style_ids, "index": index}
    viewer = Viewer(index, templates)

    @asynccontextmanager
    async def run_index(app: Starlette) -> AsyncIterator[None]:
        index.start()
        yield
        await asyncio.to_thread(index.close)

    page, sample = viewer.make_page, "/runs/{run:int}/{kind}/{step:int}/{line:int}"
    routes = [
        Route("/", page("runs.html", pages.list_runs)),
        Route("/compare", page("compare.html", pages.compare_runs)),
        Route("/runs/{run:int}", page("run.html", pages.describe_run)),
        Route("/runs/{run:int}/health", page("health.html", pages.describe_health)),
        Route("/runs/{run:int}/examples", page("examples.html", pages.list_examples)),
        Route("/runs/{run:int}/problems", page("problems.html", pages.list_problems)),
        Route("/runs/{run:int}/problems/{problem:int}", page("problem.html", pages.describe_problem)),
        Route("/runs/{run:int}/config", page("config.html", pages.describe_config)),
        Route("/runs/{run:int}/samples", page("samples.html", sample_pages.search_samples)),
        Route("/runs/{run:int}/notes", viewer.save_notes, methods=["PUT"]),
        Route("/runs/{run:int}/{kind}/{step:int}", page("iteration.html", sample_pages.describe_iteration)),
        Route("/runs/{run:int}/{kind}/{step:int}/rows", page("rows.html", sample_pages.describe_iteration)),
        Route(sample, page("trajectory.html", sample_pages.describe_trajectory)),
        Route(f"{sample}/conversation", page("conversation.html", sample_pages.describe_trajectory)),
        Route("/runs/{run:int}/images/{name}", viewer.get_image),
        Route("/curves", viewer.get_curves),
        Route("/events", viewer.send_events),
        Route("/plotly.js", lambda request: FileResponse(PLOTLY, headers={"Cache-Control": "max-age=86400"})),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
    app = Starlette(
        routes=routes,
        lifespan=run_index,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(add_headers),
            Middleware(GZipMiddleware, minimum_size=2000),
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, ValueError, OverflowError, OSError, sqlite3.Error), viewer.show_error
        ),
    )
    app.state.is_stopping = lambda: False
    return app


def make_server(app: Starlette, **options: Any) -> uvicorn.Server:
    """Make the server of the application. Open pages do not delay its end."""
    settings = uvicorn.Config(app, http="h11", log_level="warning", timeout_graceful_shutdown=2, **options)
    server = uvicorn.Server(settings)  # h11 limits headers
    app.state.is_stopping = lambda: server.should_exit
    return server


class Viewer:
    """Handlers of the application."""

    def __init__(self, index: RunIndex, templates: Jinja2Templates):
        self.index, self.templates = index, templates

    def make_page(self, template: str, describe: Describe) -> Any:
        """Return the handler of a page. describe: computes the values of the template."""

        def handle(request: Request) -> Response:  # not async, so it runs in a thread
            with closing(self.index.connect()) as database:
                query = self.make_query(database, request)
                values = {"root": query.root, "run": query.run if "run" in query.place else None, **describe(query)}
            return self.templates.TemplateResponse(request, template, values)

        return handle

    def make_query(self, database: sqlite3.Connection, request: Request) -> Query:
        """Return what a request asks for."""
        return Query(database, self.index.root, request.path_params, request.query_params, self.index.texts)

    async def save_notes(self, request: Request) -> Response:
        """Save tags, note and hidden of a run. Only the viewer's own pages can send this: browsers ask the viewer
        before they let another page send PUT, and the viewer does not allow it."""
        try:
            changes = await request.json()
        except (ValueError, RecursionError):
            changes = None
        if self.index.notes_problem:
            raise HTTPException(409, f"{self.index.notes_problem}.")
        if not isinstance(changes, dict) or not changes.keys() <= {"tags", "note", "hidden"}:
            raise HTTPException(400, "Only tags, note and hidden can be changed.")
        with closing(self.index.connect()) as database, database:
            run = self.make_query(database, request).run.id
            for name, value in changes.items():
                value = bool(value) if name == "hidden" else " ".join(str(value).split())[:MAX_NOTE]
                database.execute(f"UPDATE own.notes SET {name} = ? WHERE id = ?", (value, run))
        return Response(status_code=204)

    def show_error(self, request: Request, error: Exception) -> Response:
        """Show an error as a page."""
        status = 503 if isinstance(error, sqlite3.Error) else getattr(error, "status_code", 404)
        text = error.detail if isinstance(error, HTTPException) else str(error)
        values = {"root": self.index.root, "text": text, "title": "Not found" if status == 404 else "Error"}
        return self.templates.TemplateResponse(request, "error.html", values, status_code=status)

    def get_image(self, request: Request) -> Response:
        """Return an image of a run's messages (runs/rollout_log.py)."""
        name = request.path_params["name"]
        with closing(self.index.connect()) as database:
            folder = self.make_query(database, request).run.folder
        match = IMAGE_NAME.fullmatch(name)  # never a path
        files = [folder / "rollouts" / IMAGE_FOLDER / name, folder / IMAGE_FOLDER / name] if match else []
        inside = [file for file in files if file.is_file() and file.resolve().is_relative_to(folder.resolve())]
        file = next(iter(inside), None)
        if match is None or file is None:
            raise HTTPException(404, f"There is no image {name} in {folder}.")
        return FileResponse(file, media_type=f"image/{match[1]}" if match[1] != "bin" else "application/octet-stream")

    def get_curves(self, request: Request) -> Response:
        """Return the plotly traces of a metric of runs (query: metric, run (repeated), smooth, seeds), those of the
        rewards of a prompt (query: run, question), or a histogram (query: run, histogram, kind)."""
        query = request.query_params
        with closing(self.index.connect()) as database:
            folders = pages.read_folders(database, [int(run) for run in query.getlist("run")])
            if "question" in query or "histogram" in query:
                run, *_ = folders
                if "question" in query:
                    return JSONResponse(make_prompt_traces(database, run, int(query["question"])))
                return JSONResponse(make_histogram_traces(database, run, query.get("kind", ""), query["histogram"]))
            groups = group_runs(folders, self.index.root, bool(query.get("seeds")))
            smoothing = min(max(float(query.get("smooth") or 0), 0.0), 0.99)
            return JSONResponse(make_metric_traces(database, groups, query.get("metric", ""), smoothing))

    async def send_events(self, request: Request) -> Response:
        """Send the event `change` whenever a run (query: run; without it, any run) has written something or has ended,
        and the event `status` with what it does."""
        run = int(request.query_params.get("run") or 0)
        with closing(self.index.connect()) as database:
            read_version(database, run)  # raises an error before the response starts
            folder = pages.read_folders(database, [run]).get(run)

        async def watch() -> AsyncIterator[str]:
            with closing(self.index.connect()) as database:
                last_version, status, waited = None, "", 0.0
                yield "retry: 3000\n\n"
                while not request.app.state.is_stopping() and not await request.is_disconnected():
                    state = await asyncio.to_thread(read_run_state, folder) if folder else RunState("")
                    if (version := (state.name, read_version(database, run))) != last_version:
                        if last_version is not None:
                            yield "event: change\ndata: 1\n\n"
                        last_version, waited = version, 0.0
                    elif state.name == "running" and state.reason != status:
                        status, waited = state.reason, 0.0
                        yield f"event: status\ndata: {' '.join(status.split())}\n\n"
                    elif waited >= KEEPALIVE_SECONDS:
                        waited = 0.0
                        yield ": keep-alive\n\n"
                    await asyncio.sleep(POLL_SECONDS)
                    waited += POLL_SECONDS

        return StreamingResponse(watch(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@lru_cache(maxsize=1)
def find_plotly_style_ids() -> list[str]:
    """Return the ids that every page must have, so that plotly adds no style of its own."""
    return PLOTLY_STYLE.findall(PLOTLY.read_text(encoding="utf-8"))
