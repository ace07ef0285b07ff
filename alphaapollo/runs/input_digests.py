"""Digests of the content of a run's inputs: data files, the user's Python files, and files of models and tokenizers.

A checkpoint has them in inputs.json, so that a resumed run notices what has changed under the same path. plan.json has
the digests of the newest start, for the report and the viewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.machinery import PathFinder
from modulefinder import Module, ModuleFinder
from pathlib import Path
from typing import Any

from alphaapollo.config.changes import ConfigChange, find_resume_rule
from alphaapollo.config.keys import get_field_markers, get_value, list_keys
from alphaapollo.config.schema.base import CHANGES_DATA, FilePath, Section
from alphaapollo.data.files import HELD_OUT, TRAIN, resolve_entry
from alphaapollo.utils.hub import MODEL_TEXTS, is_local_path
from alphaapollo.utils.user_module import find_module_file

Digests = dict[str, list[tuple[str, str]]]
"""Configuration key -> (path, digest) of each file, in order."""
TRAIN_FILES = "data.train_files"
WEIGHTS = (".safetensors", ".bin", ".pt")
MODEL_FILES = (*WEIGHTS, *MODEL_TEXTS)
PACKAGE = 5  # ModuleFinder's code for a package
MAX_HASHED_BYTES, NUM_BLOCKS, BLOCK_BYTES = 2**26, 256, 2**14  # for files with weights


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a run at its newest start, in inputs.json of a checkpoint."""

    digests: Digests = field(default_factory=dict)
    data_start: int = 0  # position of the run at which the order of the present training data begins
    weights_are_shares: bool = False  # False: an earlier version wrote it, with data.source_weights as passes per epoch


def compute_input_digests(config: Section) -> Digests:
    """Compute the digests of the files that configuration keys name, except those that cannot be read."""
    digests: Digests = {}
    for key in list_keys(type(config)).values():
        kinds = {marker.kind for _, marker in get_field_markers(key, FilePath)}
        value = get_value(config, key.name) if kinds and not key.name.startswith("trainer.") else ""
        if key.name == "models":  # a map of models: {name: section}
            kinds, value = {"model"}, [model.path for model in vars(config)["models"].values() if model.path]
        paths = value if isinstance(value, list) else [str(value)] if value else []
        for path in paths:
            files = digests.setdefault(key.name, [])
            with suppress(OSError, ValueError):
                if "data" in kinds:
                    entry = resolve_entry(path, TRAIN if key.name == TRAIN_FILES else HELD_OUT)
                    files += [(str(file), digest_file(file)) for file in entry.files]
                    files += [(entry.entry, entry.part)] if entry.part else []
                elif "code" in kinds:
                    files += [(str(file), digest_file(file)) for file in _list_code_files(path)]
                elif not is_local_path(path):
                    files.append((path, _find_commit(path)))
                else:
                    model_files = filter(Path.is_file, sorted(Path(path).expanduser().iterdir()))
                    files += [(str(file), digest_file(file)) for file in model_files if file.suffix in MODEL_FILES]
    return {key: files for key, files in digests.items() if files}


def find_content_changes(
    config: Section, changes: Sequence[ConfigChange], earlier: Digests, now: Digests
) -> list[ConfigChange]:
    """Add changes of file contents to the changes of keys. The change of a path with equal content becomes `ignored`.

    Other training data is refused; other changes of content are applied.
    """
    common = earlier.keys() & now.keys()
    unchanged = {key for key in common if [digest for _, digest in earlier[key]] == [digest for _, digest in now[key]]}
    content_changes = [replace(change, verdict="ignored") if change.key in unchanged else change for change in changes]
    keys = list_keys(type(config))
    for name in sorted((common & keys.keys()) - unchanged - {change.key for change in changes}):
        rule = find_resume_rule(config, keys[name])
        old, new = _describe_difference(earlier[name], now[name]), _describe_difference(now[name], earlier[name])
        content_changes.append(
            ConfigChange(name, old, new, "refused" if rule == CHANGES_DATA else "applied", rule.reason)
        )
    return content_changes


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file; for more than 64 MiB of weights, the SHA-256 of their size and of 256 blocks.
    A file that has not changed is not read again."""
    stat = path.stat()
    return _digest_file(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(4096)
def _digest_file(path: Path, size: int, _mtime: int) -> str:
    with path.open("rb") as file:
        if size <= MAX_HASHED_BYTES or path.suffix not in WEIGHTS:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha = hashlib.sha256(str(size).encode())
        for number in range(NUM_BLOCKS):  # the first one has the header of a safetensors file
            file.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
            sha.update(file.read(BLOCK_BYTES))
        return sha.hexdigest()


def _find_commit(hub_id: str) -> str:
    """Return the commit of a model on the hub. Raises OSError if its config.json is neither cached nor available."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(hub_id, "config.json")).parent.name


class _Finder(ModuleFinder):
    """ModuleFinder that also reads folders without __init__.py, on which the base class fails with AttributeError."""

    def find_module(self, name: str, path: Any, parent: Module | None = None) -> Any:
        spec = PathFinder.find_spec(name, path or self.path)
        if spec and spec.submodule_search_locations and not spec.origin:
            return None, spec.submodule_search_locations[0], ("", "", PACKAGE)
        return super().find_module(name, path, parent)

    def load_package(self, fqname: str, pathname: str) -> Module:
        if (Path(pathname) / "__init__.py").is_file():
            return super().load_package(fqname, pathname)
        module = self.add_module(fqname)
        vars(module)["__path__"] = [pathname]
        return module


def _list_code_files(name: str) -> list[Path]:
    """Return a Python file and the files of its folder that it imports, directly or indirectly; of a module in a
    package, the files of this package's folder."""
    if (path := find_module_file(name)) and (path.parent / "__init__.py").is_file():
        return [path, *sorted({*path.parent.glob("*.py")} - {path})]
    path = path or Path(name).expanduser()
    finder = _Finder([str(path.parent)], excludes=["alphaapollo"])
    with suppress(SyntaxError, ValueError, ImportError, RecursionError):
        finder.run_script(str(path))
    module_files = (getattr(module, "__file__", None) for module in finder.modules.values())  # None: built into Python
    return [path, *sorted({Path(file) for file in module_files if file} - {path})]


def _describe_difference(files: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> str:
    """Return the files of the first list whose digests the second list lacks."""
    digests = {digest for _, digest in others}
    missing = [f"{path} ({digest[:8]})" for path, digest in files if digest not in digests]
    return ", ".join(missing) or f"{len(files)} files"
