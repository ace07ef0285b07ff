"""Tables of a few kilobytes that stand for more rows or texts than the memory has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaapollo.data import tables
from alphaapollo.data.files import read_rows

MANY = pa.table({"prompt": pa.array(["1+1=?"]).take(pa.array([0] * 300_000))})
BLANKS = pa.table({"prompt": [" " * (1 << 20)] * 90})
REPEATED = pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([0] * 300), [" " * (1 << 20)])})
COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """100 MiB, of which each slice that is converted takes what it has."""
    left = [100 << 20]
    slices = pa.RecordBatch.to_pylist

    class Batch:
        def __init__(self, batch: pa.RecordBatch):
            self.batch, self.num_rows = batch, batch.num_rows

        def slice(self, start: int, length: int) -> Batch:
            return Batch(self.batch.slice(start, length))

        def to_pylist(self) -> list[object]:
            rows = slices(self.batch)
            left[0] -= sum(len(str(row)) for row in rows)
            return rows

    convert = tables._convert_batches
    monkeypatch.setattr(tables, "_convert_batches", lambda batches, *limit: convert(map(Batch, batches), *limit))
    monkeypatch.setattr(tables, "measure_available_memory", lambda: left[0])
    return left[0]


def write_file(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema, options=COMPRESSED) as file:
        file.write_table(table)


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema, options=COMPRESSED) as file:
        file.write_table(table)


def write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, compression="zstd")


@pytest.mark.parametrize("table", [MANY, BLANKS, REPEATED], ids=["rows", "texts", "references"])
@pytest.mark.parametrize(
    ("write", "name"), [(write_parquet, "parquet"), (write_file, "arrow"), (write_stream, "arrow")]
)
def test_what_exceeds_the_memory_is_refused(
    tmp_path: Path, memory: int, write: Callable[[Path, pa.Table], None], name: str, table: pa.Table
) -> None:
    write(path := tmp_path / f"a.{name}", table.slice(0, 20))
    assert len(read_rows(path)) == 20
    write(path, table)
    assert path.stat().st_size < memory / 50
    with pytest.raises(ValueError, match=rf"{path}: its .* memory"):
        read_rows(path)


def test_a_saved_data_set_is_measured_before_it_is_mapped(tmp_path: Path, memory: int) -> None:
    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "d")
    assert len(read_rows(tmp_path / "d")) == 1
    write_stream(next((tmp_path / "d").glob("*.arrow")), MANY)
    with pytest.raises(ValueError, match=r"300,000 rows"):
        read_rows(tmp_path / "d")


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_tables_with_too_many_columns_are_refused(tmp_path: Path, name: str) -> None:
    names = [f"c{index}" for index in range(tables.MAX_COLUMNS + 1)]
    if name.endswith("csv"):
        (tmp_path / name).write_text(",".join(names) + "\n" + ",".join(names) + "\n")
    else:
        write_parquet(tmp_path / name, pa.table({column: [1] for column in names}))
    with pytest.raises(ValueError, match="10001 columns"):
        read_rows(tmp_path / name)


def test_a_bomb_of_aliases_in_a_description_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)), "configs: *a11"]
    (tmp_path / "README.md").write_text("\n".join(["---", *lines, "---"]))
    with pytest.raises(ValueError, match="aliases"):
        read_rows(tmp_path)
