"""What uses the core and can be deleted without a trace: a folder per plug-in (plugins.toml, docs/plugins.md)."""
