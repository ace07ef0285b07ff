from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from alphaapollo.launch.export_checkpoint import push_folder


class FakeApi:
    """Fake hub client that records its calls."""

    calls: list[tuple[str, dict[str, Any]]]

    def create_repo(self, repo: str, **named: Any) -> str:
        type(self).calls.append(("create", {"repo": repo} | named))
        return f"https://hub/{repo}"

    def upload_folder(self, **named: Any) -> None:
        type(self).calls.append(("upload", named))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    FakeApi.calls = []
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return FakeApi


def test_a_folder_goes_up_in_one_commit_to_a_private_repository(api: type[FakeApi], tmp_path: Path) -> None:
    assert push_folder(tmp_path, "alice/model") == "https://hub/alice/model"
    (created, first), (uploaded, second) = api.calls
    assert (created, first) == ("create", {"repo": "alice/model", "private": True, "exist_ok": True})
    assert (uploaded, second["repo_id"], second["folder_path"]) == ("upload", "alice/model", tmp_path)
