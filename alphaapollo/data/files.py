"""Read the rows of an entry of data.train_files: a file, a glob, a folder, or a data set on the Hugging Face hub.

Formats: parquet, arrow (of the library datasets), jsonl, json, csv and tsv, the text formats also compressed, and
folders that a plug-in reads (FolderReader). The library datasets finds the splits of other folders, reads data sets
that `save_to_disk` wrote, and downloads from the hub.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from alphaapollo.data.tables import check_arrow_files, check_memory, read_arrow, read_csv, read_parquet
from alphaapollo.utils.disk import find_special_file, parse_yaml, read_small_file, read_yaml
from alphaapollo.utils.hub import DATA_FILE, DatasetEntry
from alphaapollo.utils.plugins import find_plugins, load_plugin
from alphaapollo.utils.text import show_first

T = TypeVar("T")
Dataset = Any  # of the library datasets
DataRow = dict[str, Any]  # column -> plain Python value: nested parquet columns come as dicts and lists
TRAIN = ("train",)
HELD_OUT = ("validation", "val", "valid", "dev", "test")  # names of splits, best first
MAX_RATIO, MAX_EXPANDED = 100, 1 << 30  # a compressed file may expand 100 times or, if this is more, to a GiB
SUFFIXES = (".parquet", ".jsonl", ".json")  # of files that examples/data_preprocess reads
SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")  # a byte that is not UTF-8 is decoded to a surrogate
SEPARATORS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class ResolvedFiles:
    """Files of one entry of data.train_files. Entries with the same file contents in the same order are equal data."""

    entry: str  # with the split that is read, e.g. `openai/gsm8k:main#train`
    files: tuple[Path, ...]  # local files in the order of their rows; for a data set on the hub: in the hub's cache
    dataset: Dataset = None  # that reads the files; None: they are read one after the other
    hub_id: str = ""  # OWNER/NAME, for a data set on the hub
    part: str = ""  # rows of a split that are read, e.g. `train[:10%]`; empty: all
    notices: tuple[str, ...] = ()  # messages for the user
    reader: str = ""  # name of the FolderReader of `entries`
    entries: tuple[Path, ...] = ()  # folders, each of which is a row; `files` are the files in them

    @property
    def folder(self) -> Path:
        """Folder to which paths in the rows are relative."""
        return Path(os.path.commonpath([file.parent.absolute() for file in self.files] or [Path.cwd()]))


@dataclass(frozen=True)
class FolderReader:
    """Reader of one kind of data folders, e.g. of tasks, in the group `data_folders` of plug-ins (docs/plugins.md)."""

    find_entries: Callable[[Path], Sequence[Path]]  # folders that are rows: the given folder, or folders below it
    list_files: Callable[[Path], Sequence[Path]]  # files of an entry, which identify its content
    read_rows: Callable[[Sequence[Path]], list[DataRow]]  # a row for each entry


@dataclass(frozen=True)
class BadRow:
    """An unreadable row of a json or jsonl file."""

    reason: str  # kind of error, equal for all rows with the same error
    location: str  # file and line
    detail: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} ({self.detail})."


class DataRows(list[DataRow]):
    """Rows of an entry of data.train_files, in order."""

    def __init__(self, rows: Iterable[DataRow], locations: Sequence[str], source: ResolvedFiles):
        super().__init__(rows)
        self.locations, self.source = locations, source  # location of a row: e.g. "train.jsonl, row 7"


def to_file_list(files: str | Sequence[str]) -> list[str]:
    """Return `[files]` for a single path, else a list of the paths."""
    return [files] if isinstance(files, str) else list(files)


def name_splits(files: str | Sequence[str], splits: Sequence[str], notices: list[str]) -> list[str]:
    """Return the entries with the splits that they mean (see resolve_entry). Adds messages to `notices`."""
    sources = [resolve_entry(entry, splits) for entry in to_file_list(files)]
    notices += [notice for source in sources for notice in source.notices]
    return [source.entry for source in sources]


def resolve_entry(text: str, splits: Sequence[str] = TRAIN) -> ResolvedFiles:
    """Find the files of `PATH_OR_ID[:config][@revision][#split]`. A path that exists is never read as a hub id. If an
    entry without `#split` has several splits, it means the first of `splits` that it has. Raises ValueError if there is
    no such file, config or split, or the hub cannot be used."""
    path, entry = Path(text).expanduser(), DatasetEntry.parse(text)
    if path.is_file() and not DATA_FILE.search(path.name):
        formats = "parquet, arrow, jsonl, json, csv or tsv, the last four also with .gz, .bz2, .zst or .lz4"
        raise ValueError(f"{text} is a file with the suffix {path.suffix!r}. Use a file of {formats}.")
    if path.is_file():
        return ResolvedFiles(text, (path,))
    if path.exists() and not path.is_dir():
        raise ValueError(f"{text} is a pipe or a device, which can be read only once. Write its content to a file.")
    if not path.is_dir() and (matches := sorted(glob.glob(str(path), recursive=True))):
        sources = [resolve_entry(match, splits) for match in matches]
        if len(readers := {source.reader for source in sources}) > 1:
            raise ValueError(f"{text} matches folders of {max(readers)} and other data. Use one entry for each.")
        files = tuple(file for source in sources for file in source.files)
        row_folders = tuple(row_folder for source in sources for row_folder in source.entries)
        return ResolvedFiles(text, files, reader=readers.pop(), entries=row_folders)
    folder = Path(entry.path).expanduser()
    results = folder / "results.jsonl"
    if results.is_file() and (folder / "config.yaml").is_file():  # run of main_generation
        return ResolvedFiles(text, (results,))
    plugins = find_plugins("data_folders") if folder.is_dir() else {}
    for name, plugin in plugins.items():
        reader = None if plugin.is_missing else plugin.load()
        if reader is None or not (row_folders := reader.find_entries(folder.absolute())):
            continue
        if entry != DatasetEntry(entry.path):
            raise ValueError(f"{text}: a folder of {name} has no splits or configs. Use {entry.path}.")
        files = tuple(file for row_folder in row_folders for file in reader.list_files(row_folder))
        return ResolvedFiles(str(folder.absolute()), files, reader=name, entries=tuple(row_folders))
    if folder.is_dir() and not entry.revision:
        source = _resolve_folder(folder.absolute(), entry, splits)
        paths = map(os.path.abspath, source.files)
        if outside := [path for path in paths if not Path(path).is_relative_to(folder.absolute())]:
            raise ValueError(f"{text} names the file {outside[0]}, which is not in its folder. Copy it there.")
        return source
    if entry.is_hub_id:
        return _resolve_hub_id(entry, tuple(splits))
    raise ValueError(f"{text}: no such file (working folder: {Path.cwd()}). Correct the path.")


def _resolve_folder(folder: Path, entry: DatasetEntry, splits: Sequence[str]) -> ResolvedFiles:
    import datasets

    name = entry.without_split
    if special := find_special_file(folder):
        raise ValueError(f"{special} is a pipe or a device. Remove it.")
    _refuse_remote_files(folder)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
        with _explain_library_errors(name):
            check_arrow_files(folder)
            loaded = datasets.load_from_disk(str(folder))
        return _choose_dataset(loaded, entry, splits)
    with _explain_library_errors(name):
        listed = datasets.load_dataset_builder(str(folder), entry.config).config.data_files.items()
    by_split = {str(split): tuple(map(Path, files)) for split, files in listed}
    split, is_part = _choose_split(by_split, entry, splits)
    files = tuple(chain(*by_split.values())) if is_part else by_split[split]
    if is_part or not all(DATA_FILE.search(file.name) for file in files):
        with _explain_library_errors(name):
            loaded = datasets.load_dataset(str(folder), entry.config)
        return replace(_choose_dataset(loaded, replace(entry, split=split), splits), files=files)
    assigned = {*chain(*by_split.values())}
    unread = [file.name for file in sorted(folder.rglob("*")) if DATA_FILE.search(file.name) and file not in assigned]
    notice = f"{name}: files that belong to no split are not read: {', '.join(unread[:3])}."
    return ResolvedFiles(f"{name}#{split}", files, notices=(notice,) if unread and not entry.config else ())


def _refuse_remote_files(folder: Path) -> None:
    """Raise ValueError if the description of a data set names files at other addresses, which would be downloaded."""
    for name, parse in {"README.md": _read_front_matter, ".huggingface.yaml": read_yaml}.items():
        with _explain_library_errors(str(folder)):
            configs = (parse(folder / name) or {}).get("configs") if (folder / name).is_file() else None
        if "://" in str(configs):
            raise ValueError(f"{folder}/{name} names files at other addresses: {configs}. Download them first.")


def _read_front_matter(file: Path) -> Any:
    """Return the values at the beginning of a README.md, as the hub reads them."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    found = re.search(REGEX_YAML_BLOCK, read_small_file(file.resolve()).decode("utf-8-sig", "replace"))
    return parse_yaml(found[2]) if found else None


