"""The examples in docs/tools.md and docs/tools.md work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphaapollo.config.build import build_config
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.tools.base import ToolStatus, make_tools
from alphaapollo.tools.sandbox import SandboxStatus
from alphaapollo.tools.sandbox.processes import LAYERS
from alphaapollo.tools.toolbox import ToolBox
from tests.unit.tools.attacks import ATTACKS

DOCS = Path(__file__).resolve().parents[3] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_code_blocks_run(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    for page in ("tools.md",):
        code = blocks(page, "python")
        assert code
        program = tmp_path / f"{page}.py"  # a file: annotations are looked up in its module
        program.write_text("\n".join(code))
        exec(compile(program.read_text(), str(program), "exec"), {"__name__": page})
    (made,) = make_tools(["convert"], {})
    (shown,) = blocks("tools.md", "json")
    schema: dict[str, Any] = json.loads(shown)
    assert ToolBox([made], ToolLimits()).schemas()[0]["function"] == schema
    assert len([line for line in blocks("tools.md", "python")[0].splitlines() if line.strip()]) <= 11


def test_yaml_block_is_valid() -> None:
    (shown,) = blocks("tools.md", "yaml")
    servers = build_config(Config, yaml.safe_load(shown)).env.mcp_servers
    assert servers["files"].tools == ["read", "list"] and servers["search"].url


def test_pages_list_every_status_and_layer() -> None:
    tools = (DOCS / "tools.md").read_text(encoding="utf-8")
    assert all(f"| `{status}` |" in tools for status in [*ToolStatus, "failed"])
    page = (DOCS / "tools.md").read_text(encoding="utf-8")
    for status in SandboxStatus:
        assert f"| `{status}` |" in page
    for layer in ("prefork", *LAYERS):
        assert f"| `{layer}` |" in page
    for attack in ATTACKS.values():
        assert not attack.layer or f"| {attack.layer} |" in page
