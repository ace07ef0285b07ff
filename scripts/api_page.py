"""Print the page "Reference": the classes that rewards, environments, tools, estimators and losses receive and return.

Part of `make docs-site`. Fields, types and explanations come from the source code, and each section has an example from
examples/reference, which tests run.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from alphaapollo import types
from alphaapollo.algorithms.advantages import base as advantages
from alphaapollo.algorithms.policy_losses import base as policy_losses
from alphaapollo.environments import base as environments
from alphaapollo.tools import base as tools
from alphaapollo.tools import function_tool

ROOT = Path(__file__).resolve().parents[1]
INTRO = """# Reference of the Python interfaces

This page lists the classes that your own code receives and returns. Shapes are in brackets: B rows, L response tokens.
"""
SECTIONS: dict[str, tuple[str, str, list[type]]] = {  # title -> (example, page with the explanation, classes)
    "Reward functions": ("reward", "rewards.md", [types.Prompt, types.Episode, types.EpisodeTurn, types.Score]),
    "Environments": (
        "environment",
        "environments.md",
        [
            environments.Environment,
            environments.Services,
            environments.Observation,
            environments.StepResult,
            environments.FinalAnswer,
        ],
    ),
    "Tools": ("tool", "tools.md", [function_tool.FunctionTool, tools.ToolResult, tools.Session]),
    "Advantage estimators": (
        "estimator",
        "algorithms/custom.md",
        [advantages.AdvantageInputs, advantages.Turns, advantages.Advantages, advantages.Estimator],
    ),
    "Policy losses": (
        "policy_loss",
        "algorithms/custom.md",
        [policy_losses.PolicyLossInputs, policy_losses.PolicyLossOutput, policy_losses.PolicyLoss],
    ),
    "Trajectories": (
        "trajectory",
        "environments.md",
        [types.Trajectory, types.Turn, types.Completion, types.Row, types.Outcome, types.EpisodeEnd],
    ),
}


def render_page() -> str:
    parts = [INTRO]
    for title, (example, page, classes) in SECTIONS.items():
        code = (ROOT / "examples" / "reference" / f"{example}.py").read_text(encoding="utf-8")
        parts.append(f"\n## {title}\n\nExplained in [{page}]({page}). Example:\n\n```python\n{code}```\n")
        parts += [_render_class(one) for one in classes]
    return "".join(parts)


def _render_class(one: type) -> str:
    source = inspect.getsource(one)
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    rows = "".join(f"| {row} |\n" for row in _list_members(node, source.splitlines()))
    table = f"\n| member | type | meaning |\n|---|---|---|\n{rows}" if rows else ""
    return f"\n### {one.__name__}\n\n{inspect.getdoc(one)}\n{table}"


def _list_members(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Yield the table row of each public field, enum value and documented method."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = "" if statement.value is None else f" = {ast.unparse(statement.value)}"
            yield _render_row(
                statement.target.id, ast.unparse(statement.annotation) + default, text or _comment(statement, lines)
            )
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield _render_row(statement.targets[0].id, ast.unparse(statement.value), _comment(statement, lines))
        elif isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            kind = f" -> {ast.unparse(statement.returns)}" if statement.returns else ""
            text = " ".join((ast.get_docstring(statement) or "").split())
            yield _render_row(statement.name, f"({ast.unparse(statement.args)}){kind}", text)


def _comment(statement: ast.stmt, lines: list[str]) -> str:
    """Return the comment at the end of a statement's last line; empty if there is none."""
    return lines[(statement.end_lineno or 1) - 1].partition("  # ")[2]


def _render_row(name: str, kind: str, meaning: str) -> str:
    kind = kind.replace("field(default_factory=dict)", "{}").replace("field(default_factory=list)", "[]")
    cells = (f"`{name}`", f"`{kind}`", meaning.replace("<", "&lt;"))
    return " | ".join(cell.replace("|", "\\|") for cell in cells)


if __name__ == "__main__":
    print(render_page())
