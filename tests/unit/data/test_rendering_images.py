"""Chats, observations and tool results with images are rendered and expanded like transformers' processors do."""

import io

import pytest
from PIL import Image

from alphaapollo.data.prompts import apply_length_limit
from alphaapollo.types import Prompt
from tests.unit.data.images import make_test_image
from tests.vision.models import FAMILIES

TEST_IMAGE, OTHER = make_test_image(32, 48), make_test_image(48, 16, seed=1)  # 2 x 3 and 3 x 1 features of Qwen-VL
QUESTION = {"role": "user", "content": "a <image> b", "images": [TEST_IMAGE]}
ANSWER = {"role": "assistant", "content": "c"}
NEXT = {"role": "user", "content": "d <image><image>", "images": [OTHER, TEST_IMAGE]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_ids_of_the_models_own_processor(make_vision_renderer, vision_folder, family):
    from transformers import AutoProcessor

    renderer, chat = make_vision_renderer(family), [QUESTION, ANSWER, NEXT]
    processor = AutoProcessor.from_pretrained(vision_folder(family))
    images = [Image.open(io.BytesIO(encoded_image)) for encoded_image in (TEST_IMAGE, OTHER, TEST_IMAGE)]
    expected = processor(text=[renderer.render_chat(chat)], images=images, return_tensors="np")["input_ids"][0].tolist()
    assert renderer.encode_prompt(chat) == expected
    answer = renderer.encode_prompt([ANSWER])
    assert [renderer.encode_prompt(one) for one in (chat, [ANSWER])] == [expected, answer]
    assert renderer.count_prompt_tokens([Prompt(0, "", chat), Prompt(1, "", [ANSWER])]) == [len(expected), len(answer)]
    prepared = renderer.prepare_images(chat)
    assert prepared[0] is prepared[2] and len(prepared) == 3
    assert sum(image.num_placeholders for image in prepared) == expected.count(renderer.images.placeholder_id)


def test_a_prompt_continues_with_an_observation(make_vision_renderer):
    renderer = make_vision_renderer()
    sampled = [*renderer.encode(["c"])[0], *renderer.turn_end_ids[:1]]
    ids = [*renderer.encode_prompt([QUESTION]), *sampled, *renderer.encode_observation([NEXT], sampled[-1])]
    assert ids == renderer.encode_prompt([QUESTION, ANSWER, NEXT])
    assert ids.count(renderer.images.placeholder_id) == 6 + 3 + 6
    assert renderer.prepare_images([NEXT])[1] is renderer.prepare_images([QUESTION])[0]


def test_placeholders_in_messages_are_text_and_refused_in_prompts_without_messages(make_vision_renderer):
    renderer = make_vision_renderer()
    text = "what is <|image_pad|>?"
    for call in (renderer.encode_prompt, renderer.encode_observation):
        assert renderer.images.placeholder_id not in call([{"role": "user", "content": text}])
    with pytest.raises(ValueError, match=r"<\|image_pad\|> \(1\) and images \(0\)"):
        renderer.encode_prompt(text)
    with pytest.raises(ValueError, match=r"row 7: .*\(1\) and images \(0\)"):
        renderer.count_prompt_tokens([Prompt(7, "", text)])


def test_a_template_must_show_images(make_vision_renderer):
    renderer = make_vision_renderer()
    renderer.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(ValueError, match=r"<\|image_pad\|> \(0\) and images \(1\)"):
        renderer.encode_prompt([QUESTION])


def test_a_text_model_rejects_images(renderer):
    for call in (renderer.encode_prompt, renderer.encode_observation, renderer.prepare_images):
        with pytest.raises(ValueError, match="the model does not read images"):
            call([QUESTION])
    marked = [{"role": "user", "content": "a <image> tag"}]
    assert "<image>" in renderer.tokenizer.decode(renderer.encode_prompt(marked))


PROMPTS = [Prompt(3, "", [QUESTION]), Prompt(5, "", [{"role": "user", "content": "x" * 60}])]


def test_the_length_limit_counts_images_without_decoding_them(make_vision_renderer, monkeypatch):
    renderer = make_vision_renderer()
    length = len(renderer.encode_prompt([QUESTION]))
    assert length == len(renderer.encode([renderer.render_chat([QUESTION])])[0]) + 5
    monkeypatch.setattr(renderer.images, "prepare", None)
    assert apply_length_limit(PROMPTS, renderer, length, "drop") == (PROMPTS[:1], 1)
    assert apply_length_limit(PROMPTS, renderer, length, "left") == (PROMPTS, 1)
    with pytest.raises(ValueError, match=f"1 of 1 .*images.*={length - 1}.*row 3 with {length}"):
        apply_length_limit(PROMPTS, renderer, length - 1, "error")


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_prompts_with_images_are_not_truncated(make_vision_renderer, truncation):
    with pytest.raises(ValueError, match=r"1 of 1 .*images.*row 3.*to drop \("):
        apply_length_limit(PROMPTS, make_vision_renderer(), 20, truncation)
