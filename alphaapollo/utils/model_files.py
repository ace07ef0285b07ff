"""Problems of a model's folder that its files show without being loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FOREIGN_CHECKPOINTS = {  # file of another trainer: what to do with its folder
    "model_world_size_*_rank_*.pt": "is of verl. Set the folder with its shards, {}",
    "checkpoint-*/config.json": "is a run of transformers' Trainer. Set its last checkpoint, {}",
    "zero_to_fp32.py": "is of DeepSpeed. First convert it: python {0}/zero_to_fp32.py {0} {0} --safe_serialization",
    "*.distcp": "has shards of torch.distributed.checkpoint in {}. First convert them with the project that wrote them "
    "(accelerate merge-weights, verl.model_merger, ...)",
}


def explain_model_folder(path: str | Path) -> str:
    """Return an error message if a folder is no complete model: another trainer's checkpoint, without config.json, or
    with missing or damaged files. Else ""."""
    folder = Path(path).expanduser()
    if (foreign := explain_foreign_checkpoint(folder)) or (folder / "config.json").is_file():
        return foreign or next(_find_damage(folder), "")
    return f"{path} has no config.json. Set the folder of a Hugging Face model, or a hub id."


def explain_foreign_checkpoint(folder: Path) -> str:
    """Return how to use a folder that another trainer wrote and that is not also the folder of a model. Else ""."""
    if (folder / "config.json").is_file() and [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        return ""
    start = folder.parent if folder.name == "huggingface" else folder  # verl's name for files without weights
    for pattern, hint in FOREIGN_CHECKPOINTS.items():
        if found := [file for depth in range(4) for file in start.glob("*/" * depth + pattern)]:
            last = max(found, key=lambda file: [*map(int, re.findall(r"\d+", str(file)))])
            return f"{folder} {hint.format(last.parent)}."
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
