"""Images in prompts: read them, prepare them with the model's own processor, and place their tokens.

    message {"content": "<image> How many?", "images": [PNG]}
      -> chat template: ... <|image_pad|> How many? ...      one placeholder per image
      -> token ids:     ... 151655 x 64 How many? ...        as many placeholders as the model has image features

The engine and the trainer get the same tensors (`ImageInput`).
"""

from __future__ import annotations

import hashlib
import inspect
import io
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaapollo.types import IMAGE_MARK, ChatMessage, EncodedImage, ImageInput, JsonObject
from alphaapollo.utils.disk import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

CACHE_SIZE = 256  # prepared images
NUM_LOCKS = 64  # so that few different images share a lock
MAX_PIXELS = 2**26  # of an image, before the processor resizes it
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # JPEG includes MPO. Other decoders may start programs
DECODING = BoundedSemaphore(2)  # an image of MAX_PIXELS needs a GiB while it is decoded
GRID, MERGE = "image_grid_thw", "merge_size"  # names that processors for models with M-RoPE use
EXCLUDED_LOGIT = -1e9  # logit of placeholders in engine and trainer: they are never sampled
PLACEHOLDER_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # in a model's config
ORIENTATION, SIDEWAYS = 0x0112, range(5, 9)  # EXIF tag, and its values that swap width and height
PILLOW_ERRORS = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error)
"""Errors that Pillow raises for damaged files, depending on their format."""


