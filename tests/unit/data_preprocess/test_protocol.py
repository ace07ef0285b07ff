import json

import pytest

from examples.data_preprocess.columns import Dropped
from examples.data_preprocess.protocol import plain_turns, tool_turns, tool_uses

NATALIA = "She sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72"


def test_calculator_marks_become_calls_with_python_output():
    first, response, second, other_response, last = tool_turns(NATALIA, "72")
    assert first["content"] == "<think>\nShe sold 48/2 =\n</think>\n<python_code>48/2</python_code>"
    assert response == {"role": "user", "content": r'<tool_response>{"status": "ok", "text": "24.0\n"}</tool_response>'}
    expected = "<think>\n24 clips in May.\nIn all 48+24 =\n</think>\n<python_code>48+24</python_code>"
    assert second == {"role": "assistant", "content": expected}
    payload = other_response["content"].removeprefix("<tool_response>").removesuffix("</tool_response>")
    assert json.loads(payload) == {"status": "ok", "text": "72\n"}
    assert last["content"] == "<think>\n72 clips.\n</think>\n<answer>\\boxed{72}</answer>"


def test_python_blocks_with_outputs_are_calls():
    solution = "Add.\n```python\na = 1\nprint(a + 1)\n```\n```output\n2\n```\nSo 2."
    call, response, last = tool_turns(solution, "2")
    assert call["content"].endswith("<python_code>\na = 1\nprint(a + 1)\n</python_code>")
    assert r'"text": "2\n"' in response["content"]
    assert last == tool_turns("So 2.", "2")[0], "as a solution without calls"


def test_plain_solutions_are_boxed_once():
    (turn,) = plain_turns(NATALIA, "72")
    assert turn["content"] == "She sold 48/2 = 24 clips in May.\nIn all 48+24 = 72 clips.\n\\boxed{72}"
    assert plain_turns(r"So \boxed{7}.", "7")[0]["content"] == r"So \boxed{7}."
    assert plain_turns("7", "7")[0]["content"] == r"\boxed{7}"


@pytest.mark.parametrize("mark", ["2+2=5", "2x3=6", "1/0=0", "__import__('os').getcwd()=1", "9**9**9=1", "2+2=four"])
def test_wrong_marks_drop_the_row(mark):
    with pytest.raises(Dropped, match="another result than Python" if mark == "2+2=5" else "no arithmetic"):
        tool_uses(f"It is <<{mark}>>.")


def test_marks_may_be_rounded():
    uses, _ = tool_uses("<<10/3=3.33>> <<.5*4=2>> <<1000*2=2,000>> <<-(3-5)=2>>")
    assert [use.output for use in uses] == ["3.3333333333333335\n", "2.0\n", "2000\n", "2\n"]
