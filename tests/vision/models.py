"""Tiny random vision-language models with a byte tokenizer and a processor: the tested families, and two variants.

Patches are 8 x 8 pixels, and four of them (2 x 2) make one image feature. Qwen-VL models resize an image to at most
64 x 64 pixels. InternVL makes one to four crops of 32 x 32, and adds the complete image if there are several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT_LAYERS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on a CPU has no kernel for 16
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
VISION_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "depth": 2}
PATCHES = {"patch_size": 8, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [8, 4, 4]}

TEXT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(family: str, folder: str | Path) -> None:
    """Write model, tokenizer and processor to a folder. Takes a second; the weights depend only on the family."""
    import torch

    torch.manual_seed(0)
    model, processor = (FAMILIES | VARIANTS)[family]()
    save_model(model, folder)
    processor.save_pretrained(folder)


def save_model(model: Any, folder: str | Path) -> None:
    """Save a model with experts oriented as in published checkpoints, which transformers does not do."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_vl_moe":
        file = Path(folder, "model.safetensors")
        weights = {name: t.transpose(1, 2) if ".experts." in name else t for name, t in load_file(file).items()}
        save_file({name: weight.contiguous() for name, weight in weights.items()}, file, {"format": "pt"})


def make_qwen3_vl(kind: str = "Qwen3VL", **text: Any) -> tuple[Any, Any]:
    tokenizer = make_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", QWEN_TOKENS)
    vision = {"spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64}
    return make_qwen(
        kind,
        "Qwen3VL",
        tokenizer,
        make_text_config(tokenizer, rope_parameters={**MROPE, "mrope_interleaved": True}, **text),
        {**VISION_LAYERS, **PATCHES, **vision, "deepstack_visual_indexes": [0]},
    )


def make_qwen3_vl_moe() -> tuple[Any, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return make_qwen3_vl("Qwen3VLMoe", **experts, norm_topk_prob=True)  # in published configs; vLLM needs it


def make_qwen2_vl() -> tuple[Any, Any]:
    vision = {"embed_dim": 64, "hidden_size": 128, "num_heads": 4, "depth": 2, "mlp_ratio": 2, **PATCHES}
    return make_qwen2("Qwen2VL", vision)


def make_qwen2_5_vl() -> tuple[Any, Any]:
    windows = {"window_size": 32, "fullatt_block_indexes": [1]}
    sizes = {"spatial_merge_size": 2, "out_hidden_size": 128}
    return make_qwen2("Qwen2_5_VL", {**VISION_LAYERS, **PATCHES, **windows, **sizes})


def make_qwen2(kind: str, vision: dict[str, Any]) -> tuple[Any, Any]:
    tokenizer = make_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", QWEN_TOKENS)
    text = make_text_config(tokenizer, rope_parameters=MROPE, hidden_size=128)
    del text["head_dim"]  # always hidden_size / num_attention_heads
    return make_qwen(kind, kind, tokenizer, text, vision)


def make_internvl() -> tuple[Any, Any]:
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    tokenizer = make_tokenizer("<IMG_CONTEXT>\n", tuple(INTERNVL_TOKENS.values()), INTERNVL_TOKENS)
    config = InternVLConfig(
        text_config=make_text_config(tokenizer, model_type="qwen3", rope_parameters=ROPE),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    size = {"height": 32, "width": 32}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        chat_template=tokenizer.chat_template,
        image_seq_length=4,
    )
    return InternVLForConditionalGeneration(config), processor


FAMILIES = {"qwen3_vl": make_qwen3_vl, "qwen2_5_vl": make_qwen2_5_vl, "internvl": make_internvl}
VARIANTS = {"qwen3_vl_moe": make_qwen3_vl_moe, "qwen2_vl": make_qwen2_vl}


def make_tokenizer(encoded_image: str, tokens: tuple[str, ...], named_tokens: dict[str, str] | None = None) -> Any:
    """Create a tokenizer of bytes and special tokens. image: text of an image in the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*TEXT_TOKENS, *tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named_tokens or [*TEXT_TOKENS, *tokens],
        chat_template=CHAT_TEMPLATE.replace("IMAGE", encoded_image),
    )


def make_text_config(tokenizer: Any, **settings: Any) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**TEXT_LAYERS, "vocab_size": len(tokenizer), **ids, **settings}


def make_qwen(
    kind: str, processor: str, tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]
) -> tuple[Any, Any]:
    """Model and processor of transformers by the names of their classes."""
    import transformers

    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    limits = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    video = "Qwen3VL" if processor == "Qwen3VL" else "Qwen2VL"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model, getattr(transformers, f"{processor}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**PATCHES, merge_size=2, size=limits),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{video}VideoProcessor")(**PATCHES, merge_size=2),
        chat_template=tokenizer.chat_template,
    )
