"""Folders of models and their checkpoints on disk. They outlive the server.

<root>/<model id>/   model.json  metrics.jsonl      a run for the viewer
    weights/NAME/           adapter with optimizer, of save_state (own_loop/adapters.py)
    sampler_weights/NAME/   adapter in peft's format, of save_weights_for_sampler
    snapshots/N/            the same, of a sampling client; the last ones only
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alphaapollo.plugins.tinker.json_requests import LoraConfig
from alphaapollo.plugins.tinker.wire import RequestError
from alphaapollo.utils.disk import read_small_file, replace_file, replace_folder
from alphaapollo.utils.json_types import JsonObject

KINDS = {"weights": "training", "sampler_weights": "sampler"}  # folder -> tinker's type
MODEL_ID = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
SCHEME, MODEL_FILE, CHECKPOINT_FILE, SNAPSHOTS = "tinker://", "model.json", "checkpoint.json", "snapshots"


class ModelRecord(msgspec.Struct):
    """Content of model.json."""

    model_id: str
    owner: str
    base_model: str
    lora: LoraConfig
    created: float


class CheckpointRecord(msgspec.Struct):
    """Content of checkpoint.json. A folder without this file is not complete."""

    step: int
    created: float
    size: int  # bytes
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Checkpoint:
    model: ModelRecord
    folder: Path
    record: CheckpointRecord

    @property
    def kind(self) -> str:
        return self.folder.parent.name

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model.model_id}/{self.kind}/{self.folder.name}"

    def describe(self) -> JsonObject:
        """Return the checkpoint as the client reads it."""
        expires = self.record.expires_at
        return {
            "checkpoint_id": f"{self.kind}/{self.folder.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": format_time(self.record.created),
            "tinker_path": self.path,
            "size_bytes": self.record.size,
            "public": False,
            "user_metadata": self.record.user_metadata,
            "expires_at": None if expires is None else format_time(expires),
        }


class CheckpointStore:
    """Models and checkpoints of all owners. max_bytes: of one owner's checkpoints."""

    def __init__(self, root: Path, max_bytes: int):
        self.root, self.max_bytes = root, max_bytes
        self._in_use, self._removed = Counter[Path](), set[Path]()
        for file in root.glob(f"*/{MODEL_FILE}"):  # finish or remove what a server that was killed has left
            for folder in file.parent.glob("*/.writing_*"):
                if (folder / CHECKPOINT_FILE).exists():
                    replace_folder(folder, _get_final(folder))
            for folder in [file.parent / SNAPSHOTS, *file.parent.glob("*/.*_*")]:
                shutil.rmtree(folder, ignore_errors=True)

    # Folders of adapters that engines may load again while requests run are removed after the last request.

    def use(self, folder: Path) -> None:
        self._in_use[folder] += 1

    def release(self, folder: Path) -> None:
        self._in_use -= Counter([folder])
        if folder in self._removed and folder not in self._in_use:
            self._removed.discard(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint or a snapshot, now or when the last request that uses it ends."""
        if folder in self._in_use:
            self._removed.add(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def exists(self, folder: Path) -> bool:
        return folder not in self._removed and folder.is_dir()

    # Models and checkpoints.

    def get_folder(self, model_id: str) -> Path:
        return self.root / model_id

    def add_model(self, model: ModelRecord) -> None:
        folder = self.get_folder(model.model_id)
        folder.mkdir(parents=True)
        replace_file(folder / MODEL_FILE, [msgspec.json.encode(model)])

    def list_models(self, owner: str) -> list[ModelRecord]:
        """Return an owner's models, newest first."""
        models = [self._read_model(file.parent.name) for file in self.root.glob(f"*/{MODEL_FILE}")]
        return sorted((one for one in models if one and one.owner == owner), key=lambda one: -one.created)

    def find_model(self, model_id: str, owner: str) -> ModelRecord:
        """Raises RequestError if the owner has no such model."""
        model = self._read_model(model_id) if MODEL_ID.fullmatch(model_id) else None
        if model is None or model.owner != owner:
            text = f"there is no model {model_id!r} of this API key. Call list_training_runs() to see your models."
            raise RequestError(text, status=404)
        return model

    def list_checkpoints(self, model: ModelRecord) -> list[Checkpoint]:
        """Return a model's checkpoints, oldest first. Expired ones are removed."""
        folders = [one for kind in KINDS for one in self.get_folder(model.model_id).glob(f"{kind}/[!.]*")]
        found = [one for folder in folders if (one := self._read_checkpoint(model, folder)) is not None]
        return sorted(found, key=lambda one: one.record.created)

    def find(self, path: str, owner: str) -> Checkpoint:
        """Return the checkpoint with the path tinker://MODEL/KIND/NAME. Raises RequestError if it does not exist."""
        model_id, _, name = path.removeprefix(SCHEME).partition("/")
        for checkpoint in self.list_checkpoints(self.find_model(model_id, owner)):
            if name == f"{checkpoint.kind}/{checkpoint.folder.name}":
                return checkpoint
        text = f"there is no checkpoint {path}. Call list_checkpoints(model_id) to see those of a model."
        raise RequestError(text, status=404)

    def reserve_folder(self, model: ModelRecord, kind: str, name: str, overwrites: bool) -> Path:
        """Return the folder of a new checkpoint. Raises RequestError if it exists, or if there is no space left."""
        folder = self.get_folder(model.model_id) / kind / name
        if self._read_checkpoint(model, folder) and not overwrites:
            raise RequestError(f"the checkpoint {kind}/{name} exists. Use another name, or overwrite=True.")
        models = self.list_models(model.owner)
        used = sum(one.record.size for owned in models for one in self.list_checkpoints(owned))
        if used >= self.max_bytes:
            raise RequestError(
                f"the checkpoints of this API key have {used / 2**30:.2f} GiB, and the server's limit is "
                f"{self.max_bytes / 2**30:.2f} GiB. Delete some with delete_checkpoint."
            )
        return folder

    def complete(
        self, model: ModelRecord, written: Path, step: int, ttl: int | None, metadata: dict[str, str] | None
    ) -> Checkpoint:
        """Complete a checkpoint whose files are written, and put it in the place of an earlier one. ttl: seconds; None:
        it does not expire."""
        now, size = time.time(), sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        record = CheckpointRecord(step, now, size, None if ttl is None else now + ttl, metadata)
        record.size += len(msgspec.json.encode(record))
        self.write_record(Checkpoint(model, written, record))
        if (folder := _get_final(written)) != written:
            replace_folder(written, folder)
        return Checkpoint(model, folder, record)

    def write_record(self, checkpoint: Checkpoint) -> None:
        replace_file(checkpoint.folder / CHECKPOINT_FILE, [msgspec.json.encode(checkpoint.record)])

    def _read_model(self, model_id: str) -> ModelRecord | None:
        with suppress(OSError, ValueError):  # ValueError: of another version
            return msgspec.json.decode(read_small_file(self.get_folder(model_id) / MODEL_FILE), type=ModelRecord)
        return None

    def _read_checkpoint(self, model: ModelRecord, folder: Path) -> Checkpoint | None:
        with suppress(OSError, ValueError):
            record = msgspec.json.decode(read_small_file(folder / CHECKPOINT_FILE), type=CheckpointRecord)
            if record.expires_at is not None and record.expires_at < time.time():
                self.remove(folder)
            elif folder not in self._removed:
                return Checkpoint(model, folder, record)
        return None


def get_partial(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return folder.with_name(f".writing_{folder.name}")


def _get_final(written: Path) -> Path:
    return written.with_name(written.name.removeprefix(".writing_"))


def format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