@cache  # several readers ask for the same entry
def _resolve_hub_id(entry: DatasetEntry, splits: tuple[str, ...]) -> ResolvedFiles:
    import datasets

    with _explain_library_errors(entry.without_split):
        loaded = datasets.load_dataset(entry.path, entry.config, revision=entry.revision)
    found = _choose_dataset(loaded, entry, splits)
    commit = found.files[0].parent.name if found.files else ""
    if entry.revision and datasets.config.HF_HUB_OFFLINE and not commit.startswith(entry.revision):
        raise ValueError(
            f"{entry.without_split}: HF_HUB_OFFLINE is set, and the cache has the commit {commit}. Use this revision."
        )
    return replace(found, hub_id=entry.path)


def _choose_dataset(loaded: Dataset, entry: DatasetEntry, splits: Sequence[str]) -> ResolvedFiles:
    """Choose a split of `loaded`: a datasets.DatasetDict of splits, or a datasets.Dataset, which is the only split."""
    if not isinstance(loaded, dict):
        loaded = {str(loaded.split or entry.split or splits[0]): loaded}
    split, is_part = _choose_split(loaded, entry, splits)
    with _explain_library_errors(entry.without_split):
        dataset = _select_part(loaded, split) if is_part else loaded[split]
    files = tuple(Path(file["filename"]) for file in dataset.cache_files)
    return ResolvedFiles(f"{entry.without_split}#{split}", files, dataset, part=split if is_part else "")


