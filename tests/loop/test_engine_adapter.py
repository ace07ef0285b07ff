"""LoRA adapters that an engine serves on top of its loaded weights: loaded, used, replaced, and several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import Lora
from alphaapollo.engines.weight_sync.digest import format_digest
from alphaapollo.engines.weight_sync.shared_memory import write_adapter_files
from alphaapollo.models.lora import add_adapters, gather_scaled_adapter, get_lora_layers
from alphaapollo.types import BASE_MODEL, Adapter, Completion, Sampling
from tests.loop.engine_kit import (
    PLUGIN_ENGINES,
    PROBE,
    Session,
    logprobs_of,
    make_model,
    mean_abs_difference,
    start_engine,
)

pytest.importorskip("peft")


async def gather(calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls))


def draw(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in get_lora_layers(model).values():
        for part in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            part.data = torch.randn(part.shape, generator=generator) * 0.1


@pytest.mark.parametrize(
    ("kind", "targets", "rank", "name"),
    [
        ("Qwen3", "all-linear", 4, "vllm"),
        ("Llama", ["q_proj", "v_proj", "down_proj"], 12, "vllm"),
        *(
            pytest.param("Llama", ["q_proj", "v_proj", "down_proj"], 12, name, marks=pytest.mark.nightly)
            for name in PLUGIN_ENGINES
        ),
    ],
)
def test_adapters_are_loaded_and_used(kind: str, targets: Any, rank: int, tmp_path: Path, name: str) -> None:
    """Engines fuse q, k and v, also if k has no adapter; vLLM pads rank 12 to 16; the scale is 16 / rank."""
    with start_engine(make_model(kind, 0, tie_word_embeddings=True), tmp_path, lora_rank=rank, name=name) as session:
        model = make_model(kind, 0, tie_word_embeddings=True).eval()
        add_adapters(model, Lora(lora_rank=rank, target_modules=targets), seed=0)
        assert session.gap(model) < 1e-5  # B is 0
        before = session.run(session.engine.log_probs(PROBE))
        for version in (1, 2):
            draw(model, version)
            session.publish_verified(session.send_adapter(dict(gather_scaled_adapter(model)), version))
            assert session.gap(model) < 1e-5
            assert mean_abs_difference(session.run(session.engine.log_probs(PROBE)), before) > 0.05
        texts = [list(range(5 + start, 45 + start)) for start in range(4)]
        scored = session.run(gather(session.engine.log_probs(text) for text in texts))
        for text, logprobs in zip(texts, scored, strict=True):
            assert logprobs == pytest.approx(logprobs_of(model, text), abs=1e-4)
        (answer,) = session.generate((PROBE, Sampling(4, temperature=1.0)))
        assert answer.weight_version == 2
        expected = logprobs_of(model, [*PROBE, *answer.token_ids])[-4:]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)


RANKS = {1: 8, 2: 4, 3: 2, 4: 1}  # of the adapters with these versions
KEPT = 16  # adapters that an engine keeps in host memory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Engine that applies four adapters at a time."""
    model = make_model("Qwen3", 0, tie_word_embeddings=True)
    with start_engine(model, tmp_path_factory.mktemp("served"), lora_rank=8, max_loras=4) as session:
        yield session


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Adapter, str]]:
    """Adapters of different ranks and layers, and their digests."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for version, rank in RANKS.items():
        model = make_model("Qwen3", 0, tie_word_embeddings=True)
        targets = ["q_proj", "down_proj"] if version == 2 else "all-linear"
        add_adapters(model, Lora(lora_rank=rank, target_modules=targets), seed=0)
        draw(model, version)
        own = folder / f"v{version}"
        own.mkdir()
        digest = write_adapter_files(gather_scaled_adapter(model), own, torch.float32)
        made.append((Adapter(str(own), version), format_digest(digest)))
    return made


def sample_with(adapter: Adapter, seed: int, length: int = 24) -> tuple[list[int], Sampling]:
    return PROBE[: 20 + seed], Sampling(length, seed=seed, adapter=adapter)


def read(answers: list[Completion]) -> list[tuple[Any, ...]]:
    return [(one.weight_version, [*one.token_ids], [*one.logprobs]) for one in answers]


def test_a_batch_with_four_adapters_equals_each_adapter_alone(
    served: Session, adapters: list[tuple[Adapter, str]]
) -> None:
    """Bit for bit."""
    for adapter, digest in adapters:
        assert served.run(served.engine.load_adapter(adapter)) == digest
    requests = [sample_with(adapter, seed) for seed in range(3) for adapter, _ in adapters]
    together = read(served.generate(*requests))
    alone = [read(served.generate(request))[0] for request in requests]
    assert together == alone
    assert [version for version, _, _ in together[:4]] == [1, 2, 3, 4]
    assert len({logprobs[0] for _, _, logprobs in together[:4]}) == 4


def test_the_base_model_beside_adapters(served: Session, adapters: list[tuple[Adapter, str]]) -> None:
    """All slots have an adapter. On a CPU, vLLM's own operators would apply the last slot's to the base model."""
    alone = served.generate(sample_with(BASE_MODEL, seed=2))
    requests = [sample_with(adapter, seed=1) for adapter, _ in adapters]
    (found, *_) = served.generate(sample_with(BASE_MODEL, seed=2), *requests)
    assert found.token_ids == alone[0].token_ids
    assert found.logprobs == pytest.approx(alone[0].logprobs, abs=1e-6)
    model = make_model("Qwen3", 0, tie_word_embeddings=True).eval()
    expected = logprobs_of(model, [*PROBE[:22], *found.token_ids])[-24:]
    assert found.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_running_request_keeps_its_adapter(served: Session, adapters: list[tuple[Adapter, str]]) -> None:
    (first, _), (second, _), *_ = adapters
    prompt, sampling = sample_with(first, seed=1, length=160)

    async def replace_in_flight() -> list[Completion]:
        engine = served.engine
        running = asyncio.ensure_future(engine.generate(prompt, Sampling(160, seed=1), "running"))
        before = engine.get_progress_counter()
        while engine.get_progress_counter() < before + 20 and not running.done():
            await asyncio.sleep(0)
        assert not running.done() and not engine.is_paused
        await engine.receive_weights(second.folder, second.version)
        receipt = await engine.confirm_weights(second.version)
        assert (receipt.version, receipt.digest) == (2, adapters[1][1])
        assert not running.done() and not engine.is_paused
        return [await engine.generate(prompt, Sampling(160, seed=1), "new"), await running]

    served.run(served.engine.receive_weights(first.folder, first.version))
    new, running = read(served.run(replace_in_flight()))
    assert running == read(served.generate((prompt, sampling)))[0]
    assert new == read(served.generate(sample_with(second, seed=1, length=160)))[0]
    assert (running[0], new[0]) == (1, 2)


def test_an_evicted_adapter_is_loaded_again(served: Session, adapters: list[tuple[Adapter, str]]) -> None:
    (first, digest), *_ = adapters
    before = served.generate(sample_with(first, seed=5))
    for version in range(100, 101 + KEPT):
        served.run(served.engine.load_adapter(Adapter(adapters[-1][0].folder, version)))
    (loaded,) = served.run(served.engine._call_workers("list_loras"))
    assert len(loaded) == KEPT and first.version not in loaded
    assert read(served.generate(sample_with(first, seed=5))) == read(before)
    assert served.run(served.engine.load_adapter(first)) == digest


def test_a_version_is_loaded_again_with_other_weights(served: Session, adapters: list[tuple[Adapter, str]]) -> None:
    """As after `load` of an earlier checkpoint: neither the workers' copy nor cached prefixes have the old weights."""
    (first, digest), (second, other), *_ = adapters
    again = Adapter(first.folder, second.version)
    expected = read(served.generate(sample_with(first, seed=3)))[0][1:]
    assert served.run(served.engine.load_adapter(second)) == other
    served.generate(sample_with(second, seed=3))
    assert served.run(served.engine.load_adapter(again)) == digest
    assert read(served.generate(sample_with(again, seed=3)))[0][1:] == expected
