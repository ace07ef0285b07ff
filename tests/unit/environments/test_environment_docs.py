"""docs/environments.md matches the code."""

import asyncio
import re
import typing
from pathlib import Path

import pytest
import yaml

from alphaapollo.config.build import build_config
from alphaapollo.config.keys import list_keys, list_sections
from alphaapollo.config.schema import Config, Env
from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments import base
from alphaapollo.environments.base import StepResult
from alphaapollo.environments.memory import MemoryType
from alphaapollo.rollout.context import AppendContext
from alphaapollo.rollout.episode import EpisodeLimits, EpisodeRunner, EpisodeTask
from alphaapollo.tools.function_tool import FunctionTool
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import EpisodeEnd, Prompt, Sampling, Score, Trajectory
from alphaapollo.utils.user_module import load_user_module

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
if not PAGE.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def rows(first: str) -> list[list[str]]:
    """Cells of the table with a header that starts with `first`."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert table, first
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].strip().splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def example(language: str, place: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[place]


def play(*answers: str) -> Trajectory:
    """Tokens are characters."""
    left = list(answers)
    engine = FakeEngine(256, script=lambda token_ids, sampling: [ord(letter) for letter in left.pop(0)])
    text = bytes
    runner = EpisodeRunner(
        engine,
        decode=lambda ids: text(ids).decode(),
        make_token_context=lambda *_: AppendContext(
            lambda content: list(content[0]["content"].encode()),
            lambda messages, last: list(messages[0]["content"].encode()),
            lambda content: (),
        ),
        limits=EpisodeLimits(max_turns=5, environment_seconds=9.0),
    )
    factory = base.get_environment_spec("doubling").factory
    services = base.Services(score=None, config=Env())  # type: ignore[arg-type]
    prompt = Prompt(0, "text", "...")
    return asyncio.run(
        runner.run(EpisodeTask(prompt, 0, lambda _: factory(services), Sampling(200), lambda turn: 0, "t"))
    )


def test_first_example_plays(tmp_path):
    code = example("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (tmp_path / "doubling.py").write_text(code)
    load_user_module(str(tmp_path / "doubling.py"), "env.custom_module")
    assert base.check_environment(Env(env_name="doubling")).graded is False
    won, lost = play("4", "6", "8"), play("4", "7")
    assert (won.end, won.score.reward) == (EpisodeEnd.DONE, 1.0)
    assert [turn.reward for turn in won.turns] == [0.1, 0.1, 0.0]
    assert lost.score.reward == pytest.approx(2 / 3)
    base._ENVIRONMENTS._entries.pop("doubling")


def test_settings_example_reads_its_settings(tmp_path):
    (tmp_path / "maze.py").write_text(example("python", 1))
    load_user_module(str(tmp_path / "maze.py"), "env.custom_module")
    config = Env(env_name="maze", settings={"size": 9})
    assert base.get_environment_spec("maze").factory(base.Services(score=None, config=config)).size == 9
    base._ENVIRONMENTS._entries.pop("maze")


def test_tool_example_plays(tmp_path):
    def twice(x: int) -> int:
        """Twice x."""
        return 2 * x

    async def score(prompt: Prompt, text: str) -> Score:
        return Score(float(text.endswith("<answer>42</answer>")))

    async def run() -> list[StepResult]:
        box = ToolBox([FunctionTool(twice)], ToolLimits())
        environment = base.get_environment_spec("question_with_tools").factory(base.Services(score, Env(), box))
        await environment.reset(Prompt(0, "text", [{"role": "user", "content": "?"}]))
        return [await environment.step(text) for text in ('<twice>{"x": 21}</twice>', "So <answer>42</answer>!")]

    (tmp_path / "question.py").write_text(example("python", 2))
    load_user_module(str(tmp_path / "question.py"), "env.custom_module")
    called, answered = asyncio.run(run())
    assert '"text": "42"' in called.observation.messages[0]["content"]
    assert answered.score == Score(1.0) and answered.kept_chars == len("So <answer>42</answer>")
    base._ENVIRONMENTS._entries.pop("question_with_tools")


def test_tables_are_complete():
    shipped = {row[0].strip("`"): names(row[2]) for row in rows("`env.env_name`")}
    factories = {name: base.get_environment_spec(name).factory for name in base._ENVIRONMENTS.names()}
    ours = [name for name, one in factories.items() if one.__module__.startswith("alphaapollo.environments.")]
    assert sorted(shipped) == ours  # other tests register more
    own = {name: list(getattr(Env(), name).__class__.model_fields) if hasattr(Env(), name) else [] for name in shipped}
    assert shipped == own
    assert sorted(row[0].strip("`") for row in rows("end")) == sorted(EpisodeEnd)
    assert [row[0].strip("`") for row in rows("`env.memory_type`")] == list(typing.get_args(MemoryType))
    fields = [name for row in rows("field") for name in names(row[0])]
    assert sorted(fields) == sorted(StepResult.__dataclass_fields__)


def test_keys_exist():
    known = {*list_keys(Config), *list_sections(Config)}
    said = re.findall(r"`((?:env|data|actor_rollout_ref)\.[\w.]+)[`=]", TEXT)
    assert len(said) > 10 and [key for key in said if key not in known] == []


def test_yaml_block_is_valid():
    assert build_config(Config, yaml.safe_load(example("yaml"))).env.reasoning_gym.level == 2
