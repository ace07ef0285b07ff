"""Parts of the tests of loops of one's own: a reward, an environment, and checks of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.observability import curve
from alphaapollo.runs.newest_model import find_newest_model
from alphaapollo.runs.resume import read_saved_config
from alphaapollo.types import Prompt, Score


def count_digits(prompt: Prompt, completion: str) -> float:
    return sum(letter.isdigit() for letter in completion) / 10


class Echo:
    """Two turns; the episode's score is the number of its turns."""

    def __init__(self, services: Services):
        self.turns = 0

    def reset(self, prompt: Prompt) -> Observation:
        return Observation([{"role": "user", "content": "say something"}])

    def step(self, action: str) -> StepResult:
        self.turns += 1
        again = Observation([{"role": "user", "content": "again"}])
        return StepResult(again) if self.turns == 1 else StepResult(done=True, score=Score(2.0))

    def close(self) -> None: ...


def check_measured(lines: list[dict[str, Any]]) -> None:
    """Time of each verb, speed, learning rate and gradient norm are logged, but do not replace values of the caller."""
    assert lines[0]["actor/lr"] == lines[1]["actor/lr"] == 1e-2 and lines[2]["actor/lr"] == 7.0
    assert lines[0]["actor/grad_norm"] > 0 and "actor/grad_norm" not in lines[2]
    for line in lines[:2]:
        seconds = {name: line[f"timing/{name}"] for name in ("sample", "forward_backward", "optim_step", "publish")}
        assert all(spent > 0 for spent in seconds.values()) and sum(seconds.values()) <= line["timing/step"]
        assert line["rollout/tokens_per_second"] > line["rollout/tokens"] / line["timing/sample"] > 0
    assert lines[2]["timing/save"] > 0 and "rollout/tokens_per_second" not in lines[2]


def check_final_model(folder: Path) -> None:
    """The model of the last weights is a folder of Hugging Face, which alphaapollo's other commands find."""
    assert find_newest_model(folder).model_folder == (folder / "model").resolve()
    weights = load_file(folder / "model" / "model.safetensors")
    base = load_file(Path(read_saved_config(folder)["actor_rollout_ref"]["model"]["path"]) / "model.safetensors")
    assert any(not torch.equal(weights[name].float(), base[name].float()) for name in base)


def check_curve(folder: Path, file: Path) -> None:
    curve.save_figure(curve.plot_run(folder / "metrics.jsonl", ["critic/score/mean"]), file)
    assert file.read_bytes().startswith(b"\x89PNG")
