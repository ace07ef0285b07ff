"""`alphaapollo sweep`: train with all combinations of several values of keys, and compare the runs (docs/sweeps.md).

words with several values -> a run per combination, all checked -> processes (sweep_runs.py) -> sweep_table.py

With --stop-worst-half-at, all runs train to this step, and only the better half of the settings continues: one round of
successive halving (arXiv 1502.07943).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import sys
from collections.abc import Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from alphaapollo.cli.main import SUBCOMMANDS, make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS, format_override, replace_value
from alphaapollo.config.load import load_config_and_user_settings, parse_override
from alphaapollo.config.schema.trainer import RunFolder
from alphaapollo.observability.curve import check_figure_path
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.sweeps.queue import SWEPT, RunQueue, SweptRun, count_gpus, find_gpus, uses_cluster
from alphaapollo.plugins.sweeps.reproduce import write_runs_to_reproduce
from alphaapollo.plugins.sweeps.table import choose_metric, rank_settings, read_mean_curve, write_latex, write_results
from alphaapollo.plugins.viewer.run_folders import TO_REPRODUCE
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c
from alphaapollo.run_process import INTERRUPTED
from alphaapollo.runs.newest_model import resolve_model_paths
from alphaapollo.utils.hub import expand_home

PROJECT, NAME = "trainer.project_name", "trainer.experiment_name"
MAX_NAME = 120  # characters
USAGE = f"alphaapollo sweep {'|'.join(SWEPT)}|CONFIG [--config FILE] KEY=VALUE,VALUE ... [OPTION ...]"
EPILOG = """Values are e.g. 'optim.lr=1e-5,3e-5' 'trainer.seed=0,1'. Writes sweep.csv (settings), sweep_runs.csv (runs)
and sweep.png. The same command resumes. CONFIG is a YAML file, e.g. config.yaml of a run."""


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Train the runs of a sweep and compare them. Returns exit code 1 if a run failed, 130 after Ctrl-C."""
    parser = make_parser("sweep", usage=USAGE, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="your own YAML file, as of the command")
    parser.add_argument("--parallel", type=int, metavar="N", help="most runs at a time (default: what fits the GPUs)")
    parser.add_argument("--metric", help="metric to compare (default: val/accuracy, or the first that the runs have)")
    parser.add_argument("--stop-worst-half-at", type=int, metavar="STEP", help="only the better half continues then")
    parser.add_argument("--figure", metavar="FILE", type=expand_home, help="also save the plot as .png, .svg or .pdf")
    parser.add_argument("--latex", metavar="FILE", type=expand_home, help="also save the table for LaTeX (booktabs)")
    options, unknown = parser.parse_known_intermixed_args(argv)
    words, stop_at = [*options.words, *unknown], options.stop_worst_half_at
    command = words.pop(0) if words and words[0] in SWEPT else ""
    file = options.config or (words.pop(0) if words and os.path.isfile(words[0]) else "")
    if not (command or file):
        raise ConfigError(f"a sweep needs {', '.join(SWEPT)} or a YAML file. Write {USAGE}.")
    words += [f"--config={file}"] if file else []
    if options.figure:
        check_figure_path(options.figure)
    runs = make_runs(command, words) if command else make_runs_of_only_command(words)
    terminal, project = Terminal(highlight=False), runs[0].folder.parent
    terminal.write(f"{len(runs)} runs in {project}: {', '.join(run.name for run in runs)}")
    gpus = find_gpus(runs)
    check_runs(runs, len(gpus), stop_at)
    if runs[0].config.trainer.dry_run:
        terminal.write("dry run: the configurations are valid, nothing was started.")
        return 0
    limit = len(runs) if all(count_gpus(run.config, len(gpus)) for run in runs) else 1
    queue = RunQueue(gpus, max(1, options.parallel or limit), terminal)
    try:
        with treat_signals_as_ctrl_c(), lock_folder(project):
            return train_and_compare(queue, runs, stop_at, options.metric, options.figure, options.latex)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes the sweep", file=sys.stderr)
        return INTERRUPTED


def make_runs(name: str, words: Sequence[str]) -> list[SweptRun]:
    """Return the run of each combination of values. Raises ConfigError if a word or a configuration is wrong."""
    command = SUBCOMMANDS[name]
    schema, module = COMMANDS[command.command], command.main.partition(":")[0]
    choices = [[word] if word.startswith("-") else list_values_to_sweep(word, schema) for word in words]
    swept = {at: values[0].partition("=")[0].lstrip("+") for at, values in enumerate(choices) if len(values) > 1}
    if folders := {PROJECT, NAME, "trainer.output_dir"} & {*swept.values()}:
        raise ConfigError(
            f"{min(folders)} has several values, but the sweep names the folders of its runs. Set one value."
        )
    if not swept or len({*swept.values()}) < len(swept):
        given = f"{', '.join(swept.values()) or 'no key'} has several values"
        raise ConfigError(f"{given}. Give several values of each key to vary once, e.g. 'trainer.seed=0,1'.")
    labels, runs = dict(zip(swept, shorten_keys([*swept.values()]), strict=True)), list[SweptRun]()
    config: Any  # of the command
    for combination in product(*choices):
        arguments = command.make_arguments(combination)
        config, _ = load_config_and_user_settings(schema, command.command.removeprefix("main_"), arguments)
        parts = {at: make_folder_name(f"{labels[at]}={combination[at].partition('=')[2]}") for at in swept}
        project, experiment = config.trainer.project_name, config.trainer.experiment_name
        if project == RunFolder().project_name and not any(word.startswith(f"{PROJECT}=") for word in words):
            project = f"sweep_{experiment}"
        names = {PROJECT: project, NAME: make_folder_name("_".join(parts.values()))}
        config = resolve_model_paths(config)
        for key, value in names.items():
            config = replace_value(config, key, value)
        setting = "_".join(part for at, part in parts.items() if "seed" not in swept[at]) or experiment
        arguments += [format_override(key, value) for key, value in names.items()]
        runs.append(SweptRun(module, arguments, setting, config))
    return runs


