"""Upload an exported model to the Hugging Face hub, with the user's token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

REPO = re.compile(r"[\w.-]+/[\w.-]+")


def check_push_target(repo: str) -> None:
    """Raise ValueError if the hub repository `repo` is not OWNER/NAME, or if there is no Hugging Face token."""
    from huggingface_hub import get_token

    if not REPO.fullmatch(repo):
        raise ValueError(f"push_to={repo} is not OWNER/NAME. Set e.g. push_to=alice/qwen3-gsm8k.")
    if not get_token():
        raise ValueError(
            f"push_to={repo} needs a Hugging Face token with write permission. Log in (hf auth login), set HF_TOKEN, "
            "or remove push_to."
        )


def push_folder(folder: Path, repo: str) -> str:
    """Upload all files of a folder to the hub repository `repo` in one commit. A new repository is private. Returns the
    URL of the repository.

    Raises OSError if the hub rejects the upload or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    http_error = cast(type[Exception], HfHubHTTPError.__mro__[1])  # base error of the hub client's HTTP library
    try:
        address = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Model exported by alphaapollo")
    except (OSError, http_error) as error:
        raise OSError(f"{folder} is written, but could not be pushed to {repo}: {error}") from error
    return str(address)
