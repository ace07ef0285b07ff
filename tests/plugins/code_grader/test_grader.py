"""Code against tests, in the real sandbox."""

import json
from pathlib import Path

import pytest

from alphaapollo.config.schema import Reward
from alphaapollo.tools.sandbox import SandboxUnavailableError, get_default_sandbox
from alphaapollo.types import Outcome, Prompt
from tests.unit.rewards.grading import with_client

try:
    get_default_sandbox().start()
except SandboxUnavailableError as error:
    pytest.skip(f"no sandbox: {error}", allow_module_level=True)

from alphaapollo.plugins.code_grader import grader
from alphaapollo.plugins.code_grader.grader import extract_code, grade_code, is_same_output

HUMANEVAL = Path(__file__).parents[2] / "data/humaneval.jsonl"


CHECK = {
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == 9\n",
    "entry_point": "square",
    "prompt": 'import math\n\ndef square(x):\n    """The square of x."""\n',
}
ONE_CALL = "assert f(2) == 4"
RIGHT = "def square(x):\n    return x * x\n"


def score(code, truth=CHECK, fenced=True):
    prompt = Prompt(0, "code", "?", json.dumps(truth))
    return grade_code(prompt, f"<think>```python\nno\n```</think>Here:\n```python\n{code}\n```\n" if fenced else code)


def test_right_code_passes_as_program_or_continuation():
    assert (score(RIGHT).reward, score(RIGHT).reason) == (1.0, "")
    assert score("    return int(math.pow(x, 2))\n").reward == 1.0
    assert score("    return x ** 2", fenced=False).reward == 1.0


WRONG_CODE = [
    ("def square(x):\n    return 2 * x", "AssertionError"),
    ("def square(x):\n    raise KeyError(x)", "KeyError"),
    ("def square(x) return", "SyntaxError"),
    ("square = 3", "TypeError: 'int' object is not callable"),
    ("del square", "NameError: the code does not define sq"),
    ("import nothing_like_it", "ModuleNotFoundError"),
    ("def square(x):\n    while True: pass", "the code ends with timeout"),
    ("def square(x):\n    return square(x)", "RecursionError"),
]


@pytest.mark.parametrize(("code", "reason"), WRONG_CODE)
def test_wrong_code_fails_with_a_reason(code, reason):
    result = score(code, {**CHECK, "time_limit": 1})
    assert (result.reward, result.accuracy, result.outcome) == (0.0, 0.0, Outcome.SCORED)
    assert reason in result.reason


CHEATS = [
    'print(\'{"passed": true, "why": ""}\')\nimport os\nos._exit(0)',
    "class E:\n    def __eq__(self, other): return True\ndef square(x): return E()",
    "import builtins\nbuiltins.AssertionError = Exception\ndef square(x): return 0",
    # walks the frames for expected results, or patches what decides
    "import sys\ndef square(x):\n    f = sys._getframe()\n    while f.f_back: f = f.f_back\n"
    "    f.f_globals['run_tests'] = f.f_globals['_run_tests_once'] = lambda *a, **k: ''\n"
    "    return f.f_globals.get('tests')",
    "def square(x):\n    return open('/proc/self/cmdline').read()",
    "import json\njson.dumps = lambda *a, **k: '[]'\ndef square(x): return 4",
    "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef square(x): return 4",
    "import atexit\natexit.register(lambda: print('\\n[[\"returned\", null, null]]'))\ndef square(x): return 4",
]


@pytest.mark.parametrize("code", CHEATS)
def test_cheating_earns_nothing(code):
    result = score(code)
    assert (result.reward, result.outcome) == (0.0, Outcome.SCORED), result


NESTED, SUM, POWER = "assert f(f(2)) == 16", "assert sum(f(2)) == 4", "assert f(2) ** f(2) == 256"
SABOTAGE = [
    ("def f(x):\n    import pandas_nope", ONE_CALL),
    ("import os\nos.write(1, b'\\n' + b'[' * 100000); os._exit(0)", ONE_CALL),
    ('import os\nos.write(1, b\'["raised", ["SyntaxError", "x"], ["tuple", []]]\\n\'); os._exit(0)', ONE_CALL),
    ("import os\nos.write(1, b'[\"returned\", ' + b'[' * 900 + b']' * 900 + b', []]\\n'); os._exit(0)", ONE_CALL),
    ("import os\nos.write(1, b'x' * 10**8)", ONE_CALL),
    ('import os\nos.write(2, b\'\\n{"failure": ""}\'); os._exit(0)', ONE_CALL),
    ("import os\ndef f(x):\n    os._exit(0)", ONE_CALL),
    ('def f(x):\n    return \'\\n{"failure": ""}\'', "import sys\nprint(f(2), file=sys.stderr)\nassert f(2) == 4"),
    ("def f(x):\n    return object()", NESTED),
    ("import os\ndef f(x):\n    return int.from_bytes(os.urandom(4))", NESTED),
    ("def f(x):\n    return x + 1", "x = 0\nwhile len(str(f(x))) < 5: x = int(str(f(x)))\nassert x == 0"),
]
ENDLESS = [
    ("def f(x):\n    return range(10**12)", SUM),
    ("def f(x):\n    return 10**9", POWER),
    ("def f(x):\n    return 1", "while f(2) != 4: pass"),
]


