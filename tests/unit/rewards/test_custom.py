import pytest

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.rewards.grader_processes.client import check_reward_function
from alphaapollo.types import Outcome, Prompt, Score
from tests.unit.rewards.grading import with_client


def write(tmp_path, source):
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    return str(path)


def check(path="", name="f", module="", components=None, required=()):
    reward = Reward(custom_module=module, components=components or {}, required=list(required))
    check_reward_function(reward, CustomRewardFunction(path=path, name=name))


def test_function_may_import_neighbours_print_and_have_defaults(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 1.0")
    source = "import neighbour\nprint('loading')\ndef f(prompt, completion, bonus=0.0):\n    return neighbour.VALUE"
    check(write(tmp_path, source), "f")


def test_files_that_are_missing_or_not_python(tmp_path):
    with pytest.raises(ValueError, match=r"reward_function\.path=none\.py: no such"):
        check("none.py", "compute_score")
    with pytest.raises(ValueError, match=r"reward\.custom_module=none\.py: no such"):
        check(module="none.py")
    (tmp_path / "reward.txt").write_text("x")
    with pytest.raises(ValueError, match=r"reward\.txt.* not a Python file"):
        check(str(tmp_path / "reward.txt"), "f")


def test_a_missing_name_lists_the_functions_there_are(tmp_path):
    path = write(tmp_path, "import os\ndef grade(prompt, completion): return 1.0\ndef helper(): pass")
    with pytest.raises(ValueError, match=r"\.name=compute_score: .*grade, helper\."):
        check(path, "compute_score")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("x = 1\nimport no_such_module", r"ModuleNotFoundError: .*'no_such_module' .*my_reward\.py, line 2"),
        ("def f(:\n    pass", r"SyntaxError: .*my_reward\.py, line 1"),
        ("x = 1\n\nraise KeyError('k')", r"KeyError: 'k' .*my_reward\.py, line 3: raise KeyError"),
        ("import os\nos._exit(3)", r"my_reward\.py: .*does not start: .*\(exit code 3\)$"),
        ("import os\nos.kill(os.getpid(), 9)", r"my_reward\.py: .*does not start: .*\(SIGKILL\)"),
        ("def f(prompt, completion, ground_truth): return 1.0", "cannot be called .*ground_truth"),
        ("f = 5", "f cannot be called .*5 is not a callable"),
    ],
)
def test_load_errors_name_the_line(tmp_path, source, what):
    with pytest.raises(ValueError, match=what):
        check(write(tmp_path, source), "f")


POLITE = """
from alphaapollo.rewards.components import reward_component

@reward_component
def polite(prompt, completion):
    return {}
"""


def test_custom_components_are_known_by_name(tmp_path):
    path = write(tmp_path, POLITE.format("1.0"))
    check(module=path, components={"polite": 0.1, "format": 0.1}, required=["polite"])
    check(path, "polite", components={"polite": 0.1})  # in the reward function's file
    with pytest.raises(ValueError, match=r"component 'polit'\. .*'polite'"):
        check(module=path, components={"polit": 0.1})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("polite", "format"), r"'format' is registered twice.*my_reward\.py, line 4"),
        (("polite", "task"), "cannot be named task"),
        (("prompt, completion", "text"), r"polite cannot be called .*\(prompt, completion\)"),
        (("import", "imprt"), r"SyntaxError.*line 2"),
    ],
)
def test_component_errors(tmp_path, change, what):
    with pytest.raises(ValueError, match=what):
        check(module=write(tmp_path, POLITE.format("1.0").replace(*change)))


@pytest.mark.parametrize(
    ("value", "reason"), [("1.0", ""), ("None", "component 'polite' is a NoneType"), ("1/0", "my_reward")]
)
def test_custom_components_are_graded_and_fail_with_a_reason(tmp_path, value, reason):
    reward = Reward(components={"polite": 0.5}, custom_module=write(tmp_path, POLITE.format(value)))
    score = with_client(lambda client: client.score(Prompt(0, "exact", "?", ground_truth="4"), "4"), reward)
    if reason:
        assert score.outcome is Outcome.GRADER_FAILED and reason in score.reason
    else:
        assert score == Score(1.5, {"accuracy": 1.0, "task": 1.0, "polite": 1.0})
