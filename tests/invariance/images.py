"""Random rows with images: log-probs and gradients of the policy model must be those of plain transformers.

Each case draws a tiny vision-language model (three families), and groups of rows that share a prompt. A prompt has none
to three images of random sizes. A row may show another image between two of its actions, and rows without images
are beside rows with images. All parameters are trained, those of the vision tower too.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alphaapollo.batching.batch import Rows
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Model
from alphaapollo.data.images import ImageProcessor
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from alphaapollo.types import ImageInput, Row
from tests.vision.models import FAMILIES, make
from tests.vision.rows import compute_plain_logprobs, load_plain, load_processor, make_test_image

TEXT_TOKENS = 256  # the first ids of the tiny tokenizers are bytes
TEMPERATURE = 0.9
ATTENTIONS: tuple[Attention, ...] = ("padded", "sdpa")


@dataclass(frozen=True)
class ImageCase:
    """Rows of one micro-batch, and the weight of each response token in the loss."""

    number: int
    family: str
    rows: list[Row]
    group_ids: list[int]
    weights: list[np.ndarray]  # one array per row

    @classmethod
    def draw(cls, seed: int, number: int, processor: ImageProcessor, family: str) -> ImageCase:
        generator = np.random.default_rng([seed, number, 1])
        rows: list[Row] = []
        group_ids: list[int] = []
        for group in range(int(generator.integers(1, 4))):
            prompt = _draw_text(generator, 1)
            images: list[ImageInput] = []
            for _ in range(int(generator.integers(0, 4))):
                images.append(processor.prepare(_draw_image(generator)))
                prompt += [*images[-1].token_ids, *_draw_text(generator, 1)]  # transformers joins adjacent images
            for _ in range(int(generator.integers(1, 4))):
                rows.append(_draw_row(generator, prompt, images, processor))
                group_ids.append(group)
        weights = [generator.normal(size=len(row.token_ids) - row.response_start) for row in rows]
        return cls(number, family, rows, group_ids, weights)


def _draw_text(generator: np.random.Generator, shortest: int) -> list[int]:
    return generator.integers(0, TEXT_TOKENS, generator.integers(shortest, 9)).tolist()


def _draw_image(generator: np.random.Generator) -> bytes:
    height, width, seed = generator.integers(9, 90, 3).tolist()
    return make_test_image(height, width, seed)


def _draw_row(
    generator: np.random.Generator, prompt: list[int], images: list[ImageInput], processor: ImageProcessor
) -> Row:
    """Row with one or two actions. Before the second action, an observation may show another image."""
    action = _draw_text(generator, 1)
    tokens, mask, row_images = [*prompt, *action], [0] * len(prompt) + [1] * len(action), list(images)
    if generator.random() < 0.5:
        context = _draw_text(generator, 1)
        if generator.random() < 0.6:
            row_images.append(processor.prepare(_draw_image(generator)))
            context += [*row_images[-1].token_ids, *_draw_text(generator, 0)]
        action = _draw_text(generator, 1)
        tokens, mask = [*tokens, *context, *action], mask + [0] * len(context) + [1] * len(action)
    return Row(tokens, mask, [0.0] * len(tokens), [len(tokens) - 1], images=tuple(row_images))


@functools.cache
def _load_models(family: str) -> tuple[ImageProcessor, Any, dict[Attention, PolicyModel]]:
    """Processor, model of transformers, and policy models with a trained tower."""
    with tempfile.TemporaryDirectory() as name:
        make(family, name)
        policies = {attention: PolicyModel(load_causal_lm(Model(path=name), attention)) for attention in ATTENTIONS}
        return load_processor(Path(name)), load_plain(Path(name)), policies


def compute_with_transformers(family: str, case: ImageCase) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return the log-probs of each row's response, and the gradients, of plain transformers."""
    _, model, _ = _load_models(family)
    model.zero_grad()
    logprobs = []
    for row, weights in zip(case.rows, case.weights, strict=True):
        logp = compute_plain_logprobs(model, row, TEMPERATURE)
        chosen = torch.tensor(list(row.action_mask)[row.response_start :], dtype=torch.bool)
        (torch.from_numpy(weights).float() * logp)[chosen].sum().backward()
        logprobs.append(np.where(chosen, logp.detach().numpy(), 0.0))
    return logprobs, {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}


