"""Shapes of tests that other projects' data files have, each with a right and a wrong answer."""

import base64
import json
import pickle
import zlib

import numpy as np
import pytest

from alphaapollo.tools.sandbox import SandboxUnavailableError, get_default_sandbox
from alphaapollo.types import Outcome, Prompt

try:
    get_default_sandbox().start()
except SandboxUnavailableError as error:
    pytest.skip(f"no sandbox: {error}", allow_module_level=True)

from alphaapollo.plugins.code_grader.grader import answer_code, grade_code
from alphaapollo.plugins.code_grader.problem_tests import TIME_LIMIT, read_tests_and_time_limit

ADD, SUBTRACT = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> Optional[int]:\n        return a + b"
WRONG_METHOD = METHOD.replace("a + b", "a - b")
SUM, CONSTANT = "a, b = map(int, sys.stdin.read().split())\nprint(a + b)", "print(3)"
PROGRAM_CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7"}]
CALL_CASES = [{"input": "1\n2", "output": "3"}, {"input": "3\n4\n", "output": "7\n"}]
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"}
LIVECODEBENCH = [{**case, "testtype": "functional", "metadata": {"func_name": "add"}} for case in CALL_CASES]
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
KODCODE = (
    "from solution import add\n\ndef test_a():\n    assert add(1, 2) == 3\n\ndef test_b():\n    assert add(3, 4) == 7\n"
)
PYTEST = (
    "import pytest\nfrom solution import add\n\ndef test_add():\n"
    "    with pytest.raises(TypeError):\n        add(1, '2')\n"
    "    assert add(0.1, 0.2) == pytest.approx(0.3)\n    assert add([1], [2]) == [1, 2]\n"
)
UNITTEST = (
    "import unittest\nfrom solution import add\n\nclass TestAdd(unittest.TestCase):\n    def test_add(self):\n"
    "        self.assertEqual(add(1, 2), 3)\n        self.assertFalse(add(1, 2) == 4)\n"
)
CHECK = "def check(candidate):\n    assert candidate(a=1, b=2) == 3\n"