def list_values_to_sweep(word: str, schema: type[BaseModel]) -> list[str]:
    """Return a word `KEY=VALUE` for each of the values of `KEY=VALUE,VALUE`, or of Hydra's choice() or range()."""
    override = parse_override(word, schema)
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ConfigError(f"{word}: interval() and glob() list no values. Write them, or use range(start,stop,step).")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def make_runs_of_only_command(words: Sequence[str]) -> list[SweptRun]:
    """Return the runs of the only command that knows all keys. Raises ConfigError if there are several or none."""
    found, errors = dict[str, list[SweptRun]](), list[ConfigError]()
    for name in SWEPT[:-1]:
        try:
            found[name] = make_runs(name, words)
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: len(error.errors))  # the command that knows most keys
    if len(found) > 1:
        names = ", ".join(found)
        raise ConfigError(f"the keys are those of {names}. Add the command's name: alphaapollo sweep {min(found)} ...")
    return next(iter(found.values()))


def shorten_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest ends of the keys that differ.

    >>> shorten_keys(["actor_rollout_ref.actor.optim.lr", "critic.optim.lr"])
    ['actor.optim.lr', 'critic.optim.lr']
    """
    ends = ([".".join(key.split(".")[-length:]) for key in keys] for length in count(1))
    return next(names for names in ends if len({*names}) == len(keys))


def make_folder_name(text: str) -> str:
    """Replace what is inconvenient in paths. A long name ends with a digest."""
    name = re.sub(r"[^\w.+=-]+", "-", text)
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def check_runs(runs: Sequence[SweptRun], num_gpus: int, stop_at: int | None) -> None:
    """Raise ConfigError if a run cannot start or be resumed, as far as this is known before its data is read."""
    for run in runs:
        trainer = run.config.trainer
        if not uses_cluster(run.config):
            check_config_and_get_notices(run.config, num_gpus)
        if (needed := count_gpus(run.config, num_gpus)) > num_gpus:
            has = f"but this machine has {num_gpus}. Lower trainer.n_gpus_per_node"
            raise ConfigError(f"{run.name} needs {needed} GPUs, {has}.")
        if trainer.resume_mode != "auto":
            raise ConfigError(f"trainer.resume_mode={trainer.resume_mode}: a sweep resumes its runs. Set auto.")
        if stop_at is not None and not 0 < stop_at < (trainer.total_training_steps or math.inf):
            total = f"trainer.total_training_steps={trainer.total_training_steps}"
            raise ConfigError(f"--stop-worst-half-at={stop_at} must be positive and lower than {total}.")
        if stop_at is not None and trainer.save_freq == -1:
            raise ConfigError("--stop-worst-half-at continues from checkpoints. Remove trainer.save_freq=-1.")
    if len({run.folder for run in runs}) < len(runs):
        raise ConfigError(
            "two runs have the same folder, because their values are equal or differ only in characters that "
            "folders do not have. Remove repeated values, or use more than one sweep."
        )


def train_and_compare(
    queue: RunQueue,
    runs: Sequence[SweptRun],
    stop_at: int | None,
    metric: str | None,
    figure: Path | None = None,
    latex: Path | None = None,
) -> int:
    """Train the runs, of which only the better half continues after `stop_at`, and show the table, which is also
    written to `latex`, as its plot to `figure`. Returns the exit code."""
    settings: dict[str, list[SweptRun]] = {}
    for run in runs:
        settings.setdefault(run.setting, []).append(run)
    folders, errors, continuing = [run.folder for run in runs], dict[str, str](), [*settings]

    def list_trained(name: str) -> list[Path]:
        return [run.folder for run in settings[name] if run.name not in errors]

    if stop_at is not None:
        errors = queue.train(runs, [f"trainer.stop_at_step={stop_at}"])
        metric = choose_metric(folders, metric)
        curves = {name: read_mean_curve(metric, list_trained(name), stop_at) for name in settings}
        continuing = rank_settings(curves, metric)[: math.ceil(len(settings) / 2)]
        queue.terminal.write(f"step {stop_at}: the better half by {metric} continues: {', '.join(continuing)}")
    errors |= queue.train([run for run in runs if run.setting in continuing and run.name not in errors], [])
    states = {name: "finished" if name in continuing else f"stopped at step {stop_at}" for name in settings}
    states |= {run.setting: f"failed: {run.name}: {errors[run.name]}" for run in runs if run.name in errors}
    metric, project = choose_metric(folders, metric), runs[0].folder.parent
    trained = {name: list_trained(name) for name in settings}
    table, best = write_results(project, trained, states, metric, figure)
    files = [project / "sweep.csv", "sweep_runs.csv", "sweep.png", *filter(None, (figure, latex))]
    write_runs_to_reproduce(project / TO_REPRODUCE, [folder for runs in trained.values() for folder in runs])
    if latex:
        write_latex(table, metric, latex)
    queue.terminal.write(table.to_string(index=False, na_rep="-", float_format="{:.4g}".format, max_colwidth=80))
    queue.terminal.write(best)
    queue.terminal.write(f"to train the runs again and compare: alphaapollo reproduce {project / TO_REPRODUCE}")
    queue.terminal.write(f"written: {', '.join(map(str, files))}. All runs: alphaapollo view {project}")
    return 1 if errors else 0
