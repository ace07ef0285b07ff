"""Paths of models and data: ids on the Hugging Face hub, local folders, and errors that explain unusable folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from alphaapollo.utils.disk import find_special_file, parse_json, read_small_file
from alphaapollo.utils.plugins import is_available

DATA_FILE = re.compile(r"\.(parquet|arrow|jsonl|ndjson|json|csv|tsv)(\.(gz|bz2|zst|lz4))?$", re.IGNORECASE)
"""End of the name of a data file: its format and, except for parquet and arrow, a compression."""
ENTRY = re.compile(r"(?P<path>.+?)(:(?P<config>[^:@#/]+))?(@(?P<revision>[^:@#]+))?(#(?P<split>[^#/]+))?")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MODEL_TEXTS = (".json", ".jinja", ".model", ".txt", ".py")  # files of a model that are read into memory
MAX_MODEL_TEXT = 1 << 27  # bytes
ENDLESS_SIZE = re.compile(rb'"n(?:um)?_\w*(?:layers?|experts)"\s*:\s*\d{6,}')
"""Number of layers or experts in config.json with which building the model would not end."""
FOREIGN_CHECKPOINTS = {  # file of another trainer: what to do with its folder
    "model_world_size_*_rank_*.pt": "has a checkpoint of verl. Set the folder with its shards, {}",
    "checkpoint-*/config.json": "has checkpoints of transformers' Trainer. Set the last one, {}",
    "zero_to_fp32.py": "has files of DeepSpeed. Convert them: python {0}/zero_to_fp32.py {0} {0} --safe_serialization",
    "*.distcp": "has a checkpoint of torch.distributed in {}. Convert it with the project that wrote it, "
    "e.g. accelerate merge-weights or verl.model_merger",
}


def expand_home(path: str) -> Path:
    """Return a path of the command line, whose `~` is the home folder. An unknown `~user` is not an error."""
    return Path(os.path.expanduser(path))


@dataclass(frozen=True)
class DatasetEntry:
    """Parts of `PATH_OR_ID[:config][@revision][#split]`, an entry of data.train_files."""

    path: str
    config: str | None = None
    revision: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetEntry:
        before, _, split = text.rpartition("#")
        if os.path.exists(os.path.expanduser(text)) or not (match := ENTRY.fullmatch(text)):
            return cls(text)
        return cls(before, split=split) if os.path.exists(os.path.expanduser(before)) else cls(**match.groupdict())

    @property
    def without_split(self) -> str:
        """The entry without `#split`."""
        return self.path + (f":{self.config}" if self.config else "") + (f"@{self.revision}" if self.revision else "")

    @property
    def is_hub_id(self) -> bool:
        """Whether `path` is the id of a data set on the hub: OWNER/NAME, but not a local path or the name of a file."""
        return bool(HUB_ID.fullmatch(self.path)) and not is_local_path(self.path) and not DATA_FILE.search(self.path)


def is_local_path(path: str) -> bool:
    """Return whether a model path is local rather than a hub id OWNER/NAME.

    OWNER/NAME counts as local if OWNER is an existing folder, so that a misspelled `outputs/modle` is not downloaded.
    """
    return path.startswith(("/", ".", "~")) or path.count("/") != 1 or Path(path.split("/")[0]).is_dir()


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder has a LoRA adapter, as trainer.export_lora=adapter and peft write it."""
    return (Path(folder).expanduser() / "adapter_config.json").is_file()


def find_verl_shards(folder: str | Path) -> list[Path]:
    """Return the files in which the ranks of verl saved the weights of an FSDP model, in the order of the ranks."""
    files = Path(folder).expanduser().glob("model_world_size_*_rank_*.pt")
    return sorted(files, key=lambda file: int(file.stem.rpartition("_")[2]))


def needs_conversion(folder: str | Path) -> bool:
    """Return whether a folder has an adapter or a checkpoint of verl, which must be converted to a complete model."""
    return is_adapter(folder) or bool(find_verl_shards(folder))


