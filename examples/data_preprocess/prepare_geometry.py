r"""Prepare RL data from problems with pictures.

    python -m examples.data_preprocess.prepare_geometry --data_source hiyouga/geometry3k
    python -m examples.data_preprocess.prepare_geometry --data_source problems.jsonl --max_pixels 262144

Each row of the source has question, answer and `images`: a list of paths, bytes or {bytes, path}. `<image>` marks the
position of a picture in the question; without marks, the pictures come first. Writes <local_dir>/<split>.parquet with
the files of the pictures. Rows without pictures or with damaged ones are dropped and counted.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pyarrow as pa

from alphaapollo.data.files import DataRow
from alphaapollo.data.image_messages import PictureReader
from alphaapollo.data.images import encode_png, read_picture
from alphaapollo.runs.images import read_picture_bytes
from alphaapollo.types import IMAGE_MARK
from examples.data_preprocess.columns import Columns, Dropped, find_problem
from examples.data_preprocess.common import RL_SCHEMA, MakeRow, read_arguments, rl_row, run, write_splits

MAX_PIXELS = {"type": int, "default": 0, "help": "shrink pictures with more pixels (default: none)"}
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
SCHEMA = RL_SCHEMA.append(pa.field("images", pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))))


def geometry_row(data_source: str, split: str, columns: Columns, reader: PictureReader, max_pixels: int) -> MakeRow:
    """Function that makes an RL row with pictures. Raises Dropped if question, answer or a picture is missing."""

    def make(row: DataRow, index: int) -> DataRow:
        problem = find_problem({key: value for key, value in row.items() if key != "images"}, columns)
        if not isinstance(row.get("images"), list) or not row["images"]:
            raise Dropped("no pictures (column images)")
        pictures = [read_picture_file(value, reader, max_pixels) for value in row["images"]]
        question = problem.question
        if IMAGE_MARK not in question:
            question = IMAGE_MARK * len(pictures) + question
        if question.count(IMAGE_MARK) != len(pictures):
            raise Dropped(f"the question has more or fewer marks {IMAGE_MARK} than pictures")
        made = rl_row(problem, f"{question} {INSTRUCTION}", data_source, "math", split, index)
        return {**made, "images": [{"bytes": picture, "path": None} for picture in pictures]}

    return make


def read_picture_file(value: object, reader: PictureReader, max_pixels: int) -> bytes:
    """File of a picture: the original, or a smaller PNG if it has more than `max_pixels`. Raises Dropped if the picture
    cannot be read."""
    try:
        picture = reader.read(value)
        image = read_picture(picture)
    except ValueError as error:
        found = re.match(r"cannot read .*: (.*?)(\. | \()", str(error))  # without what differs between pictures
        raise Dropped(f"a picture cannot be read: {found[1] if found else 'it is no file and has no bytes'}") from error
    if not max_pixels or image.width * image.height <= max_pixels:
        return read_picture_bytes(picture)
    scale = math.sqrt(max_pixels / (image.width * image.height))
    return encode_png(image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale)))))


def main() -> None:
    args = read_arguments(__doc__, {"--max_pixels": MAX_PIXELS}, ("train", "validation", "test"))
    path = Path(args.data_source).expanduser()
    reader = PictureReader(path if path.is_dir() else path.parent)

    def prepare() -> None:
        if args.max_pixels < 0:
            raise ValueError(f"--max_pixels {args.max_pixels} must not be negative.")

        def make(data_source: str, split: str) -> MakeRow:
            return geometry_row(data_source, split, args.columns, reader, args.max_pixels)

        write_splits(args, make, "math", schema=SCHEMA)

    run(prepare)


if __name__ == "__main__":
    main()
