"""`alphaapollo reproduce`: train runs again as they were recorded, and compare the numbers (docs/sweeps.md).

config.yaml, history.jsonl, plan.json of a run -> what differs -> the same command -> metrics.jsonl of both, compared
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from alphaapollo.cli.main import SUBCOMMANDS, make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.config.changes import find_changes, identify_command
from alphaapollo.config.keys import COMMANDS, find_nested_map, flatten_maps, format_override
from alphaapollo.config.load import SavedConfig, load_config, refuse_saved_code
from alphaapollo.config.metrics import load_catalogue
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import Config, TuningConfig
from alphaapollo.config.schema.trainer import RunFolder
from alphaapollo.controller.placement import detect_machine
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.sweeps.queue import SWEPT
from alphaapollo.plugins.viewer.run_folders import TO_REPRODUCE, find_kind, find_runs, list_config_starts
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c
from alphaapollo.run_process import INTERRUPTED, RunFailed, run_in_child_process
from alphaapollo.runs.command_history import PACKAGES, read_history
from alphaapollo.runs.input_digests import compute_input_digests, find_content_changes
from alphaapollo.runs.metrics_file import read_metrics
from alphaapollo.runs.newest_model import resolve_model_paths
from alphaapollo.runs.resume import find_saved_config, read_saved_config
from alphaapollo.runs.run_plan import read_input_digests
from alphaapollo.utils.disk import replace_file
from alphaapollo.utils.hub import expand_home
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.redaction import find_secret_keys_and_reasons
from alphaapollo.utils.versions import find_commit, list_versions

NUMBERS = ("format.json", "history.jsonl", "plan.json", "metrics.jsonl")  # versions, digests and values of a run
REWARD = "custom_reward_function.path"
SPEED = "rollout/tokens_per_second"
MODULES = {SUBCOMMANDS[name].command: SUBCOMMANDS[name].main.partition(":")[0] for name in SWEPT}
README = """These are the settings, versions, digests and numbers of {runs} runs. Train them again and compare:

    alphaapollo reproduce {folder}

The digests belong to the files that the keys in each config.yaml name. Add KEY=VALUE for files that are elsewhere.
"""


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Train recorded runs again. Returns exit code 1 if a run failed or numbers differ, 130 after Ctrl-C."""
    parser = make_parser("reproduce", usage="alphaapollo reproduce RUN|SWEEP [KEY=VALUE ...]", allow_abbrev=False)
    parser.add_argument(
        "folder", metavar="RUN|SWEEP", type=expand_home, help=f"a run, a sweep, or its folder {TO_REPRODUCE}"
    )
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="keys to set, e.g. trainer.dry_run=True")
    options, unknown = parser.parse_known_intermixed_args(argv)
    terminal, words = Terminal(highlight=False), [*options.words, *unknown]
    if not (folders := sorted(find_runs(options.folder))):
        raise ValueError(f"{options.folder} has no runs. Give the folder of a run or a sweep, e.g. outputs/sweep_sft.")
    prepared = [(folder, *prepare_run(folder, words)) for folder in folders]
    try:
        with treat_signals_as_ctrl_c():
            same = [reproduce_run(*run, terminal) for run in prepared]
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    if len(same) > 1 and not prepared[0][-1].trainer.dry_run:
        terminal.write(f"{sum(same)} of {len(same)} runs have the same numbers")
    return 0 if all(same) else 1


def prepare_run(folder: Path, user_words: Sequence[str]) -> tuple[str, list[str], Config | TuningConfig]:
    """Return module, words and configuration of the command that trains a recorded run again. Raises ValueError if
    the folder is no training run, a word is wrong, or code that the run names is not among the words, too."""
    command = identify_command(saved := read_saved_config(folder))
    if command not in MODULES or find_kind(folder) == "own loop":
        raise ValueError(f"{folder} is not a run of {', '.join(SWEPT)}. Give the folder of such a run, or of a sweep.")
    trainer = find_nested_map(saved, "trainer")
    names = {"output_dir": RunFolder().output_dir, "project_name": f"reproduced_{trainer['project_name']}"}
    names["resume_mode"] = "disable"  # numbers of an earlier call are not compared again
    words = [*(format_override(f"trainer.{name}", value) for name, value in names.items()), *user_words]
    start = SavedConfig(folder, saved)
    config = resolve_model_paths(load_config(COMMANDS[command], command.removeprefix("main_"), words, start))
    assert isinstance(config, Config | TuningConfig)
    if reward := flatten_maps(config.model_dump(mode="json")).get(REWARD):
        refuse_saved_code(folder, {REWARD: reward}, user_words)
    if config.trainer.resume_mode != "disable":
        raise ValueError(f"trainer.resume_mode={config.trainer.resume_mode}: reproduce trains from scratch. Remove it.")
    if config.trainer.folder.absolute() == folder.absolute():
        raise ValueError(f"{folder} is the recorded run. Set another trainer.project_name.")
    return MODULES[command], [f"--config={find_saved_config(folder)[0]}", *words], config


