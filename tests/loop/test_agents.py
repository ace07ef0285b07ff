"""Agents on the real stack: exact tokens, kills, weights that change in a session, many sessions at once."""

from __future__ import annotations

import math
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.loop.conftest import Runner, wait_until_nothing_is_left
from tests.loop.engine_kit import needs_sglang

PROGRAM = """
import time
from pathlib import Path
from openai import OpenAI
from openai.resources import chat, responses  # once, not in each session

METRICS = Path(__file__).parent / "test/run/metrics.jsonl"  # not there yet while the program is tried out

def wait_for_first_step(task):
    # only if the sum is odd: the step trains on the other problems
    first, second = task["content"][-1]["content"].removesuffix("=?").split("+")
    is_odd, ends = (int(first) + int(second)) % 2, time.monotonic() + 60
    while is_odd and METRICS.exists() and '"step": 1' not in METRICS.read_text() and time.monotonic() < ends:
        time.sleep(0.05)

def digits(text):
    return sum(letter.isdigit() for letter in text)

def run(task, endpoint):
    client = OpenAI(max_retries=0)
    messages, rewards = task["content"], []
    for turn in range(3):
        answer = client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=6, temperature=0.3)
        text = answer.choices[0].message.content
        rewards.append(digits(text) / 10)
        WAIT
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "1"}]
    checked = client.responses.create(
        model=endpoint.model, input="2", max_output_tokens=4, extra_headers={"x-role": "checker"}
    )
    endpoint.reward(checked.id, 0.5)
    return {"reward": 0.0, "accuracy": float(sum(rewards) > 0.2), "turn_rewards": [*rewards, 0.0]}
"""
SIZES = ("data.val_files=", "data.max_response_length=64", "env.rollout.n=4", "custom_reward_function.path=")


DROPPED = """
from openai import OpenAI
from openai.resources import chat

def run(task, endpoint):
    client = OpenAI(max_retries=0)
    request = {"model": endpoint.model, "messages": task["content"], "max_tokens": 60}
    with client.chat.completions.create(**request, stream=True) as chunks:
        next(iter(chunks))  # then the connection is closed
    text = client.chat.completions.create(**request).choices[0].message.content
    return {"reward": len(text) / 10, "accuracy": float(len(text) % 2)}
"""


SCRIPT = """
body=$(python3 -c '
import json, os
content = json.load(open(os.environ["ALPHAAPOLLO_TASK"]))["content"]
print(json.dumps({"model": "policy", "max_tokens": 4, "messages": content}))')
curl -sf $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" -d "$body" && echo 1.0 > $ALPHAAPOLLO_RESULT
"""


def agent_of(tmp_path: Path, wait: str) -> tuple[str, ...]:
    """Settings with an agent of three turns. wait: code that it executes after each turn."""
    (tmp_path / "agent.py").write_text(PROGRAM.replace("WAIT", wait))
    return ("env.env_name=agent", f"env.agent.path={tmp_path / 'agent.py'}", *SIZES)


def count_turns(row: dict) -> int:
    """Number of parts of a row that were sampled one after the other."""
    return sum(end - start == 1 for start, end in pairwise([0, *row["mask"]]))


@pytest.mark.core
def test_exact_tokens_and_bitwise_resume(ppo: Runner, tmp_path: Path) -> None:
    """Killed in the middle of sessions; no program of the user survives. Each turn has its own reward and advantage."""
    settings = (*agent_of(tmp_path, "time.sleep(0.1)"), "trainer.controller=local", "trainer.save_freq=1")
    settings += ("algorithm.adv_estimator=turn_group",)
    settings += ("trainer.total_training_steps=3", "data.train_batch_size=2")
    done = ppo.run(*settings, name="whole")
    last = done.metrics[-1]
    assert last["outcome/failed"] == 0 and last["actor/grad_norm"] > 0
    assert last["num_turns/mean"] == 4 and last["agent/branches"] == 1 and last["agent/rerendered"] == 0
    assert last["agent/reused_tokens"] > 0 and last["agent/reward/checker"] == 0.5
    assert last["rollout/prompt_tokens_cached"] > 0
    assert all(math.isfinite(value) for value in last.values())
    assert "requests set temperature=0.3" in done.output
    for record in done.rollouts(3):
        assert [count_turns(row) for row in record["rows"]] == [3, 1]
        digits = [sum(letter.isdigit() for letter in turn["text"]) for turn in record["turns"]]
        assert [turn["reward"] for turn in record["turns"]] == [*(count / 10 for count in digits[:3]), 0.5]
        assert sum(sum(row["mask"]) for row in record["rows"]) == sum(turn["num_tokens"] for turn in record["turns"])

    settings = (*settings, ppo.hold("learn", step=3))
    program = ppo.start(*settings, name="killed")
    progress = ppo.out / "test/killed/checkpoints/step_000001/progress.json"
    while not progress.exists():
        assert program.wait(0.05) is None, program.printed
    program.signal(signal.SIGKILL)
    wait_until_nothing_is_left(ppo)
    (ppo.out / "release").touch()
    resumed = ppo.run(*settings, name="killed")
    assert "resumed from" in resumed.output
    for name in ("actor/loss", "actor/grad_norm", "critic/score/mean", "agent/reused_tokens"):
        assert last[name] == resumed.metrics[-1][name], name