def compute_with_policy(
    policy: PolicyModel, builder: MicroBatchBuilder, case: ImageCase, shares: bool, micro_batches: list[list[int]]
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return the log-probs of each row's response, and the gradients, of the policy model."""
    rows = Rows.from_rows(case.rows, find_shared_prompts(case.rows, case.group_ids) if shares else None)
    policy.zero_grad()
    logprobs: dict[int, np.ndarray] = {}
    for chosen in micro_batches:
        micro = builder.build(rows, chosen)
        logp = policy(micro, TEMPERATURE).logprobs
        weights = np.concatenate([np.zeros(0), *(case.weights[index] for index in chosen)]) if chosen else np.zeros(1)
        (torch.from_numpy(weights).float() * micro.mask * torch.where(micro.mask > 0, logp, 0.0)).sum().backward()
        masked = torch.where(micro.mask > 0, logp, 0.0).detach().numpy()
        ends = np.cumsum(rows.response_lengths[chosen])
        logprobs |= dict(zip(chosen, np.split(masked, ends[:-1]), strict=True)) if chosen else {}
    gradients = {
        name.removeprefix("model."): parameter.grad.numpy().copy()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    return [logprobs[index] for index in sorted(logprobs)], gradients


def measure_difference(
    ours: tuple[list[np.ndarray], dict[str, np.ndarray]], expected: tuple[list[np.ndarray], dict[str, np.ndarray]]
) -> float:
    """Largest difference of log-probs in nats, and of gradients relative to the largest entry of each parameter."""
    gaps = [float(np.abs(a - b).max(initial=0.0)) for a, b in zip(ours[0], expected[0], strict=True)]
    largest = max(np.abs(gradient).max() for gradient in expected[1].values())
    for name, gradient in ours[1].items():
        other = expected[1].get(name, np.zeros_like(gradient))  # transformers: no image, no gradient of the tower
        gaps.append(float(np.abs(gradient - other).max() / max(np.abs(other).max(), 1e-2 * largest, 1e-6)))
    assert expected[1].keys() <= ours[1].keys()
    return max(gaps) if np.isfinite(gaps).all() else float("inf")


def check_case(case: ImageCase) -> dict[str, float]:
    """Compare all layouts of one case with plain transformers. Returns {layout: difference}."""
    expected = compute_with_transformers(case.family, case)
    _, _, policies = _load_models(case.family)
    everything, single = [list(range(len(case.rows)))], [[index] for index in range(len(case.rows))]
    differences = {}
    for attention in ATTENTIONS:
        builder = MicroBatchBuilder(attention == "padded", torch.device("cpu"))
        for name, shares, micro_batches in (
            ("together", False, everything),
            ("alone", False, single),
            ("shared prompts", True, everything),
        ):
            ours = compute_with_policy(policies[attention], builder, case, shares, micro_batches)
            differences[f"{attention}, {name}"] = measure_difference(ours, expected)
    return differences


def draw_cases(seed: int, count: int) -> list[ImageCase]:
    """Draw cases of all families in turn."""
    families = islice(cycle(FAMILIES), count)
    return [ImageCase.draw(seed, number, _load_models(one)[0], one) for number, one in enumerate(families)]


def check_images(seed: int, count: int) -> Iterator[tuple[str, float]]:
    """Yield (layout, difference from transformers) of `count` random cases."""
    for case in draw_cases(seed, count):
        for layout, gap in check_case(case).items():
            yield f"images, case {case.number}, {case.family}: {layout}", gap
