"""The export format `gguf`. This module imports no large packages."""

from __future__ import annotations

from alphaapollo.runs.export_format import ExportFormat

FORMAT = ExportFormat(
    ("q8_0", "f16", "bf16", "f32"),
    "write a GGUF file with weights of this type (default q8_0), also of a model's folder",
    "alphaapollo.plugins.gguf.export:check_can_export",
    "alphaapollo.plugins.gguf.export:export_gguf",
)
