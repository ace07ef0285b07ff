"""Run the scripts of examples/data_preprocess in this process."""

from __future__ import annotations

import importlib
import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.builders import write_rows

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data"

GOOD = {"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}
DIRTY = [  # two good rows among them
    {"question": "no answer"},
    {},
    {"question": 5, "answer": None},
    {"question": {"a": 1}, "answer": "1"},
    {"question": "", "answer": "1"},
    {"question": "half \ud83d", "answer": "1"},
    {"question": "数学 🙂?", "answer": 3},
    {"question": "x" * 2_000_000, "answer": "y" * 2_000_000},
]
REASONS = {"no answer": 2, "no question": 1, "not text": 1, "is empty": 1, "not valid Unicode": 1}  # to drop DIRTY rows


def run(name: str, tmp_path: Path, source: str | Path | list[Any] | None, *args: object) -> SimpleNamespace:
    """Exit code and output of a script. Rows as `source` are written to x.jsonl."""
    module = importlib.import_module(f"examples.data_preprocess.{name}")
    words = ["--local_dir", tmp_path / "out", *args]
    if source is not None:
        words += ["--data_source", write_rows(tmp_path / "x.jsonl", source) if isinstance(source, list) else source]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [name, *map(str, words)])
        try:
            module.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            err.write(end.code if isinstance(end.code, str) else "")
    return SimpleNamespace(code=code, stdout=out.getvalue(), stderr=err.getvalue())


def made(name: str, tmp_path: Path, source: str | Path | list[Any] | None, *args: object, split: str = "train") -> Any:
    """Rows that a script writes, and its output."""
    done = run(name, tmp_path, source, *args)
    assert done.code == 0, done.stderr
    assert "A sample row" in done.stdout
    return pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist(), done.stdout


def refused(name: str, tmp_path: Path, source: str | Path | list[Any] | None, *args: object) -> str:
    """Error of a script, which is one line and leaves no files."""
    done = run(name, tmp_path, source, *args)
    assert done.code == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    return done.stderr


def check_counts(said: str, kept: int, reasons: dict[str, int]) -> None:
    """Check how many rows a script kept, and how many it dropped for reasons with these words."""
    found = {reason: int(count) for count, reason in re.findall(r"^  (\d+) dropped: (.*)", said, re.MULTILINE)}
    for words, count in reasons.items():
        assert [number for reason, number in found.items() if words in reason] == [count], (words, found)
    assert sum(reasons.values()) == sum(found.values()), found
    assert f"{kept} rows kept, {sum(found.values())} dropped" in said
