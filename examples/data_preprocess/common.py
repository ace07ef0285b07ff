"""Shared parts of the scripts: read sources (hub id, local file or folder), build RL rows, write parquet."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich import print_json
from rich.progress import track

from alphaapollo.data.files import SUFFIXES, BadRow, DataRow, read_rows_leniently
from alphaapollo.observability.terminal import Terminal
from alphaapollo.rewards.registry import get_grader
from examples.data_preprocess.columns import Columns, Dropped, Problem, chosen_columns, column_arguments, find_problem

INSTRUCTION = r"Reason step by step, and put your final answer in \boxed{}."

CHAT = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))

RL_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": CHAT,
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {
                "split": pa.string(),
                "index": pa.int64(),
                "question": pa.string(),
                "ground_truth": pa.string(),
                "gt_traj": pa.string(),
                "data_source": pa.string(),
            }
        ),
        "metadata": pa.string(),
        "env_kwargs": pa.struct(
            {
                "question": pa.string(),
                "ground_truth": pa.string(),
                "gt_traj": pa.string(),
                "data_source": pa.string(),
                "seed": pa.int64(),
            }
        ),
    }
)

SFT_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "messages": CHAT,
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "ground_truth": pa.string()}),
    }
)

SHOWN = 1000  # characters per text in the printed sample row

console = Terminal(highlight=False, soft_wrap=True)

SourceRow = DataRow | BadRow  # a BadRow is dropped and counted with its reason


@dataclass
class Count:
    """Number of kept rows, and of dropped rows by reason."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = "".join(f"\n  {number} dropped: {reason}" for reason, number in self.dropped.most_common())
        return f"{self.kept} rows kept, {self.dropped.total()} dropped{reasons}"


