"""Random rows with images: log-probs and gradients of the policy model must be those of plain transformers.

Each case draws a tiny vision-language model (three families), and groups of rows that share a prompt. A prompt has none
to three images of random sizes. A row may show another image between two of its actions, and rows without images
are beside rows with images. All parameters are trained, those of the vision tower too.
"""

from __future__ import annotations

import functools
import inspect
import io
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from alphaapollo.batching.batch import Rows
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Model
from alphaapollo.data.images import ImageProcessor, find_placeholder_ids, load_image_processor
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel, load_policy
from alphaapollo.models.sharding import full_tensor, join_process_group, make_mesh
from alphaapollo.models.ulysses import create_sequence_groups
from alphaapollo.types import ImageInput, Row
from tests.unit.tiny import free_address, run_ranks
from tests.vision.models import FAMILIES, make

TEXT_TOKENS = 256  # the first ids of the tiny tokenizers are bytes
TEMPERATURE = 0.9
CASES_ON_RANKS = 9  # they are the same for any number of cases
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
    height, width = generator.integers(9, 90, 2)
    buffer = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


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
def _save_models() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="alphaapollo-images-")
    for family in FAMILIES:
        make(family, Path(folder.name, family))
    return folder


@functools.cache
def load_family(family: str) -> tuple[str, ImageProcessor]:
    folder = str(Path(_save_models().name, family))
    processor = load_image_processor(folder, load_tokenizer(folder))
    assert processor is not None
    return folder, processor


def load_trained_policy(folder: str, attention: Attention) -> PolicyModel:
    model = Model(path=folder, attention=attention, dtype="float32", freeze_vision=False)
    return load_policy(model, make_mesh("cpu"), torch.float32, False, adapter_seed=0)


@functools.cache
def _load_models(family: str) -> tuple[Any, dict[Attention, PolicyModel]]:
    from transformers import AutoModelForImageTextToText

    join_process_group("cpu", 0, 1, free_address())
    folder, _ = load_family(family)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return plain, {attention: load_trained_policy(folder, attention) for attention in ATTENTIONS}


def compute_with_transformers(family: str, case: ImageCase) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return the log-probs of each row's response, and the gradients, of plain transformers."""
    model, _ = _load_models(family)
    model.zero_grad()
    logprobs = []
    for row, weights in zip(case.rows, case.weights, strict=True):
        ids = torch.tensor([list(row.token_ids)])
        logits = model(input_ids=ids, **_make_arguments(model, ids, row.images)).logits[0, :-1].float()
        excluded = torch.zeros(logits.shape[1])
        excluded[list(find_placeholder_ids(model.config))] = -1e9
        logp = ((logits + excluded) / TEMPERATURE).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logp = logp[row.response_start - 1 :]
        chosen = torch.tensor(list(row.action_mask)[row.response_start :], dtype=torch.bool)
        (torch.from_numpy(weights).float() * logp)[chosen].sum().backward()
        logprobs.append(np.where(chosen, logp.detach().numpy(), 0.0))
    return logprobs, {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}


def _make_arguments(model: Any, ids: torch.Tensor, images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
    if not images:
        return {}
    names = inspect.signature(model.model.get_image_features).parameters
    arguments = {
        name: torch.from_numpy(np.concatenate([image.tensors[name] for image in images]))
        for name in images[0].tensors
        if name in names
    }
    if images[0].grid is not None:
        arguments["mm_token_type_ids"] = (ids == images[0].placeholder_id).int()
    return arguments


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
        name.removeprefix("model."): full_tensor(parameter.grad).numpy()
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
    _, policies = _load_models(case.family)
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


def compute_on_rank(
    rank: int, num_ranks: int, address: str, folders: dict[str, str], cases: list[ImageCase], sequence: bool
) -> list[Any]:
    """Log-probs and gradients of cases on one of several ranks, which share sequences or distribute rows."""
    join_process_group("cpu", rank, num_ranks, address)
    group, _ = create_sequence_groups("cpu", num_ranks if sequence else 1)
    results = []
    policies: dict[tuple[str, Attention], PolicyModel] = {}
    for case in cases:
        for attention in ATTENTIONS:
            key = (case.family, attention)
            if key not in policies:
                policies[key] = load_trained_policy(folders[case.family], attention)
            builder = MicroBatchBuilder(attention == "padded", torch.device("cpu"), group)
            own = list(range(len(case.rows))) if sequence else list(range(rank, len(case.rows), num_ranks))
            for shares in (False, True):
                results.append(compute_with_policy(policies[key], builder, case, shares, [own]))
    return results


def draw_cases(seed: int, count: int) -> list[ImageCase]:
    """Draw cases of all families in turn."""
    families = islice(cycle(FAMILIES), count)
    return [ImageCase.draw(seed, number, load_family(one)[1], one) for number, one in enumerate(families)]


def check_images(seed: int, count: int, processes: bool) -> Iterator[tuple[str, float]]:
    """Yield (layout, difference from transformers) of `count` random cases. processes: some also on two ranks, each of
    which has a part of the rows, or a part of every row."""
    cases = draw_cases(seed, count)
    for case in cases:
        for layout, gap in check_case(case).items():
            yield f"images, case {case.number}, {case.family}: {layout}", gap
    on_ranks = cases[: min(count, CASES_ON_RANKS)]
    expected = [compute_with_transformers(case.family, case) for case in on_ranks]
    folders = {family: load_family(family)[0] for family in FAMILIES}
    for sequence in (False, True) if processes else ():
        results = zip(*run_ranks(compute_on_rank, 2, folders, on_ranks, sequence, timeout=300), strict=True)
        for case, one in zip(on_ranks, expected, strict=True):
            for layout in (f"{attention}, shares={shares}" for attention in ATTENTIONS for shares in (False, True)):
                gap = measure_difference(_join_ranks(next(results), sequence), one)
                yield f"images, case {case.number}, {case.family}: two ranks, {sequence=}, {layout}", gap


def _join_ranks(of_ranks: Sequence[Any], sequence: bool) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Join the log-probs of two ranks. Gradients are means over the ranks, and are equal on both."""
    logprobs = list(of_ranks[0][0])
    if not sequence:
        logprobs = [one for pair in zip_longest(*(rank[0] for rank in of_ranks)) for one in pair if one is not None]
    return logprobs, {name: 2 * gradient for name, gradient in of_ranks[0][1].items()}
