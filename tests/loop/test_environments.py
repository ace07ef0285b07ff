"""Multi-turn episodes on the real stack: contexts, tools, step rewards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.loop.conftest import GUESSING_GAME, FinishedRun
from tests.loop.stack import Case, StackRunner, parametrize
from tests.unit.tool_templates import tokenizer_of


def check_memory_context(done: FinishedRun) -> None:
    """One row per turn."""
    assert done.metrics[-1]["actor/grad_norm"] > 0
    records = done.rollouts(2)
    assert any(len(record["rows"]) > 1 for record in records)
    for record in records:
        assert [row["first_turn"] for row in record["rows"]] == list(range(len(record["turns"])))


def check_native_tools(done: FinishedRun, tools: Iterable[str] = ("twice",)) -> None:
    """An untrained model makes no tool call, so its first turn is the answer; template, parser and tools still work."""
    assert done.metrics[-1]["turn/invalid"] == 0
    tokenizer = tokenizer_of(words=())
    for record in done.rollouts(1):
        shown = tokenizer.decode(record["rows"][0]["ids"])
        assert all(f'"name": "{tool}"' in shown for tool in tools) and len(record["turns"]) == 1


OWN_TOOL = '''
from alphaapollo.tools.function_tool import tool

@tool
def twice(x: int) -> int:
    """Twice x."""
    return 2 * x
'''
ACTOR = "actor_rollout_ref.actor"
GAME = (
    *("env.env_name=guessing_game", f"env.custom_module={GUESSING_GAME}", "env.settings.numbers=9", "env.max_steps=3"),
    *("env.max_tokens_per_turn=8", 'env.prompt="1-{numbers}"', "data.val_files="),
    *("data.max_prompt_length=96", "data.max_response_length=64"),
)
MATHS = ("env.env_name=informal_math", "env.max_steps=2", 'env.prompt="{question}"')
NATIVE_TOOLS = (
    *("env.action_format=chat_template", "env.tool_parser=hermes", "env.informal_math.enable_python_code=False"),
    "actor_rollout_ref.model.tokenizer_path=FOLDER/tokenizer",
    *("actor_rollout_ref.rollout.name=hf", "data.max_prompt_length=480", "data.val_files="),
    "trainer.total_training_steps=1",
)
OWN_TOOLS = ("env.custom_module=FOLDER/own.py", "env.tools=[twice]")


def prepare_native_tools(folder: Path) -> None:
    tokenizer_of(words=()).save_pretrained(folder / "tokenizer")
    (folder / "own.py").write_text(OWN_TOOL)


MEMORY = (*GAME, "env.context=memory", "algorithm.adv_estimator=gigpo", f"{ACTOR}.use_invalid_action_penalty=True")
CASES = {
    "memory": Case(check_memory_context, MEMORY, core=True),
    "native_tools": Case(check_native_tools, (*MATHS, *NATIVE_TOOLS, *OWN_TOOLS), prepare_native_tools),
}


@parametrize(CASES)
def test_environment(stack: StackRunner, case: Case) -> None:
    case.run(stack)
