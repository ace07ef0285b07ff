"""Agents on the real stack: exact tokens, kills, weights that change in a session, many sessions at once."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.loop.conftest import FinishedRun, Runner, child, wait_until_nothing_is_left
from tests.loop.replays import check_verified
from tests.loop.stack import Case, StackRunner, parametrize

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


AGENT = (
    *("env.env_name=agent", "env.agent.path=FOLDER/agent.py", "custom_reward_function.path=", "data.val_files="),
    *("data.max_response_length=64", "env.rollout.n=4", "data.train_batch_size=2"),
)
TURNS = (*AGENT, "algorithm.adv_estimator=turn_group", "trainer.total_training_steps=3")


def write_agent(program: str, folder: Path, wait: str = "") -> None:
    """wait: code that the agent executes after each turn."""
    (folder / "agent.py").write_text(program.replace("WAIT", wait))


def count_turns(row: dict) -> int:
    """Number of parts of a row that were sampled one after the other."""
    return sum(end - start == 1 for start, end in pairwise([0, *row["mask"]]))


def check_exact_tokens(done: FinishedRun) -> None:
    """Each turn has its own reward and advantage, and the tokens that the engine sampled."""
    last = done.metrics[-1]
    assert last["outcome/failed"] == 0 and last["actor/grad_norm"] > 0 and last["mismatch/abs"] < 1e-4
    assert last["num_turns/mean"] == 4 and last["agent/branches"] == 1 and last["agent/rerendered"] == 0
    assert last["agent/reused_tokens"] > 0 and last["agent/reward/checker"] == 0.5
    assert last["rollout/prompt_tokens_cached"] > 0
    assert all(math.isfinite(value) for value in last.values())
    for record in done.rollouts(3):
        assert [count_turns(row) for row in record["rows"]] == [3, 1]
        digits = [sum(letter.isdigit() for letter in turn["text"]) for turn in record["turns"]]
        assert [turn["reward"] for turn in record["turns"]] == [*(count / 10 for count in digits[:3]), 0.5]
        assert sum(sum(row["mask"]) for row in record["rows"]) == sum(turn["num_tokens"] for turn in record["turns"])


def check_weights_change_in_a_session(done: FinishedRun) -> None:
    records = [record for step in (1, 2, 3) for record in done.rollouts(step)]
    versions = [{version for row in record["rows"] for version, _ in row["weight_versions"]} for record in records]
    assert any(len(found) > 1 for found in versions), versions
    assert all(line["outcome/failed"] == 0 for line in done.metrics[1:])


CORRECTED = "algorithm.rollout_correction.method=tis"
SEPARATE = (
    *("trainer.async_mode=separate", "trainer.max_staleness=2", CORRECTED, "trainer.total_training_steps=3"),
    "actor_rollout_ref.rollout.max_num_seqs=32",  # all sessions run at once
)
write_waiting = partial(write_agent, PROGRAM, wait="wait_for_first_step(task)")
CASES = {
    "weights_change": Case(check_weights_change_in_a_session, (*AGENT, *SEPARATE), write_waiting),
}


@parametrize(CASES)
def test_agent(stack: StackRunner, case: Case) -> None:
    case.run(stack)


@pytest.mark.core
def test_exact_tokens_and_bitwise_resume(stack: StackRunner, ppo: Runner) -> None:
    """The engine dies in the middle of sessions, which are repeated. Later the run is killed in the middle of sessions;
    no program of the user survives."""
    write_agent(PROGRAM, ppo.out, "time.sleep(0.1)")
    settings = [word.replace("FOLDER", str(ppo.out)) for word in TURNS] + ["trainer.save_freq=1"]
    whole = stack.run(*settings, "trainer.record_steps=[3]", name="whole")
    check_exact_tokens(whole)
    check_verified(whole, 3)

    settings += ["trainer.controller=local", ppo.hold("learn", step=3)]
    program = ppo.start(*settings, name="killed")
    program.wait_for(lambda: ppo.last_step("killed") == 0)
    os.kill(child(ppo, "EngineCore"), signal.SIGKILL)
    program.wait_for((ppo.out / "test/killed/checkpoints/step_000001/progress.json").exists)
    program.signal(signal.SIGKILL)
    wait_until_nothing_is_left(ppo)
    (ppo.out / "release").touch()
    resumed = ppo.run(*settings, name="killed")
    assert "resumed from" in resumed.output and "requests set temperature=0.3" in resumed.output
    assert [line["engines/replaced"] for line in resumed.metrics] == [0, 1, 0, 0]
    for name in ("actor/loss", "actor/grad_norm", "critic/score/mean", "agent/reused_tokens"):
        assert whole.metrics[-1][name] == resumed.metrics[-1][name], name
