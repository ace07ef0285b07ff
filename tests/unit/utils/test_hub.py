from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.utils.hub import is_local_path


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("Qwen/Qwen3-0.6B", False),
        *((path, True) for path in ("outputs/modle", "modle", "./modle", "~/modle", "/modle", "a/b/modle")),
    ],
)
def test_what_looks_like_a_folder(path: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert is_local_path(path) is local
