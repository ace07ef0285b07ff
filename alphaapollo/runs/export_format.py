"""File formats of exported models, which plug-ins and packages add to the group export_formats (docs/plugins.md)."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ExportFormat:
    """Format NAME of `alphaapollo export RUN [OUT] --NAME [TYPE]`: one file *.NAME with a policy, merged."""

    types: tuple[str, ...]  # types of the weights in a file; the first type is the default
    help: str  # help text of the option --NAME
    check: str  # module:function(None or the PretrainedConfig of a model), raises ValueError if unsupported
    write: str  # module:function, called with model folder, file, type, run's name and base model's hub id or ""

    def load(self) -> tuple[Callable[..., None], Callable[..., str]]:
        """Import the functions `check` and `write`. `write` returns a sentence about what it verified."""
        return pkgutil.resolve_name(self.check), pkgutil.resolve_name(self.write)
