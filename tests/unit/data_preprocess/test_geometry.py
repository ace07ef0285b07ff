"""prepare_geometry: problems with images."""

import json
from pathlib import Path

from alphaapollo.data.images import read_image_size
from alphaapollo.data.prompts import load_prompts
from examples.data_preprocess.prepare_geometry import INSTRUCTION
from tests.builders import write_rows
from tests.unit.data.images import make_gif, make_test_image
from tests.unit.data_preprocess.scripts import check_counts, made, refused

TEST_IMAGE = make_test_image(32, 48)


def test_rows_in_the_layout_of_geometry3k(tmp_path: Path):
    good = {"images": [{"bytes": TEST_IMAGE, "path": None}], "problem": "<image>Find $x$.", "answer": "2\\sqrt{3}"}
    damaged = [
        {"bytes": encoded_image, "path": None}
        for encoded_image in (TEST_IMAGE[:2000], TEST_IMAGE[:1900], make_gif(), b"x")
    ]
    rows = [
        good,
        {**good, "images": good["images"] * 2, "problem": "Compare."},
        *({**good, "images": [encoded_image]} for encoded_image in damaged),
        {**good, "images": [{"bytes": None, "path": "missing.png"}]},
        {**good, "images": [{"bytes": None, "path": None}]},
        {**good, "images": []},
        {**good, "images": good["images"] * 2},
        {**good, "answer": None},
    ]
    written, said = made("prepare_geometry", tmp_path, write_rows(tmp_path / "geo_train.parquet", rows))
    unreadable = {"truncated": 2, "animated": 1, "unknown format": 1, "No such file": 1, "no bytes": 1}
    check_counts(said, 2, {**unreadable, "no images (column images)": 1, "marks <image>": 1, "no answer": 1})
    assert [row["prompt"][0]["content"] for row in written] == [
        f"<image>Find $x$. {INSTRUCTION}",
        f"<image><image>Compare. {INSTRUCTION}",
    ]
    first, second = load_prompts(str(tmp_path / "out" / "train.parquet"), "prompt")
    assert first.ground_truth == "2\\sqrt{3}" and first.data_source == "math/geo"
    assert first.content[0]["images"] == [TEST_IMAGE] and second.content[0]["images"] == [TEST_IMAGE] * 2
    assert "images" not in first.extra_info and json.loads(written[0]["metadata"]) == {}


def test_images_of_a_folder_are_shrunk(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(TEST_IMAGE)
    (tmp_path / "b.png").write_bytes(make_test_image(8, 8))
    rows = [{"images": [name], "question": "What is x?", "answer": "7"} for name in ("a.png", "b.png")]
    source = write_rows(tmp_path / "x_train.jsonl", rows)
    arguments = ("prepare_geometry", tmp_path, source, "--max_pixels")
    assert "--max_pixels -1" in refused(*arguments, -1)
    written, _ = made(*arguments, 384)
    encoded_images = [row["images"][0]["bytes"] for row in written]
    assert read_image_size(encoded_images[0]) == (24, 16)  # of 48 x 32
    assert encoded_images[1] == (tmp_path / "b.png").read_bytes()
