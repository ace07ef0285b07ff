"""The examples in docs/tools.md work, and its tables are complete."""

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

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_code_blocks_run(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    program = tmp_path / "page.py"  # a file: annotations are looked up in its module
    program.write_text("\n".join(blocks("python")))
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "page"})
    (made,) = make_tools(["convert"], {})
    (shown,) = blocks("json")
    schema: dict[str, Any] = json.loads(shown)
    assert ToolBox([made], ToolLimits()).schemas()[0]["function"] == schema
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 11


def test_yaml_block_is_valid() -> None:
    (shown,) = blocks("yaml")
    servers = build_config(Config, yaml.safe_load(shown)).env.mcp_servers
    assert servers["files"].tools == ["read", "list"] and servers["search"].url


def test_the_page_lists_every_status_and_layer() -> None:
    listed = [f"`{name}`" for name in (*ToolStatus, "failed", *SandboxStatus, "prefork", *LAYERS)]
    listed += [attack.layer for attack in ATTACKS.values() if attack.layer]  # in the table of missing layers
    assert [name for name in listed if f"| {name} |" not in PAGE] == []