def reproduce_run(
    folder: Path, module: str, words: Sequence[str], config: Config | TuningConfig, terminal: Terminal
) -> bool:
    """Train a recorded run again and compare it at each validation. Returns whether all numbers are the same; True
    for a dry run."""
    terminal.write(f"{folder} -> {config.trainer.folder}")
    differences = [*list_differences(folder, config)]
    for line in differences:
        terminal.write(f"  differs: {line}")
    reasons = ["of what differs"] * bool(differences) + [*list_inexact_settings(config)]
    promise = f"may differ in the last bits or more, because {' and '.join(reasons)}" if reasons else "bit for bit"
    terminal.write(f"  expected numbers: {'they ' * bool(reasons)}{promise}")
    if config.trainer.dry_run:
        return True
    recorded = read_numbers(folder)

    def report(step: int, metrics: Mapping[str, float]) -> None:
        if any(name.startswith("val/") for name in (*recorded.get(step, {}), *metrics)):
            terminal.write(f"reproduced, step {step}: {compare({step: metrics}, recorded, [step])[1]}")

    try:
        run_in_child_process(module, words, config.trainer.folder, report, show=True)
    except RunFailed as error:
        terminal.write(f"{folder.name} failed: {error}")
        return False
    is_same, text = compare(read_numbers(config.trainer.folder), recorded, sorted(recorded))
    terminal.write(f"{folder.name}, {len(recorded)} logged iterations: {text}")
    return is_same


def list_differences(folder: Path, config: Config | TuningConfig) -> Iterator[str]:
    """Yield what differs from the recorded run: versions, settings, contents of inputs."""
    history, now = read_history(folder), dict(list_versions(PACKAGES)) | {"commit": find_commit() or "unknown"}
    versions = history[-1].versions if history else {}
    yield from ["history.jsonl is missing, which has the versions"] * (not history)
    for name in sorted(versions.keys() & {*PACKAGES, "commit"}):
        if versions[name] != now.get(name):
            yield f"{name}: {now.get(name, 'not installed')} instead of {versions[name]}"
    if versions.get("commit", "").endswith("-dirty"):
        yield "the recorded commit had changes that are not in it"
    if len(list_config_starts(folder)) > 1:
        yield "the recorded run was resumed with other values; the newest ones are used"
    earlier, found = read_input_digests(folder), compute_input_digests(config)
    for change in find_content_changes(config, find_changes(read_saved_config(folder), config), earlier, found):
        if change.verdict != "ignored" and change.key.removeprefix("trainer.") not in RunFolder.model_fields:
            yield f"{change.key}: {change.new} instead of {change.old}"
    for key in sorted(earlier.keys() - found.keys()):
        yield f"{key}: {earlier[key][0][0]} cannot be read. Add {key}=PATH"
    yield from ["plan.json is missing, which has the digests of the inputs"] * (not earlier)


def list_inexact_settings(config: Config | TuningConfig) -> Iterator[str]:
    """Yield the reasons why the same run need not have the same numbers bit for bit (docs/reliability.md)."""
    values = flatten_maps(config.model_dump(mode="json"))
    rollout = "actor_rollout_ref.rollout."
    if resolve_device(config.trainer.device, detect_machine().num_gpus) != "cpu":
        yield "GPUs add in another order each time"
    if values.get("trainer.max_staleness"):
        yield "trainer.max_staleness is not 0"
    if values.get(f"{rollout}name") == "hf" and values[f"{rollout}max_num_seqs"] != 1:
        yield f"{rollout}max_num_seqs is not 1 with hf"


def read_numbers(folder: Path) -> dict[int, JsonObject]:
    """Read the metrics of a run by iteration. Raises ValueError without metrics.jsonl."""
    if not (path := folder / "metrics.jsonl").is_file():
        raise ValueError(f"{path} is missing: there are no numbers to compare with. Use a run that has trained.")
    return {int(record["step"]): record for record in read_metrics(path)}


def compare(
    found: Mapping[int, Mapping[str, float]], recorded: Mapping[int, Mapping[str, float]], steps: Sequence[int]
) -> tuple[bool, str]:
    """Compare validations and main metrics at these iterations. Returns whether all are equal, and a text."""
    main, rows = load_catalogue().main.keys() - {SPEED}, list[tuple[float, str, int]]()
    for step in steps:
        old, new = recorded.get(step, {}), found.get(step, {})
        for name in sorted(name for name in old.keys() | new.keys() if name in main or name.startswith("val/")):
            a, b = old.get(name), new.get(name)
            distance = math.inf if a is None or b is None else abs(a - b) / (max(abs(a), abs(b)) or 1.0)
            rows.append((0.0 if a == b else distance, f"{name} {b} instead of {a}", step))
    if different := [row for row in rows if row[0]]:
        size, text, step = max(different)
        size_text = f"{size:.1g} of the value" if math.isfinite(size) else "one is missing"
        return False, f"{len(different)} of {len(rows)} numbers differ, most: {text} at step {step} ({size_text})"
    return bool(rows), f"all {len(rows)} numbers are the same, bit for bit" if rows else "no numbers to compare"


def write_runs_to_reproduce(folder: Path, runs: Sequence[Path]) -> None:
    """Write settings without secrets, versions, digests and numbers of the runs to a folder, which is replaced, and
    which `reproduce` reads."""
    shutil.rmtree(folder, ignore_errors=True)
    for run in filter(lambda run: find_saved_config(run)[0], runs):
        (folder / run.name).mkdir(parents=True, exist_ok=True)
        values = read_saved_config(run)
        for key, _ in [*find_secret_keys_and_reasons(values)]:
            outer, _, name = key.rpartition(".")
            del find_nested_map(values, outer)[name]
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        replace_file(folder / run.name / "config.yaml", [text.encode()])
        for name in filter(lambda name: (run / name).is_file(), NUMBERS):
            shutil.copyfile(run / name, folder / run.name / name)
    if folder.is_dir():
        (folder / "README.md").write_text(README.format(runs=len(runs), folder=folder.name), encoding="utf-8")