def explain_gguf_file(path: str) -> str:
    """Return an error message if a model path is a GGUF file, else ""."""
    if not path.endswith(".gguf"):
        return ""
    convert = f"Convert it: alphaapollo import-gguf {path} FOLDER"
    return f"{path} is a GGUF file. {convert if is_available('commands', 'import-gguf') else 'Set a model folder.'}"


def explain_model_folder(path: str | Path) -> str:
    """Return an error message if a folder is not a complete model, because it has another trainer's checkpoint, no
    config.json, or missing or damaged files. Else ""."""
    folder = Path(path).expanduser()
    if foreign := explain_foreign_checkpoint(folder):
        return foreign
    if not (folder / "config.json").is_file():
        return f"{path} has no config.json. Set the folder of a Hugging Face model, or a hub id."
    return next(_find_unreadable_files(folder), "") or next(_find_damage(folder), "")


def check_model_files(path: str | Path) -> None:
    """Check the files of a local folder of a model, a tokenizer or an adapter before a library opens them. Raises
    ValueError if the folder has a pipe, a device or a too large text file, or if a configuration is damaged, is nested
    too deeply, has 100,000 layers or more, or names weights in another folder."""
    if error := next(_find_unreadable_files(Path(path).expanduser()), ""):
        raise ValueError(error)


def _find_unreadable_files(folder: Path) -> Iterator[str]:
    if special := find_special_file(folder):
        yield f"{special} is a pipe or a device. Remove it, or copy the model again."
    for file in filter(Path.is_file, sorted(folder.iterdir())):
        stat = file.stat()
        if file.suffix in MODEL_TEXTS and stat.st_size > MAX_MODEL_TEXT:
            size = f"{stat.st_size >> 20} MiB, more than {MAX_MODEL_TEXT >> 20}"
            yield f"{file} has {size}. Remove it, or copy the model again."
        elif file.name.endswith(("config.json", ".index.json")):
            yield from _find_json_damage(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(4096)
def _find_json_damage(file: Path, _size: int, _mtime: int) -> list[str]:
    """Return [error message] for a configuration or an index that cannot be read, or []. _size, _mtime: cache keys."""
    try:
        text = read_small_file(file.resolve(), MAX_MODEL_TEXT)
        if size := ENDLESS_SIZE.search(text):
            raise ValueError(f"it has {size[0].decode()}")
        content = parse_json(text)
        names = content["weight_map"].values() if file.name.endswith(".index.json") else []
        return [f"{file} names {name}, which is in another folder. Copy it." for name in names if "/" in name][:1]
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return [f"{file} cannot be read ({error}). Copy it again from the model."]


def explain_foreign_checkpoint(folder: Path) -> str:
    """Return how to use a folder with another trainer's checkpoint; "" if it has none, or is also a model's folder."""
    if (folder / "config.json").is_file() and [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        return ""
    start = folder.parent if folder.name == "huggingface" else folder  # verl's subfolder with config and tokenizer
    for pattern, hint in FOREIGN_CHECKPOINTS.items():
        if found := [file for depth in range(3) for file in start.glob("*/" * depth + pattern)]:
            newest = max(found, key=lambda file: [*map(int, re.findall(r"\d+", str(file)))])
            return f"{folder} {hint.format(newest.parent)}."
    return ""


def _find_damage(folder: Path) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    for index in folder.glob("*.safetensors.index.json"):
        names = sorted(set(re.findall(r'"([^"]+\.safetensors)"', index.read_text())))
        yield from (f"{folder} lacks {name}. Download it again." for name in names if not (folder / name).is_file())
    for file in filter(Path.is_file, sorted(folder.iterdir())):
        with file.open("rb") as opened:
            if opened.read(40).startswith(b"version https://git-lfs"):
                yield f"{file} is a pointer of Git LFS. Run `git lfs pull` in its folder."
        if file.suffix == ".safetensors":
            try:
                safe_open(file, "numpy")  # reads the header, and compares it with the size
            except SafetensorError as error:
                yield f"{file} is truncated or damaged ({error}). Download it again."
