"""Create a sandbox by the name of its backend."""

from __future__ import annotations

from alphaapollo.plugins.tasks.sandboxes.base import Sandbox, SandboxSpec
from alphaapollo.utils.plugins import find_plugins, load_plugin
from alphaapollo.utils.registry import suggest_similar

BUILT_IN = ("rootless", "bubblewrap", "docker", "podman")


def check_backend(backend: str) -> None:
    """Raise ValueError for an unknown sandbox."""
    known = [*BUILT_IN, *find_plugins("sandboxes", BUILT_IN)]
    if backend not in known:
        hint = suggest_similar(backend, known)
        raise ValueError(f"the sandbox {backend!r} is unknown.{hint} Use one of {', '.join(known)}.")


def make_sandbox(backend: str, spec: SandboxSpec) -> Sandbox:
    """Create a sandbox of a backend: a built-in one, or that of an installed package (entry point
    `alphaapollo.sandboxes`, docs/plugins.md). Raises ValueError for an unknown one."""
    check_backend(backend)
    if backend in ("rootless", "bubblewrap"):
        from alphaapollo.plugins.tasks.sandboxes.rootless import NamespaceSandbox

        return NamespaceSandbox(spec, backend)
    if backend in ("docker", "podman"):
        from alphaapollo.plugins.tasks.sandboxes.containers import ContainerSandbox

        return ContainerSandbox(spec, backend)
    sandbox: Sandbox = load_plugin("sandboxes", backend)(spec)
    return sandbox
