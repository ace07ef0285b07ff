"""Folders of models and their checkpoints on disk. They outlive the server.

<root>/<model id>/   model.json  metrics.jsonl      a run for the viewer
    weights/NAME/           adapter with optimizer, of save_state (session/adapters.py)
    sampler_weights/NAME/   adapter in peft's format, of save_weights_for_sampler
    snapshots/N/            the same, of a sampling client; the last ones only
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from alphaapollo.tinker_server.json_requests import LoraConfig
from alphaapollo.tinker_server.wire import RequestError
from alphaapollo.utils.disk import read_small_file, replace_file

KINDS = {"weights": "training", "sampler_weights": "sampler"}  # folder -> tinker's type
SCHEME, MODEL_FILE, CHECKPOINT_FILE, SNAPSHOTS = "tinker://", "model.json", "checkpoint.json", "snapshots"


class ModelRecord(msgspec.Struct):
    """Content of model.json."""

    model_id: str
    owner: str
    base_model: str
    lora: LoraConfig
    created: float


class CheckpointRecord(msgspec.Struct):
    """Content of checkpoint.json. Without this file, the checkpoint has the defaults."""

    step: int = 0
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

    def describe(self) -> dict[str, Any]:
        """Return the checkpoint as the client reads it."""
        expires = self.record.expires_at
        return {
            "checkpoint_id": f"{self.kind}/{self.folder.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": format_time(self.folder.stat().st_mtime),
            "tinker_path": self.path,
            "size_bytes": count_bytes(self.folder),
            "public": False,
            "user_metadata": self.record.user_metadata,
            "expires_at": None if expires is None else format_time(expires),
        }


class CheckpointStore:
    """Models and checkpoints of all owners. max_bytes: of one owner's checkpoints."""

    def __init__(self, root: Path, max_bytes: int):
        self.root, self.max_bytes = root, max_bytes
        for folder in [*root.glob(f"*/{SNAPSHOTS}"), *root.glob("*/*/.writing_*")]:  # of a server that was killed
            shutil.rmtree(folder, ignore_errors=True)

    def get_folder(self, model_id: str) -> Path:
        return self.root / model_id

    def add_model(self, model: ModelRecord) -> None:
        folder = self.get_folder(model.model_id)
        folder.mkdir(parents=True)
        replace_file(folder / MODEL_FILE, [msgspec.json.encode(model)])

    def list_models(self, owner: str) -> list[ModelRecord]:
        """Return an owner's models, newest first."""
        models = [self._read_model(file) for file in self.root.glob(f"*/{MODEL_FILE}")]
        return sorted((one for one in models if one.owner == owner), key=lambda one: -one.created)

    def find_model(self, model_id: str, owner: str) -> ModelRecord:
        """Raises RequestError if the owner has no such model."""
        for model in self.list_models(owner):
            if model.model_id == model_id:
                return model
        raise RequestError(f"there is no model {model_id!r} of this API key. list_training_runs has them.", status=404)

    def list_checkpoints(self, model: ModelRecord) -> list[Checkpoint]:
        """Return a model's checkpoints, oldest first. Expired ones are removed."""
        folders = [one for kind in KINDS for one in self.get_folder(model.model_id).glob(f"{kind}/[!.]*")]
        found = [self._read_checkpoint(model, one) for one in sorted(folders, key=lambda one: one.stat().st_mtime)]
        return [one for one in found if one is not None]

    def find(self, path: str, owner: str) -> Checkpoint:
        """Return the checkpoint with the path tinker://MODEL/KIND/NAME. Raises RequestError if it does not exist."""
        model_id, _, name = path.removeprefix(SCHEME).partition("/")
        for checkpoint in self.list_checkpoints(self.find_model(model_id, owner)):
            if name == f"{checkpoint.kind}/{checkpoint.folder.name}":
                return checkpoint
        raise RequestError(f"there is no checkpoint {path}. list_checkpoints has those of a model.", status=404)

    def begin(self, model: ModelRecord, kind: str, name: str, overwrites: bool) -> Path:
        """Return the folder of a new checkpoint. Raises RequestError if it exists, or if there is no space left."""
        folder = self.get_folder(model.model_id) / kind / name
        if folder.exists() and not overwrites:
            raise RequestError(f"the checkpoint {kind}/{name} exists. Use another name, or overwrite=True.")
        used = sum(count_bytes(self.get_folder(one.model_id)) for one in self.list_models(model.owner))
        if used >= self.max_bytes:
            raise RequestError(
                f"the checkpoints of this API key have {used / 2**30:.2f} GiB, and the server's limit is "
                f"{self.max_bytes / 2**30:.2f} GiB. Delete some with delete_checkpoint."
            )
        return folder

    def complete(self, model: ModelRecord, folder: Path, record: CheckpointRecord) -> Checkpoint:
        """Write the record of a checkpoint whose files are complete."""
        replace_file(folder / CHECKPOINT_FILE, [msgspec.json.encode(record)])
        return Checkpoint(model, folder, record)

    def _read_model(self, file: Path) -> ModelRecord:
        return msgspec.json.decode(read_small_file(file), type=ModelRecord)

    def _read_checkpoint(self, model: ModelRecord, folder: Path) -> Checkpoint | None:
        file, record = folder / CHECKPOINT_FILE, CheckpointRecord()
        if file.is_file():
            record = msgspec.json.decode(read_small_file(file), type=CheckpointRecord)
        if record.expires_at is not None and record.expires_at < time.time():
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return Checkpoint(model, folder, record)


def count_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in _list_files(folder))


def _list_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
