"""Retired words (CONTRIBUTING.md, "Language"): code, docs and configs use the field's own terms."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("retired_words.txt")
CHECKED = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".ipynb", ""}
NOT_CHECKED = {
    "tests/unit/retired_words.txt",
    "tests/unit/test_language.py",
    "CONTRIBUTING.md",  # shows the words beside their replacements
    "LICENSE",
}


def retired_words() -> dict[str, str]:
    """{regular expression: what to write instead}"""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {word.strip(): instead.strip() for word, instead in (line.split(" | ") for line in lines)}


def findings(text: str, words: dict[str, str]) -> list[tuple[int, str, str]]:
    """(line, words found, what to write instead) of a text."""
    pattern = re.compile(r"\b(?:" + "|".join(f"({word})" for word in words) + r")\b", re.IGNORECASE)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for match in pattern.finditer(line):
            assert match.lastindex
            found.append((number, match.group(), list(words.values())[match.lastindex - 1]))
    return found


def checked_files() -> list[Path]:
    """Files that git tracks or would track; all text files where this is not a git checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.*")]
    paths = [ROOT / name for name in names if name not in NOT_CHECKED]
    return [path for path in paths if path.suffix in CHECKED and path.is_file()]


def test_no_retired_words() -> None:
    words = {re.sub(r"\((?!\?)", "(?:", word): instead for word, instead in retired_words().items()}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}; write: {instead}"
        for path in checked_files()
        for line, word, instead in findings(path.read_text(encoding="utf-8"), words)
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_check_can_fail() -> None:
    found = findings("fine\nIt is Mended anew", {"mended": "fixed", "anew": "again"})
    assert found == [(2, "Mended", "fixed"), (2, "anew", "again")]
