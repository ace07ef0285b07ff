"""A tool of an MCP server in a run."""

from __future__ import annotations

import json
import sys

from tests.loop.conftest import ROOT
from tests.loop.stack import StackRunner
from tests.loop.test_environments import MATHS, NATIVE_TOOLS, check_native_tools, prepare_native_tools

SERVER = ROOT / "tests/plugins/mcp/mcp_server.py"


def test_a_tool_of_a_program(stack: StackRunner) -> None:
    prepare_native_tools(stack.out)
    servers = f"env.mcp_servers={{small: {{command: {json.dumps([sys.executable, str(SERVER)])}, tools: [count]}}}}"
    filled = [word.replace("FOLDER", str(stack.out)) for word in (*MATHS, *NATIVE_TOOLS)]
    check_native_tools(stack.run(*filled, servers, name="tools"), ["count"])