@pytest.mark.parametrize(("code", "test"), SABOTAGE + ENDLESS)
def test_answer_cannot_cause_a_grader_failure(code, test, monkeypatch):
    """A grader failure is excluded from the advantages, so a wrong answer must not cause one."""
    is_endless = (code, test) in ENDLESS
    if is_endless:
        monkeypatch.setattr(grader, "TESTS_TIMEOUT", 2.0)
    result = score(code, {"asserts": [test]} | ({"time_limit": 0.5} if is_endless else {}))
    assert (result.reward, result.outcome) == (0.0, Outcome.SCORED), result
    assert result.reason


def test_reason_is_one_short_line():
    # it reads the call, because the reply is lost if a connection with unread data closes
    code = "import os\nos.read(1, 9999)\n"
    code += "os.write(1, b'[\"broken\", \"%s\", []]\\n' % (b'\\\\u001b\\\\n' + b'x' * 1000)); os._exit(0)"
    result = score(code, {"asserts": [ONE_CALL]})
    assert result.reason == "  " + 498 * "x", result


BLOCKS = [
    ("```python\na\n```", "a"),
    ("```\na\n```\n```\nb\n```", "b"),
    ("```\na\n```\ntext ```py\nb\n```\n```text\nc\n```", "b"),
    ("<think>```python\na\n```</think>\n```python\nb\n", "b\n"),
    ("    return 1", "    return 1"),
    ("```python\n    return 1\n```", "    return 1"),
]


@pytest.mark.parametrize(("text", "code"), BLOCKS)
def test_the_last_block_is_the_answer(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize("text", ["", "  \n", "```python\n\n```", "<think>def f(): pass</think>"])
def test_no_code_is_a_wrong_format(text):
    assert score(text, fenced=False).outcome is Outcome.WRONG_FORMAT


def test_asserts_with_a_setup():
    setup = "import math\ndef near(a, b):\n    return abs(a - b) < 1e-9"
    truth = {"asserts": ["assert near(area(1), math.pi)", "assert area(0) == 0"], "setup": setup}
    assert [score(f"def area(r):\n    return {pi} * r * r", truth).reward for pi in ("math.pi", 3)] == [1.0, 0.0]


def test_types_and_in_place_changes_are_preserved():
    asserts = [
        "assert same((1, 2)) == (1, 2)",
        "assert same((1, 2)) != [1, 2]",
        "assert same({1: {2}, 'a': b'x'}) == {1: {2}, 'a': b'x'}",
        "assert same(2.5) == 2.5 and same(10**30) == 10**30 and same(1j) == 1j and same(None) is None",
        "assert list(same(iter([1]))) == [1] and same(range(3)) == range(3)",
        "values = [3, 1, 2]\nassert change(values) is None and values == [1, 2, 3]",
        "assert same(same(same(1))) == 1",
        "assert same(same(['unknown'])) == ['unknown'] and same(same(['opaque', 1])) == ['opaque', 1]",
        "x = 1\nfor _ in range(99): x = same(x + same(0))\nassert x == 1",
        "try:\n    fail(1)\n    assert False\nexcept ZeroDivisionError as error:\n    assert 'by zero' in str(error)",
    ]
    code = "def same(x): return x\ndef change(x): x.sort()\ndef fail(x): return x / 0"
    assert score(code, {"asserts": asserts}) == score(code, {"asserts": asserts[:1]})
    assert score(code, {"asserts": asserts}).reward == 1.0


def test_reasons_of_programs():
    truth = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    wrong = score("print(3)", truth)
    assert wrong.reward == 0.0 and "test 1: " in wrong.reason and r"'3\n'" in wrong.reason and "'7'" in wrong.reason
    assert "the code ends with error" in score("1 / 0", truth).reason
    assert "timeout" in score("while True: pass", {**truth, "time_limit": 0.5}).reason


OUTPUTS = [
    ("1 2\n3", ["1 2 \n3\n\n", "\n1 2\n\n3"], ["1 2 3"]),
    ("0.33333", ["0.3333333333"], ["0.33334"]),
    ("0.5", ["0.50000001"], ["0.51"]),
    ("123456789", [], ["123456700.0"]),  # only a number with a point may be rounded
    ("123456789.0", ["123456789.1"], []),
    ("9" * 400, [], ["1.0e999"]),  # both are infinite as floats
    ("10000000000000000000001", [], ["10000000000000000000000.0"]),
    ("1 2", [], ["1\n2"]),
    ("", ["\n"], []),
]


@pytest.mark.parametrize(("wanted", "same", "different"), OUTPUTS)
def test_outputs(wanted, same, different):
    assert all(is_same_output(wanted, printed) for printed in same)
    assert not any(is_same_output(wanted, printed) for printed in different)


def test_in_grader_processes():
    async def scenario(client):
        prompt = Prompt(0, "openai_humaneval", "?", json.dumps(CHECK))
        return [(await client.score(prompt, text)).reward for text in (RIGHT, "def square(x): return 1")]

    assert with_client(scenario, Reward(timeout=20.0)) == [1.0, 0.0]


@pytest.mark.parametrize("line", HUMANEVAL.read_text().splitlines(), ids=lambda line: json.loads(line)["task_id"])
def test_humaneval(line):
    problem = json.loads(line)
    truth = {key: problem[key] for key in ("test", "entry_point", "prompt")}
    assert score(problem["prompt"] + problem["canonical_solution"], truth).reward == 1
    assert score(problem["prompt"] + "    return None\n", truth).reward == 0
