from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from alphaapollo.launch.export_checkpoint import check_push_target, push_folder


class FakeApi:
    """Fake hub client that records its calls."""

    calls: list[tuple[str, dict[str, Any]]]
    error: Exception | None = None

    def create_repo(self, repo: str, **named: Any) -> str:
        type(self).calls.append(("create", {"repo": repo} | named))
        if self.error:
            raise self.error
        return f"https://hub/{repo}"

    def upload_folder(self, **named: Any) -> None:
        type(self).calls.append(("upload", named))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    FakeApi.calls, FakeApi.error = [], None
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return FakeApi


def test_a_folder_goes_up_in_one_commit_to_a_private_repository(api: type[FakeApi], tmp_path: Path) -> None:
    assert push_folder(tmp_path, "alice/model") == "https://hub/alice/model"
    (created, first), (uploaded, second) = api.calls
    assert (created, first) == ("create", {"repo": "alice/model", "private": True, "exist_ok": True})
    assert (uploaded, second["repo_id"], second["folder_path"]) == ("upload", "alice/model", tmp_path)


def test_a_hub_that_refuses_leaves_the_folder(api: type[FakeApi], tmp_path: Path) -> None:
    no_answer = huggingface_hub.errors.HfHubHTTPError.__mro__[1]
    for error in (OSError("403 Forbidden"), no_answer("no answer")):
        api.error = error
        with pytest.raises(OSError, match="could not be pushed to alice/model"):
            push_folder(tmp_path, "alice/model")


def test_without_a_token_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"token .*hf auth login"):
        check_push_target("alice/model")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    check_push_target("alice/model")
    with pytest.raises(ValueError, match="is not OWNER/NAME"):
        check_push_target("https://hub/alice/model")
