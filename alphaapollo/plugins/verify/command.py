"""`alphaapollo verify RUN`: check a recorded update of a run against an independent reference (docs/verify.md)."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.config.load import SavedConfig, drop_unknown_keys, load_config, refuse_saved_code
from alphaapollo.config.schema import Config
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.verify.stages import Verification
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, check_format, list_checkpoints, parse_step
from alphaapollo.runs.resume import find_saved_config, read_saved_config
from alphaapollo.runs.update_checks import Check, summarize, write_checks
from alphaapollo.trainer.replay.recording import is_recording, read_complete_recording
from alphaapollo.utils.hub import expand_home

CONFIG = "config.yaml"
REWARD = "custom_reward_function.path"
MODEL_KEYS = ("actor_rollout_ref.model.", "critic.model.", "teacher.")


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Verify an update. Returns exit code 1 if a quantity differs from the reference."""
    parser = make_parser("verify")
    parser.add_argument("run", metavar="RUN", type=expand_home, help="a run's folder, or one of its recordings")
    help_text = "a recorded iteration (default: the last one; a run without recordings records its next iteration)"
    parser.add_argument("--iteration", type=int, metavar="N", help=help_text)
    help_text = "a key of the run that names code, or a moved model (docs/cli.md#folders-of-others)"
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=help_text)
    options = parser.parse_intermixed_args(argv)
    terminal = Terminal(highlight=False)
    folder = find_recording(options.run, options.iteration)
    if folder is None:
        terminal.write(f"{options.run} has no recording. Recording its next iteration ...")
        folder = record_next_iteration(options.run, options.overrides)
        if folder is None:
            return 1
    config = load_saved_config(folder, options.overrides, MODEL_KEYS).model_dump(mode="json")
    recording = replace(read_complete_recording(folder), config=config)
    terminal.write(f"iteration {recording.inputs.step}, recorded in {folder}")
    terminal.write(f"{'quantity':28}{'deviation':>9}{'tolerance':>11}  {'verdict':13}where; reason of the tolerance")
    checks = list[Check]()
    for check in Verification(recording).run():
        terminal.write(format_check(check))
        checks.append(check)
    terminal.write(summarize(checks))
    write_checks(folder, checks)
    return 0 if all(check.passed for check in checks) else 1


def find_recording(run: Path, iteration: int | None) -> Path | None:
    """Return the recording of an iteration, or the newest one; None if the run has none. Raises ValueError."""
    if is_recording(run):
        return run
    check_format(run)
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is no run: it has no {CONFIG}. Give the folder of a run, or one of its recordings.")
    found = CheckpointFolder(run / "recorded", keep=None).list_completed()
    if iteration is None:
        return found[-1] if found else None
    path = run / "recorded" / f"step_{iteration:06d}"
    if path not in found:
        names = ", ".join(str(parse_step(one)) for one in found) or "no iteration"
        raise ValueError(
            f"{run} has no recording of iteration {iteration}; it recorded {names}. Leave out --iteration, or train "
            f"with trainer.record_steps=[{iteration}]."
        )
    return path


def load_saved_config(folder: Path, overrides: Sequence[str], read_keys: tuple[str, ...]) -> Config:
    """Load the configuration of a run or recording. Raises ValueError if it names code that the overrides do not name.
    read_keys: beginnings of the keys that are used."""
    saved = SavedConfig(folder, drop_unknown_keys(Config, read_saved_config(folder)), read_keys)
    return load_config(Config, "ppo", overrides, saved)


def record_next_iteration(run: Path, overrides: Sequence[str]) -> Path | None:
    """Train one iteration from the newest checkpoint of a run, in the folder <run>/verify. Returns its recording, or
    None if training failed."""
    saved = load_saved_config(run, overrides, ("",))
    reward = saved.custom_reward_function.path
    if reward:
        refuse_saved_code(run, {REWARD: reward}, overrides)
    complete = list_checkpoints(run)
    step = parse_step(complete[-1]) + 1 if complete else 1
    words = {
        "trainer.output_dir": run,
        "trainer.project_name": "verify",
        "trainer.experiment_name": f"step_{step}",
        "trainer.resume_mode": "resume_path" if complete else "disable",
        "trainer.total_training_steps": max(step, saved.trainer.total_training_steps or step),  # of the schedules
        "trainer.stop_at_step": step,
        "trainer.record_steps": f"[{step}]",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.export_hf": False,
        "trainer.verify_first_iteration": False,
    }
    if complete:
        words["trainer.resume_from_path"] = complete[-1]
    train = pkgutil.resolve_name("alphaapollo.trainer.main_ppo:main")
    newest = find_saved_config(run)[0]
    code = train(["--config", str(newest), *overrides, *(f"{key}={value}" for key, value in words.items())])
    return run / "verify" / f"step_{step}" / "recorded" / f"step_{step:06d}" if code == 0 else None


def format_check(check: Check) -> str:
    """Format a check as a line of the table."""
    numbers = (f"{check.deviation:.1e}", f"{check.tolerance:.0e}") if check.covered else ("-", "-")
    place = "; ".join(filter(None, (check.where, check.reason)))
    return f"{check.quantity:28}{numbers[0]:>9}{numbers[1]:>11}  {check.verdict:13}{place}"
