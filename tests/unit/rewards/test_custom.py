import pytest

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.client import check_reward_function
from alphaapollo.types import Outcome, Prompt, Score
from tests.unit.rewards.grading import open_graders

POLITE = """
from alphaapollo.rewards.components import reward_component

@reward_component
def polite(prompt, completion):
    return 1.0
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Function that checks a reward function, or `components` of a file, as a start of a run does."""
    monkeypatch.chdir(tmp_path)

    def check(source, name="f", components=None, required=(), is_module=False):
        (tmp_path / "my_reward.py").write_text(source)
        module, path = ("my_reward.py", "") if is_module else ("", "my_reward.py")
        reward = Reward(custom_module=module, components=components or {}, required=list(required))
        check_reward_function(reward, CustomRewardFunction(path=path, name=name))

    return check


def test_function_may_import_neighbours_print_and_have_defaults(tmp_path, check):
    (tmp_path / "neighbour.py").write_text("VALUE = 1.0")
    check("import neighbour\nprint('loading')\ndef f(prompt, completion, bonus=0.0):\n    return neighbour.VALUE")


BAD_FILES = [
    ("none.py", "", r"reward_function\.path=none\.py: no such"),
    ("", "none.py", r"reward\.custom_module=none\.py: no such"),
    ("reward.txt", "", r"reward\.txt.* not a Python file"),
]


@pytest.mark.parametrize(("path", "module", "what"), BAD_FILES)
def test_files_that_are_missing_or_not_python(tmp_path, monkeypatch, path, module, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.txt").write_text("x")
    with pytest.raises(ValueError, match=what):
        check_reward_function(Reward(custom_module=module), CustomRewardFunction(path=path))


LOAD_ERRORS = [
    ("x = 1\nimport no_such_module", r"ModuleNotFoundError: .*'no_such_module' .*my_reward\.py, line 2"),
    ("def f(:\n    pass", r"SyntaxError: .*my_reward\.py, line 1"),
    ("x = 1\n\nraise KeyError('k')", r"KeyError: 'k' .*my_reward\.py, line 3: raise KeyError"),
    ("import os\nos.kill(os.getpid(), 9)", r"my_reward\.py: .*does not start: .*\(SIGKILL\)"),
    ("def f(prompt, completion, ground_truth): return 1.0", "cannot be called .*ground_truth"),
    ("import os\ndef grade(prompt, completion): return 1.0\ndef helper(): pass", r"\.name=f: .*grade, helper\."),
]


@pytest.mark.parametrize(("source", "what"), LOAD_ERRORS)
def test_load_errors_name_the_line(check, source, what):
    with pytest.raises(ValueError, match=what):
        check(source)


def test_custom_components_are_known_by_name(check):
    check(POLITE, components={"polite": 0.1, "format": 0.1}, required=["polite"], is_module=True)
    check(POLITE, "polite", components={"polite": 0.1})  # in the reward function's file


COMPONENT_ERRORS = [
    (("polite", "format"), "format", r"'format' is registered twice.*my_reward\.py, line 4"),
    (("polite", "task"), "task", "cannot be named task"),
    (("prompt, completion", "text"), "polite", r"polite cannot be called .*\(prompt, completion\)"),
    (("", ""), "polit", r"component 'polit'\. .*'polite'"),
]


@pytest.mark.parametrize(("change", "name", "what"), COMPONENT_ERRORS)
def test_component_errors(check, change, name, what):
    with pytest.raises(ValueError, match=what):
        check(POLITE.replace(*change), components={name: 0.1}, is_module=True)


def test_custom_components_are_graded_and_fail_with_a_reason(tmp_path):
    """A component that gives the value of each text."""
    path = tmp_path / "my_reward.py"
    path.write_text(POLITE.replace("1.0", "{'4': 1.0, ' 4': None}[completion]"))
    with open_graders(Reward(components={"polite": 0.5}, custom_module=str(path))) as graders:
        right, none, raised = graders.score(Prompt(0, "exact", "?", ground_truth="4"), ["4", " 4", "4 "])
    assert right == Score(1.5, {"accuracy": 1.0, "task": 1.0, "polite": 1.0})
    for failed, reason in ((none, "component 'polite' is a NoneType"), (raised, "my_reward")):
        assert failed.outcome is Outcome.GRADER_FAILED and reason in failed.reason
