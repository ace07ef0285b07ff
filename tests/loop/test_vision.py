"""A tiny vision-language model end to end: images in both turns of RL, resume, LoRA, SFT, preferences, generation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from examples.colours.make_task import make_data
from examples.colours.model import make_model, make_processor
from examples.colours.task import COLOURS
from tests.loop.conftest import ROOT, FinishedRun, Runner, Task
from tests.loop.replays import check_verified, equal_lines, recording, replay
from tests.loop.test_main_dpo import tune
from tests.loop.test_main_generation import GenerationRunner
from tests.loop.test_main_sft import SftRunner
from tests.unit.data.images import make_test_image
from tests.vision.models import make

LOCAL = "trainer.controller=local"
TRAINS_TOWER = "actor_rollout_ref.model.freeze_vision=false"

TWO_TURNS = '''
import io

import numpy as np
from PIL import Image

from alphaapollo.environments.base import Observation, StepResult, register_environment
from alphaapollo.types import Score


@register_environment("two_images")
class TwoImages:
    """Shows the prompt's image, then a second one; counts digits in both answers."""

    def __init__(self, services):
        self.answers = []

    async def reset(self, prompt):
        return Observation(prompt.content)

    async def step(self, action):
        self.answers.append(action)
        if len(self.answers) == 2:
            digits = sum(letter.isdigit() for answer in self.answers for letter in answer)
            return StepResult(done=True, score=Score(digits / 10))
        pixels = np.full((20, 40, 3), 7 * len(action), dtype=np.uint8)
        parts = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "And now?"}]
        return StepResult(observation=Observation([{"role": "user", "content": parts}]))

    async def close(self): ...
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A tiny Qwen3-VL, and rows of one or two images, or none."""
    folder = tmp_path_factory.mktemp("vision")
    make("qwen3_vl", folder / "model")
    (folder / "data").mkdir()
    encoded_images = [
        [make_test_image(16 + 16 * (row % 3), 32, seed=10 * row + i) for i in range(row % 3)] for row in range(12)
    ]
    chats = [[{"role": "user", "content": "<image>" * len(images) + "How many?"}] for images in encoded_images]
    frame = pd.DataFrame({"prompt": chats, "images": encoded_images, "data_source": "count"})
    frame.to_parquet(folder / "data/train.parquet")
    frame[:3].to_parquet(folder / "data/val.parquet")
    answered = [[*chat, {"role": "assistant", "content": str(row % 3)}] for row, chat in enumerate(chats)]
    pd.DataFrame({"messages": answered, "images": encoded_images}).to_parquet(folder / "data/sft.parquet")
    pairs = frame.assign(chosen=[str(row % 3) for row in range(12)], rejected="9")
    pairs.to_parquet(folder / "data/pairs.parquet")
    pairs[:4].to_parquet(folder / "data/val_pairs.parquet")
    return Task(folder / "model", folder / "data")


@pytest.fixture
def ppo(task: Task, tmp_path: Path) -> Iterator[Runner]:
    runner = VisionRunner(task, tmp_path)
    yield runner
    runner.close()


class VisionRunner(Runner):
    def sizes(self, name: str) -> dict[str, Any]:
        return super().sizes(name) | {"data.max_prompt_length": 96, "trainer.save_freq": 1}


def read_weights(done: FinishedRun) -> bytes:
    return (done.folder / "model/model.safetensors").read_bytes()


def check_exactness(done: FinishedRun) -> None:
    """Engine and trainer agree on rows and probe, which have images."""
    for line in done.metrics[1:]:
        assert line["mismatch/abs"] < 1e-5 and line["sync/probe_gap"] < 1e-5


def write_two_turns(folder: Path) -> tuple[str, ...]:
    """Settings of an environment that shows a second image."""
    (folder / "images.py").write_text(TWO_TURNS)
    return (
        LOCAL,
        f"env.custom_module={folder / 'images.py'}",
        "env.env_name=two_images",
        "env.max_steps=2",
        "env.max_tokens_per_turn=8",
        "data.max_response_length=64",
    )


@pytest.mark.core
def test_two_turns_with_a_trained_tower_resume_bit_for_bit(ppo: Runner) -> None:
    """The last iteration is recorded and replayed."""
    keys = (*write_two_turns(ppo.out), TRAINS_TOWER, "actor_rollout_ref.actor.use_kl_loss=true")
    whole = ppo.run(*keys, "trainer.record_steps=[2]", name="whole")
    check_exactness(whole)
    check_verified(whole, 2, {"published weights"})
    assert whole.metrics[-1]["sync/probe_moved"] > 1e-3
    ppo.run(*keys, "trainer.total_training_steps=1", name="parts")
    parts = ppo.run(*keys, name="parts")
    assert "resumed from" in parts.output and read_weights(parts) == read_weights(whole)
    rollout = next(one for one in whole.rollouts(1) if "<image>" in json.dumps(one["prompt"]))
    shown = [rollout["prompt"][0], rollout["turns"][0]["observation"][0]]
    files = [name for message in shown for name in message["images"]]
    assert shown[1]["content"] == "<image>And now?" and len(files) >= 2
    assert all((whole.folder / "rollouts" / name).is_file() for name in files)
    assert equal_lines(replay(ppo, recording(whole, 2)))


@pytest.mark.nightly
def test_new_prompts_in_each_turn_and_weights_that_change_in_between(ppo: Runner) -> None:
    keys = write_two_turns(ppo.out)
    check_exactness(ppo.run(*keys, "env.context=memory", "data.max_prompt_length=192", name="memory"))
    behind = ("trainer.async_mode=separate", "trainer.max_staleness=2", "algorithm.rollout_correction.method=tis")
    done = ppo.run(*keys, TRAINS_TOWER, *behind, "trainer.total_training_steps=3", name="separate")
    assert all(line["outcome/failed"] == 0 and line["sync/probe_gap"] < 1e-5 for line in done.metrics[1:])
    assert done.metrics[1]["mismatch/abs"] < 1e-5 and done.metrics[-1]["staleness/max"] > 0


@pytest.mark.nightly
def test_critic_and_frozen_tower_on_two_ranks_that_share_sequences(ppo: Runner, task: Task) -> None:
    from safetensors.torch import load_file

    done = ppo.run(
        "algorithm.adv_estimator=gae",
        "trainer.n_gpus_per_node=2",
        LOCAL,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "trainer.total_training_steps=1",
        "trainer.record_steps=[1]",
    )
    check_exactness(done)
    check_verified(done, 1, {"published weights"})
    before, after = load_file(task.model / "model.safetensors"), load_file(done.folder / "model/model.safetensors")
    changed = {name for name, tensor in after.items() if (before[name] != tensor).any()}
    assert changed and not any(".visual." in name for name in changed)


def test_adapters_on_the_language_model(ppo: Runner) -> None:
    keys = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2")
    check_exactness(ppo.run(LOCAL, *keys, "actor_rollout_ref.rollout.lora=adapter", "trainer.export_lora=adapter"))


def test_fine_tuning_and_generation_with_images(task: Task, tmp_path: Path) -> None:
    sft = SftRunner(task, tmp_path)
    tuned = sft.run("model.freeze_vision=false", "trainer.total_training_steps=3", "data.train_batch_size=4")
    assert tuned.metrics[-1]["train/loss"] < tuned.metrics[0]["train/loss"]
    pairs = tune("main_dpo", task, task.data, tmp_path, f"model.path={tuned.folder / 'model'}", name="pairs")
    assert pairs.code == 0 and pairs.metrics[0]["train/margin"] == pytest.approx(0.0, abs=1e-4)
    generation = GenerationRunner(task, tmp_path)
    words = (LOCAL, f"model.path={pairs.folder / 'model'}", "data.max_prompt_length=96", "data.n_samples=2")
    done = generation.run(*words, name="answers")
    results = [json.loads(line) for line in (done.folder / "results.jsonl").read_bytes().splitlines()]
    assert len(results) == 24 and {len(one["prompt"][0].get("images", [])) for one in results} == {0, 1, 2}


@pytest.mark.nightly
def test_the_example_shows_a_second_image(tmp_path: Path) -> None:
    """A short warm-up of examples/colours, and one iteration of its game of two turns."""
    task, example = Task(tmp_path / "model", tmp_path / "data"), ("--config-dir", str(ROOT / "examples/colours"))
    make_processor(task.model, [*COLOURS])
    make_model(task.model, seed=0)
    make_data(task.data, seed=0, num_sft=800, num_rl=8, num_val=4)
    sizes = ("trainer.total_training_steps=50", "data.train_batch_size=16")
    tuned = SftRunner(task, tmp_path).run(*example, "--config-name", "sft", *sizes, name="sft")
    short = ("trainer.total_training_steps=1", "data.max_response_length=40", "env.rollout.n=8")
    keys = (LOCAL, f"actor_rollout_ref.model.path={tuned.folder / 'model'}", *short)
    done = VisionRunner(task, tmp_path).run(*example, "--config-name", "grpo_two_turns", *keys)
    check_exactness(done)
    assert {len(one["turns"]) for one in done.rollouts(1)} == {1, 2}
