"""Bad user input is refused before any worker starts, with one error that gives the problem, the value and the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from alphaapollo.utils.folder_lock import lock_folder
from tests.loop.conftest import Runner

pytestmark = [pytest.mark.loop, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.adv_estimator=gpro", "grpo"),
        ("trainer.total_step=3", "trainer.total_training_steps"),
        ("data.train_batch_size=four", "integer"),
        ("env.rollout.n=1", "group size"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=5", "divide"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=64", "core"),
        ("actor_rollout_ref.model.path=/no/such/model", "no such folder"),
        ("data.train_files=/no/such/data.parquet", "no such file"),
        ("data.prompt_key=question", "no column"),
        ("data.max_prompt_length=4", "longer than data.max_prompt_length"),
        ("custom_reward_function.name=score", "compute_score"),
        ("env.env_name=gym", "single_turn"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=pppo", "ppo"),
        ("trainer.experiment_name=", "the name is empty"),
        ("actor_rollout_ref.actor.optim.lr=1e30", "expected number > 0.0 and <= 1.0, got 1e+30"),
    ],
)
def test_invalid_value_is_refused(ppo: Runner, override: str, says: str) -> None:
    done = ppo.refuse(override)
    assert says in done.output, done.output
    assert not done.folder.exists(), "nothing is written"


def test_unknown_key_is_reported_before_slow_imports(ppo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = ppo.refuse("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", warm=False)
    imported = {line.rpartition("|")[2].strip() for line in done.output.splitlines() if line.startswith("import time:")}
    assert "alphaapollo.config.load" in imported and not imported & {"torch", "transformers", "ray", "vllm"}


def test_dry_run_prints_the_plan_and_starts_nothing(ppo: Runner) -> None:
    done = ppo.finish(ppo.start("trainer.dry_run=True", warm=True))
    assert done.code == 0
    for words in (
        "4 prompts x 4 samples = 16 trajectories",
        "2 mini-batches",
        "data-parallel degree",
        "rollout engines",
    ):
        assert words in done.output, done.output
    assert not done.folder.exists()


def test_empty_prompts_are_named(ppo: Runner, tmp_path: Path) -> None:
    file = tmp_path / "bad.parquet"
    pd.DataFrame({"prompt": ["a question", ""]}).to_parquet(file)
    assert "row 1" in ppo.refuse(f"data.train_files={file}").output


def test_model_without_tokenizer(ppo: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(ppo.task.model / name)
    assert "has no tokenizer" in ppo.refuse(f"actor_rollout_ref.model.path={folder}").output


def test_missing_document_index(ppo: Runner) -> None:
    rag = ("env.env_name=informal_math", "env.max_steps=2", "env.informal_math.enable_local_rag=True")
    done = ppo.refuse(*rag, "env.tool_settings={local_rag: {index: /no/such/index}}")
    assert "no index of documents at /no/such/index" in done.output, done.output
    assert "alphaapollo.tools.retrieval build" in done.output


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_like_this", "nothing_like_this"),
        ("def compute_score(text):\n    return 1.0\n", "compute_score"),
    ],
)
def test_unusable_reward_function(ppo: Runner, source: str, says: str) -> None:
    ppo.reward.write_text(source)
    assert says in ppo.refuse().output


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('no such thing')", "no such thing"),
        ("return float('nan')", "nan"),
        ("return [1.0, 2.0]", "list"),
    ],
)
def test_reward_function_that_fails_on_every_input_is_refused(ppo: Runner, body: str, says: str) -> None:
    ppo.reward.write_text(f"def compute_score(prompt, completion):\n    {body}\n")
    assert says in ppo.refuse().output


def test_reward_function_that_fails_on_every_answer_of_the_model_stops_the_run(ppo: Runner) -> None:
    passes_a_try = "if completion[:8] in ('<answer>', 'The answ', 'I do not'):\n        return 0.0\n"
    body = f"    {passes_a_try}    return completion['no such thing']\n"
    ppo.reward.write_text(f"def compute_score(prompt, completion):\n{body}")
    done = ppo.finish(
        ppo.start("actor_rollout_ref.rollout.name=fake", "trainer.controller=local", "trainer.val_before_train=False")
    )
    assert done.code == 1
    assert "string indices" in done.output and "Traceback" not in done.output, done.output


def test_folder_in_use_is_refused_with_its_process(ppo: Runner, tmp_path: Path) -> None:
    with lock_folder(tmp_path / "test" / "run"):
        done = ppo.refuse()
        assert f"is in use by process {os.getpid()} on " in done.output, done.output
        assert not done.folder.exists(), "nothing is written"
        assert ppo.finish(ppo.start("trainer.dry_run=True", warm=True)).code == 0
