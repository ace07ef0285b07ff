"""Small runs of the whole stack, started as by a user, and comparisons of their results."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

from scripts.small_run import make_task, run_words

REWARD = """
def compute_score(prompt, completion):
    digits = sum(map(str.isdigit, completion))
    return {"reward": digits / 10, "accuracy": float(digits % 2)}
"""
GUESSING_GAME = Path(__file__).parents[2] / "examples" / "guessing_game" / "environment.py"
GAME = (
    *("env.env_name=guessing_game", f"env.custom_module={GUESSING_GAME}", "env.settings.numbers=9", "env.max_steps=3"),
    *("env.max_tokens_per_turn=8", 'env.prompt="1-{numbers}"'),
    *("data.max_prompt_length=96", "data.max_response_length=64"),
)
AHEAD = (
    *("trainer.async_mode=separate", "trainer.max_staleness=2", "algorithm.rollout_correction.method=tis"),
    *("data.max_response_length=48", "actor_rollout_ref.rollout.max_num_seqs=24"),
)
SMALL = (
    "algorithm.adv_estimator=grpo",
    "env.rollout.n=4",
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.kv_cache_gib=0.1",
    "trainer.device=cpu",
    "trainer.cpu_threads=1",
    "actor_rollout_ref.rollout.cpu_threads=1",
    "trainer.val_before_train=false",
    "trainer.max_ckpt_to_keep=3",
)
NONDETERMINISTIC = (  # times, memory, and properties of a start
    *("timing", "memory/", "perf/", "checkpoint/", "tool/seconds", "rollout/tokens_per_second"),
    *("actor/sharing_gap", "critic/sharing_gap", "engines/replaced"),
)


SGLANG = "actor_rollout_ref.rollout.name=sglang"
ROLES = {  # processes that can be killed -> words of the command line; the driver is the command itself
    "driver": "",
    "policy": "ray::PolicyActor",
    "rollout": "ray::RolloutActor",
    "engine": "EngineCore",
    "scheduler": "sglang::scheduler",
    "grader": "alphaapollo.rewards.grader_processes.worker",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
}


@dataclass(frozen=True)
class Scene:
    """Configuration of a run.

    words: overrides in addition to SMALL. exact: a disturbed run ends with the bytes of the undisturbed one.
    same_logprobs: so do its log-probs. SGLang's depend on the batch in the last bits, but its tokens do not.
    """

    words: tuple[str, ...]
    exact: bool = True
    same_logprobs: bool = True

    @property
    def roles(self) -> list[str]:
        """Processes of the run."""
        if "trainer.controller=local" in self.words:
            return ["driver", "grader"]
        absent = "engine" if SGLANG in self.words else "scheduler"
        return [role for role in ROLES if role != absent]


SCENES = {
    "local": Scene(("trainer.controller=local", "actor_rollout_ref.rollout.name=fake")),
    "sync_single": Scene(()),
    "sync_multi": Scene(GAME),
    "async_single": Scene(AHEAD, exact=False),
    "sync_sglang": Scene((SGLANG,), same_logprobs=False),
    "async_sglang": Scene((SGLANG, *AHEAD), exact=False),
    "async_multi": Scene((*GAME, *AHEAD[:3], "actor_rollout_ref.rollout.max_num_seqs=24"), exact=False),
}


@dataclass(frozen=True)
class SceneFolders:
    """Folders of the runs of a scene: out/SCENE/alphaapollo/NAME."""

    out: Path
    scene: str

    def folder(self, name: str) -> Path:
        return self.out / self.scene / "alphaapollo" / name

    def words(self, name: str, *more: str) -> list[str]:
        """Overrides of main_ppo for the run of that name."""
        task = self.out / "task"
        make_task(task, REWARD)
        own = SCENES[self.scene].words
        given = {word.split("=")[0] for word in own}
        return [
            *(word for word in SMALL if word.split("=")[0] not in given),
            *own,
            *run_words(task, self.out / self.scene, name),
            *more,
        ]

    def steps(self, name: str) -> int:
        """Number of iterations in the metrics so far."""
        path = self.folder(name) / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics without times and memory."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(NONDETERMINISTIC)} for line in lines]


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    """All trajectories, without times."""
    records = []
    for path in sorted((folder / "rollouts").glob("step_*.jsonl")):
        for line in path.read_bytes().splitlines():  # str.splitlines also splits at other characters
            record = json.loads(line)
            del record["seconds"]
            for turn in record["turns"]:
                turn["num_cached_tokens"] = turn["info"] = None  # prefix cache hits vary; info has the seconds of tools
            records.append(record)
    return records


def differences(undisturbed: Path, disturbed: Path) -> list[str]:
    """Parts of a disturbed run that differ from the undisturbed one in any bit."""
    found = []
    for one, other in zip(metrics_of(undisturbed), metrics_of(disturbed), strict=False):
        names = [name for name in one | other if one.get(name) != other.get(name)]
        if names:
            found.append(f"metrics of step {one['step']}: {', '.join(names[:5])}")
    if (count := len(metrics_of(undisturbed))) != len(metrics_of(disturbed)):
        found.append(f"{len(metrics_of(disturbed))} lines of metrics, not {count}")
    if rollouts_of(undisturbed) != rollouts_of(disturbed):
        found.append("rollouts")
    model = "model/model.safetensors"
    if (undisturbed / model).read_bytes() != (disturbed / model).read_bytes():
        found.append("the model")
    return found


def unaccounted(folder: Path, steps: int) -> list[str]:
    """Missing or repeated iterations, and lost or reused samples, of a run that cannot be compared bit for bit."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line["step"]]
    found = []
    if [line["step"] for line in trained] != list(range(1, steps + 1)):
        found.append("iterations are missing or repeated")
    carried = 0.0
    for line in trained if "async/started" in trained[0] else ():
        gone = sum(line[f"async/{name}"] for name in ("trained", "dropped_failed", "dropped_no_signal"))
        if carried + line["async/started"] != gone + line["async/carried"]:
            found.append(f"groups of step {line['step']} do not add up")
        carried = line["async/carried"]
    records = rollouts_of(folder)
    counts = Counter(int(record["step"]) for record in records)
    if found_counts := [line["step"] for line in trained if counts[line["step"]] != line["rollout/trajectories"]]:
        found.append(f"trajectories of steps {found_counts[:5]} are not all in rollouts/")
    played = [(record["step"], record["prompt_id"], record["sample"]) for record in records]
    if len(played) != len(set(played)):
        found.append("a sample was used twice")
    return found


@dataclass(frozen=True)
class MemoryTrend:
    """Memory of a role over a run, in MiB. slope: per iteration, without the first third of the run."""

    slope: float
    last: float
    most: float


def memory(folder: Path) -> dict[str, MemoryTrend]:
    """Trend of each memory metric of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    settled = lines[len(lines) // 3 :]
    steps = [line["step"] for line in settled]
    found = {}
    for name in (name for name in lines[0] if name.startswith("memory/")):
        values = [1024 * line[name] for line in settled]
        slope = linear_regression(steps, values).slope if len(steps) > 1 else 0.0
        found[name] = MemoryTrend(slope, values[-1], max(values))
    return found
