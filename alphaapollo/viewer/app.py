"""Web application of the viewer: pages made on the server, which ask it whether a run has written something."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import plotly
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from alphaapollo.runs.rollout_log import IMAGES as IMAGE_FOLDER
from alphaapollo.viewer import pages, sample_pages
from alphaapollo.viewer.curves import make_histogram_traces, make_metric_traces
from alphaapollo.viewer.experiments import group_runs
from alphaapollo.viewer.formats import FILTERS
from alphaapollo.viewer.index import RunIndex, read_version
from alphaapollo.viewer.query import Describe, Query
from alphaapollo.viewer.run_folders import RunState, read_run_state

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
ERRORS = (HTTPException, ValueError, OverflowError, OSError, sqlite3.Error)  # shown as a page
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.([a-z]+)")


async def add_headers(request: Request, respond: RequestResponseEndpoint) -> Response:
    """Add HEADERS to a response."""
    response = await respond(request)
    response.headers.update(HEADERS)
    return response


def make_app(index: RunIndex, hosts: list[str]) -> Starlette:
    """Make the application. hosts: names under which browsers may address it; others are refused, so that no other
    web page can read it through a name of its own."""
    templates = Jinja2Templates(HERE / "templates")
    templates.env.filters |= FILTERS
    templates.env.globals |= {"plotly_style_ids": find_plotly_style_ids, "index": index}

    @asynccontextmanager
    async def run_index(app: Starlette) -> AsyncIterator[None]:
        index.start()
        yield
        await asyncio.to_thread(index.close)

    def show_error(request: Request, error: Exception) -> Response:
        status = 503 if isinstance(error, sqlite3.Error) else getattr(error, "status_code", 404)
        text = error.detail if isinstance(error, HTTPException) else str(error)
        values = {"root": index.root, "text": text, "title": "Not found" if status == 404 else "Error"}
        return templates.TemplateResponse(request, "error.html", values, status_code=status)

    return Starlette(
        routes=list_routes(index, templates),
        lifespan=run_index,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(BaseHTTPMiddleware, dispatch=add_headers),
            Middleware(GZipMiddleware, minimum_size=2000),
        ],
        exception_handlers=dict.fromkeys(ERRORS, show_error),
    )


def list_routes(index: RunIndex, templates: Jinja2Templates) -> list[BaseRoute]:
    """List the addresses of the viewer with their handlers."""

    def handle(respond: Callable[[Request, Query], Response]) -> Callable[[Request], Response]:
        def handle_request(request: Request) -> Response:  # not async, so it runs in a thread
            with closing(index.connect()) as database:
                return respond(request, Query(database, index.root, request.path_params, request.query_params))

        return handle_request

    def page(template: str, describe: Describe) -> Callable[[Request], Response]:
        def respond(request: Request, query: Query) -> Response:
            values = {"root": query.root, "run": query.run if "run" in query.place else None, **describe(query)}
            return templates.TemplateResponse(request, template, values)

        return handle(respond)

    run, iteration = "/runs/{run:int}", "/runs/{run:int}/{kind}/{step:int}"
    return [
        Route("/", page("runs.html", pages.list_runs)),
        Route("/compare", page("compare.html", pages.compare_runs)),
        Route(run, page("run.html", pages.describe_run)),
        Route(f"{run}/health", page("health.html", pages.describe_health)),
        Route(f"{run}/examples", page("examples.html", pages.list_examples)),
        Route(f"{run}/config", page("config.html", pages.describe_config)),
        Route(f"{run}/samples", page("samples.html", sample_pages.search_samples)),
        Route(f"{run}/images/{{name}}", handle(get_image)),
        Route(iteration, page("iteration.html", sample_pages.describe_iteration)),
        Route(f"{iteration}/rows", page("rows.html", sample_pages.describe_iteration)),
        Route(f"{iteration}/{{line:int}}", page("trajectory.html", sample_pages.describe_trajectory)),
        Route(f"{iteration}/{{line:int}}/conversation", page("conversation.html", sample_pages.describe_trajectory)),
        Route("/curves", handle(get_curves)),
        Route("/version", handle(get_version)),
        Route("/plotly.js", lambda request: FileResponse(PLOTLY, headers={"Cache-Control": "max-age=86400"})),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]


def make_server(app: Starlette, **options: Any) -> uvicorn.Server:
    """Make the server of the application."""
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", **options))


def get_image(request: Request, query: Query) -> Response:
    """Return an image of a run's messages (runs/rollout_log.py)."""
    name, folder = query.place["name"], query.run.folder
    match = IMAGE_NAME.fullmatch(name)  # never a path
    files = [folder / "rollouts" / IMAGE_FOLDER / name, folder / IMAGE_FOLDER / name] if match else []
    inside = [file for file in files if file.is_file() and file.resolve().is_relative_to(folder.resolve())]
    if match is None or not inside:
        raise HTTPException(404, f"There is no image {name} in {folder}.")
    return FileResponse(inside[0], media_type=f"image/{match[1]}" if match[1] != "bin" else "application/octet-stream")


def get_curves(request: Request, query: Query) -> Response:
    """Return the plotly traces of a metric of runs (options: metric, run (repeated), smooth, seeds), or a histogram
    (options: run, histogram, kind)."""
    options, database = query.options, query.database
    folders = pages.read_folders(database, [int(run) for run in options.getlist("run")])
    if "histogram" in options:
        run, *_ = folders
        return JSONResponse(make_histogram_traces(database, run, options.get("kind", ""), options["histogram"]))
    groups = group_runs(folders, query.root, bool(options.get("seeds")))
    smoothing = min(max(float(options.get("smooth") or 0), 0.0), 0.99)
    return JSONResponse(make_metric_traces(database, groups, options.get("metric", ""), smoothing))


def get_version(request: Request, query: Query) -> Response:
    """Return a text that changes when a run (option: run; without it, any run) has written something or has ended, and
    what the run does."""
    run = int(query.options.get("run") or 0)
    folder = pages.read_folders(query.database, [run]).get(run)
    state = read_run_state(folder) if folder else RunState("")
    version = f"{state.name} {read_version(query.database, run)}"
    return JSONResponse({"version": version, "status": state.reason if state.name == "running" else ""})


@lru_cache(maxsize=1)
def find_plotly_style_ids() -> list[str]:
    """Return the ids that every page must have, so that plotly adds no style of its own."""
    return PLOTLY_STYLE.findall(PLOTLY.read_text(encoding="utf-8"))
