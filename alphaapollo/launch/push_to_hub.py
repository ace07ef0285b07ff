"""An exported folder to the Hugging Face hub, with the user's own token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

REPO = re.compile(r"[\w.-]+/[\w.-]+")


def check_push(repo: str) -> None:
    """ValueError: not OWNER/NAME, or nobody is logged in."""
    from huggingface_hub import get_token

    if not REPO.fullmatch(repo):
        raise ValueError(f"push_to={repo}: give OWNER/NAME, e.g. push_to=alice/qwen3-gsm8k.")
    if not get_token():
        raise ValueError(
            f"push_to={repo}: there is no token of yours for the hub. Log in (hf auth login), or set HF_TOKEN in the "
            "environment; it needs the right to write. Without push_to the folder is written here alone."
        )


def push(folder: Path, repo: str) -> str:
    """Upload every file in one commit; a new repository is private. Returns its address.

    OSError: the hub refused it, or could not be reached; the folder stands.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    no_answer = cast(type[Exception], HfHubHTTPError.__mro__[1])  # of the HTTP library that the hub's client uses
    try:
        address = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Model exported by alphaapollo")
    except (OSError, no_answer) as error:
        raise OSError(f"{folder} is written, but could not be pushed to {repo}: {error}") from error
    return str(address)
