"""`env.harbor`: the sandboxes of tasks."""

from typing import Annotated

from pydantic import PositiveInt

from alphaapollo.config.schema.base import NAMES_CODE, FilePath, Section


class Harbor(Section):
    backend: str = "rootless"
    """Sandbox of a task: rootless, bubblewrap, docker, podman, or that of an installed package."""
    rootfs: Annotated[str, FilePath("folder"), NAMES_CODE] = ""
    """Folder of an unpacked image, whose programs replace this machine's; rootless and bubblewrap."""
    max_sandboxes: PositiveInt = 64
    """Concurrent sandboxes per rollout worker; further episodes wait."""
