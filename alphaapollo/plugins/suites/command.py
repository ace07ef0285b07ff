"""`alphaapollo eval RUN --suite ...`: run evaluation suites on a run's newest model, which vLLM serves meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.serve import open_server, prepare_model_for_vllm
from alphaapollo.config.errors import report_error
from alphaapollo.engines.vllm.settings import build_server_command, build_server_environment
from alphaapollo.processes.network import find_free_port
from alphaapollo.rollout.suites import FOLDER, ModelServer, make_suites, run_suite
from alphaapollo.runs.newest_model import RunModel
from alphaapollo.utils.redaction import replace_control_characters


def main(argv: Sequence[str]) -> int:
    """Run evaluation suites. Returns 0 if done, 1 if failed. Raises ValueError if they cannot run."""
    options = _parse_arguments(argv)
    suites = make_suites(options.suite, options.python, options.timeout)
    newest, prepared = prepare_model_for_vllm(options.run, options.keys)
    spec = prepared.make_engine_spec()
    folder = find_results_folder(newest)
    log, host, port, key = folder / "server.txt", "127.0.0.1", find_free_port(), secrets.token_urlsafe()
    server = ModelServer(f"http://{host}:{port}/v1", key, "model", spec.model_path, spec.max_model_len)
    command = build_server_command(spec, server.model_name, host, port)
    variables = build_server_environment(spec) | {"VLLM_API_KEY": key}
    failed = False
    folder.mkdir(parents=True, exist_ok=True)
    print(f"starting vLLM with {newest.model_folder} (log: {log})", flush=True)
    with log.open("wb") as output, open_server(command, variables, (host, port), output) as process:
        if process.poll() is not None:
            return report_error(ChildProcessError(f"vLLM ended with exit code {process.returncode}. See {log}."), 1)
        for suite in suites:
            print(f"{suite.text} (results: {folder / suite.name})", flush=True)
            result = asyncio.run(run_suite(suite, server, folder / suite.name))
            for score in result.scores:
                error = f"standard error {score.stderr}, {score.rows} rows"
                print(f"  {score.task} {score.metric} {score.value:.4f} ({error})")
            if result.error:
                print(replace_control_characters(f"  failed: {result.error}"), flush=True)
            failed |= bool(result.error)
    return int(failed)


def find_results_folder(newest: RunModel) -> Path:
    """Return the folder for the results of suites: in the model's run, or in outputs/ for a model of no run."""
    parent = Path("outputs") if newest.run_folder == newest.model_folder else newest.run_folder
    return parent / FOLDER / newest.model_folder.name


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("eval", epilog="docs/evaluation.md#evaluation-suites")
    parser.add_argument("run", metavar="RUN", help="a run's folder, one of its checkpoints, or a model's folder")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help="keys of main_generation")
    suite_help = "lm-eval:TASK or inspect:FILE.py@TASK, and options of its own command: 'lm-eval:gsm8k --limit 100'"
    parser.add_argument("--suite", action="append", help=f"{suite_help}; may be repeated")
    parser.add_argument("--python", default="", help="Python of an environment with the suites' packages")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a suite is ended")
    return parser.parse_intermixed_args(argv)
