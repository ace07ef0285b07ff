"""Entries of data.train_files: files of each format, globs, folders, data sets of save_to_disk and of the hub."""

import gzip
import json
import os
import re
import shutil
import socket
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from alphaapollo.config.check import find_path_errors
from alphaapollo.config.schema import SftConfig
from alphaapollo.data.files import HELD_OUT, TRAIN, convert_rows, name_splits, read_rows, resolve_entry
from tests.builders import write_rows

ROWS = [{"text": "a", "more": {"x": 1}}, {"text": "b", "more": {"y": [None]}}]
COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


def lines(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Working folder in which paths are relative, with a folder `chats` of two splits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split in ("train", "test"):
        write_rows(tmp_path / "chats" / f"{split}.jsonl", [{"text": f"{split} 0"}, {"text": f"{split} 1"}])
    return tmp_path


VALUES = [
    ("a.jsonl", lines(*ROWS), ROWS),
    ("a.json", json.dumps(ROWS).encode(), ROWS),
    ("a.json", lines(*ROWS), ROWS),  # JSON lines
    ("a.jsonl.gz", gzip.compress(lines(*ROWS), mtime=0), ROWS),
    ("a.jsonl.zst", pa.compress(lines(*ROWS), "zstd", asbytes=True), ROWS),
    ("a.csv", b'\xef\xbb\xbftext,n\r\n"a, b\nc",007\r\n', [{"text": "a, b\nc", "n": "007"}]),
    ("a.csv", b"text\nNA\nNone\n\n", [{"text": "NA"}, {"text": "None"}]),
    ("a.tsv", b"text\tn\na,b\t1e3\n", [{"text": "a,b", "n": "1e3"}]),
    ("a.csv.gz", gzip.compress(b"text\n" + b"x" * 200_000, mtime=0), [{"text": "x" * 200_000}]),
]


@pytest.mark.parametrize(("name", "content", "rows"), VALUES, ids=[name for name, *_ in VALUES])
def test_values_are_those_that_the_file_has(folder, name, content, rows):
    Path(name).write_bytes(content)
    assert read_rows(name) == rows


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_files_are_read(folder, is_stream):
    table = pa.Table.from_pylist([{"a": 1, "b": {"bytes": b"x", "path": None}}])
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)("a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert read_rows("a.arrow") == table.to_pylist()


UNREADABLE = [
    ("a.csv", b"a,b\n1,2\n1,2,3\n", "1,2,3"),
    ("a.csv", b"a,b\n1\n", "2 columns, got 1"),
    ("a.csv", b"a,a\n1,2\n", "same name"),
    ("a.json", b'{"a": 1,\n"b": 2}', "line 1"),
    ("a.jsonl.gz", gzip.compress(b" " * 3_000_000, mtime=0), "more than 100 times"),
]


@pytest.mark.parametrize(("name", "content", "said"), UNREADABLE)
def test_what_cannot_be_read_is_an_error_that_names_the_file(folder, monkeypatch, name, content, said):
    monkeypatch.setattr("alphaapollo.data.files.MAX_EXPANDED", 1_000_000)
    Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_rows(name)
    assert name in str(caught.value)


ENTRIES = [
    ("chats", TRAIN, ["train.jsonl"], "chats#train"),
    ("chats", HELD_OUT, ["test.jsonl"], "chats#test"),
    ("chats#test", TRAIN, ["test.jsonl"], "chats#test"),
    ("chats/*.jsonl", TRAIN, ["test.jsonl", "train.jsonl"], "chats/*.jsonl"),
    ("**/tr*.jsonl", TRAIN, ["train.jsonl"], "**/tr*.jsonl"),
]


@pytest.mark.parametrize(("entry", "splits", "names", "resolved"), ENTRIES)
def test_folders_and_globs_are_read(folder, entry, splits, names, resolved):
    found = resolve_entry(entry, splits)
    assert (found.entry, [file.name for file in found.files]) == (resolved, names)
    assert read_rows(found.entry) == [row for name in names for row in read_rows(f"chats/{name}")]
    assert found.folder == folder / "chats"


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl", "/dev/stdin"])
def test_a_pipe_is_an_error(folder, monkeypatch, name):
    read_end, write_end = os.pipe()
    os.mkfifo("a.jsonl")
    with pytest.raises(ValueError, match="a pipe or a device"):
        read_rows(name.replace("/dev/stdin", f"/dev/fd/{read_end}"))
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "files", ["https://127.0.0.1:1/a.jsonl", "zip://*::http://127.0.0.1:1/a", "../a.jsonl", "/ROOT/a.jsonl"]
)
def test_a_folder_reads_only_its_own_files(folder, monkeypatch, name, files):
    write_rows(folder / "a.jsonl", ROWS)
    card = (
        f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(files.replace('/ROOT', str(folder)))}\n---\n"
    )
    Path("chats", name).write_text(card if name == "README.md" else card.replace("---\n", ""))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a request was made"))
    with pytest.raises(ValueError, match=r"other addresses|not in its folder"):
        read_rows("chats")


def test_the_only_split_needs_no_name(folder):
    shutil.copytree("chats", "one@v1")
    Path("one@v1/test.jsonl").unlink()
    (entry,) = name_splits("one@v1", HELD_OUT, [])
    assert read_rows(entry) == read_rows("chats/train.jsonl")


