"""main_sft that waits until the file HELD_UNTIL exists: before optimizer step HELD_STEP, or before its ranks write the
checkpoint HELD_WRITE."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.controller.handles import FinetuningGroup
from alphaapollo.models import checkpoint
from alphaapollo.trainer import main_sft

released = Path(os.environ.get("HELD_UNTIL", "")).exists


def hold_step(number: int) -> None:
    step, calls = FinetuningGroup.step, [0]

    async def held(self: FinetuningGroup[Any], *arguments: Any) -> Any:
        calls[0] += 1
        while calls[0] == number and not released():
            await asyncio.sleep(0.01)
        return await step(self, *arguments)

    FinetuningGroup.step = held  # type: ignore[method-assign]


def hold_write(path: str) -> None:
    write = checkpoint.write_snapshot

    def held(part: Any, group: Any) -> None:
        while path in part.folder and not released():
            time.sleep(0.01)
        write(part, group)

    checkpoint.write_snapshot = held


def main(argv: Sequence[str] | None = None) -> int:
    if "HELD_STEP" in os.environ:
        hold_step(int(os.environ["HELD_STEP"]))
    if "HELD_WRITE" in os.environ:
        hold_write(os.environ["HELD_WRITE"])
    return main_sft.main(argv)


if __name__ == "__main__":
    sys.exit(main())
