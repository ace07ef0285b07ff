"""Images for tests."""

import io

import numpy as np
from PIL import Image


def encode(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def make_test_image(height=32, width=48, seed=0):
    """A PNG of random pixels. Tiny Qwen-VL models have (height / 16) x (width / 16) features of it, up to 64 x 64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels))


def make_rotated_photo(width=48, height=16):
    """A JPEG whose EXIF data says that it has to be turned by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(Image.new("RGB", (width, height), "red"), "JPEG", exif=exif)


def make_gif(frames=2):
    images = [Image.new("RGB", (8, 8), (90 * index, 0, 0)) for index in range(frames)]
    return encode(images[0], "GIF", save_all=True, append_images=images[1:])