def read_splits(source: str, splits: Sequence[str], config_name: str | None) -> dict[str, list[SourceRow]]:
    """Read the rows of each split of the source.

    A file is one split: the one its name starts or ends with, else the first. In a folder, a split consists of all
    files with its name (`train.parquet`, `gsm8k_train.jsonl`, `train-00000-of-00002.parquet`).

    Raises:
        ValueError: the source has none of the splits, or cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        split = next((split for split in splits if _belongs(path, split)), splits[0])
        return {split: read_rows_leniently(path)}
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _plain_name(file).suffix in SUFFIXES)
        files_by_split = {split: [file for file in files if _belongs(file, split)] for split in splits}
        if not any(files_by_split.values()):
            names = ", ".join(file.name for file in files) or f"no {', '.join(SUFFIXES)} file"
            raise ValueError(f"{source}: no file is named like one of the splits {', '.join(splits)}; it has {names}.")
        return {
            split: [row for file in files for row in read_rows_leniently(file)]
            for split, files in files_by_split.items()
            if files
        }
    is_path = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if is_path or _plain_name(path).suffix in SUFFIXES:
        raise ValueError(f"{source}: no such file or folder (working folder: {Path.cwd()}).")
    return _read_hub(source, splits, config_name)


def source_name(source: str) -> str:
    """Short name: the last part of a hub id, or the name of a file or folder without suffix and split."""
    path = _plain_name(Path(source).expanduser().resolve() if Path(source).expanduser().exists() else Path(source))
    stem = path.stem if path.suffix in SUFFIXES else path.name
    return re.sub(r"[-_.](train|test|val|validation|dev)$", "", stem)


def data_source_of(source: str, fallback: str) -> str:
    """Value of the data_source column: the hub id or file name if a grader accepts it, else `fallback`/name."""
    name = source_name(source) if Path(source).expanduser().exists() else source
    try:
        get_grader(name)
    except ValueError:
        return f"{fallback}/{name}"
    return name


def rl_row(problem: Problem, prompt: str, data_source: str, ability: str, split: str, index: int) -> DataRow:
    """One row of the full RL schema."""
    facts = {
        "question": problem.question,
        "ground_truth": problem.ground_truth,
        "gt_traj": problem.solution,
        "data_source": data_source,
    }
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index, **facts},
        "metadata": json.dumps(problem.metadata, default=str),
        "env_kwargs": facts,
    }


def maths_row(data_source: str, split: str, columns: Columns | None = None) -> MakeRow:
    """Function that makes an RL row of a maths problem from a row of any dataset."""

    def make(row: DataRow, index: int) -> DataRow:
        problem = find_problem(row, columns)
        return rl_row(problem, f"{problem.question}\n\n{INSTRUCTION}", data_source, "math", split, index)

    return make


def make_maths_row(args: argparse.Namespace, data_source: str, split: str) -> MakeRow:
    return maths_row(data_source, split, args.columns)


def convert(
    rows: Sequence[SourceRow], make: MakeRow, what: str, columns: Columns | None = None
) -> tuple[list[DataRow], Count]:
    """Apply `make(row, index)` to every row with a progress bar, and count kept and dropped rows.

    Raises:
        ValueError: no row has a column that the user selected.
    """
    columns = columns or Columns()
    columns.check(rows, what)
    made, count = list[DataRow](), Count()
    for index, row in enumerate(track(rows, what, console=console)):
        try:
            if isinstance(row, BadRow):
                raise Dropped(row.reason)
            columns.keep(row)
            new = make(row, index)
            made += new if isinstance(new, list) else [new]
            count.kept += 1
        except Dropped as reason:
            count.dropped[str(reason)] += 1
    return made, count


def write_parquet(rows: Iterable[DataRow], path: Path, schema: pa.Schema = RL_SCHEMA) -> None:
    """Write to a temporary file and rename it. Raises ValueError if the folder is not writable."""
    table = pa.Table.from_pylist(list(rows), schema=schema)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, partial)
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error}). Set --local_dir.") from error


def finish(rows: Sequence[DataRow], count: Count, path: Path, what: str, schema: pa.Schema = RL_SCHEMA) -> None:
    """Write the rows of one split and print one row and the counts. Raises ValueError if there are no rows."""
    if not rows:
        raise ValueError(f"split {path.stem} has no usable row: {count}")
    write_parquet(rows, path, schema)
    show_sample(rows)
    console.print(f"{path} ({what}): {count}\n")


MakeRow = Callable[[DataRow, int], DataRow | list[DataRow]]
"""(row of the source, its index) -> what is written. Raises Dropped for a row that cannot be used."""


def read_source(args: argparse.Namespace) -> dict[str, list[SourceRow]]:
    return read_splits(args.data_source, args.splits, args.config_name)


@dataclass(frozen=True)
class Script:
    """Program that reads one source and writes <local_dir>/<split>.parquet for each of its splits.

    Args:
        doc: the help text.
        make: (arguments, data source, split) -> function that makes the rows of a source's row.
        options: arguments of the program: name (or names) -> settings for add_argument.
        splits: the default of --splits.
        read: arguments -> rows by split.
        fallback: see `data_source_of`.
        folder: the default of --local_dir below outputs/data, for `{}` = the name of the source.
        schema: columns that are written, or arguments -> columns.
        has_columns: whether the user can select columns and rows.
        describe: rows of a split -> what is printed about them; by default their data source.
    """

    doc: str | None
    make: Callable[[argparse.Namespace, str, str], MakeRow]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    splits: Sequence[str] = ("train", "test")
    read: Callable[[argparse.Namespace], dict[str, list[SourceRow]]] = read_source
    fallback: str = "math"
    folder: str = "{}"
    schema: pa.Schema | Callable[[argparse.Namespace], pa.Schema] = RL_SCHEMA
    has_columns: bool = True
    describe: Callable[[Sequence[DataRow]], str] | None = None

    def parse(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        source = {"required": True, "help": "hub id, or a file or folder of parquet, json or jsonl"}
        for name, settings in {"--data_source": source, **self.options}.items():
            parser.add_argument(*name.split(), **settings)
        common_arguments(parser, self.splits)
        if self.has_columns:
            column_arguments(parser)
        args = parser.parse_args()
        args.columns = chosen_columns(args) if self.has_columns else Columns()
        return args

    def write(self, args: argparse.Namespace) -> Path:
        """Write each split, and return the folder. Raises ValueError if the source cannot be read, or a split has no
        usable row."""
        found, data_source = self.read(args), data_source_of(args.data_source, self.fallback)
        target = output_folder(args.local_dir, self.folder.format(source_name(args.data_source)))
        schema = self.schema if isinstance(self.schema, pa.Schema) else self.schema(args)
        for split, rows in found.items():
            made, count = convert(rows, self.make(args, data_source, split), split, args.columns)
            what = self.describe(made) if self.describe else f"data_source {data_source}"
            finish(made, count, target / f"{split}.parquet", what, schema)
        return target

    def main(self) -> None:
        args = self.parse()
        run(lambda: self.write(args))


def common_arguments(parser: argparse.ArgumentParser, splits: Sequence[str]) -> None:
    """Add --local_dir, --splits and --config_name."""
    parser.add_argument("--local_dir", help="where to write (default: outputs/data/NAME)")
    parser.add_argument("--splits", nargs="+", default=list(splits), help="splits to write, if the source has them")
    parser.add_argument("--config_name", help="configuration of a hub dataset, e.g. main")


def output_folder(local_dir: str | None, name: str) -> Path:
    return Path(local_dir or Path("outputs/data") / name).expanduser()


def show_sample(rows: Sequence[DataRow]) -> None:
    """Print the first row with long texts truncated."""
    console.print("A sample row:")
    print_json(data=_cut(rows[0]), ensure_ascii=False)


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_cut(part) for part in value]
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if not isinstance(value, str) or len(value) <= SHOWN:
        return value
    return f"{value[:SHOWN]}... ({len(value):,} characters)"


def run(script: Callable[[], None]) -> None:
    """Run a script. Bad input is reported in one line without a traceback."""
    try:
        script()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def _plain_name(path: Path) -> Path:
    """File name without .gz."""
    return path.with_suffix("") if path.suffix == ".gz" else path


def _belongs(file: Path, split: str) -> bool:
    name = re.sub(r"-\d+-of-\d+$", "", _plain_name(file).stem)  # hub shards
    return re.search(rf"(^|[-_.]){re.escape(split)}$|^{re.escape(split)}[-_.]", name) is not None


def _read_hub(source: str, splits: Sequence[str], config_name: str | None) -> dict[str, list[SourceRow]]:
    import datasets

    try:
        loaded = datasets.load_dataset(source, config_name)
    except Exception as error:  # any error of the hub, the network or the dataset's own code
        raise ValueError(f"{source}: cannot be loaded from the hub ({type(error).__name__}: {error}).") from error
    found = {split: loaded[split].to_list() for split in splits if split in loaded}
    if not found:
        known = ", ".join(loaded)
        raise ValueError(f"{source}: has none of the splits {', '.join(splits)}; it has {known}. Set --splits.")
    return found
