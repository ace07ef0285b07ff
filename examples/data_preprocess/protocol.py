r"""Convert solutions to turns of the tool protocol: their calculations become real calls with real results.

    48/2 = <<48/2=24>>24 clips  ->  <think>48/2 =</think><python_code>48/2</python_code>
                                    <tool_response>{"status": "ok", "text": "24.0\n"}</tool_response>
                                    <think>24 clips</think><answer>\boxed{...}</answer>

Calculations are GSM8K's calculator marks, and ```python blocks followed by an ```output block.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from alphaapollo.types import Message
from examples.data_preprocess.columns import Dropped, without_final_answer

CALCULATOR = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
BLOCK = re.compile(r"```python[^\n]*\n(.*?)```\s*```output[^\n]*\n(.*?)```", re.DOTALL)
TOOL_INSTRUCTION = r"""Reason step by step. Think inside <think>...</think>, then do exactly one thing:
run Python with <python_code>...</python_code>, whose result comes back in <tool_response>...</tool_response>,
or answer with <answer>\boxed{...}</answer>."""
CLOSE = 1e-6  # relative difference of a mark's result from Python's: marks are rounded to about 2 decimal places
ROUNDED = 0.01

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class ToolUse:
    """One call in a solution: the text before it, the code, and its output."""

    thought: str
    code: str
    output: str


def tool_uses(solution: str) -> tuple[list[ToolUse], str]:
    """Calls in a solution, and the text after the last one. Raises Dropped if a calculator mark is wrong."""
    pattern = BLOCK if BLOCK.search(solution) else CALCULATOR
    uses, end = [], 0
    for match in pattern.finditer(solution):
        thought, end = solution[end : match.start()].strip(), match.end()
        if pattern is BLOCK:
            uses.append(ToolUse(thought, match[1].strip("\n"), match[2]))
        else:
            uses.append(ToolUse(thought, match[1].strip(), f"{check_mark(match[1], match[2])!r}\n"))
    return uses, solution[end:].strip()


def tool_turns(solution: str, ground_truth: str) -> list[Message]:
    """Assistant turns and tool results (as user turns), ending with the boxed ground truth."""
    uses, rest = tool_uses(solution)
    turns: list[Message] = []
    for use in uses:
        code = f"\n{use.code}\n" if "\n" in use.code else use.code
        turns.append(_assistant(use.thought, f"<python_code>{code}</python_code>"))
        response = json.dumps({"status": "ok", "text": use.output}, ensure_ascii=False)
        turns.append({"role": "user", "content": f"<tool_response>{response}</tool_response>"})
    return [*turns, _assistant(without_final_answer(rest), rf"<answer>\boxed{{{ground_truth}}}</answer>")]


def plain_turns(solution: str, ground_truth: str) -> list[Message]:
    r"""One turn: the solution without calculator marks, ending with the boxed ground truth."""
    text = without_final_answer(CALCULATOR.sub("", solution)).strip()
    if "\\boxed" not in text:
        text = f"{text}\n\\boxed{{{ground_truth}}}" if text != ground_truth else f"\\boxed{{{ground_truth}}}"
    return [{"role": "assistant", "content": text}]


def check_mark(expression: str, result: str) -> float:
    """Python's result of a calculator mark. Raises Dropped if it is not arithmetic or the results differ."""
    try:
        value = compute(ast.parse(expression.strip(), mode="eval").body)
        claimed = float(result.replace(",", "").strip().rstrip("%"))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise Dropped("a calculator mark is no arithmetic that Python can do") from error
    if not math.isclose(value, claimed, rel_tol=CLOSE, abs_tol=ROUNDED):
        raise Dropped("a calculator mark has another result than Python")
    return value


def compute(node: ast.AST) -> float:
    """Value of an arithmetic expression. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in OPERATORS:
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        return OPERATORS[type(node.op)](*map(compute, parts))
    raise ValueError(ast.dump(node))


def _assistant(thought: str, action: str) -> Message:
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n{action}"}
