"""The tool local_rag in episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.environments.informal_math import make_tag_instruction
from alphaapollo.plugins.search.index import build_index
from tests.unit.environments.test_informal_math import play, python, response

ONLY_SEARCH = {"enable_python_code": False, "enable_local_rag": True}


@pytest.fixture
def index(tmp_path: Path) -> str:
    (tmp_path / "docs" / "notes").mkdir(parents=True)
    (tmp_path / "docs" / "notes" / "a.md").write_text("Bananas are yellow.")
    build_index(tmp_path / "docs", tmp_path / "index")
    return str(tmp_path / "index")


def test_example_call_is_valid(index: str) -> None:
    tools = python(informal_math=ONLY_SEARCH, tool_settings={"local_rag": {"index": index}})
    call = '<local_rag>{"repo_name": "notes", "query": "...", "top_k": 3}</local_rag>'
    assert call in make_tag_instruction(tools)
    _, (result,) = play(call.replace("...", "yellow"), tools=tools)
    assert response(result)["status"] == "ok"
