import pytest

from alphaapollo.rewards.custom import check_reward_function

pytestmark = pytest.mark.timeout(60)


def write(tmp_path, source):
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    return str(path)


def test_a_good_function_passes(tmp_path):
    check_reward_function(
        write(tmp_path, "def compute_score(prompt, completion, bonus=0.0):\n    return 1.0"), "compute_score"
    )


def test_it_may_import_its_neighbours_and_print(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 1.0")
    source = "import neighbour\nprint('loading')\ndef f(prompt, completion):\n    return neighbour.VALUE"
    check_reward_function(write(tmp_path, source), "f")


def test_a_missing_file():
    with pytest.raises(ValueError, match=r"none\.py: no such file \(custom_reward_function\.path"):
        check_reward_function("none.py", "compute_score")


def test_a_missing_name_lists_the_functions_there_are(tmp_path):
    path = write(tmp_path, "import os\ndef grade(prompt, completion): return 1.0\ndef helper(): pass")
    with pytest.raises(ValueError, match="has no function 'compute_score'; it defines grade, helper"):
        check_reward_function(path, "compute_score")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            "x = 1\nimport no_such_module",
            r"ModuleNotFoundError: No module named 'no_such_module' .*my_reward\.py, line 2",
        ),
        ("def f(:\n    pass", r"SyntaxError: .*my_reward\.py, line 1"),
        ("x = 1\n\nraise KeyError('k')", r"KeyError: 'k' .*my_reward\.py, line 3: raise KeyError"),
        ("import os\nos._exit(3)", "ended the process with exit code 3"),
        (
            "def f(data_source, solution_str, ground_truth): return 1.0",
            r"must take \(prompt, completion\).*ground_truth",
        ),
        ("f = 5", "f is a int; write a plain `def f"),
        ("async def f(prompt, completion): return 1.0", "f is an async function"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, source, what):
    with pytest.raises(ValueError, match=what):
        check_reward_function(write(tmp_path, source), "f")


def test_a_file_that_is_not_python(tmp_path):
    path = tmp_path / "reward.txt"
    path.write_text("x")
    with pytest.raises(ValueError, match="must be a Python file"):
        check_reward_function(str(path), "f")
