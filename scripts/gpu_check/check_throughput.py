"""Speed of an update with micro-batches of 16k tokens: tokens/s and MFU, the time of its parts, and a minimal loop in
bfloat16 on the same tokens (Hugging Face model, log-softmax, PPO's clipped loss, backward, clip, fused AdamW)."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from alphaapollo.batching.batch import Columns, RankBatch
from alphaapollo.config.resolve import get_attention_kernel, resolve_model
from alphaapollo.config.schema import Fsdp, Model
from alphaapollo.config.schema.planned_device import find_gpu
from alphaapollo.models.flops import FlopsEstimator
from alphaapollo.models.load import LIGER_ARCHITECTURES, load_causal_lm
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.planning.model_memory import estimate_update, make_rank_model
from alphaapollo.workers.policy import PolicyWorker
from scripts.checks import Untested
from scripts.gpu_check.device import GIB
from scripts.gpu_check.kit import PUBLISHED, ROUNDS, Kit, need, read_config, vocabulary_of
from scripts.random_batch import random_batch

MICRO_BATCHES = 2  # of an update
MAX_WAITS = 6.0  # per micro-batch: metrics are summed on the device
USABLE = 0.9  # share of the GPU's memory that a planned update may take


@dataclass(frozen=True)
class Shape:
    """Model of a published size, or a slice of it."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    tokens: int = 16_384  # of a micro-batch
    against_bare: bool = False


SHAPES = {
    "0.5b": Shape("qwen2.5-0.5b", against_bare=True),
    "1.5b": Shape("qwen2.5-1.5b", against_bare=True),
    "7b": Shape("qwen2.5-7b", {"num_hidden_layers": 8}),
    "30b-a3b": Shape("qwen3-30b-a3b", {"num_hidden_layers": 4}, tokens=8192),
}


@dataclass(frozen=True)
class Work:
    """An optimizer step of MICRO_BATCHES micro-batches on a model."""

    kit: Kit
    folder: Path
    lengths: list[int]
    batch: RankBatch
    columns: Columns
    checkpointing: bool

    @property
    def micro_batches(self) -> list[list[int]]:
        return self.batch.mini_batches[0].micro_batches

    def worker(self, **model: Any) -> PolicyWorker:
        worker = self.kit.worker(self.folder, model=model | {"enable_gradient_checkpointing": self.checkpointing})
        worker.load_batch(self.batch)
        return worker


def run(kit: Kit, size: str) -> None:
    if size == "compiled":
        work = prepare(kit, SHAPES["0.5b"])
        for name, compiled in (("", False), ("compiled ", True)):
            with kit.part(f"{name}update"):
                measure_update(work, work.worker(use_torch_compile=compiled), name)
        return
    work = prepare(kit, SHAPES[size])
    with kit.part("update"):
        measure_update_and_parts(work)
    if SHAPES[size].against_bare:
        with kit.part("bare"):
            measure_bare_loop(work)
    with kit.part("liger"):  # last: it replaces functions of this process
        kit.need_gpu("Liger")
        need("liger_kernel")
        if (kind := read_config(work.folder)["model_type"]) not in LIGER_ARCHITECTURES:
            raise Untested(f"Liger is not used for {kind}")
        measure_update(work, work.worker(use_liger=True), "liger ")


