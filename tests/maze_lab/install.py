"""Install the example package maze-lab, whose files docs/plugins.md shows, into a folder."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

SOURCE = Path(__file__).parent


def install_maze_lab(site: Path) -> Path:
    """Copy the package and write its dist-info, as pip does. Returns the folder, for PYTHONPATH."""
    shutil.copytree(SOURCE / "maze_lab", site / "maze_lab", ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    add_dist_info(site, project["name"], project["version"], project["entry-points"])
    return site


def add_dist_info(site: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the metadata of a package: {group: {name: object}} of its entry points."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sections = (
        [f"[{group}]", *(f"{key} = {value}" for key, value in items.items())] for group, items in groups.items()
    )
    (folder / "entry_points.txt").write_text("\n".join(line for lines in sections for line in lines) + "\n")