@needs_sglang
def test_exact_tokens_of_sglang(ppo: Runner, tmp_path: Path) -> None:
    settings = ("trainer.controller=local", "trainer.total_training_steps=2", "data.train_batch_size=2")
    done = ppo.run(*agent_of(tmp_path, ""), *settings, "actor_rollout_ref.rollout.name=sglang")
    last = done.metrics[-1]
    assert last["outcome/failed"] == 0 and last["actor/grad_norm"] > 0
    assert last["num_turns/mean"] == 4 and last["agent/branches"] == 1 and last["agent/rerendered"] == 0
    assert last["agent/reused_tokens"] > 0 and last["rollout/prompt_tokens_cached"] > 0
    assert last["mismatch/abs"] < 1e-4
    for record in done.rollouts(2):
        assert [count_turns(row) for row in record["rows"]] == [3, 1]


def test_weights_change_in_the_middle_of_a_session(ppo: Runner, tmp_path: Path) -> None:
    done = ppo.run(
        *agent_of(tmp_path, "wait_for_first_step(task)"),
        "trainer.controller=local",
        "trainer.async_mode=separate",
        "trainer.max_staleness=2",
        "actor_rollout_ref.rollout.max_num_seqs=32",  # all sessions run at once
        "algorithm.rollout_correction.method=tis",
        "trainer.total_training_steps=3",
    )
    versions = [
        {version for row in record["rows"] for version, _ in row["weight_versions"]}
        for step in range(1, 4)
        for record in done.rollouts(step)
    ]
    assert any(len(found) > 1 for found in versions), versions
    assert all(line["outcome/failed"] == 0 for line in done.metrics[1:])


@pytest.mark.parametrize(
    "settings",
    [
        ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.lora=adapter"),
        ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis"),
    ],
    ids=["adapter", "carry"],
)
def test_dropped_connections_with_dapo(ppo: Runner, tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Each session closes a connection during generation. An answer is trained on if it was complete before that."""
    (tmp_path / "agent.py").write_text(DROPPED)
    done = ppo.run(
        *("env.env_name=agent", f"env.agent.path={tmp_path / 'agent.py'}", *SIZES, *settings),
        *("algorithm=dapo", "algorithm.filter_groups.max_num_gen_batches=3", "trainer.controller=local"),
        "trainer.total_training_steps=2",
    )
    for line in done.metrics[1:]:
        assert line["outcome/failed"] == 0 and 1 <= line["num_turns/mean"] < 2 and line["actor/grad_norm"] > 0


def test_evaluation_of_a_command(ppo: Runner, tmp_path: Path) -> None:
    """64 sessions of a shell script at once."""
    ppo.module = "alphaapollo.trainer.main_generation"
    (tmp_path / "solve.sh").write_text(SCRIPT)
    ppo.sizes = lambda name: {  # type: ignore[method-assign]
        "data.path": ppo.task.data / "train.parquet",
        "data.max_samples": 16,
        "data.n_samples": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 16,
        "model.path": ppo.task.model,
        "rollout.kv_cache_gib": 0.1,
        "trainer.output_dir": ppo.out,
        "trainer.project_name": "test",
        "trainer.experiment_name": name,
    }
    done = ppo.run("env.env_name=agent", f"env.agent.command=sh {tmp_path / 'solve.sh'}", "trainer.controller=local")
    assert "64 samples of 16 problems; 64 scored" in done.output
