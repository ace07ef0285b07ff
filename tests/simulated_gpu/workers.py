"""Workers, batches and columns for the scenarios on a fake GPU, made as a run makes them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from alphaapollo.batching.batch import BatchLayout, Columns
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Actor, Model, Reference
from alphaapollo.engines.weight_sync import digest_kernel
from alphaapollo.engines.weight_sync.buckets import make_buckets, prefetch_buckets
from alphaapollo.engines.weight_sync.digest import compute_joint_digest
from alphaapollo.models import sharding
from alphaapollo.models.export import gather_parameters
from alphaapollo.planning.model_requirements import choose_kernels
from alphaapollo.types import Row
from alphaapollo.workers import model_worker, process_group
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.process_group import RankPlacement
from tests.simulated_gpu.fake_cuda import FakeGpu, fake_cuda
from tests.simulated_gpu.work import outside
from tests.unit.tiny import _config, save_tokenizer
from tests.vision.models import make

TEXT_MODELS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "granite": "GraniteForCausalLM",
}
AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification)
VISION_MODELS = ("qwen2_5_vl", "qwen3_vl", "internvl")
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_models(folder: Path) -> None:
    """Write config.json (and the tokenizer or processor) of a tiny model of each family, without weights."""
    for name, architecture in TEXT_MODELS.items():
        config = _config(name, 64)
        config.architectures, config.dtype = [architecture], "bfloat16"
        config.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    for name in VISION_MODELS:
        make(name, folder / name)
    for name, layers in {"qwen3": 3, "qwen3_deep": 5}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": layers}))
        save_tokenizer(folder / name, num_tokens=1000)  # 24 ids of the model have no token


@dataclass
class Recorder:
    """Host synchronizations, and kernels and bytes, of the parts of a scenario."""

    models: Path
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    work: dict[str, dict[str, int]] = field(default_factory=dict)

    @contextmanager
    def record(self, title: str) -> Iterator[None]:
        """Record what the block does under a title."""
        FakeGpu.syncs.clear()
        FakeGpu.work.clear()
        yield
        self.work[title] = dict(FakeGpu.work)
        self.parts[title] = {f"{kind} in {place}": number for (kind, place), number in FakeGpu.syncs.items()}


class NoWriter:
    """Stand-in for the writer of checkpoints, which starts a thread."""

    def __init__(self, *_: Any): ...
    def close(self) -> None: ...


def build_without_weights(auto_class: Any, path: str, config: Any, **settings: Any) -> Any:
    """Build a fake model from its configuration, where `from_pretrained` reads weights."""
    del settings["output_loading_info"]
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    return auto_class.from_config(config, **settings | {"dtype": dtype}), {"unexpected_keys": [], "missing_keys": []}


@contextmanager
def fake_rank(world_size: int = 1, modes: Sequence[Any] = ()) -> Iterator[FakeGpu]:
    """Context manager with a fake GPU, in which workers can be built for rank 0 of `world_size` ranks."""
    with ExitStack() as stack:
        for owner, name, value in (
            *((auto, "from_pretrained", classmethod(build_without_weights)) for auto in AUTO_CLASSES),
            (sharding, "join_process_group", lambda *_: None),
            (sharding, "load_for_ranks", nullcontext),
            (process_group, "join_process_group", lambda *_: None),
            (process_group, "make_mesh", outside(process_group.make_mesh)),
            (process_group, "create_sequence_groups", outside(process_group.create_sequence_groups)),
            (model_worker, "CheckpointWriter", NoWriter),
            (digest_kernel, "_add_hashes", mock.MagicMock()),
            (sharding, "make_host_buffer", make_pinned_buffer),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(fake_cuda(world_size, modes))


def make_pinned_buffer(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)


def place(world_size: int = 1, sequence_parallel_size: int = 1) -> RankPlacement:
    return RankPlacement(0, world_size, "", "cuda", 1, sequence_parallel_size)


def resolve(path: Path, **settings: Any) -> Model:
    """The model section of a run on GPUs."""
    configured = Model(path=str(path), **settings)
    return choose_kernels(resolve_model(configured, "cuda", 8192), configured)


def make_policy(
    path: Path,
    actor: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    world_size: int = 1,
    sequence_parallel_size: int = 1,
    **settings: Any,
) -> PolicyWorker:
    """settings: further fields of PolicyWorkerConfig."""
    setup: dict[str, Any] = {"ref": Reference(), "needs_reference": False, "optimizer_steps": 10, "temperature": 1.0}
    section = resolve(path, **(model or {}))
    config = PolicyWorkerConfig(model=section, actor=Actor(**(actor or {})), **setup | settings)
    return PolicyWorker(config, place(world_size, sequence_parallel_size))


def make_rows(responses: Sequence[int], prompt: int = 20, vocabulary: int = 900) -> list[Row]:
    """Rows of a prompt of equal length and random tokens. responses: number of response tokens of each row."""
    random, rows = np.random.default_rng(0), []
    for response in responses:
        ids, length = random.integers(5, vocabulary, prompt + response).tolist(), prompt + response
        mask = [0] * prompt + [1] * response
        rows.append(Row(ids, mask, [-float(bit) for bit in mask], [length - 1]))
    return rows


RESPONSES = (30, 5, 12, 30, 9, 30)


def make_batch(
    worker: Any,
    rows: list[Row] | None = None,
    world_size: int = 1,
    shares_prompts: bool = False,
    mini_batch_size: int = 0,
    max_tokens: int = 120,
) -> BatchLayout:
    rows = make_rows(RESPONSES) if rows is None else rows
    shared = None
    if shares_prompts:
        rows = [replace(row, token_ids=[*rows[0].token_ids[:20], *row.token_ids[20:]]) for row in rows]
        shared = find_shared_prompts(rows, [0] * len(rows))
    size = mini_batch_size or len(rows)
    padded = worker.builder.padded
    return build_batch_layout(rows, range(len(rows)), world_size, size, max_tokens, padded, shared_prompts=shared)


def make_columns(batch: BatchLayout, **more: Any) -> Columns[np.ndarray]:
    """Columns of rank 0 with one weight for each row."""
    rows = batch.rank_batches[0].rows
    zeros, weights = np.zeros(int(rows.response_lengths.sum()), np.float32), np.full(len(rows), 1.0 / batch.num_rows)
    columns = Columns(
        advantages=zeros + 1,
        ref_logprobs=zeros,
        loss_weights=weights,
        sequence_weights=weights,
        value_weights=weights,
        trajectory_ids=np.arange(len(rows)),
    )
    return replace(columns, **more)


def update(run: Recorder, worker: PolicyWorker, batch: BatchLayout, title: str = "update", **more: Any) -> None:
    """Update the policy, and record the synchronizations. more: further columns."""
    worker.load_batch(batch.rank_batches[0])
    with run.record(title):
        worker.update(make_columns(batch, **more))


def publish(worker: PolicyWorker) -> None:
    """Gather all weights in buckets with their digests, as for the engines."""
    names: Counter[str] = Counter()
    for bucket in prefetch_buckets(make_buckets(gather_parameters(worker.policy.model, worker.dtype), worker.dtype)):
        compute_joint_digest(bucket.values())
        names.update(bucket.keys())
        assert all(one.device.type == "cuda" and one.dtype == torch.bfloat16 for one in bucket.values())
    plain = [name for name, _ in worker.policy.model.named_parameters() if ".lora_" not in name]
    assert set(names.values()) == {1} and len(names) >= len(plain), names
