"""docs/environments.md matches the code."""

import re
import typing
from itertools import filterfalse
from pathlib import Path

import pytest

from alphaapollo.config.keys import list_keys, list_sections
from alphaapollo.config.schema import Config, Env
from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.config.schema.plugins import describe_missing_section
from alphaapollo.environments import base
from alphaapollo.environments.base import StepResult
from alphaapollo.environments.classes import load_environment_module
from alphaapollo.environments.memory import MemoryType
from alphaapollo.tools.function_tool import FunctionTool
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import EpisodeEnd, Prompt, Score
from alphaapollo.utils.plugins import find_own_plugins
from alphaapollo.utils.user_module import load_user_module
from tests.unit.environments.episode_helpers import make, row, take_turns

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
if not PAGE.exists():
    pytest.skip("an installed package has no docs folder", allow_module_level=True)
TEXT = PAGE.read_text(encoding="utf-8")


def table_rows(first: str) -> list[list[str]]:
    """Cells of the table with a header that starts with `first`."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert table, first
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].strip().splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def example(language: str, place: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[place]


@pytest.fixture
def load_example(tmp_path, monkeypatch):
    """Function that registers the environment of a Python example of the page."""
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))

    def load(place: int) -> None:
        (tmp_path / "module.py").write_text(example("python", place))
        load_user_module(str(tmp_path / "module.py"), "env.custom_module")

    return load


def test_first_example_plays(load_example):
    assert len([line for line in example("python").splitlines() if line.strip()]) <= 15
    load_example(0)
    config = Env(env_name="doubling")
    assert base.check_environment(config).graded is False
    (_, won), (_, lost) = take_turns(config, row(), "4", "6", "8"), take_turns(config, row(), "4", "7")
    assert [result.reward for result in won] == [0.1, 0.1, 0.0]
    assert won[-1].done and won[-1].score.reward == 1.0
    assert lost[-1].score.reward == pytest.approx(2 / 3)


def test_class_of_another_framework_is_registered(load_example, tmp_path):
    load_example(1)
    env = Env(env_name="Counter", custom_module=str(tmp_path / "module.py"))
    load_environment_module(env)
    assert base.check_environment(env).list_tools(env) == ["add"]


def test_settings_example_reads_its_settings(load_example):
    load_example(2)
    assert make(Env(env_name="maze", settings={"size": 9})).size == 9


def test_tool_example_plays(load_example):
    def twice(x: int) -> int:
        """Twice x."""
        return 2 * x

    async def score(prompt: Prompt, text: str) -> Score:
        return Score(float(text.endswith("<answer>42</answer>")))

    load_example(3)
    texts = '<twice>{"x": 21}</twice>', "So <answer>42</answer>!"
    tools = ToolBox([FunctionTool(twice)], ToolLimits())
    _, (called, answered) = take_turns(Env(env_name="question_with_tools"), row(), *texts, score=score, tools=tools)
    assert '"text": "42"' in called.observation.messages[0]["content"]
    assert answered.score == Score(1.0) and answered.kept_chars == len("So <answer>42</answer>")


def test_tables_are_complete():
    shipped = {row[0].strip("`"): names(row[2]) for row in table_rows("`env.env_name`")}
    factories = {name: base.get_environment_spec(name).factory for name in base._ENVIRONMENTS.names()}
    ours = [name for name, one in factories.items() if one.__module__.startswith("alphaapollo.environments.")]
    plugins = find_own_plugins("environments")
    assert sorted(shipped) == sorted([*ours, *plugins])  # other tests register more
    shipped = {name: keys for name, keys in shipped.items() if name not in plugins or not plugins[name].is_missing}
    own = {name: list(getattr(Env(), name).__class__.model_fields) if hasattr(Env(), name) else [] for name in shipped}
    assert shipped == own
    assert sorted(row[0].strip("`") for row in table_rows("end")) == sorted(EpisodeEnd)
    assert [row[0].strip("`") for row in table_rows("`env.memory_type`")] == list(typing.get_args(MemoryType))
    fields = [name for row in table_rows("field") for name in names(row[0])]
    assert sorted(fields) == sorted(StepResult.__dataclass_fields__)


def test_keys_exist():
    known = {*list_keys(Config), *list_sections(Config)}
    said = re.findall(r"`((?:env|data|actor_rollout_ref)\.[\w.]+)[`=]", TEXT)
    unknown = {key for key in said if key not in known and not key.startswith("env.plugins.")}
    assert len(said) > 10 and not [*filterfalse(describe_missing_section, unknown)]
