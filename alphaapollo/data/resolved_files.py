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
    part: str = ""  # rows of a split that are read, e.g. `train[:10%]`; empty: all
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
    if not path.is_dir() and (matches := _expand_glob(str(path))):
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


@cache
def _expand_glob(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))


@cache
def _list_folder(folder: str, config: str | None) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split of a folder."""
    import datasets

    found = datasets.load_dataset_builder(folder, config).config.data_files.items()
    return {str(split): tuple(map(Path, files)) for split, files in found}


def forget_files() -> None:
    """Forget which files folders and globs have. The next run finds them again."""
    _expand_glob.cache_clear()
    _list_folder.cache_clear()


def _resolve_folder(folder: Path, entry: DatasetEntry, splits: Sequence[str]) -> ResolvedFiles:
    import datasets

    name = entry.without_split
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
        return _choose_dataset(_call_library(name, datasets.load_from_disk, str(folder)), entry, splits)
    found = _call_library(name, _list_folder, str(folder), entry.config)
    split, is_part = _choose_split(found, entry, splits)
    files = tuple(file for one, files in found.items() if one == split or is_part for file in files)
    if is_part or not all(DATA_FILE.search(file.name) for file in files):
        loaded = _call_library(name, datasets.load_dataset, str(folder), entry.config)
        return replace(_choose_dataset(loaded, replace(entry, split=split), splits), files=files)
    known = {file for some in found.values() for file in some}
    unread = [file.name for file in sorted(folder.rglob("*")) if DATA_FILE.search(file.name) and file not in known]
    notice = f"{name}: files that belong to no split are not read: {', '.join(unread[:3])}."
    return ResolvedFiles(f"{name}#{split}", files, notices=(notice,) if unread and not entry.config else ())


@cache  # several readers ask for the same entry
def _resolve_hub_id(entry: DatasetEntry, splits: tuple[str, ...]) -> ResolvedFiles:
    import datasets

    name = entry.without_split
    try:
        loaded = _call_library(name, datasets.load_dataset, entry.path, entry.config, revision=entry.revision)
    except ConnectionError as error:
        raise ValueError(
            f"{name} is neither a local path nor in the cache, and the hub cannot be reached ({error}). Correct the "
            "path, load the data set once with access to the hub, or use the folder that `hf download` prints."
        ) from error
    found = _choose_dataset(loaded, entry, splits)
    commit = found.files[0].parent.name if found.files else ""
    if entry.revision and datasets.config.HF_HUB_OFFLINE and not commit.startswith(entry.revision):
        raise ValueError(f"{name}: HF_HUB_OFFLINE is set, and the cache has the commit {commit}. Use this revision.")
    return replace(found, hub_id=entry.path, commit=commit)


def _choose_dataset(loaded: Any, entry: DatasetEntry, splits: Sequence[str]) -> ResolvedFiles:
    """Choose a split of a datasets.DatasetDict, or return the only split, a datasets.Dataset."""
    if not isinstance(loaded, dict):
        loaded = {str(loaded.split or entry.split or splits[0]): loaded}
    split, is_part = _choose_split(loaded, entry, splits)
    dataset = _call_library(entry.without_split, _select_part, loaded, split) if is_part else loaded[split]
    files = tuple(Path(file["filename"]) for file in dataset.cache_files)
    return ResolvedFiles(f"{entry.without_split}#{split}", files, dataset, part=split if is_part else "")


def _select_part(loaded: dict[str, Any], part: str) -> Any:
    """Return the rows of a part such as `train[:10%]` or `train[:100]+test`, as the library datasets reads it."""
    import datasets
    from datasets.arrow_reader import ReadInstruction

    sizes = {split: len(dataset) for split, dataset in loaded.items()}
    chosen = ReadInstruction.from_spec(part).to_absolute(sizes)
    return datasets.concatenate_datasets([loaded[one.splitname].select(range(one.from_, one.to)) for one in chosen])


def _choose_split(known: dict[str, Any], entry: DatasetEntry, splits: Sequence[str]) -> tuple[str, bool]:
    """Return the split of an entry, and whether it is a part of one or several splits, e.g. `train[:10%]`."""
    wanted = [entry.split] if entry.split else [*known] if len(known) == 1 else splits
    if found := next((split for split in wanted if split in known), None):
        return found, False
    if entry.split and ("[" in entry.split or "+" in entry.split):
        return entry.split, True
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
