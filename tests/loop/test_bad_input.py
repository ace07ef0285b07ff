"""Bad user input is refused before any worker starts, with one error that gives the problem, the value and the fix."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.loop.conftest import FinishedRun, Runner
from tests.loop.stack import StackRunner


def run_and_refuse(ppo: Runner, *overrides: str, warm: bool = True) -> FinishedRun:
    """Run the command. It must end with an error before it writes anything."""
    done = ppo.finish(ppo.start(*overrides, warm=warm))
    assert done.code == 2 and "error" in done.output and "Traceback" not in done.output, done.output[-4000:]
    assert not done.folder.exists()
    return done


@pytest.mark.core
def test_command_refuses_a_missing_model(ppo: Runner) -> None:
    done = run_and_refuse(ppo, "actor_rollout_ref.model.path=/no/such/model")
    assert "/no/such/model" in done.output


def test_unknown_key_is_reported_before_slow_imports(ppo: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = run_and_refuse(ppo, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", warm=False)
    imported = {line.rpartition("|")[2].strip() for line in done.output.splitlines() if line.startswith("import time:")}
    assert "alphaapollo.config.load" in imported and not imported & {"torch", "transformers", "ray", "vllm"}


@pytest.mark.core
def test_dry_run_prints_the_plan_and_starts_nothing(ppo: Runner) -> None:
    done = ppo.finish(ppo.start("trainer.dry_run=True"))
    assert done.code == 0
    for words in ("4 prompts x 4 samples = 16 trajectories", "2 mini-batches", "data-parallel", "rollout engines"):
        assert words in done.output, done.output
    assert not done.folder.exists()


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["data.prompt_key=question"], ["'question'", "train.parquet"]),
        (["data.max_prompt_length=4"], ["data.max_prompt_length"]),
        ([f"{ACTOR}.optim.lr=1e30"], [f"{ACTOR}.optim.lr", "1e+30", "1.0"]),
        (["data.train_files=FOLDER/empty.parquet"], ["empty.parquet", "row 1"]),
        (["actor_rollout_ref.model.path=FOLDER/model"], ["FOLDER/model", "tokenizer"]),
        (["reward_model.enable=True", "reward_model.model.path=MODEL"], ["MODEL", "not a reward model"]),
    ],
    ids=lambda value: value[-1].partition("=")[0] if "=" in value[-1] else "",
)
def test_invalid_value_is_refused(ppo: Runner, overrides: list[str], facts: list[str]) -> None:
    pd.DataFrame({"prompt": ["a question", ""]}).to_parquet(ppo.out / "empty.parquet")
    (ppo.out / "model").mkdir()
    for name in ("config.json", "model.safetensors"):  # no tokenizer
        (ppo.out / "model" / name).symlink_to(ppo.task.model / name)

    def fill(word: str) -> str:
        return word.replace("FOLDER", str(ppo.out)).replace("MODEL", str(ppo.task.model))

    error = ppo.refuse(*map(fill, overrides))
    assert [fact for fact in facts if fill(fact) not in error] == [], error


def test_reward_function_that_fails_on_every_answer_of_the_model_stops_the_run(stack: StackRunner) -> None:
    passes_a_try = "if completion[:8] in ('<answer>', 'The answ', 'I do not'):\n        return 0.0\n"
    body = f"    {passes_a_try}    return completion['no such thing']\n"
    stack.reward.write_text(f"def compute_score(prompt, completion):\n{body}")
    done = stack.start("actor_rollout_ref.rollout.name=fake", "trainer.val_before_train=False")
    assert done.code == 1
    assert "string indices" in done.output and "Traceback" not in done.output, done.output
