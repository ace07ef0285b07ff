"""Tiny vision-language model with random weights: a Qwen3-VL with its tokenizer and processor, built from a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.quickstart.make_task import make_tokenizer

PATCH, MERGE, FRAMES = 8, 2, 2  # width of a patch, patches per token in each direction, frames per patch
MIN_PIXELS, MAX_PIXELS = 16 * 16, 64 * 64  # of an image: 1 to 16 tokens of 16 x 16 pixels
HIDDEN = 64  # size of the embeddings in the language model and in the vision tower
INITIALIZER_RANGE = 0.1  # with the usual 0.02, a model this small takes several times as long to find shapes
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_processor(folder: Path, words: Sequence[str] = ()) -> None:
    """Tokenizer of the quickstart with vision tokens and `words`, and the processor of Qwen3-VL."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    make_tokenizer(folder, words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES}
    pixels = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, size=pixels),
        video_processor=Qwen3VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def make_model(folder: Path, seed: int) -> None:
    """Qwen3-VL with 377,856 random parameters for the tokenizer in the folder."""
    import torch
    from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 2 * HIDDEN,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "initializer_range": INITIALIZER_RANGE,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": INITIALIZER_RANGE,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
