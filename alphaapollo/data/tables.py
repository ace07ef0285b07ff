"""Read parquet, arrow and CSV files with pyarrow. A small file may expand to more than the memory of the machine, so
the sizes that its metadata declares are compared with the available memory before the content is decoded."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.memory import measure_available_memory

ROW_BYTES, VALUE_BYTES = 2000, 100  # memory of a row with its prompt, and of each of its values, without texts
MAX_ROWS_AT_ONCE, MAX_COLUMNS = 1024, 10_000
GIB = 2**30


def check_memory(num_rows: int, num_values: int, num_bytes: int) -> None:
    """Raise MemoryError if rows with values of `num_bytes` need more memory than is available."""
    needed = num_rows * ROW_BYTES + num_values * VALUE_BYTES + 2 * num_bytes
    if needed > (available := measure_available_memory()):
        sizes = f"about {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are available"
        raise MemoryError(f"its {num_rows or num_bytes:,} {'rows' if num_rows else 'bytes'} need {sizes}")


def _check_columns(count: int) -> None:
    if count > MAX_COLUMNS:
        raise ValueError(f"it has {count} columns, more than {MAX_COLUMNS}. Write the values as a list")


ArrowObject = Any  # of pyarrow, which has no types


def _convert_batches(batches: Iterable[ArrowObject], max_rows: int = MAX_ROWS_AT_ONCE) -> list[JsonObject]:
    rows, reserve = list[JsonObject](), measure_available_memory() // 4
    for batch in batches:
        for start in range(0, batch.num_rows, max_rows):
            rows += batch.slice(start, max_rows).to_pylist()
            if measure_available_memory() < reserve:
                raise MemoryError(f"its first {len(rows)} rows take three quarters of the available memory")
    return rows


def _limit_rows(num_bytes: int) -> int:
    """Return how many rows need half the reserve of _convert_batches, if each of them repeats a text of `num_bytes`."""
    return max(1, min(MAX_ROWS_AT_ONCE, measure_available_memory() // (8 * num_bytes + 1)))


def read_parquet(path: Path) -> list[JsonObject]:
    """Read a parquet file. Raises MemoryError if the memory does not suffice."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table, path.open("rb") as file:  # read_table would import pandas
        groups = [table.metadata.row_group(index) for index in range(table.num_row_groups)]
        _check_columns(table.metadata.num_columns)
        chunks = [[group.column(index) for index in range(group.num_columns)] for group in groups]
        num_values = sum(chunk.num_values for group in chunks for chunk in group)
        check_memory(table.metadata.num_rows, num_values, sum(group.total_byte_size for group in groups))
        repeated = max((sum(_measure_dictionary(file, chunk) for chunk in group) for group in chunks), default=0)
        return _convert_batches(table.iter_batches(_limit_rows(repeated)))


def _measure_dictionary(file: BinaryIO, chunk: ArrowObject) -> int:
    """Return the bytes of the texts that a column chunk may repeat in each row: the size in the header of a dictionary
    page, which starts with type and size in Thrift's compact protocol, or else the size of the chunk."""
    file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
    header = file.read(8)
    if header.startswith(b"\x15\x04\x15"):
        digits = [*takewhile(lambda byte: byte > 127, header[3:])]  # of the size, a zigzag varint
        return sum((byte & 127) << 7 * index for index, byte in enumerate([*digits, header[3 + len(digits)]])) // 2
    return chunk.total_uncompressed_size if "DELTA_BYTE_ARRAY" in chunk.encodings or chunk.has_dictionary_page else 0


def read_arrow(content: bytes | bytearray) -> list[JsonObject]:
    """Read arrow's stream format, or its file format, which contains a stream. Raises MemoryError as read_parquet."""
    import pyarrow

    stream = pyarrow.py_buffer(content)[8:] if content[:6] == b"ARROW1" else pyarrow.py_buffer(content)
    num_rows, num_bytes = measure_arrow(stream)
    with pyarrow.ipc.open_stream(stream) as table:
        _check_columns(len(table.schema))
        check_memory(num_rows, num_rows * len(table.schema), num_bytes)
        has_references = any(word in str(table.schema) for word in ("dictionary<", "_view", "run_end_encoded<"))
        return _convert_batches(table, _limit_rows(num_bytes) if has_references else MAX_ROWS_AT_ONCE)


def measure_arrow(stream: ArrowObject) -> tuple[int, int]:
    """Return the numbers of rows and of decompressed bytes that the messages of an arrow stream declare."""
    import pyarrow

    num_rows = num_bytes = 0
    for message in pyarrow.ipc.MessageReader.open_stream(stream):
        if message.type in ("record batch", "dictionary"):
            is_dictionary = message.type == "dictionary"
            rows, size = _measure_message(memoryview(message.metadata), message.body, is_dictionary)
            num_rows, num_bytes = num_rows + (0 if is_dictionary else rows), num_bytes + size
    return num_rows, num_bytes


def check_arrow_files(folder: Path) -> None:
    """Raise MemoryError if arrow files below a folder, which the library datasets maps, need more than the memory."""
    import pyarrow

    for file in folder.rglob("*.arrow"):
        with pyarrow.memory_map(str(file)) as opened:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(8 * is_file)
            num_rows, num_bytes = measure_arrow(opened)
        check_memory(num_rows, num_values=0, num_bytes=num_bytes)


def _measure_message(header: memoryview, body: ArrowObject, is_dictionary: bool) -> tuple[int, int]:
    """Return the numbers of rows and bytes in the header of a record batch, a flatbuffer (arrow's Message.fbs)."""

    def find(table: int, field: int) -> int:
        fields = table - struct.unpack_from("<i", header, table)[0]
        has_field = 4 + 2 * field < struct.unpack_from("<H", header, fields)[0]
        offset = struct.unpack_from("<H", header, fields + 4 + 2 * field)[0] if has_field else 0
        return table + offset if offset else 0

    def follow(position: int) -> int:
        return position + int(struct.unpack_from("<I", header, position)[0])

    batch = follow(find(follow(0), 2))
    batch = follow(find(batch, 1)) if is_dictionary else batch
    rows, buffers, compression = (find(batch, field) for field in (0, 2, 3))
    num_bytes = 0
    num_buffers = struct.unpack_from("<I", header, follow(buffers))[0] if buffers else 0
    for index in range(num_buffers):
        offset, length = struct.unpack_from("<qq", header, follow(buffers) + 4 + 16 * index)
        declared = struct.unpack_from("<q", body, offset)[0] if compression and length else -1
        num_bytes += max(declared, length)
    return (struct.unpack_from("<q", header, rows)[0] if rows else 0), num_bytes


def read_csv(content: bytes, separator: str) -> list[JsonObject]:
    """Parse a table with a header. Cells are text, as they are written; an empty cell is None."""
    from pyarrow import BufferReader, csv, string

    header = content.decode().partition("\n")[0]
    separator = next((candidate for candidate in (separator, ";", "\t") if candidate in header), separator)
    _check_columns(header.count(separator) + 1)
    one_block = csv.ReadOptions(block_size=len(content) + 1)
    lines = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    names = csv.open_csv(BufferReader(content), one_block, lines).schema.names
    if len({*names}) < len(names):
        raise ValueError(f"two columns have the same name: {', '.join(names)}")
    types = dict.fromkeys(names, string())
    texts = csv.ConvertOptions(null_values=[""], strings_can_be_null=True, column_types=types)
    return _convert_batches(csv.read_csv(BufferReader(content), one_block, lines, texts).to_batches())