def _select_part(loaded: dict[str, Dataset], part: str) -> Dataset:
    """Return the rows of a part such as `train[:10%]` or `train[:100]+test`, as the library datasets reads it."""
    import datasets
    from datasets.arrow_reader import ReadInstruction

    sizes = {split: len(dataset) for split, dataset in loaded.items()}
    spans = ReadInstruction.from_spec(part).to_absolute(sizes)
    return datasets.concatenate_datasets([loaded[span.splitname].select(range(span.from_, span.to)) for span in spans])


def _choose_split(known: dict[str, Dataset], entry: DatasetEntry, splits: Sequence[str]) -> tuple[str, bool]:
    """Return the split of an entry, and whether it is a part of one or several splits, e.g. `train[:10%]`.

    splits: names to try if the entry names none and there are several.
    """
    wanted = [entry.split] if entry.split else ([*known] if len(known) == 1 else splits)
    if found := next((split for split in wanted if split in known), None):
        return found, False
    if entry.split and ("[" in entry.split or "+" in entry.split):
        return entry.split, True
    listed = ", ".join(f"{entry.without_split}#{split}" for split in known)
    raise ValueError(f"{entry.without_split}: no split {' or '.join(wanted)}. Use one of {listed}.")


@contextmanager
def _explain_library_errors(name: str) -> Iterator[None]:
    """Context manager that converts any error of the library datasets, the hub or the files to ValueError."""
    try:
        yield
    except Exception as error:
        reason = f"the library datasets cannot read it ({' '.join(str(error).split())})."
        if isinstance(error, ConnectionError):
            reason += (
                " It is neither a local path nor in the cache, and the hub cannot be reached. Correct the path, load "
                "the data set once with access to the hub, or use the folder that `hf download` prints."
            )
        if type(error).__name__ == "DatasetNotFoundError":
            reason += " Correct the id; for a private or gated data set, log in with `hf auth login`."
        raise ValueError(f"{name}: {reason}") from error


def read_rows(path: str | Path) -> DataRows:
    """Read all rows of an entry of data.train_files. Rows of the hub without a column `data_source` get the id of the
    data set as `data_source`. Raises ValueError if there are no rows, or a row is unreadable."""
    source = resolve_entry(str(path))
    if source.reader:
        rows = load_plugin("data_folders", source.reader).read_rows(source.entries)
        return DataRows(rows, [*map(str, source.entries)], source)
    names = [str(path)] if source.dataset is not None or len(source.files) == 1 else map(str, source.files)
    rows, dataset = list[DataRow](), source.dataset
    tables = [*map(_read_file, source.files)] if dataset is None else [_read_dataset(dataset, source.entry)]
    root = Path(DatasetEntry.parse(source.entry).path).expanduser().absolute()
    for number, table in enumerate(tables):
        for row in table:
            if isinstance(row, BadRow):
                raise ValueError(str(row))
            rows.append({**_read_partitions(root, source.files[number]), **row} if dataset is None else row)
    if not rows:
        raise ValueError(f"{path}: the file has no rows. Use a file with data.")
    if source.hub_id and "data_source" not in list_column_names(rows):
        rows = [row | {"data_source": source.hub_id} for row in rows]
    sizes = zip(names, map(len, tables), strict=True)
    return DataRows(rows, [f"{name}, row {index}" for name, size in sizes for index in range(size)], source)


def _read_dataset(dataset: Dataset, name: str) -> list[DataRow | BadRow]:
    with _explain_library_errors(name):
        check_memory(len(dataset), num_values=0, num_bytes=dataset.data.nbytes)
        return [*dataset.with_format("arrow")[:].to_pylist()]


