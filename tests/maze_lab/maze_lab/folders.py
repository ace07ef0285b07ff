from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.data.files import FolderReader


def find_mazes(folder: Path) -> list[Path]:
    """Return the folders with a file maze.txt: this one, or those in it."""
    files = sorted([folder / "maze.txt", *folder.glob("*/maze.txt")])
    return [file.parent for file in files if file.is_file()]


def list_files(maze: Path) -> list[Path]:
    return [maze / "maze.txt"]


def read_rows(mazes: Sequence[Path]) -> list[dict[str, Any]]:
    texts = [(maze / "maze.txt").read_text().strip() for maze in mazes]
    return [{"prompt": "Walk.", "data_source": "short_path", "ground_truth": str(len(text))} for text in texts]


MAZES = FolderReader(find_mazes, list_files, read_rows)
