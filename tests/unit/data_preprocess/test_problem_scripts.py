"""The scripts that write problems: prepare, _informal_math, _validation, _custom, _single_question, _search and
_geometry."""

import json
import re

import pytest

from alphaapollo.data.prompts import load_prompts
from examples.data_preprocess.prepare_geometry import INSTRUCTION
from tests.builders import write_rows
from tests.processes import run_python
from tests.unit.data.images import make_gif, make_test_image
from tests.unit.data_preprocess.scripts import DATA, DIRTY, GOOD, REASONS, ROOT, check_counts, made, refused

ONE, SIX = {"question": "q", "answer": "1"}, [GOOD] * 6
IMAGE = make_test_image(32, 48)


def truths(rows):
    return [row["reward_model"]["ground_truth"] for row in rows]


def test_gsm8k_as_a_command(tmp_path):
    words = ["-m", "examples.data_preprocess.prepare_informal_math", "--val_size", "2"]
    done = run_python(*words, "--data_source", str(DATA / "gsm8k_train.jsonl"), "--local_dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "(data_source gsm8k): 8 rows kept, 0 dropped" in done.stdout
    train, val = (load_prompts(str(tmp_path / f"{split}.parquet"), "prompt") for split in ("train", "val"))
    assert (len(train), len(val), train[0].ground_truth) == (8, 2, "72")
    assert train[0].content[0]["content"].startswith("Natalia sold clips")
    assert train[0].env_kwargs["ground_truth"] == train[0].extra_info["ground_truth"] == "72"
    assert not {p.extra_info["question"] for p in train} & {p.extra_info["question"] for p in val}


@pytest.mark.parametrize(
    ("script", "source", "args", "facts"),  # the error is one line with these facts
    [
        ("informal_math", [{"x": 1}], [], ["train", "0 rows kept, 1 dropped"]),
        ("informal_math", b"", [], ["x.jsonl", "no rows"]),
        ("informal_math", [ONE], ["--answer_key", "no"], ["--answer_key no", "question, answer"]),
        ("informal_math", [ONE], ["--val_size", 5], ["train", "only 1 rows"]),
        ("informal_math", [ONE], ["--val_size", -5], ["--val_size -5", "negative"]),
        ("informal_math", [ONE], ["--local_dir", "/dev/null"], ["/dev/null", "cannot be written"]),
        ("", None, ["--train_data_size", 0], ["train is 0"]),
        ("custom", SIX, ["--sample_indices", "0-99999999999"], ["0 to 5"]),
        ("custom", SIX, ["--sample_indices", "3-1"], ["not an index or range"]),
        ("validation", None, ["--data_sources", DATA / "gsm8k_test.jsonl", "--repeat", 0], ["give one number"]),
        ("single_question", None, ["--question", "q", "--ground_truth", 4, "--data_source", "poems"], ["poems"]),
        ("search", [{"question": "What is black?", "answer": "coffee"}], [], ["no usable row"]),
        ("geometry", [{"images": ["a.png"], **ONE}], ["--max_pixels", -1], ["--max_pixels -1"]),
    ],
)
def test_unusable_input_is_an_error(tmp_path, script, source, args, facts):
    if isinstance(source, bytes):
        (tmp_path / "x.jsonl").write_bytes(source)
        source = tmp_path / "x.jsonl"
    error = refused(f"prepare_{script}".rstrip("_"), tmp_path, source, *args)
    assert [fact for fact in facts if fact not in error] == [], error


def test_validation_repeats_each_source_and_writes_what_came_from_where(tmp_path):
    one = write_rows(tmp_path / "aime_test.jsonl", [GOOD, {"problem": "2+2?", "solution": r"\boxed{4}"}])
    two = write_rows(tmp_path / "other_test.jsonl", [*DIRTY, GOOD])
    rows, said = made("prepare_validation", tmp_path, None, "--data_sources", one, two, "--repeat", 2, 3, split="test")
    assert [(row["data_source"], row["extra_info"]["index"]) for row in rows] == (
        [("aime", 0)] * 2 + [("aime", 1)] * 2 + [("math/other", index) for index in (6, 7, 8) for _ in range(3)]
    )
    assert "(aime, math/other)" in said
    check_counts(said, 13, REASONS)
    info = json.loads((tmp_path / "out" / "test_info.json").read_text())
    assert (info["split"], info["rows"]) == ("test", 13)
    counts = {"problems": 2, "repeat": 2, "rows": 4, "dropped": {}}
    assert info["sources"][0] == {"data_source": "aime", "source": str(one), **counts}
    assert sum(info["sources"][1]["dropped"].values()) == 6


def test_custom_takes_the_chosen_rows(tmp_path):
    source = [{**GOOD, "level": index} for index in range(6)]
    rows, _ = made("prepare_custom", tmp_path, source, "--sample_indices", "4,0-1")
    found = [(row["extra_info"]["index"], json.loads(row["metadata"])["level"]) for row in rows]
    assert found == [(4, 4), (0, 0), (1, 1)]
    rows, said = made("prepare_custom", tmp_path, [GOOD, *DIRTY], "--sample_indices", "0-5")
    check_counts(said, 1, {name: count for name, count in REASONS.items() if name != "not valid Unicode"})


def test_search_rows_and_corpus(tmp_path):
    tea, milk = {"title": ["Tea"], "sentences": [["Tea is ", "brown."]]}, {"title": ["Milk"], "sentences": [["White."]]}
    both = {"title": ["Tea", "Milk"], "sentences": [["Tea is ", "brown."], ["White."]]}
    rows = [
        {"question": "What is brown?", "answer": "tea", "context": tea, "level": "easy"},
        {"question": "Is milk white?", "answer": "yes", "context": both},
        {"question": "What is white?", "context": milk},
        {"question": "What is black?", "answer": "coffee"},
        {"question": "What is black?", "answer": "coffee", "context": {"title": ["\ud83d"], "sentences": [["x"]]}},
    ]
    written, said = made("prepare_search", tmp_path, write_rows(tmp_path / "hotpot_train.jsonl", rows))
    check_counts(said, 2, {"no answer (": 1, "no passages (column context": 1, "not valid Unicode": 1})
    assert truths(written) == ["tea", "yes"]
    assert {row["data_source"] for row in written} == {"hotpot"}
    assert written[0]["env_kwargs"]["question"] == "What is brown?"
    assert json.loads(written[0]["metadata"]) == {"level": "easy"}
    lines = (tmp_path / "out" / "corpus" / "passages.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"contents": "Tea\nTea is brown."}, {"contents": "Milk\nWhite."}]
    assert "2 passages" in said


def test_geometry_rows_in_the_layout_of_geometry3k(tmp_path):
    good = {"images": [{"bytes": IMAGE, "path": None}], "problem": "<image>Find $x$.", "answer": "2\\sqrt{3}"}
    damaged = [{"bytes": encoded, "path": None} for encoded in (IMAGE[:2000], IMAGE[:1900], make_gif(), b"x", None)]
    rows = [
        good,
        {**good, "images": good["images"] * 2, "problem": "Compare."},
        *({**good, "images": [image]} for image in (*damaged, {"bytes": None, "path": "missing.png"})),
        {**good, "images": []},
        {**good, "images": good["images"] * 2},
        {**good, "answer": None},
    ]
    written, said = made("prepare_geometry", tmp_path, write_rows(tmp_path / "geo_train.parquet", rows))
    unreadable = {"truncated": 2, "animated": 1, "unknown format": 1, "No such file": 1, "no bytes": 1}
    check_counts(said, 2, {**unreadable, "no images (column images)": 1, "marks <image>": 1, "no answer": 1})
    asked = [row["prompt"][0]["content"] for row in written]
    assert asked == [f"<image>Find $x$. {INSTRUCTION}", f"<image><image>Compare. {INSTRUCTION}"]
    first, second = load_prompts(str(tmp_path / "out" / "train.parquet"), "prompt")
    assert first.ground_truth == "2\\sqrt{3}" and first.data_source == "math/geo"
    assert first.content[0]["images"] == [IMAGE] and second.content[0]["images"] == [IMAGE] * 2
    assert "images" not in first.extra_info and json.loads(written[0]["metadata"]) == {}


def test_the_page_lists_all_scripts():
    page = ROOT / "docs" / "data.md"
    if not page.exists():
        pytest.skip("an installed package has no docs folder")
    scripts = {path.stem for path in (ROOT / "examples" / "data_preprocess").glob("prepare*.py")}
    assert set(re.findall(r"^\| `(prepare\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)) == scripts
