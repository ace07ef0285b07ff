"""Record the metrics and model digests of eight reference runs, and compare two recordings.

    python -m scripts.reference_runs record before.json      # about twenty-five minutes on two cores
    python -m scripts.reference_runs compare before.json after.json

A change that should not alter behavior leaves every value the same to the last bit. Values depend on the processor, so
record both sides on one machine: `before.json` in a worktree of the earlier commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TIMING_WORDS = ("timing/", "timing_share/", "seconds", "per_second", "memory", "mfu", "/time", "_s/")
AGENT = ("env.agent.path=scripts/reference_agent.py", "trainer.total_training_steps=6")
TRAIN_SFT, TRAIN_PPO, TRAIN_DPO = (f"alphaapollo.trainer.main_{name}" for name in ("sft", "ppo", "dpo"))


def small_run(example: str, config: str, out: Path, steps: int | None, more: tuple[str, ...] = ()) -> list[list[str]]:
    """Commands of examples/small_run.sh; with `steps`, both trainings are cut to that length."""
    run = [f"trainer.output_dir={out.parent}", f"trainer.project_name={out.name}", "trainer.seed=0"]
    run += [f"trainer.total_training_steps={steps}"] if steps else []
    configs = ["--config-dir", f"examples/{example}", "--config-name"]
    return [
        [f"examples.{example}.make_task", "--out", str(out), "--seed", "0"],
        [TRAIN_SFT, *configs, "sft", f"data.train_files={out}/data/sft.parquet", f"model.path={out}/model", *run],
        [
            TRAIN_PPO,
            *configs,
            config,
            f"data.train_files={out}/data/train.parquet",
            f"data.val_files={out}/data/val.parquet",
            f"actor_rollout_ref.model.path={out}/sft/model",
            *run,
            *more,
        ],
    ]


def sft_run(out: Path, steps: int) -> list[list[str]]:
    """SFT of adapters on the quickstart's task, from its untrained model."""
    return [
        ["examples.quickstart.make_task", "--out", str(out), "--seed", "0"],
        [
            TRAIN_SFT,
            *(
                "--config-dir",
                "examples/quickstart",
                "--config-name",
                "sft",
                f"data.train_files={out}/data/sft.parquet",
            ),
            *(f"data.val_files={out}/data/sft.parquet", "data.val_max_samples=64", "trainer.test_freq=16"),
            *(
                f"model.path={out}/model",
                "model.lora_rank=8",
                "model.lora_alpha=16",
                f"trainer.output_dir={out.parent}",
            ),
            *(f"trainer.project_name={out.name}", "trainer.seed=0", f"trainer.total_training_steps={steps}"),
        ],
    ]


def own_loops(out: Path) -> list[list[str]]:
    """Distillation with engines, and DPO of adapters, in loops of examples/own_loop."""
    model, folder = f"{out}/model", [f"trainer.output_dir={out.parent}", f"trainer.project_name={out.name}"]
    folder += ["data.max_prompt_length=64", "data.max_response_length=32"]
    distill = [model, model, *folder, "trainer.experiment_name=distill"]
    dpo = [model, *folder, "trainer.experiment_name=dpo"]
    return [
        ["examples.quickstart.make_task", "--out", str(out), "--seed", "0"],
        ["-c", f"from examples.own_loop.distill import main; main(*{distill}, steps=4)"],
        ["-c", f"from examples.own_loop.dpo import main; main(*{dpo}, steps=4)"],
    ]


def dpo_run(out: Path, steps: int) -> list[list[str]]:
    """DPO on the pairs of examples/preferences, from the quickstart's untrained model."""
    return [
        ["examples.quickstart.make_task", "--out", str(out), "--seed", "0"],
        ["examples.preferences.make_pairs", "--out", str(out), "--seed", "0"],
        [
            TRAIN_DPO,
            *("--config-dir", "examples/preferences", "--config-name", "dpo"),
            f"data.train_files={out}/data/pairs.parquet",
            f"data.val_files={out}/data/val_pairs.parquet",
            f"model.path={out}/model",
            *(f"trainer.output_dir={out.parent}", f"trainer.project_name={out.name}", "trainer.seed=0"),
            f"trainer.total_training_steps={steps}",
        ],
    ]


def record() -> dict[str, dict]:
    """{run: {"metrics": {file: [line, ...]}, "models": {file: sha256}}} of all reference runs."""
    found = {}
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.getcwd()}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "quickstart": small_run("quickstart", "grpo", Path(folder, "quickstart"), None),
            "multi_turn": small_run("guessing_game", "grpo", Path(folder, "multi_turn"), 6),
            "ppo_critic": small_run("grid_world", "ppo", Path(folder, "ppo_critic"), 6),
            "images": small_run("colours", "grpo_two_turns", Path(folder, "images"), 6),
            "agent": small_run("agents", "prices", Path(folder, "agent"), None, AGENT),
            "dpo": dpo_run(Path(folder, "dpo"), 32),
            "sft": sft_run(Path(folder, "sft"), 48),
            "own_loops": own_loops(Path(folder, "own_loops")),
        }
        for name, commands in runs.items():
            for command in commands:
                print("==", name, command[0], flush=True)
                with open(Path(folder, "log"), "wb") as log:
                    words = command if command[0] == "-c" else ["-m", *command]
                    done = subprocess.run([sys.executable, *words], env=environment, stdout=log, stderr=log)
                if done.returncode:
                    sys.exit(Path(folder, "log").read_text(errors="replace")[-4000:])
            out = Path(folder, name)
            metrics = {str(path.relative_to(out)): read_metrics(path) for path in sorted(out.rglob("metrics.jsonl"))}
            models = {str(path.relative_to(out)): digest(path) for path in sorted(out.glob("*/model/*.safetensors"))}
            found[name] = {"metrics": metrics, "models": models}
    return found


def read_metrics(path: Path) -> list[dict[str, float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [{key: line[key] for key in line if not any(word in key for word in TIMING_WORDS)} for line in lines]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """One line for each model or metric that differs; names present on one side only are listed once."""
    found = []
    for name in before:
        old, new = before[name], after.get(name, {"metrics": {}, "models": {}})
        found += [f"{name}: {path} differs" for path in old["models"] if old["models"][path] != new["models"].get(path)]
        for path, lines in old["metrics"].items():
            others = new["metrics"].get(path, [])
            if len(lines) != len(others):
                found.append(f"{name}: {path} has {len(lines)} and {len(others)} lines")
            for key in sorted({key for line in (*lines, *others) for key in line}):
                values, values_after = [line.get(key) for line in lines], [line.get(key) for line in others]
                if values != values_after:
                    found.append(f"{name}: {path} {key}: {values[-1]} and {values_after[-1:]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("file", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        given.file.write_text(json.dumps(record(), indent=1))
        return
    found = differences(json.loads(given.before.read_text()), json.loads(given.after.read_text()))
    print("\n".join(found) or "equal to the last bit")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
