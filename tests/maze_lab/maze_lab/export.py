import json
from pathlib import Path

from alphaapollo.runs.export_format import ExportFormat

FORMAT = ExportFormat(
    ("names", "shapes"),
    "write the names of the weights, or also their shapes",
    "maze_lab.export:check_model",
    "maze_lab.export:write_list",
)


def check_model(config: object) -> None:
    """Accept all models."""


def write_list(folder: Path, file: Path, kind: str, name: str, base_model: str) -> str:
    header = next(folder.glob("*.safetensors")).read_bytes()[8:].split(b"}}")[0] + b"}}"
    weights = {key: weight["shape"] for key, weight in json.loads(header).items() if key != "__metadata__"}
    file.write_text("\n".join(f"{key} {shape}" if kind == "shapes" else key for key, shape in weights.items()))
    return f"{len(weights)} weights of {name} are in the list."
