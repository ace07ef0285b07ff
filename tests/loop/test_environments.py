"""Multi-turn episodes on the real stack: contexts, tools, step rewards."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.loop.conftest import GUESSING_GAME, Runner
from tests.unit.tool_templates import tokenizer_of

GAME = (
    "env.env_name=guessing_game",
    f"env.custom_module={GUESSING_GAME}",
    "env.max_steps=3",
    "env.max_tokens_per_turn=8",
    "data.max_prompt_length=96",
    "data.max_response_length=64",
    'env.prompt="1-{numbers}"',
    "env.settings.numbers=9",
    "data.val_files=",
    "trainer.controller=local",
)


def test_append_context_trains_on_one_row_with_several_turns(ppo: Runner) -> None:
    done = ppo.run(*GAME, "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.overlong_filter=False")
    last = done.metrics[-1]
    assert last["num_turns/mean"] > 1 and last["turn/invalid"] > 0
    assert all(math.isfinite(value) for value in last.values())
    for record in done.rollouts(2):
        (row,) = record["rows"]
        assert sum(row["mask"]) == sum(turn["num_tokens"] for turn in record["turns"])


@pytest.mark.core
def test_memory_context_trains_on_one_row_per_turn(ppo: Runner) -> None:
    done = ppo.run(
        *GAME,
        "env.context=memory",
        "algorithm.adv_estimator=gigpo",
        "actor_rollout_ref.actor.use_invalid_action_penalty=True",
    )
    assert done.metrics[-1]["actor/grad_norm"] > 0
    records = done.rollouts(2)
    assert any(len(record["rows"]) > 1 for record in records)
    for record in records:
        assert [row["first_turn"] for row in record["rows"]] == list(range(len(record["turns"])))


def test_maths_with_a_tool_continues_after_unreadable_turns(ppo: Runner) -> None:
    """An untrained model makes no tool calls: each turn gets an error message and the episode continues."""
    done = ppo.run(
        "env.env_name=informal_math",
        "env.max_steps=2",
        "env.max_tokens_per_turn=12",
        'env.prompt="{question}"',
        "data.max_response_length=64",
        "trainer.controller=local",
    )
    last = done.metrics[-1]
    assert last["turn/invalid"] > 0.5
    answers = [record["turns"] for record in done.rollouts(2)]
    assert any(turn["info"].get("tool_status") == "unreadable" for turns in answers for turn in turns)


OWN_TOOL = '''
from alphaapollo.tools.function_tool import tool

@tool
def twice(x: int) -> int:
    """Twice x."""
    return 2 * x
'''


def test_custom_tools_in_native_tool_format(ppo: Runner, tmp_path: Path) -> None:
    """An untrained model makes no tool call, so its first turn is the answer; template, parser and tools still work."""
    tokenizer = tokenizer_of(words=())
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "own.py").write_text(OWN_TOOL)
    command = json.dumps([sys.executable, str(Path(__file__).parents[1] / "unit" / "tools" / "mcp_server.py")])
    done = ppo.run(
        "env.env_name=informal_math",
        "env.max_steps=2",
        "env.action_format=chat_template",
        "env.tool_parser=hermes",
        f"env.custom_module={tmp_path / 'own.py'}",
        "env.tools=[twice]",
        f"env.mcp_servers={{small: {{command: {command}, tools: [count]}}}}",
        "env.informal_math.enable_python_code=False",
        'env.prompt="{question}"',
        f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'tokenizer'}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.controller=local",
        "data.max_prompt_length=480",
        "data.val_files=",
        "trainer.total_training_steps=1",
    )
    assert done.metrics[-1]["turn/invalid"] == 0
    for record in done.rollouts(1):
        shown = tokenizer.decode(record["rows"][0]["ids"])
        assert '"name": "twice"' in shown and '"name": "count"' in shown and len(record["turns"]) == 1
