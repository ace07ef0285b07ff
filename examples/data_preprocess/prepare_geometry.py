r"""Prepare RL data from problems with images.

    python -m examples.data_preprocess.prepare_geometry --data_source hiyouga/geometry3k
    python -m examples.data_preprocess.prepare_geometry --data_source problems.jsonl --max_pixels 262144

Each row of the source has question, answer and `images`: a list of paths, bytes or {bytes, path}. `<image>` marks the
position of an image in the question; without marks, the images come first. Writes <local_dir>/<split>.parquet with
the files of the images. Rows without images or with damaged ones are dropped and counted.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import pyarrow as pa

from alphaapollo.data.files import DataRow
from alphaapollo.data.image_messages import ImageReader
from alphaapollo.data.images import encode_png, read_image
from alphaapollo.runs.rollout_log import read_image_bytes
from alphaapollo.types import IMAGE_MARK
from examples.data_preprocess.columns import Dropped, find_problem
from examples.data_preprocess.common import RL_SCHEMA, MakeRow, Script, rl_row

MAX_PIXELS = {"type": int, "default": 0, "help": "shrink images with more pixels (default: none)"}
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
SCHEMA = RL_SCHEMA.append(pa.field("images", pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))))


def geometry_row(args: argparse.Namespace, data_source: str, split: str) -> MakeRow:
    """Function that makes an RL row with images. Raises Dropped if question, answer or an image is missing."""
    if args.max_pixels < 0:
        raise ValueError(f"--max_pixels {args.max_pixels} must not be negative.")
    path = Path(args.data_source).expanduser()
    reader = ImageReader(path if path.is_dir() else path.parent)

    def make(row: DataRow, index: int) -> DataRow:
        problem = find_problem({key: value for key, value in row.items() if key != "images"}, args.columns)
        if not isinstance(row.get("images"), list) or not row["images"]:
            raise Dropped("no images (column images)")
        encoded_images = [read_image_file(value, reader, args.max_pixels) for value in row["images"]]
        question = problem.question
        if IMAGE_MARK not in question:
            question = IMAGE_MARK * len(encoded_images) + question
        if question.count(IMAGE_MARK) != len(encoded_images):
            raise Dropped(f"the question has more or fewer marks {IMAGE_MARK} than images")
        made = rl_row(problem, f"{question} {INSTRUCTION}", data_source, "math", split, index)
        return {**made, "images": [{"bytes": encoded_image, "path": None} for encoded_image in encoded_images]}

    return make


def read_image_file(value: object, reader: ImageReader, max_pixels: int) -> bytes:
    """File of an image: the original, or a smaller PNG if it has more than `max_pixels`. Raises Dropped if the image
    cannot be read."""
    try:
        encoded_image = reader.read(value)
        image = read_image(encoded_image)
    except ValueError as error:
        found = re.match(r"cannot read .*: (.*?)(\. | \()", str(error))  # without what differs between images
        raise Dropped(f"an image cannot be read: {found[1] if found else 'it is no file and has no bytes'}") from error
    if not max_pixels or image.width * image.height <= max_pixels:
        return read_image_bytes(encoded_image)
    scale = math.sqrt(max_pixels / (image.width * image.height))
    return encode_png(image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale)))))


main = Script(__doc__, geometry_row, {"--max_pixels": MAX_PIXELS}, ("train", "validation", "test"), schema=SCHEMA).main

if __name__ == "__main__":
    main()
