"""Compare forward and backward of the samples of a prompt whose images are encoded once and per sample.

    .venv/bin/python scripts/bench/images.py --train-vision

All sides compute log-probs and gradients of the same rows, packed, with a random Qwen3-VL of 15M parameters:

    per sample   rows with own images, as if the samples came from different prompts
    once         the same rows, and each image is encoded once
    shared       the prompt, with its images, is computed once

The sides alternate. The last line is a JSON object: `ratio` is the seconds of `per sample` over those of `shared`, the
median of the rounds, and `ratio_once` the same for `once`. `difference` is the largest difference of log-probs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: E402

from alphaapollo.batching.batch import Rows  # noqa: E402
from alphaapollo.batching.shared_prompts import find_shared_prompts  # noqa: E402
from alphaapollo.config.schema import Model  # noqa: E402
from alphaapollo.models.lora import load_trainable_lm  # noqa: E402
from alphaapollo.models.micro_batch import MicroBatchBuilder  # noqa: E402
from alphaapollo.models.policy import PolicyModel  # noqa: E402
from alphaapollo.types import ImageInput, Row  # noqa: E402
from scripts.bench._task import machine  # noqa: E402

FOLDER = ROOT / "outputs" / "bench" / "images"
VOCABULARY, PLACEHOLDER, PATCH, MERGE = 512, 500, 16, 2
SIDES = ("per sample", "once", "shared")


def make_model(folder: Path) -> int:
    """Write a random model and return its number of parameters."""
    torch.manual_seed(0)
    text = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    text["rope_parameters"]["mrope_interleaved"] = True
    vision = {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "depth": 6, "out_hidden_size": 256}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "deepstack_visual_indexes": [1, 3]}
    ids = {"image_token_id": PLACEHOLDER, "video_token_id": 501, "vision_start_token_id": 502}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_image(rng: np.random.Generator, number: int, side: int) -> ImageInput:
    """Make a prepared image of `side` x `side` pixels."""
    patches, tokens = side // PATCH, side // PATCH // MERGE
    pixels = rng.normal(size=(patches**2, 3 * 2 * PATCH**2)).astype(np.float32)
    tensors = {"pixel_values": pixels, "image_grid_thw": np.array([[1, patches, patches]])}
    return ImageInput(tensors, [PLACEHOLDER] * tokens**2, PLACEHOLDER, str(number), (tokens, tokens))


def make_batches(args: argparse.Namespace) -> dict[str, Rows]:
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return rng.integers(0, 256, count).tolist()

    images = tuple(make_image(rng, number, args.pixels) for number in range(args.pictures))
    prompt = draw(args.prompt_tokens) + [token for image in images for token in [*image.token_ids, *draw(2)]]
    mask = [0] * len(prompt) + [1] * args.response_tokens
    answers = [draw(args.response_tokens) for _ in range(args.samples)]
    rows = [Row(prompt + answer, mask, [0.0] * len(mask), [len(mask) - 1], images=images) for answer in answers]
    own = [
        replace(row, images=tuple(replace(image, digest=f"{image.digest} of {index}") for image in images))
        for index, row in enumerate(rows)
    ]
    prefixes = find_shared_prompts(rows, [0] * args.samples)
    return {"per sample": Rows.from_rows(own), "once": Rows.from_rows(rows), "shared": Rows.from_rows(rows, prefixes)}


def measure(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    parameters = make_model(FOLDER)
    policy = PolicyModel(
        load_trainable_lm(Model(path=str(FOLDER), freeze_vision=not args.train_vision), "sdpa", None, 0)
    )
    batches, builder = make_batches(args), MicroBatchBuilder(padded=False, device=torch.device("cpu"))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    logprobs: dict[str, torch.Tensor] = {}
    for round_number in range(args.rounds + 1):
        for side in SIDES:
            start = time.perf_counter()
            logprobs[side] = policy(builder.build(batches[side], range(args.samples)), 1.0).logprobs
            logprobs[side].sum().backward()
            if round_number:  # the first round warms up
                seconds[side].append(time.perf_counter() - start)
            policy.zero_grad()

    def ratio(side: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["per sample"], seconds[side], strict=True)), 2)

    return {
        "benchmark": "images",
        "ratio": ratio("shared"),
        "ratio_once": ratio("once"),
        "seconds": {side: round(statistics.median(values), 3) for side, values in seconds.items()},
        "difference": max(float((logprobs[side] - logprobs["per sample"]).abs().max()) for side in SIDES),
        "parameters": parameters,
        "image_tokens": args.pictures * (args.pixels // PATCH // MERGE) ** 2,
        "trains_vision": args.train_vision,
        "threads": args.threads,
        **machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=224, help="width and height of an image, a multiple of 32")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of the prompt's text")
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--train-vision", action="store_true", help="freeze_vision=false")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
