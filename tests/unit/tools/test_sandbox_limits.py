"""Limits that the zygote enforces: files of a snippet, memory of suspended sessions, names of folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alphaapollo.tools.sandbox import Sandbox, zygote
from alphaapollo.tools.sandbox.zygote import has_more_files

MANY_FILES = """
import itertools, os
for folder in itertools.count():
    os.mkdir(str(folder), 0o300)
    for number in range(1000):
        open(f"{folder}/{number}", "w").close()
"""


def test_files_are_counted_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for number in range(5):
        (tmp_path / "a" / "b" / str(number)).touch()
    (tmp_path / "link").symlink_to("/usr")
    assert has_more_files(str(tmp_path), 7) and not has_more_files(str(tmp_path), 8)


def test_a_snippet_cannot_make_many_files() -> None:
    with Sandbox() as sandbox:
        result = sandbox.run(MANY_FILES, timeout=30)
        assert result.status == "error" and "10000 files" in result.reason, result
        assert sandbox.run("open('one', 'w').close()").status == "ok"


def test_folders_of_snippets_have_random_names() -> None:
    with Sandbox() as sandbox:
        names = [sandbox.run("import os; print(os.path.basename(os.getcwd()))").stdout.strip() for _ in range(2)]
    assert len({*names}) == 2 and all(len(name) == 32 for name in names)


@pytest.mark.skipif((os.cpu_count() or 1) > 4, reason="needs too much memory on a machine with more CPUs")
def test_suspended_sessions_share_a_limit_of_memory() -> None:
    count = zygote.SUSPENDED_BYTES // (400 << 20) + 2
    with Sandbox() as sandbox:
        for number in range(count):
            assert sandbox.run("x = bytearray(400 << 20)", session=f"s{number}").status == "ok"
        found = [sandbox.run("'x' in globals()", session=f"s{number}", echo=True) for number in reversed(range(count))]
    is_kept = [result.stdout == "True\n" for result in found]
    assert is_kept[:2] == [True, True] and not is_kept[-1], "the oldest sessions end first"
    assert [result.restarted for result in found] == [not kept for kept in is_kept]
