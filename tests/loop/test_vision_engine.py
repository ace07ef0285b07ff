"""Vision-language models behind the engine protocol: log-probs with images, and weight syncs of the vision tower.

One engine per family. Each test sends the weights that it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.data.images import load_image_processor
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.weight_sync.verification import PROBE_TOLERANCE_FLOAT32, WeightSyncError, check_probe_log_probs
from alphaapollo.models.export import gather_parameters
from alphaapollo.session.publish import make_probe
from alphaapollo.types import Completion, ImageInput, Message, Row, Sampling
from tests.loop.engine_kit import Session, start_engine
from tests.vision.models import FAMILIES, VARIANTS, make
from tests.vision.rows import compute_plain_logprobs, load_plain, make_test_image

MAX_TOKENS, TWO_RANKS = 256, {"tensor_model_parallel_size": 2}


def load_model(folder: Path, seed: int) -> Any:
    """Load a model whose weights, norms and biases included, are perturbed, so that probabilities differ."""
    model, generator = load_plain(folder), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.07 if parameter.ndim > 1 else 0.05
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return model


def draw_image(seed: int, width: int = 48, height: int = 32) -> bytes:
    return make_test_image(height, width, seed)


def ask(text: str, *encoded_images: bytes) -> list[Message]:
    return [{"role": "user", "content": "<image>" * len(encoded_images) + text, "images": list(encoded_images)}]


@torch.inference_mode()
def compute_logprobs(model: Any, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
    """Log-prob of each token after the first, computed by transformers over the vocabulary without placeholders."""
    mask = [0] + [1] * (len(token_ids) - 1)
    row = Row(token_ids, mask, [0.0] * len(mask), [len(mask) - 1], images=tuple(images))
    return compute_plain_logprobs(model, row).tolist()


@dataclass
class Vision:
    """Started engine of a family."""

    session: Session
    renderer: Renderer
    folder: Path  # of the processor and the first weights
    version: int = field(default=0)

    def publish(self, model: Any) -> None:
        """Send weights and verify the digest."""
        self.version += 1
        with self.session.sent(dict(gather_parameters(model, torch.float32)), self.version) as update:
            receipt = self.session.publish(update)
        assert (receipt.version, receipt.digest) == (update.version, update.digest)

    def generate(self, *requests: tuple[list[int], Sampling, tuple[ImageInput, ...]]) -> list[Completion]:
        async def gather_all() -> list[Completion]:
            generate = self.session.engine.generate
            calls = (generate(ids, how, f"r{i}", images) for i, (ids, how, images) in enumerate(requests))
            return list(await asyncio.gather(*calls))

        return self.session.run(gather_all())

    def encode(self, messages: list[Message]) -> tuple[list[int], tuple[ImageInput, ...]]:
        return self.renderer.encode_prompt(messages), self.renderer.prepare_images(messages)

    def compute_probe_difference(self, model: Any) -> float:
        probe = make_probe(self.renderer, "What does the image show?", MAX_TOKENS - 1)
        assert probe.images
        expected = probe.select_text(compute_logprobs(model, probe.token_ids, probe.images))
        actual = probe.select_text(self.session.run(self.session.engine.log_probs(probe.token_ids, probe.images)))
        return check_probe_log_probs([expected], [actual], PROBE_TOLERANCE_FLOAT32, "the probe")


def make_renderer(folder: Path) -> Renderer:
    tokenizer = load_tokenizer(str(folder))
    return Renderer(tokenizer, images=load_image_processor(str(folder), tokenizer))


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    folder = tmp_path_factory.mktemp(request.param)
    make(request.param, folder / "model")
    with start_engine(load_model(folder / "model", 0), folder, max_num_batched_tokens=MAX_TOKENS) as session:
        yield Vision(session, make_renderer(folder / "model"), folder / "model")


def test_logprobs_equal_transformers(vision: Vision) -> None:
    """0, 1 and 2 images, and a second turn with another image after the sampled tokens."""
    model = load_model(vision.folder, 1)
    vision.publish(model)
    chats = [ask("why?"), ask("what?", draw_image(0)), ask("more?", draw_image(0), draw_image(1, 20, 60))]
    prompts = [vision.encode(chat) for chat in chats]
    answers = vision.generate(*((ids, Sampling(8, seed=1), images) for ids, images in prompts))
    follow_up = ask("and this?", draw_image(2, 100, 40))
    for (ids, images), answer in zip(prompts[:], answers, strict=True):
        ids = [*ids, *answer.token_ids, *vision.renderer.encode_observation(follow_up, answer.token_ids[-1])]
        prompts.append((ids, (*images, *vision.renderer.prepare_images(follow_up))))
    answers += vision.generate(*((ids, Sampling(8, seed=2), images) for ids, images in prompts[3:]))
    for (ids, images), answer in zip(prompts, answers, strict=True):
        expected = compute_logprobs(model, ids + answer.token_ids, images)[-8:]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    assert prompts[5][1][0] is prompts[1][1][0]  # prepared once
    vision.compute_probe_difference(model)


def test_images_of_equal_size_are_not_mixed_up(vision: Vision) -> None:
    """Their prompts have the same tokens, and the prefix cache has both."""
    model = load_model(vision.folder, 1)
    vision.publish(model)
    one, other = (vision.encode(ask("what is in this image? " * 3, draw_image(seed))) for seed in (0, 1))
    assert one[0] == other[0]
    expected = [compute_logprobs(model, *prompt) for prompt in (one, other)]
    placeholder = one[1][0].placeholder_id
    text = [index for index, token in enumerate(one[0][1:]) if token != placeholder]
    assert max(abs(expected[0][index] - expected[1][index]) for index in text) > 1e-2
    for _ in range(2):
        for (ids, images), logprobs in zip((one, other), expected, strict=True):
            found = vision.session.run(vision.session.engine.log_probs(ids, images))
            assert [found[index] for index in text] == pytest.approx([logprobs[index] for index in text], abs=1e-5)
    answers = vision.generate(*((ids, Sampling(4, seed=1), images) for ids, images in (one, other, one, other)))
    for answer, (ids, images) in zip(answers, (one, other, one, other), strict=True):
        expected_answer = compute_logprobs(model, ids + answer.token_ids, images)[-4:]
        assert answer.logprobs == pytest.approx(expected_answer, abs=1e-5)
        assert answer.num_cached_tokens >= 32


def test_placeholders_are_never_sampled(vision: Vision) -> None:
    """Even if the output head prefers them."""
    model = load_model(vision.folder, 1)
    ids = vision.renderer.encode_prompt(ask("why?"))
    head = model.get_output_embeddings().weight
    placeholder = vision.renderer.images.placeholder_id  # type: ignore[union-attr]
    with torch.inference_mode():
        head[placeholder] = 3 * model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert model(torch.tensor([ids])).logits[0, -1].argmax() == placeholder
    vision.publish(model)
    for answer in vision.generate(*((ids, Sampling(8, temperature=seed % 2, seed=seed), ()) for seed in range(8))):
        assert placeholder not in answer.token_ids
        expected = compute_logprobs(model, ids + answer.token_ids)[-8:]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)


def test_prompts_that_fill_the_encoder_cache(vision: Vision) -> None:
    """vLLM's encoder cache has room for the images of one prompt only."""
    model = load_model(vision.folder, 1)
    vision.publish(model)
    count = 8 if "internvl" in str(vision.folder) else 12
    encoded_images = [draw_image(seed, 64, 64) for seed in range(6 * count)]
    prompts = [vision.encode(ask("", *encoded_images[i * count : (i + 1) * count])) for i in range(6)]
    assert all(200 < len(ids) < MAX_TOKENS - 4 for ids, _ in prompts)
    answers = vision.generate(*((ids, Sampling(4, seed=i), images) for i, (ids, images) in enumerate(prompts)))
    for answer, (ids, images) in zip(answers, prompts, strict=True):
        expected = compute_logprobs(model, ids + answer.token_ids, images)[-4:]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)


