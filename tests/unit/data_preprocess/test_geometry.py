"""prepare_geometry: problems with pictures."""

import json
from pathlib import Path

from alphaapollo.data.images import read_picture_size
from alphaapollo.data.prompts import load_prompts
from examples.data_preprocess.prepare_geometry import INSTRUCTION
from tests.builders import write_rows
from tests.unit.data.pictures import make_gif, make_picture
from tests.unit.data_preprocess.scripts import check_counts, made, refused

PICTURE = make_picture(32, 48)


def test_rows_in_the_layout_of_geometry3k(tmp_path: Path):
    good = {"images": [{"bytes": PICTURE, "path": None}], "problem": "<image>Find $x$.", "answer": "2\\sqrt{3}"}
    damaged = [{"bytes": picture, "path": None} for picture in (PICTURE[:2000], PICTURE[:1900], make_gif(), b"x")]
    rows = [
        good,
        {**good, "images": good["images"] * 2, "problem": "Compare."},
        *({**good, "images": [picture]} for picture in damaged),
        {**good, "images": [{"bytes": None, "path": "missing.png"}]},
        {**good, "images": [{"bytes": None, "path": None}]},
        {**good, "images": []},
        {**good, "images": good["images"] * 2},
        {**good, "answer": None},
    ]
    written, said = made("prepare_geometry", tmp_path, write_rows(tmp_path / "geo_train.parquet", rows))
    unreadable = {"truncated": 2, "animated": 1, "unknown format": 1, "No such file": 1, "no bytes": 1}
    check_counts(said, 2, {**unreadable, "no pictures (column images)": 1, "marks <image>": 1, "no answer": 1})
    assert [row["prompt"][0]["content"] for row in written] == [
        f"<image>Find $x$. {INSTRUCTION}",
        f"<image><image>Compare. {INSTRUCTION}",
    ]
    first, second = load_prompts(str(tmp_path / "out" / "train.parquet"), "prompt")
    assert first.ground_truth == "2\\sqrt{3}" and first.data_source == "math/geo"
    assert first.content[0]["images"] == [PICTURE] and second.content[0]["images"] == [PICTURE] * 2
    assert "images" not in first.extra_info and json.loads(written[0]["metadata"]) == {}


def test_pictures_of_a_folder_are_shrunk(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(PICTURE)
    (tmp_path / "b.png").write_bytes(make_picture(8, 8))
    rows = [{"images": [name], "question": "What is x?", "answer": "7"} for name in ("a.png", "b.png")]
    source = write_rows(tmp_path / "x_train.jsonl", rows)
    arguments = ("prepare_geometry", tmp_path, source, "--max_pixels")
    assert "--max_pixels -1" in refused(*arguments, -1)
    written, _ = made(*arguments, 384)
    pictures = [row["images"][0]["bytes"] for row in written]
    assert read_picture_size(pictures[0]) == (24, 16)  # of 48 x 32
    assert pictures[1] == (tmp_path / "b.png").read_bytes()
