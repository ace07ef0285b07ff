"""SFT and preference examples with images."""

import pickle

import pytest

from alphaapollo.batching.batch import Rows
from alphaapollo.config.schema import PairData, PreferenceData, SftData
from alphaapollo.data.examples import load_examples
from alphaapollo.data.images import find_placeholders, load_image_processor
from alphaapollo.data.preference_examples import load_preferences
from alphaapollo.data.rendering import Renderer, load_tokenizer
from tests.builders import write_rows
from tests.unit.data.images import make_test_image

RED, BLUE = make_test_image(32, 48, seed=1), make_test_image(48, 16, seed=2)
ASK = {"role": "user", "content": "a <image> b"}
ANSWER = {"role": "assistant", "content": "c"}
NEXT = {"role": "user", "content": "<image>?"}
LAST = {"role": "assistant", "content": "an <image> tag"}


@pytest.fixture(scope="module", params=["qwen3_vl", "internvl"])
def vision_renderer(request, vision_folder):
    folder = str(vision_folder(request.param))
    tokenizer = load_tokenizer(folder)
    return Renderer(tokenizer, images=load_image_processor(folder, tokenizer))


def write(tmp_path, rows):
    rows = [{**row, "images": [{"bytes": encoded_image} for encoded_image in row["images"]]} for row in rows]
    return write_rows(tmp_path / "data.parquet", rows)


def check_images(renderer, row, encoded_images):
    assert [image.digest for image in row.images] == [renderer.images.prepare(one).digest for one in encoded_images]
    assert not any(row.action_mask[position] for position in find_placeholders(row.token_ids, row.images))


def get_trained_text(renderer, row):
    tokens = [token for token, trained in zip(row.token_ids, row.action_mask, strict=True) if trained]
    return renderer.tokenizer.decode(tokens)


def test_a_chat_with_images_in_two_turns(tmp_path, vision_renderer):
    rows = [
        {"messages": [ASK, ANSWER, NEXT, LAST], "images": [RED, BLUE]},
        {"messages": [ASK, ANSWER], "images": [BLUE]},
    ]
    first, second = load_examples(write(tmp_path, rows), vision_renderer, SftData()).examples
    placed = [{**ASK, "images": [RED]}, ANSWER, {**NEXT, "images": [BLUE]}]
    prompt = vision_renderer.encode_prompt(placed)
    assert list(first.token_ids[: len(prompt)]) == prompt
    check_images(vision_renderer, first, [RED, BLUE])
    check_images(vision_renderer, second, [BLUE])
    assert get_trained_text(vision_renderer, first) == "c<|im_end|>an <image> tag<|im_end|>"
    batch = Rows.from_rows([first, second])
    assert [len(images) for images in batch.images] == [2, 1] and isinstance(batch.images[0], tuple)
    assert [image.digest for image in pickle.loads(pickle.dumps(first)).images] == [one.digest for one in first.images]


def test_a_prompt_with_an_image_and_a_response(tmp_path, vision_renderer):
    rows = [
        {"prompt": [ASK], "response": "c", "images": [RED]},
        {"prompt": [ANSWER | {"role": "user"}], "response": "d", "images": []},
    ]
    first, second = load_examples(write(tmp_path, rows), vision_renderer, SftData()).examples
    assert list(first.token_ids[: first.response_start]) == vision_renderer.encode_prompt([{**ASK, "images": [RED]}])
    check_images(vision_renderer, first, [RED])
    assert second.images == ()


def test_examples_with_images_are_dropped_but_not_truncated(tmp_path, vision_renderer):
    rows = [{"messages": [ASK, ANSWER], "images": [RED]}, {"messages": [NEXT, ANSWER], "images": [BLUE]}]
    path = write(tmp_path, rows)
    lengths = [len(row.token_ids) for row in load_examples(path, vision_renderer, SftData()).examples]
    short = max(lengths) - 1
    loaded = load_examples(path, vision_renderer, SftData(max_length=short, truncation="drop"))
    assert len(loaded.examples) == 1 and "1 of 2 examples" in loaded.notices[0]
    with pytest.raises(ValueError, match=f"images.*data.max_length={short}.*drop"):
        load_examples(path, vision_renderer, SftData(max_length=short, truncation="right"))


def test_invalid_examples_are_reported_with_their_rows(tmp_path, vision_renderer, renderer):
    good = {"messages": [ASK, ANSWER], "images": [RED]}
    placeholder = {**ANSWER, "content": vision_renderer.images.placeholder}
    answer = [ANSWER, {**NEXT, "images": [{"bytes": BLUE}]}, LAST]
    for rows, facts in (
        (
            [{**good, "images": [RED[:2000]]}, {"messages": [ANSWER, ASK], "images": []}],
            "2 of 2 .*row 0: .*2000 .*trunc",
        ),
        ([{"prompt": [ASK], "response": answer, "images": [RED]}], "row 0: the answer to 'prompt' .*images"),
        ([good, {"messages": [ASK, placeholder], "images": [RED]}], r"1 of 2 .*  row 1: .*\(1\) .*\(0\)"),
    ):
        with pytest.raises(ValueError, match=f"(?s){facts}"):
            load_examples(write(tmp_path, rows), vision_renderer, SftData())
    with pytest.raises(ValueError, match=r"row 0: .*model does not read images"):
        load_examples(write(tmp_path, [good]), renderer, SftData())


def test_both_answers_of_a_pair_share_the_image(tmp_path, vision_renderer):
    rows = [
        {"prompt": [ASK], "chosen": "c", "rejected": "d", "images": [RED]},
        {"prompt": [NEXT], "chosen": "c", "rejected": "e", "images": [BLUE]},
    ]
    pairs = load_preferences(write(tmp_path, rows), vision_renderer, PairData()).examples
    for pair, encoded_image in zip(pairs, (RED, BLUE), strict=True):
        for row in pair.rows:
            check_images(vision_renderer, row, [encoded_image])
    chats = [{"chosen": [ASK, ANSWER], "rejected": [ASK, LAST], "images": [RED]}]
    (pair,) = load_preferences(write(tmp_path, chats), vision_renderer, PairData()).examples
    assert [get_trained_text(vision_renderer, row) for row in pair.rows] == ["c<|im_end|>", "an <image> tag<|im_end|>"]
    check_images(vision_renderer, pair.rows[1], [RED])


def test_unrelated_answers_keep_the_image_of_their_prompt(tmp_path, vision_renderer):
    other = make_test_image(32, 48, seed=3)  # the same tokens as RED
    rows = [
        {"prompt": [ASK], "response": "good", "label": True, "images": [RED]},
        {"prompt": [ASK], "response": "bad", "label": False, "images": [other]},
    ]
    first, second = load_preferences(
        write(tmp_path, rows), vision_renderer, PreferenceData(), single_answers=True
    ).examples
    check_images(vision_renderer, first.unrelated_answer, [RED])
    check_images(vision_renderer, second.unrelated_answer, [other])
    assert get_trained_text(vision_renderer, first.unrelated_answer) == "bad<|im_end|>"


def test_marks_without_a_column_of_images_are_noticed(tmp_path, vision_renderer):
    path = write_rows(tmp_path / "data.parquet", [{"messages": [ASK, ANSWER]}])
    (notice,) = load_examples(path, vision_renderer, SftData()).notices
    assert notice.startswith("1 rows have <image>") and "column images" in notice
