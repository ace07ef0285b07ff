"""Images are read, counted and prepared like transformers' processors do, and damaged ones have one clear error."""

import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from alphaapollo.data.images import (
    find_placeholders,
    load_image_processor,
    read_image,
    read_image_size,
)
from alphaapollo.data.vocabulary import load_tokenizer
from tests.unit.data.images import encode, make_gif, make_rotated_photo, make_test_image
from tests.vision.models import FAMILIES


def make_palette():
    image = Image.new("P", (1, 1), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    return image


PIXELS = [  # image, options of its file, RGB value of its first pixel
    (Image.new("RGB", (1, 1), (1, 2, 3)), {}, (1, 2, 3)),
    (Image.new("1", (1, 1), 1), {}, (255, 255, 255)),
    (Image.new("CMYK", (8, 8), (0, 0, 0, 255)), {"file_format": "TIFF"}, (0, 0, 0)),
    (Image.fromarray(np.array([[0xFEFF]], dtype=np.uint16)), {}, (254, 254, 254)),  # Pillow alone gives 255
    (make_palette(), {"transparency": 1}, (255, 255, 255)),
    (Image.new("RGBA", (1, 1), (0, 0, 0, 0)), {}, (255, 255, 255)),  # transparent on white
    (Image.new("RGBA", (1, 1), (5, 6, 7, 255)), {}, (5, 6, 7)),
]


def test_every_pixel_format_becomes_rgb():
    for image, options, pixel in PIXELS:
        assert read_image(encode(image, **options)).getpixel((0, 0)) == pixel


def test_photos_are_rotated_as_their_exif_data_says_and_a_preview_is_no_animation():
    photo = make_rotated_photo(width=48, height=16)
    assert read_image_size(photo) == read_image(photo).size == (16, 48)
    images = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    assert read_image(encode(images[0], "MPO", save_all=True, append_images=images[1:])).size == (8, 8)


BAD = {
    "a text": (b"no image", "unknown format"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "unknown format"),
    "empty": (b"", "unknown format"),
    "truncated": (make_test_image()[:2000], "truncated"),
    "truncated in the header": (make_test_image()[:20], "image of 20 bytes"),
    "animated": (make_gif(2), r"animated \(2 frames\)"),
    "missing": ("/nowhere/x.png", "/nowhere/x.png: No such file"),
    "a folder": ("/tmp", "/tmp: it is a pipe, a device or a folder"),
    "a device": ("/dev/zero", "/dev/zero: it is a pipe, a device or a folder"),
    "float": (encode(Image.new("F", (4, 4)), "TIFF"), "32 bits"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_has_one_clear_error(name):
    encoded_image, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        read_image(encoded_image)


@pytest.mark.parametrize("side", [9_000, 10_000, 20_000])
def test_a_huge_image_is_rejected_from_its_header(side):
    encoded_image = encode(Image.new("1", (side, side)), compress_level=1)
    for read in (read_image, read_image_size):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=r"more than 67108864 pixels|exceeds limit"):
            warnings.simplefilter("error")  # Pillow's DecompressionBombWarning
            read(encoded_image)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, vision_folder):
    return request.param, vision_folder(request.param)


def load(folder):
    tokenizer = load_tokenizer(str(folder))
    processor = load_image_processor(str(folder), tokenizer)
    assert processor is not None
    return processor, tokenizer


@pytest.fixture(scope="module")
def processor(vision_folder):
    return load(vision_folder("qwen3_vl"))[0]


def test_tokens_and_pixels_equal_those_of_transformers(family):
    from transformers import AutoImageProcessor, AutoProcessor

    processor, tokenizer = load(family[1])
    plain = AutoProcessor.from_pretrained(family[1])
    plain.image_processor = AutoImageProcessor.from_pretrained(family[1], backend="pil")
    sizes = ((32, 48), (100, 40), (1, 1), (16, 16))
    encoded_images = [make_test_image(*size, seed=seed) for seed, size in enumerate(sizes)]
    images = [processor.prepare(encoded_image) for encoded_image in encoded_images]
    text = f"a{processor.placeholder}b{processor.placeholder}{processor.placeholder} c{processor.placeholder}"
    opened = [Image.open(io.BytesIO(encoded_image)) for encoded_image in encoded_images]
    expected = plain(text=[text], images=opened, return_tensors="np")
    ids = processor.expand_placeholders(tokenizer.encode(text, add_special_tokens=False), images)
    assert ids == expected["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        if name in expected:
            tensors = np.concatenate([image.tensors[name] for image in images])
            assert tensors.tolist() == expected[name].tolist()
    positions = find_placeholders(ids, images)
    assert positions.tolist() == [index for index, token in enumerate(ids) if token == processor.placeholder_id]


def test_counts_from_headers_are_the_numbers_of_prepared_tokens(family):
    processor, _ = load(family[1])
    sides = (1, 3, 16, 31, 33, 64, 100, 640)
    encoded_images = [
        encode(Image.new("RGB", (width, height))) for height in sides for width in sides if height < width * 99
    ]
    encoded_images.append(make_rotated_photo(96, 16))
    for encoded_image in encoded_images:
        try:
            count = processor.count_tokens(encoded_image)
        except ValueError as error:
            assert "processor rejects" in str(error)
            with pytest.raises(ValueError, match="processor rejects"):
                processor.prepare(encoded_image)
        else:
            assert count == len(processor.prepare(encoded_image).token_ids)


def test_features_of_hand_made_images(processor, vision_folder):
    image = processor.prepare(make_test_image(32, 48))
    assert image.grid == (2, 3) and image.num_placeholders == len(image.token_ids) == 6
    assert image.tensors["pixel_values"].shape == (24, 384)  # patches of 8 x 8 pixels, 3 colors, 2 equal frames
    assert processor.prepare(make_rotated_photo(48, 16)).grid == (3, 1)
    crops, tokenizer = load(vision_folder("internvl"))
    image = crops.prepare(make_test_image(32, 64))
    assert image.tensors["pixel_values"].shape == (3, 3, 32, 32)  # two crops and the complete image
    assert (image.num_placeholders, len(image.token_ids), image.grid) == (12, 14, None)
    assert tokenizer.decode(image.token_ids) == f"<img>{'<IMG_CONTEXT>' * 12}</img>"


def test_the_same_image_is_prepared_once(processor, tmp_path):
    encoded_image, other = make_test_image(), make_test_image(seed=1)
    with ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(processor.prepare, [bytes(bytearray(encoded_image)) for _ in range(8)])
    assert all(one is first for one in others)
    assert processor.prepare(encoded_image).digest != processor.prepare(other).digest
    (tmp_path / "a.png").write_bytes(encoded_image)
    assert processor.prepare(str(tmp_path / "a.png")).digest == processor.prepare(encoded_image).digest


def test_a_text_model_has_no_image_processor(small_model_folder):
    assert load_image_processor(str(small_model_folder), object()) is None


def test_a_missing_processor_has_a_fix(vision_folder, tmp_path):
    source = vision_folder("qwen3_vl")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with pytest.raises(ValueError, match=r"no processor.*save_pretrained"):
        load_image_processor(str(tmp_path), load_tokenizer(str(tmp_path)))


def test_the_chat_template_may_come_from_the_processor(vision_folder):
    tokenizer = load_tokenizer(str(vision_folder("qwen3_vl")))
    template, tokenizer.chat_template = tokenizer.chat_template, None
    load_image_processor(str(vision_folder("qwen3_vl")), tokenizer)
    assert tokenizer.chat_template == template
