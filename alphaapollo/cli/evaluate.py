"""`alphaapollo eval`: score existing responses (main_eval) or, with --suite, run evaluation suites on a run's model."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.cli.serve import make_engine_spec, open_server
from alphaapollo.config.errors import report_error
from alphaapollo.engines.vllm.settings import build_server_command, build_server_environment
from alphaapollo.processes.entry_point import MainFunction, entry_point
from alphaapollo.processes.network import find_free_port
from alphaapollo.rollout.suites import FOLDER, ModelServer, Suite, check_suites, run_suite
from alphaapollo.runs.run_model import RunModel, load_run_model
from alphaapollo.utils.redaction import replace_control_characters


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Call main_eval or, if there is an option --suite, run evaluation suites. Returns 0 if done, 1 if a suite failed,
    2 if the run, a key, a suite or the model cannot be used."""
    words = sys.argv[1:] if argv is None else argv
    if not any(word.partition("=")[0] == "--suite" for word in words):
        score_responses: MainFunction = importlib.import_module("alphaapollo.trainer.main_eval").main
        return score_responses(words)
    options = _parse_arguments(words)
    try:
        suites = [Suite(text, options.python, options.timeout) for text in options.suite]
        check_suites(suites)
        newest, config = load_run_model(options.run, options.keys)
        spec = make_engine_spec(config)
    except ValueError as error:
        return report_error(error, 2)
    folder = find_results_folder(newest)
    log, host, port, key = folder / "server.txt", "127.0.0.1", find_free_port(), secrets.token_urlsafe()
    server = ModelServer(f"http://{host}:{port}/v1", key, "model", spec.model_path, spec.max_model_len)
    command = build_server_command(spec, server.model_name, host, port)
    variables = build_server_environment(spec) | {"VLLM_API_KEY": key}
    failed = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print(f"starting vLLM with {newest.model_folder} (log: {log})", flush=True)
        with log.open("wb") as output, open_server(command, variables, (host, port), output) as process:
            if process.poll() is not None:
                raise ChildProcessError(f"vLLM ended with exit code {process.returncode}. See {log}.")
            for suite in suites:
                print(f"{suite.text} (results: {folder / suite.name})", flush=True)
                result = asyncio.run(run_suite(suite, server, folder / suite.name))
                for one in result.scores:
                    print(f"  {one.task} {one.metric} {one.value:.4f} (standard error {one.stderr}, {one.rows} rows)")
                if result.error:
                    print(replace_control_characters(f"  failed: {result.error}"), flush=True)
                failed |= bool(result.error)
    except OSError as error:
        return report_error(error, 1)
    return int(failed)


def find_results_folder(newest: RunModel) -> Path:
    """Return the folder for the results of suites: in the model's run, or in outputs/ for a model of no run."""
    parent = Path("outputs") if newest.run_folder == newest.model_folder else newest.run_folder
    return parent / FOLDER / newest.model_folder.name


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="alphaapollo eval",
        description="Run tasks of lm-eval and inspect-ai on a run's newest model, which vLLM serves meanwhile "
        "(docs/evaluation.md#evaluation-suites).",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, one of its checkpoints, or a model's folder")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help="keys of main_generation")
    suite_help = "lm-eval:TASK or inspect:FILE.py@TASK, and options of its own command: 'lm-eval:gsm8k --limit 100'"
    parser.add_argument("--suite", action="append", help=f"{suite_help}; may be repeated")
    parser.add_argument("--python", default="", help="Python of an environment with the suites' packages")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a suite is ended")
    return parser.parse_intermixed_args(argv)