def test_a_card_selects_files_and_configs(folder):
    shutil.copytree("chats", "card")
    Path("card/README.md").write_text(
        "---\nconfigs:\n- config_name: b\n  data_files: [{split: eval, path: test.jsonl}]\n"
        "- config_name: a\n  data_files: [{split: train, path: train.jsonl}]\n---\n"
    )
    assert resolve_entry("card:b").files == (folder / "card" / "test.jsonl",)
    assert resolve_entry("card:a", HELD_OUT).entry == "card:a#train"
    with pytest.raises(ValueError, match="'c'"):
        resolve_entry("card:c")


def test_files_of_a_folder_that_are_not_read_are_told(folder):
    write_rows(Path("chats/other.parquet"), [{"text": "a"}])
    notices = []
    assert name_splits(["chats"], TRAIN, notices) == ["chats#train"]
    assert "other.parquet" in notices[0]


@pytest.mark.parametrize("in_dict", [True, False])
def test_folders_of_save_to_disk_are_read(folder, in_dict):
    rows = [{"a": index, "b": [{"c": None}, {"c": b"d"}]} for index in range(4)]
    saved = datasets.Dataset.from_list(rows).select([3, 1])
    (datasets.DatasetDict({"train": saved, "test": saved.select([0])}) if in_dict else saved).save_to_disk("saved")
    assert read_rows("saved") == [rows[3], rows[1]]
    if in_dict:
        assert read_rows(resolve_entry("saved", HELD_OUT).entry) == [rows[3]]


@pytest.mark.parametrize(
    ("part", "texts"),
    [("train[:1]", ["train 0"]), ("train[50%:]", ["train 1"]), ("train[1:]+test", ["train 1", "test 0", "test 1"])],
)
@pytest.mark.parametrize("name", ["chats", "saved"])
def test_parts_of_splits_are_read(folder, name, part, texts):
    datasets.load_dataset("chats").save_to_disk("saved")
    found = resolve_entry(f"{name}#{part}")
    assert (found.entry, found.part) == (f"{name}#{part}", part)
    assert [row["text"] for row in read_rows(found.entry)] == texts


@pytest.fixture
def hub(folder) -> Path:
    """Cache of the library datasets with openai/gsm8k:main."""
    loaded = datasets.load_dataset(str(folder / "chats"))
    cached = folder / "cache" / "openai___gsm8k" / "main" / "0.0.0" / COMMIT
    shutil.copytree(Path(loaded["train"].cache_files[0]["filename"]).parent, cached)
    for file in cached.glob("chats-*.arrow"):
        file.rename(cached / file.name.replace("chats", "gsm8k"))
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"config_name": "main"}))
    return folder


CACHED = [
    ("openai/gsm8k:main", TRAIN, "train"),
    ("openai/gsm8k", HELD_OUT, "test"),
    (f"openai/gsm8k:main@{COMMIT[:7]}#test", TRAIN, "test"),
    ("openai/gsm8k:main#train[:1]", TRAIN, "train[:1]"),
]


@pytest.mark.parametrize(("entry", "splits", "split"), CACHED)
def test_data_sets_in_the_cache_are_read_offline(hub, entry, splits, split):
    found = resolve_entry(entry, splits)
    name = entry.partition("#")[0]
    assert (found.entry, found.hub_id) == (f"{name}#{split}", name[: len(found.hub_id)])
    assert all(file.is_file() and file.parent.name == COMMIT for file in found.files)
    own = read_rows(f"chats/{split.partition('[')[0]}.jsonl")[: 1 if "[" in split else 2]
    rows = [row | {"data_source": found.hub_id} for row in own]
    assert read_rows(found.entry) == rows


WRONG_ENTRIES = [
    *((f"chats#{part}", "chats: the library datasets") for part in ("trian[:1]", "train[:x]", "train+")),
    ("chats#val", "chats#train, chats#test"),
    *((entry, "no such file") for entry in ("missing", "chats/*.parquet", "./no/such", "chats/train.jsonl#train")),
    ("absent/nothing", "hub cannot be reached"),
    ("openai/gsm8k:socratic", "'main'"),
    ("openai/gsm8k:main@abcdef", COMMIT),
    ("openai/gsm8k:main#validation", "openai/gsm8k:main#train, openai/gsm8k:main#test"),
]


@pytest.mark.parametrize(("entry", "said"), WRONG_ENTRIES)
def test_an_entry_that_names_no_files_is_an_error(hub, entry, said):
    Path("empty").mkdir()
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        resolve_entry(entry)
    assert re.split("[#@:]", entry)[0] in str(caught.value)


def test_an_existing_path_is_never_a_hub_id(hub):
    shutil.copytree("chats", "openai/gsm8k:main")
    assert resolve_entry("openai/gsm8k:main").hub_id == ""


def test_an_invalid_row_of_a_folder_names_its_file(folder):
    def convert(row):
        if row["text"] == "test 1":
            raise ValueError("bad")

    with pytest.raises(ValueError, match=r"test\.jsonl, row 1: bad"):
        convert_rows("chats/*.jsonl", read_rows("chats/*.jsonl"), convert)


ABSENT = ("data/train.parquet", "chats/*.csv", "chats/gsm8k", "./openai/gsm8k")


@pytest.mark.parametrize("entry", ["chats", "chats#test", "chats/*.jsonl", "openai/gsm8k:main#test", *ABSENT])
def test_paths_are_checked_before_anything_is_read(folder, entry):
    config = SftConfig.model_validate({"data": {"train_files": entry}})
    found = [error for error in find_path_errors(config) if error.startswith("data.train_files")]
    assert bool(found) == (entry in ABSENT)
