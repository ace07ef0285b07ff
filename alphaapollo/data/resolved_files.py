"""Find the files of an entry of data.train_files: a file, a glob, a folder, or an id on the Hugging Face hub.

The library datasets finds the splits of folders, reads data sets that `save_to_disk` wrote, and downloads from the hub.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from alphaapollo.utils.hub import DATA_FILE, DatasetEntry

T = TypeVar("T")
TRAIN = ("train",)
HELD_OUT = ("validation", "val", "valid", "dev", "test")


@dataclass(frozen=True)
class ResolvedFiles:
    """Files of one entry of data.train_files. The same content in the same order is the same data."""

    entry: str  # with the split that is read, e.g. `openai/gsm8k:main#train`
    files: tuple[Path, ...]  # local files in the order of their rows; for a data set on the hub, those of the cache
    dataset: Any = None  # datasets.Dataset that reads the files; None: data/files.py reads one after the other
    hub_id: str = ""  # OWNER/NAME, for a data set on the hub
    commit: str = ""  # commit of the data set on the hub
    notices: tuple[str, ...] = ()  # messages for the user

    @property
    def folder(self) -> Path:
        """Folder to which paths in the rows are relative."""
        return Path(os.path.commonpath([file.parent.absolute() for file in self.files] or [Path.cwd()]))


def resolve_files(files: str | Sequence[str], splits: Sequence[str] = TRAIN) -> list[ResolvedFiles]:
    """Resolve each entry of a key such as data.train_files (see resolve_entry)."""
    return [resolve_entry(entry, splits) for entry in ([files] if isinstance(files, str) else files)]


def name_splits(files: str | list[str], splits: Sequence[str], notices: list[str]) -> list[str]:
    """Return the entries with the splits that they mean (see resolve_entry). Adds messages to `notices`."""
    resolved = resolve_files(files, splits)
    notices += [notice for one in resolved for notice in one.notices]
    return [one.entry for one in resolved]


def resolve_entry(text: str, splits: Sequence[str] = TRAIN) -> ResolvedFiles:
    """Find the files of `PATH_OR_ID[:config][@revision][#split]`. A path that exists is never read as a hub id.

    splits: splits that an entry without `#split` means if there are several, best first. Raises ValueError if there is
    no such file, config or split, the split is not unique, or the hub cannot be used.
    """
    path, entry = Path(text).expanduser(), DatasetEntry.parse(text)
    if path.is_file() and DATA_FILE.search(path.name):
        return ResolvedFiles(text, (path,))
    if path.is_file():
        formats = "parquet, arrow, jsonl, json, csv or tsv, the last four also with .gz, .bz2, .zst or .lz4"
        raise ValueError(f"{text} is a file with the suffix {path.suffix!r}. Use a file of {formats}.")
    if not path.is_dir() and (matches := sorted(glob.glob(str(path), recursive=True))):
        return ResolvedFiles(text, tuple(file for one in matches for file in resolve_entry(one, splits).files))
    folder = Path(entry.path).expanduser()
    results = folder / "results.jsonl"
    if results.is_file() and (folder / "config.yaml").is_file():  # run of main_generation
        return ResolvedFiles(text, (results,))
    if folder.is_dir() and not entry.revision:
        return _resolve_folder(folder.absolute(), entry, splits)
    if entry.is_hub_id:
        return _resolve_hub_id(entry, tuple(splits))
    raise ValueError(f"{text}: no such file (working folder: {Path.cwd()}). Correct the path.")


def _resolve_folder(folder: Path, entry: DatasetEntry, splits: Sequence[str]) -> ResolvedFiles:
    import datasets

    name = entry.without_split
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
        return _choose_dataset(_call_library(name, datasets.load_from_disk, str(folder)), entry, splits)
    builder = _call_library(name, datasets.load_dataset_builder, str(folder), entry.config)
    found = {str(split): tuple(map(Path, files)) for split, files in builder.config.data_files.items()}
    files = found[split := _choose_split(found, entry, splits)]
    if not all(DATA_FILE.search(file.name) for file in files):
        loaded = _call_library(name, datasets.load_dataset, str(folder), entry.config)
        return replace(_choose_dataset(loaded, replace(entry, split=split), splits), files=files)
    known = {file for some in found.values() for file in some}
    unread = [file.name for file in sorted(folder.rglob("*")) if DATA_FILE.search(file.name) and file not in known]
    notice = f"{name}: files that belong to no split are not read: {', '.join(unread[:3])}."
    return ResolvedFiles(f"{name}#{split}", files, notices=(notice,) if unread and not entry.config else ())


@cache  # several readers ask for the same entry
def _resolve_hub_id(entry: DatasetEntry, splits: tuple[str, ...]) -> ResolvedFiles:
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = entry.without_split
    try:
        loaded = _call_library(name, datasets.load_dataset, entry.path, entry.config, revision=entry.revision)
    except ConnectionError as error:
        try:  # the cache of `hf download`
            kept = snapshot_download(entry.path, repo_type="dataset", revision=entry.revision, local_files_only=True)
        except LocalEntryNotFoundError:
            raise ValueError(
                f"{name} is neither a local path nor in the cache, and the hub cannot be reached ({error}). Correct "
                "the path, or load the data set once with access to the hub."
            ) from error
        return replace(_resolve_folder(Path(kept), entry, splits), hub_id=entry.path, commit=Path(kept).name)
    found = _choose_dataset(loaded, entry, splits)
    commit = found.files[0].parent.name if found.files else ""
    if entry.revision and datasets.config.HF_HUB_OFFLINE and not commit.startswith(entry.revision):
        raise ValueError(f"{name}: HF_HUB_OFFLINE is set, and the cache has the commit {commit}. Use this revision.")
    return replace(found, hub_id=entry.path, commit=commit)


def _choose_dataset(loaded: Any, entry: DatasetEntry, splits: Sequence[str]) -> ResolvedFiles:
    """Choose a split of a datasets.DatasetDict, or return the only split, a datasets.Dataset."""
    if not isinstance(loaded, dict):
        loaded = {str(loaded.split or entry.split or splits[0]): loaded}
    split = _choose_split(loaded, entry, splits)
    files = tuple(Path(file["filename"]) for file in loaded[split].cache_files)
    return ResolvedFiles(f"{entry.without_split}#{split}", files, loaded[split])


def _choose_split(known: dict[str, Any], entry: DatasetEntry, splits: Sequence[str]) -> str:
    wanted = [entry.split] if entry.split else [*known] if len(known) == 1 else splits
    if found := next((split for split in wanted if split in known), None):
        return found
    listed = ", ".join(f"{entry.without_split}#{split}" for split in known)
    raise ValueError(f"{entry.without_split}: no split {' or '.join(wanted)}. Use one of {listed}.")


def _call_library(name: str, function: Callable[..., T], *arguments: object, **options: object) -> T:
    """Call the library datasets. Raises ConnectionError if the hub cannot be reached, ValueError for other errors."""
    try:
        return function(*arguments, **options)
    except ConnectionError:
        raise
    except Exception as error:  # any error of the hub, or of the files that the library reads
        login = type(error).__name__ == "DatasetNotFoundError"
        hint = " Correct the id; for a private or gated data set, log in with `hf auth login`." if login else ""
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the library datasets cannot read it ({reason}).{hint}") from error
