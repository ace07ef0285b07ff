"""Type of parsed JSON. This module is imported everywhere, so it imports nothing large."""

from typing import Any

JsonObject = dict[str, Any]
"""Parsed JSON object, or a value like it: YAML, a tool schema, the arguments of a tool call."""