def prepare(kit: Kit, shape: Shape) -> Work:
    """Make the model and a batch, and choose gradient checkpointing by the memory plan."""
    folder = kit.model(shape.name, **shape.changes)
    length, tokens = (1024, shape.tokens) if kit.on_gpu else (64, 128)
    lengths = [length] * (MICRO_BATCHES * tokens // length)
    batch, columns = random_batch(lengths, vocabulary_of(folder), tokens, padded=not kit.on_gpu)
    memory = kit.memory.get_total()
    checkpointing, planned = choose_checkpointing(kit.device, folder, (tokens // length, length), memory)
    if planned > USABLE * memory:
        raise Untested(f"an update needs {planned / GIB:.0f} GiB")
    kit.record("checkpointing", checkpointing)
    return Work(kit, folder, lengths, batch, columns, checkpointing)


@contextmanager
def write_config(shape: Shape) -> Iterator[Path]:
    """Context manager that yields a folder with the config.json of a shape, for plans."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(read_config(PUBLISHED / shape.name) | shape.changes))
        yield Path(folder)


def choose_checkpointing(
    device: str, folder: Path, micro_batch_shape: tuple[int, int], memory: int
) -> tuple[bool, int]:
    """Return whether an update needs gradient checkpointing to fit into `memory` bytes, and its planned peak."""
    for checkpointing in (False, True):
        model = resolve_model(Model(path=str(folder), enable_gradient_checkpointing=checkpointing), device)  # type: ignore[arg-type]
        planned = estimate_update(make_rank_model(model, Fsdp(), device, 1, micro_batch_shape)).total()  # type: ignore[arg-type]
        if planned < USABLE * memory:
            break
    return checkpointing, planned


def measure_update(work: Work, worker: PolicyWorker, prefix: str = "") -> float:
    """Record tokens/s, MFU and the peak of an update. Returns its seconds."""
    kit = work.kit
    kit.memory.reset_peak()
    seconds = kit.time(lambda: worker.update(work.columns))
    kit.record(f"{prefix}tokens_per_s", sum(work.lengths) / seconds)
    if mfu := compute_mfu(worker.policy.model, work, seconds):
        kit.record(f"{prefix}mfu", mfu)
    kit.record(f"{prefix}peak_gib", kit.memory.get_peak() / GIB)
    return seconds


def compute_mfu(model: Any, work: Work, seconds: float) -> float | None:
    """Model FLOP/s utilization; None if the peak FLOP/s of the device are unknown."""
    size = FlopsEstimator.from_model(model)
    gpu = find_gpu(torch.cuda.get_device_name()) if work.kit.on_gpu else None
    return (
        size.estimate_training_flops(work.batch.rows.lengths) / seconds / (1e12 * gpu.tflops) if gpu and size else None
    )


def count_waits(worker: PolicyWorker, work: Work) -> float:
    """Synchronizations with the GPU per micro-batch, counted by torch; 0 on a CPU."""
    if work.kit.on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.update(work.columns)
    if work.kit.on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchronizing CUDA operation" in str(one.message)]
    return len(waits) / len(work.micro_batches)


def measure_update_and_parts(work: Work) -> None:
    """Record an update, and the milliseconds of a micro-batch in trunk (decoder) and head without FSDP, of FSDP, of the
    optimizer step, and of the rest of the update."""
    kit, count, worker = work.kit, len(work.micro_batches), work.worker()
    update = measure_update(work, worker)
    config, dtype = worker.config, worker.dtype
    micro = worker.builder.build(work.batch.rows, work.micro_batches[0])
    sharded, step = time_passes_and_step(work, worker, micro)
    waits = count_waits(worker, work)
    worker.close()
    del worker
    kit.memory.free_unused()
    policy = PolicyModel(load_causal_lm(config, get_attention_kernel(config))).to(kit.device, dtype)
    complete = kit.time(lambda: run_passes(policy, micro))
    trunk = kit.time(lambda: run_trunk(policy, micro))
    parts = {"trunk": trunk, "head": complete - trunk, "fsdp": sharded - complete, "optimizer": step}
    parts["rest"] = (update - step) / count - sharded
    for name, value in parts.items():
        kit.record(f"{name}_ms", 1000 * value)
    kit.record("waits_per_micro_batch", waits)
    assert waits <= MAX_WAITS, f"{waits:.1f} synchronizations with the GPU per micro-batch"


def time_passes_and_step(work: Work, worker: PolicyWorker, micro: MicroBatch) -> tuple[float, float]:
    """Seconds of the passes of a micro-batch under FSDP, and of the optimizer step."""
    sharded = work.kit.time(lambda: run_passes(worker.policy, micro))
    steps = []
    for _ in range(ROUNDS):
        run_passes(worker.policy, micro, keeps_gradients=True)
        with work.kit.clock() as seconds:
            worker.state.step()
        steps += seconds
    return sharded, min(steps)


def run_passes(policy: PolicyModel, micro: MicroBatch, keeps_gradients: bool = False) -> None:
    """Forward and backward pass with log-probs and entropy."""
    stats = policy(micro, 1.0, needs_entropy=True)
    assert stats.entropy is not None
    (stats.logprobs + 0.01 * stats.entropy).sum().backward()
    if not keeps_gradients:
        policy.zero_grad(set_to_none=True)


def run_trunk(policy: PolicyModel, micro: MicroBatch) -> None:
    """Forward and backward pass of the decoder layers."""
    policy.compute_lm_head_input(micro).states.sum().backward()
    policy.zero_grad(set_to_none=True)


def measure_bare_loop(work: Work) -> None:
    """Record tokens/s and MFU of a minimal loop with weights, gradients and moments in bfloat16, which does less work
    than an optimizer in float32."""
    from transformers import AutoModelForCausalLM

    kit, dtype = work.kit, torch.bfloat16 if work.kit.on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=dtype, attn_implementation="sdpa").to(kit.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    seconds = kit.time(lambda: run_bare_step(kit, model, optimizer, work.batch))
    kit.record("bare_tokens_per_s", sum(work.lengths) / seconds)
    if mfu := compute_mfu(model, work, seconds):
        kit.record("bare_mfu", mfu)


def run_bare_step(kit: Kit, model: Any, optimizer: torch.optim.Optimizer, batch: RankBatch) -> None:
    rows = batch.rows
    for micro in batch.mini_batches[0].micro_batches:
        for position in (micro[i : i + 4] for i in range(0, len(micro), 4)):  # tokens for which dense logits fit
            tokens = [rows.token_ids[slice(*rows.token_offsets[[p, p + 1]])] for p in position]
            ids = torch.stack([torch.from_numpy(one) for one in tokens]).to(kit.device)
            logits = model(ids, use_cache=False).logits[:, :-1]
            logp = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logp - logp.detach()).exp()
            (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() / len(rows.token_ids)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