def pack(value):
    """LiveCodeBench's private_test_cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


CODE_CONTESTS = {
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": ["3 4"], "output": ["7"]},
    "generated_tests": {"input": [], "output": []},
    "time_limit": {"seconds": 2, "nanos": 0},
}
COLUMNS = {"public_test_cases": json.dumps(PROGRAM_CASES[:1]), "private_test_cases": pack(PROGRAM_CASES)}
NO_FUNCTION = {"testtype": "stdin", "metadata": {"func_name": None}}
TYPING = "from typing import *\n"
PROGRAMS = {
    "apps": STDIN,
    "apps as JSON": json.dumps(STDIN),
    "apps, lists of lines": {"inputs": [["1", "2"], ["3", "4"]], "outputs": [["3"], ["7"]]},
    "apps, lists of words": {"inputs": [[[1, 2]], [[3, 4]]], "outputs": [[3], [7]]},
    "apps, one test": {"inputs": "3 4\n", "outputs": "7\n"},
    "numpy": {name: np.array(value, dtype=object) for name, value in STDIN.items()},
    "taco": {"input_output": json.dumps(STDIN), "time_limit": "2.0 seconds"},
    "code_contests": CODE_CONTESTS,
    "klear": {"type": "stdin_stdout", "input": ["1 2", "3 4"], "output": ["3", "7"], "fn_name": None},
    "records": PROGRAM_CASES,
    "records of lists": [STDIN, {"inputs": ["5 6"], "outputs": ["11"]}],
    "codeforces": {"official_tests": PROGRAM_CASES, "time_limit": 2.0, "memory_limit": 256.0},
    "deepcoder": [{**case, "type": "stdin_stdout", "fn_name": None} for case in PROGRAM_CASES],
    "open-r1": {"language": "python", "test_cases": PROGRAM_CASES},
    "livecodebench, stdin": [case | NO_FUNCTION for case in PROGRAM_CASES],
    "livecodebench, columns": COLUMNS | {"metadata": "{}"},
}
FUNCTIONS = {
    "livecodebench, call": LIVECODEBENCH,
    "prime_code": CALLS,
    "apps, arguments": {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"},
    "arguments by name": {"inputs": [{"a": 1, "b": 2}], "outputs": [3], "func_name": "add"},
    "primeintellect": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
    "humaneval": {"test": CHECK, "entry_point": "add", "prompt": "import math\n"},
    "humaneval+": {"test": f"{CHECK}\ncheck(add)"},
    "mbpp": {"test_list": ASSERTS, "test_setup_code": "", "challenge_test_list": []},
    "mbpp+": {"prompt": "Add two numbers.", "test_imports": ["import math"], "test_list": ASSERTS},
    "asserts": ASSERTS,
    "kodcode": KODCODE,
    "kodcode, columns": {"test": KODCODE, "test_info": [{"function_name": "add"}]},
    "pytest": PYTEST,
    "unittest": UNITTEST,
}
METHODS = {
    "livecodebench, method": json.dumps(LIVECODEBENCH),
    "livecodebench, compressed": pack(LIVECODEBENCH),
    "livecodebench, name in a column": {"private_test_cases": pack(CALL_CASES), "metadata": '{"func_name": "add"}'},
    "prime_code, method": json.dumps(CALLS),
    "leetcode": {"test": CHECK, "entry_point": "Solution().add", "prompt": TYPING},
}
BODY = {"test": CHECK, "entry_point": "add", "prompt": "import math\ndef add(a, b):\n"}
NUMBERS_AS_KEYS = {"inputs": [[{"1": 2}]], "outputs": [{"2": 1}], "fn_name": "invert"}
INVERT = "def invert(d):\n    return {v: k for k, v in d.items()} if 1 in d else None"
SHAPES = {
    **{name: (truth, SUM, CONSTANT) for name, truth in PROGRAMS.items()},
    **{name: (truth, ADD, SUBTRACT) for name, truth in FUNCTIONS.items()},
    **{name: (truth, METHOD, WRONG_METHOD) for name, truth in METHODS.items()},
    "leetcode, rllm": ({"functional": f"{CHECK}\ncheck(Solution().add)"}, TYPING + METHOD, TYPING + WRONG_METHOD),
    "humaneval, no docstring": (BODY, "    return a + b", "    return a - b"),
    "apps, numbers as keys": (NUMBERS_AS_KEYS, INVERT, "def invert(d):\n    return d"),
    "pytest, only errors": (PYTEST, ADD, "def add(a, b):\n    return int(a) + int(b)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_right_and_wrong_answers(name):
    truth, right, wrong = SHAPES[name]
    prompt = Prompt(0, "code", "?", truth)
    assert answer_code(prompt) is None
    codes = (right, f"from __future__ import annotations\n{right}", wrong)
    scores = [grade_code(prompt, f"```python\n{code}\n```") for code in codes]
    assert [(score.reward, score.outcome) for score in scores] == [(reward, Outcome.SCORED) for reward in (1, 1, 0)]
    assert [bool(score.reason) for score in scores] == [False, False, True]


RESULTS = [
    ("[1, 2]", ["(1, 2)", "[1, 2]"], ["[2, 1]", "[1]", "1", "{1, 2}"]),
    ('{"1": [2]}', ["{1: (2,)}", "{'1': [2]}"], ["{1: [3]}", "{}"]),
    ("0.3", ["0.1 + 0.2"], ["0.31", "'0.3'", "None"]),
    ('"a"', ["'a'"], ["'A'", "['a']"]),
    ("null", ["None"], ["0", "False"]),
    ("true", ["True"], ["False", "'true'"]),
]


@pytest.mark.parametrize(("expected", "same", "different"), RESULTS)
def test_results_of_functions(expected, same, different):
    truth = {"inputs": ["0", "1"], "outputs": [expected, "5"], "fn_name": "f"}
    rewards = [
        grade_code(Prompt(0, "code", "?", truth), f"def f(x):\n    return 5 if x else {result}").reward
        for result in same + different
    ]
    assert rewards == [1.0] * len(same) + [0.0] * len(different)


BROKEN = [
    ({**STDIN, "checker": "x"}, "'checker' is unknown.*fn_name"),
    ([{"stdin": "1", "stdout": "1"}], "'stdin' is unknown"),
    ({**STDIN, "language": "cpp"}, "'cpp'"),
    ([{**case, "testtype": "functional"} for case in CALL_CASES], "fn_name"),
    ([{**CALL_CASES[0], "fn_name": "a"}, {**CALL_CASES[1], "fn_name": "b"}], "a, b"),
    ({**CALLS, "fn_name": "a.b"}, "a.b"),
    ({**CALLS, "inputs": ["nums = 1", "2"]}, "SyntaxError"),
    ({**STDIN, "test_list": ASSERTS}, "code and inputs"),
    ({"inputs": [], "outputs": []}, "no tests"),
    (None, "no tests"),
    (3, "is a int"),
    (base64.b64encode(zlib.compress(pickle.dumps({"a": "b", "c": "d"}))).decode(), "pickled string"),
    ({**STDIN, "time_limit": ""}, "ValueError"),
    ({"test": "def check(f): pass", "entry_point": "f"}, "do not call the answer"),
    ({"asserts": ["assert 1 == 1"]}, "do not call the answer"),
    ({"test": "def check(", "entry_point": "f"}, "SyntaxError"),
    ({"test": "import nothing_like_it\ndef check(f): f()", "entry_point": "f"}, "are broken: ModuleNotF"),
    ({"test": "def check(f): f(lambda: 1)", "entry_point": "f"}, "not plain data"),
]


@pytest.mark.parametrize(("truth", "named"), BROKEN)
def test_broken_tests_are_refused_at_the_start_and_for_an_answer(truth, named):
    prompt = Prompt(0, "code", "?", truth)
    for call in (answer_code, lambda prompt: grade_code(prompt, "def f(x): return x")):
        with pytest.raises(ValueError, match=named):
            call(prompt)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [(2, 2.0), ("2.5 seconds", 2.5), ({"seconds": 1, "nanos": 500_000_000}, 1.5), (None, TIME_LIMIT), (0, TIME_LIMIT)],
)
def test_time_limits(limit, seconds):
    assert read_tests_and_time_limit({**STDIN, "time_limit": limit})[1] == seconds


@pytest.mark.parametrize("code", ["", "pass", "from operator import sub", METHOD.replace("add", "other")])
def test_imported_names_are_no_answers(code):
    result = grade_code(Prompt(0, "code", "?", CALLS), f"```python\n# {code!r}\n{code}\n```")
    assert (result.reward, result.outcome) == (0.0, Outcome.SCORED)
    assert "add" in result.reason