@cache
def _read_partitions(root: Path, file: Path) -> dict[str, str]:
    """Return the columns in the names of the folders between `root` and a file below it: `level=easy/0.parquet`."""
    parts = file.absolute().relative_to(root).parts[:-1] if file.absolute().is_relative_to(root) else ()
    return {match[1]: match[2] for part in parts if (match := re.fullmatch(r"(\w+)=(.+)", part))}


def read_rows_leniently(path: str | Path) -> list[DataRow | BadRow]:
    """Read all rows of a file like read_rows, but return an unreadable row as BadRow instead of raising ValueError."""
    rows = _read_file(Path(path).expanduser())
    if not rows:
        raise ValueError(f"{path}: the file has no rows. Use a file with data.")
    return rows


def convert_rows(path: str, rows: DataRows, convert_row: Callable[[DataRow], T]) -> list[T]:
    """Apply `convert_row` to each row of the file `path`. The ValueErrors of all rows are raised as one ValueError."""
    converted, errors = [], list[str]()
    for row, location in zip(rows, rows.locations, strict=True):
        try:
            converted.append(convert_row(row))
        except ValueError as error:
            errors.append(f"{location.removeprefix(f'{path}, ')}: {error}")
    if errors:
        shown = show_first(errors)
        raise ValueError(f"{path}: {len(errors)} of {len(rows)} rows are invalid (row numbers start at 0):\n  {shown}")
    return converted


def list_column_names(rows: Iterable[DataRow]) -> list[str]:
    """Return the names of the columns that occur in any row, in order of appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _read_file(path: Path) -> list[DataRow | BadRow]:
    """Read a file. Raises ValueError if it cannot be read in the format of its suffix."""
    if len(files := resolve_entry(str(path)).files) != 1:
        raise ValueError(f"{path} has {len(files)} files. Use one data file.")
    (path,) = files
    kind = DATA_FILE.search(path.name)[1].lower()  # type: ignore[index]
    try:
        check_memory(num_rows=0, num_values=0, num_bytes=path.stat().st_size)
        if path.name.lower().endswith(("json", "jsonl")):
            return _read_json(path, _convert_to_utf8(path.read_bytes()), kind)
        import pyarrow  # only now: gpu-check reads jsonl without it

        if kind == "parquet":
            return [*read_parquet(path)]
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            content, limit = bytearray(), max(MAX_EXPANDED, MAX_RATIO * path.stat().st_size)
            while len(content) <= limit and (part := stream.read(1 << 24)):
                content += part
        if len(content) > limit:
            raise ValueError(f"it expands to more than {MAX_RATIO} times its size; decompress it if you trust it")
        if kind == "arrow":
            return [*read_arrow(content)]
        text = _convert_to_utf8(bytes(content))
        return [*read_csv(text, SEPARATORS[kind])] if kind in SEPARATORS else _read_json(path, text, kind)
    except MemoryError as error:
        reason = str(error) or "it needs more memory than is available"
        raise ValueError(f"{path}: {reason}. Use fewer rows, or a machine with more memory.") from error
    except (OSError, ValueError, TypeError, LookupError, NotImplementedError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path}: the file is not a readable {kind} file ({error}). Create it again, with texts in UTF-8."
        ) from error


def _convert_to_utf8(content: bytes) -> bytes:
    """Convert a text that begins with the byte order mark of UTF-16; other texts are unchanged."""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16").encode() if is_utf16 else content


def _read_json(path: Path, content: bytes, kind: str) -> list[DataRow | BadRow]:
    """Parse JSON lines, or a .json file with a list of objects."""
    text = content.decode("utf-8-sig", "surrogateescape")
    if kind == "json" and text.lstrip().startswith("["):
        located_values = [(f"{path}, row {index}", value) for index, value in enumerate(json.loads(text))]
    else:
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        located_values = [(location, _parse_line(line, location)) for location, line in lines]
    check = _check_object if SURROGATE.search(text) is None else _check_text
    return [check(location, value) for location, value in located_values]


def _parse_line(line: str, location: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also raised for a number with too many digits
        return BadRow("not valid JSON", location, str(error))


def _check_object(location: str, value: object) -> DataRow | BadRow:
    if isinstance(value, dict | BadRow):
        return value
    return BadRow("not an object {...}", location, f"a {type(value).__name__}")


def _check_text(location: str, value: object) -> DataRow | BadRow:
    """Return a row, or a BadRow if it is not an object or one of its texts cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        found = f"invalid UTF-8, or the unpaired surrogate \\u{ord(error.object[error.start]):04x}"
        return BadRow("not valid Unicode", location, found)
    return _check_object(location, value)
