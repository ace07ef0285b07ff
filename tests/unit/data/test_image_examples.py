"""SFT and preference examples with images."""

import pickle

import pytest

from alphaapollo.batching.batch import Rows
from alphaapollo.data.images import find_placeholders
from tests.unit.data.images import make_test_image
from tests.unit.data.rows import Loader, trained

RED, BLUE = make_test_image(32, 48, seed=1), make_test_image(48, 16, seed=2)
ASK = {"role": "user", "content": "a <image> b"}
ANSWER = {"role": "assistant", "content": "c"}
NEXT = {"role": "user", "content": "<image>?"}
LAST = {"role": "assistant", "content": "an <image> tag"}
C, TAG = "c<|im_end|>", "an <image> tag<|im_end|>"


def row_of(*encoded_images, **columns):
    return {**columns, "images": [{"bytes": encoded_image} for encoded_image in encoded_images]}


@pytest.fixture(scope="module", params=["qwen3_vl", "internvl"])
def vision_renderer(request, make_vision_renderer):
    return make_vision_renderer(request.param)


@pytest.fixture
def vision(tmp_path, vision_renderer):
    return Loader(tmp_path, vision_renderer, ".parquet")


def check_images(vision, row, *encoded_images):
    prepare = vision.renderer.images.prepare
    assert [image.digest for image in row.images] == [prepare(one).digest for one in encoded_images]
    assert not any(row.action_mask[position] for position in find_placeholders(row.token_ids, row.images))


def test_a_chat_with_images_in_two_turns(vision):
    chat = [ASK, ANSWER, NEXT, LAST]
    first, second = vision.sft(row_of(RED, BLUE, messages=chat), row_of(BLUE, messages=chat[:2])).examples
    prompt = vision.renderer.encode_prompt([{**ASK, "images": [RED]}, ANSWER, {**NEXT, "images": [BLUE]}])
    assert list(first.token_ids[: len(prompt)]) == prompt
    check_images(vision, first, RED, BLUE)
    check_images(vision, second, BLUE)
    assert trained(vision.renderer, first) == [C, TAG]
    batch = Rows.from_rows([first, second])
    assert [len(images) for images in batch.images] == [2, 1] and isinstance(batch.images[0], tuple)
    assert [image.digest for image in pickle.loads(pickle.dumps(first)).images] == [one.digest for one in first.images]


def test_examples_with_images_are_dropped_but_not_truncated(vision):
    rows = [row_of(image, messages=[question, ANSWER]) for image, question in ((RED, ASK), (BLUE, NEXT))]
    short = max(len(row.token_ids) for row in vision.sft(*rows).examples) - 1
    loaded = vision.sft(*rows, max_length=short, truncation="drop")
    assert len(loaded.examples) == 1 and "1 of 2 examples" in loaded.notices[0]
    with pytest.raises(ValueError, match=f"images.*data.max_length={short}.*drop"):
        vision.sft(*rows, max_length=short, truncation="right")


def test_invalid_examples_are_reported_with_their_rows(vision, tmp_path, renderer):
    good = row_of(RED, messages=[ASK, ANSWER])
    broken = [row_of(RED[:2000], messages=[ASK, ANSWER]), row_of(messages=[ANSWER, ASK])]
    answer = row_of(RED, prompt=[ASK], response=[ANSWER, {**NEXT, "images": [{"bytes": BLUE}]}, LAST])
    placeholder = row_of(RED, messages=[ASK, {**ANSWER, "content": vision.renderer.images.placeholder}])
    for rows, facts in (
        (broken, "2 of 2 .*row 0: .*2000 .*trunc"),
        ([answer], "row 0: the answer to 'prompt' .*images"),
        ([good, placeholder], r"1 of 2 .*  row 1: .*\(1\) .*\(0\)"),
    ):
        with pytest.raises(ValueError, match=f"(?s){facts}"):
            vision.sft(*rows)
    with pytest.raises(ValueError, match=r"row 0: .*model does not read images"):
        Loader(tmp_path, renderer, ".parquet").sft(good)


def test_both_answers_of_a_pair_share_the_image(vision):
    first, second, chats = (
        vision.pairs(
            row_of(RED, prompt=[ASK], chosen="c", rejected="d"), row_of(BLUE, prompt=[NEXT], chosen="c", rejected="e")
        ).examples
        + vision.pairs(row_of(RED, chosen=[ASK, ANSWER], rejected=[ASK, LAST])).examples
    )
    for pair, encoded_image in ((first, RED), (second, BLUE), (chats, RED)):
        for row in pair.rows:
            check_images(vision, row, encoded_image)
    assert [trained(vision.renderer, row) for row in chats.rows] == [[C], [TAG]]


def test_unrelated_answers_keep_the_image_of_their_prompt(vision):
    other = make_test_image(32, 48, seed=3)  # the same tokens as RED
    rows = (
        row_of(RED, prompt=[ASK], response="good", label=True),
        row_of(other, prompt=[ASK], response="bad", label=False),
    )
    first, second = vision.labelled(*rows).examples
    check_images(vision, first.unrelated_answer, RED)
    check_images(vision, second.unrelated_answer, other)
    assert trained(vision.renderer, first.unrelated_answer) == ["bad<|im_end|>"]