class ImageProcessor:
    """Processor of a vision-language model, with its tokenizer. Images are resized and normalized by transformers'
    Pillow implementation, which gives the same pixels on every machine; torchvision's differs by rounding."""

    def __init__(self, processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase):
        self._processor, self._tokenizer = processor, tokenizer
        self.placeholder: str = processor.image_token  # rendered by the chat template, once per image
        self.placeholder_id: int = processor.image_token_id
        self._arguments = dict(processor.valid_processor_kwargs._defaults.get("images_kwargs", {}))
        self._prepare_cached = lru_cache(CACHE_SIZE)(self._prepare)
        self._locks = [Lock() for _ in range(NUM_LOCKS)]

    def prepare(self, encoded_image: EncodedImage) -> ImageInput:
        """Prepare an image, or return it from the cache. Threads that need the same image wait for the first one.
        Raises ValueError if the image cannot be read or the model's processor rejects it."""
        with self._locks[hash(encoded_image) % NUM_LOCKS]:
            return self._prepare_cached(encoded_image)

    def count_tokens(self, encoded_image: EncodedImage) -> int:
        """Return the number of tokens of an image in a prompt, `len(prepare(image).token_ids)`, without decoding its
        pixels. Raises ValueError if its header is unreadable or the model's processor rejects its size."""
        width, height = read_image_size(encoded_image)
        with self._explain_rejection(encoded_image, width, height):
            sizes = [(height, width)]
            return int(self._processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"][0])

    def _prepare(self, encoded_image: EncodedImage) -> ImageInput:
        image = read_image(encoded_image)
        with self._explain_rejection(encoded_image, *image.size):
            output = dict(self._processor.image_processor(images=[image], return_tensors="np", **self._arguments))
            text = self._processor.replace_image_token(output, 0)
        tensors = {name: np.ascontiguousarray(array) for name, array in output.items()}
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(tensors.items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode() + array.tobytes())
        grid = None
        if GRID in tensors:
            merge = getattr(self._processor.image_processor, MERGE)
            grid = (int(tensors[GRID][0, 1]) // merge, int(tensors[GRID][0, 2]) // merge)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ImageInput(tensors, token_ids, self.placeholder_id, digest.hexdigest(), grid)

    @contextmanager
    def _explain_rejection(self, encoded_image: EncodedImage, width: int, height: int) -> Iterator[None]:
        """Context manager that converts the processor's errors for an image to a ValueError that describes it."""
        try:
            yield
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise ValueError(
                f"the model's processor rejects {describe_image(encoded_image)} of {width} x {height} pixels: {error}. "
                "Resize or remove it."
            ) from error

    def expand_placeholders(self, token_ids: Sequence[int], images: Sequence[ImageInput | ImageTokens]) -> list[int]:
        """Replace the placeholder of each image by the tokens of the image. Raises ValueError if the numbers of
        placeholders and images differ."""
        self.check_placeholders(token_ids.count(self.placeholder_id), len(images))
        remaining, expanded = iter(images), list[int]()
        for token in token_ids:
            expanded += next(remaining).token_ids if token == self.placeholder_id else (token,)
        return expanded

    def check_placeholders(self, found: int, num_images: int) -> None:
        """Raise ValueError unless a rendered prompt has one placeholder per image. found: number of placeholders."""
        if found != num_images:
            raise ValueError(
                f"the rendered prompt has different numbers of tokens {self.placeholder} ({found}) and images "
                f"({num_images}). Remove {self.placeholder} from texts, and use a chat template that shows each "
                "image once."
            )


@dataclass(frozen=True)
class ImageTokens:
    """Unprepared image, with its tokens in a prompt."""

    encoded_image: EncodedImage
    token_ids: Sequence[int]


@dataclass(frozen=True)
class LazyImages(Sequence[ImageInput]):
    """Images of a training example, prepared each time they are needed, because the prepared images of all examples do
    not fit in memory. Pickled as a tuple of prepared images."""

    processor: ImageProcessor
    encoded_images: tuple[EncodedImage, ...]

    def __len__(self) -> int:
        return len(self.encoded_images)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazyImages(self.processor, self.encoded_images[index])
        return self.processor.prepare(self.encoded_images[index])

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (tuple(self),)


def collect_images(content: Sequence[ChatMessage] | str) -> list[EncodedImage]:
    """Return the images of a chat, in order. A text without messages has none."""
    messages = () if isinstance(content, str) else content
    return [encoded_image for message in messages for encoded_image in message.get("images") or ()]


def make_content_parts(message: ChatMessage) -> JsonObject:
    """Convert a message with images to the form of chat templates, with a list of parts: `{"type": "image"}` and
    `{"type": "text", "text": ...}`. Raises ValueError if the numbers of marks and images differ."""
    texts, num_images = message["content"].split(IMAGE_MARK), len(message["images"])
    if len(texts) - 1 != num_images:
        raise make_count_error(f"a message of role {message['role']}", len(texts) - 1, num_images)
    parts: list[dict[str, str]] = []
    for index, text in enumerate(texts):
        if index > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**{key: value for key, value in message.items() if key != "images"}, "content": parts}


def make_count_error(subject: str, num_marks: int, num_images: int) -> ValueError:
    """Return an error for a message or chat (`subject`) with different numbers of marks and images."""
    return ValueError(
        f"{subject} has different numbers of marks {IMAGE_MARK} ({num_marks}) and images ({num_images}). Write one "
        "mark per image, where it belongs in the text."
    )


def read_image(encoded_image: EncodedImage) -> Image:
    """Decode an image to RGB, rotated as its EXIF data says, on white if it is transparent. Raises ValueError if it is
    damaged, too large, animated, or has 32-bit pixels."""
    from PIL import Image, ImageOps

    with DECODING, open_image(encoded_image) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16"):  # Pillow would clip the values to 255
            return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
        if image.mode in ("I", "F"):
            raise ValueError(f"its pixels have 32 bits (Pillow mode {image.mode})")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        return image.convert("RGB")


def read_image_size(encoded_image: EncodedImage) -> tuple[int, int]:
    """Return width and height of an image after its EXIF rotation. Raises ValueError like open_image."""
    from PIL import Image

    with open_image(encoded_image) as image:
        exif = Image.Image.getexif(image)  # a PNG's own getexif decodes its pixels
        return (image.height, image.width) if exif.get(ORIENTATION) in SIDEWAYS else image.size


@contextmanager
def open_image(encoded_image: EncodedImage) -> Iterator[Image]:
    """Context manager that reads the header of an image. Raises ValueError if it is damaged, too large or animated,
    also for errors in the body of the context, where pixels are decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        if not isinstance(encoded_image, bytes):
            open_regular(Path(encoded_image).resolve()).close()  # Pillow would wait for a pipe
        with warnings.catch_warnings():  # MAX_PIXELS is stricter than the limit of this warning
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(
                io.BytesIO(encoded_image) if isinstance(encoded_image, bytes) else encoded_image, formats=FORMATS
            )
        with opened as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has more than {MAX_PIXELS} pixels")
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # MPO: a photo with a preview
                raise ValueError(f"it is animated ({frames} frames)")
            yield image
    except (Image.DecompressionBombError, *PILLOW_ERRORS) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".") or type(error).__name__
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else reason
        fix = "Correct its path, convert it to PNG, resize or remove it."
        raise ValueError(f"cannot read {describe_image(encoded_image)}: {reason}. {fix}") from error


def make_example_image() -> bytes:
    """Return a generated image, a PNG of 64 x 48 pixels, by which models and engines are checked."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return encode_png(Image.fromarray(pixels))


def encode_png(image: Image) -> bytes:
    """Convert a PIL image to the bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def describe_image(encoded_image: EncodedImage) -> str:
    """Return a short description of an image for messages."""
    return f"the image {encoded_image}" if isinstance(encoded_image, str) else f"an image of {len(encoded_image)} bytes"


def find_placeholders(token_ids: Sequence[int] | np.ndarray, images: Sequence[ImageInput]) -> np.ndarray:
    """Return the positions of the placeholders of all images in a token sequence, image after image, int64
    [placeholders]. Asserts that there is one for each image feature."""
    if not images:
        return np.zeros(0, dtype=np.int64)
    positions = np.flatnonzero(np.asarray(token_ids) == images[0].placeholder_id)
    needed = sum(image.num_placeholders for image in images)
    assert len(positions) == needed, f"{len(positions)} placeholder tokens for {needed} image features"
    return positions


def find_placeholder_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the ids of the image and video placeholder tokens of a transformers config, which a model must never
    sample. Empty for a text model."""
    ids = (getattr(config, name, None) for name in PLACEHOLDER_IDS)
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def reads_images(config: PretrainedConfig) -> bool:
    """Return whether a model is a vision-language model whose images are supported. Other models are used for texts
    only, e.g. Gemma 3, in which the tokens of an image attend to each other in both directions."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if getattr(config, "vision_config", None) is None or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    is_bidirectional = "token_type_ids" in inspect.signature(model_class.forward).parameters or getattr(
        config.get_text_config(), "use_bidirectional_attention", None
    )
    return not is_bidirectional and hasattr(model_class, "get_image_features") and "text_config" in config.sub_configs


def load_image_processor(
    path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> ImageProcessor | None:
    """Load the processor of a model, given as hub id or local folder; None if the model reads no images. A tokenizer
    without chat template gets the processor's. Raises ValueError if a model that reads images has no processor."""
    from transformers import AutoConfig, PreTrainedConfig

    has_vision = "vision_config" in PreTrainedConfig.get_config_dict(path)[0]
    if not has_vision or not reads_images(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)):
        return None
    try:
        from transformers import AutoImageProcessor, AutoProcessor  # takes a second, so not for text models

        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        image_processor = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
        processor.image_processor = image_processor
        loaded = ImageProcessor(processor, tokenizer)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(
            f"{path}: the vision-language model has no processor with an image token that can be loaded ({reason}). "
            "Save it beside the model with save_pretrained. For a hub id, check the network and HF_HUB_OFFLINE."
        ) from error
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return loaded


def check_images_are_supported(messages: Sequence[ChatMessage] | str, processor: ImageProcessor | None) -> None:
    """Raise ValueError if a chat has images and the model does not read images."""
    if processor is None and collect_images(messages):
        raise ValueError("the prompt has images, but the model does not read images. Use a family of docs/vision.md.")
