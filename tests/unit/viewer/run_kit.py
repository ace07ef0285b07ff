"""Run folders for the tests of the viewer, written by the code that writes real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from alphaapollo.observability.metrics_file import JsonlTracker
from alphaapollo.observability.rollout_log import RolloutLog
from alphaapollo.observability.training_log import TrainedRow
from alphaapollo.types import (
    Completion,
    EpisodeEnd,
    Outcome,
    Prompt,
    Row,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

HOSTILE = (
    '<script>document.title="hacked"</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"\'><style>*{display:none}</style>'
)


def make_trajectory(prompt: int, sample: int, text: str, reward: float) -> Trajectory:
    completion = Completion([5, 6, 7], [-0.1, -0.2, -0.3], StopReason.STOP, 3)
    turn = Turn([1, 2], completion, text)
    row = Row([1, 2, 5, 6, 7], [0, 0, 1, 1, 1], [0.0, 0.0, -0.1, -0.2, -0.3], [4], 0, [(2, 1), (3, 2)])
    score = Score(reward, {"accuracy": reward}, Outcome.SCORED, f"because {text}")
    return Trajectory(prompt, sample, [turn], [row], score, EpisodeEnd.DONE)


def make_group(prompt: int, *answers: tuple[str, float], question: str = "What is 7 + 7?") -> TrajectoryGroup:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    samples = [make_trajectory(prompt, number, *answer) for number, answer in enumerate(answers)]
    return TrajectoryGroup(Prompt(prompt, "sums", chat, "14"), samples)  # type: ignore[arg-type]


def write_run(folder: Path, seed: int = 0, steps: int = 3, text: str = "<think>7, 7</think>14") -> Path:
    """Write a run of a few iterations: configuration, metrics, trajectories, and the trainer's values of tokens."""
    folder.mkdir(parents=True)
    config = {"actor_rollout_ref": {"model": {"path": "m"}}, "trainer": {"seed": seed, "total_training_steps": 9}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    log = RolloutLog(folder / "rollouts")
    for step in range(1, steps + 1):
        tracker.log(step, {"critic/score/mean": step / 10 + seed, "timing/step": 1.5, "groups/mixed": 0.5})
        log.write(step, [make_group(17, (text, 1.0), ("15", 0.0))])
        trained = TrainedRow(17, 0, 0, np.array([-0.1, -0.7, -0.3], np.float32), np.full(3, 0.5, np.float32))
        log.write_trained_rows(step, [trained])
    tracker.close()
    log.close()
    return folder