def test_stale_encoder_cache_is_detected(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reset, the engine reuses features that the vision tower computed with earlier weights."""
    old, new = (load_model(vision.folder, seed) for seed in (1, 2))
    new.load_state_dict(old.state_dict() | {n: p for n, p in new.state_dict().items() if is_of_tower(n)})
    vision.publish(old)
    vision.compute_probe_difference(old)

    async def keep_encoder_cache() -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(vision.session.engine._running_llm, "reset_encoder_cache", keep_encoder_cache)
        vision.publish(new)
    with pytest.raises(WeightSyncError, match="its forward pass uses others"):
        vision.compute_probe_difference(new)
    for model in (new, old, new):
        vision.publish(model)
        vision.compute_probe_difference(model)


def is_of_tower(name: str) -> bool:
    return "language_model" not in name and "lm_head" not in name


def test_in_flight_update_encodes_images_again(vision: Vision) -> None:
    """A request that is paused during a sync continues with the features of the new weights."""
    models = [load_model(vision.folder, seed) for seed in (1, 2)]
    ids, images = vision.encode(ask("what?", draw_image(0)))
    engine, length = vision.session.engine, 100

    async def update_in_flight() -> Completion:
        call = asyncio.ensure_future(engine.generate(ids, Sampling(length, seed=1), "r", images))
        while engine.get_progress_counter() < 10 and not call.done():
            await asyncio.sleep(0)
        await engine.pause()
        with vision.session.sent(models[1], vision.version + 1) as update:
            await vision.session.receive(update)
            receipt = await engine.confirm_weights(update.version)
            assert receipt.digest == update.digest
        await engine.resume()
        return await call

    for _ in range(10):  # on a busy machine, the engine may finish the request before it is paused
        vision.publish(models[0])
        answer = vision.session.run(update_in_flight())
        vision.version += 1
        if len(answer.weight_versions) == 2:
            break
    (before, count), (after, rest) = answer.weight_versions
    assert (before + 1, count + rest) == (after, length) and count >= 10 and rest > 0
    expected = [compute_logprobs(model, ids + answer.token_ids, images)[-length:] for model in models]
    assert answer.logprobs == pytest.approx(expected[0][:count] + expected[1][count:], abs=1e-4)
    vision.compute_probe_difference(models[1])


@pytest.mark.parametrize(("family", "settings"), [*((one, {}) for one in VARIANTS), ("qwen2_5_vl", TWO_RANKS)])
def test_variants_and_a_tower_on_two_ranks(family: str, settings: dict[str, int], tmp_path: Path) -> None:
    make(family, tmp_path / "model")
    models = [load_model(tmp_path / "model", seed) for seed in (0, 1)]
    with start_engine(models[0], tmp_path, max_num_batched_tokens=MAX_TOKENS, **settings) as session:
        vision = Vision(session, make_renderer(tmp_path / "model"), tmp_path / "model")
        ids, images = vision.encode(ask("what?", draw_image(0)))
        for model in (models[1], models[0]):
            vision.publish(model)
            vision.compute_probe_difference(model)
            (answer,) = vision.generate((ids, Sampling(8, seed=1), images))
            expected = compute_logprobs(model, ids + answer.token_ids, images)[-8:]
            assert answer.logprobs == pytest.approx(expected, abs=1e-5)
