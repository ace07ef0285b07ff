"""Device synchronizations of an update, and its tokens/s and MFU at 0.5B and 1.5B against a minimal loop on the same
tokens: Hugging Face model, log-softmax, PPO's clipped loss, backward, clip, fused AdamW."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import torch

from alphaapollo.data.batch import Columns, RankBatch
from alphaapollo.models.flops import FlopsEstimator, find_peak_flops
from alphaapollo.workers.policy import PolicyWorker
from scripts.gpu_check.kit import Kit, vocabulary_of
from scripts.random_batch import random_batch

MAX_WAITS = 6.0  # per micro-batch: metrics are summed on the device
ROUNDS = 3
NEEDED = {"qwen2.5-0.5b": 20, "qwen2.5-1.5b": 48}  # GiB of the GPU


def run(kit: Kit) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if kit.on_gpu else 0.0
    for name, needed in NEEDED.items() if kit.on_gpu else [("qwen2.5-0.5b", 0)]:
        size = name.removeprefix("qwen2.5-")
        if gib < needed:
            figures[size] = f"untested: needs {needed} GiB"
            continue
        figures |= {f"{size} {key}": value for key, value in measure(kit, kit.model(name)).items()}
        gc.collect()
        if kit.on_gpu:
            torch.cuda.empty_cache()
    if "0.5b waits_a_micro_batch" in figures:
        waits = figures["0.5b waits_a_micro_batch"]
        assert waits <= MAX_WAITS, f"{waits:.1f} waits for the GPU per micro-batch"
    return figures


def measure(kit: Kit, folder: Path) -> dict[str, float]:
    lengths, tokens = ([1024] * 32, 4096) if kit.on_gpu else ([64] * 4, 128)
    padded = not kit.on_gpu
    batch, columns = random_batch(lengths, vocabulary_of(folder), tokens, padded)
    figures = {}
    ours = update_seconds(kit, folder, batch, columns, figures)
    bare = bare_seconds(kit, folder, batch)
    figures |= {"tokens_per_s": sum(lengths) / ours, "bare_tokens_per_s": sum(lengths) / bare}
    figures["over_bare"] = bare / ours
    if kit.on_gpu:
        figures["compiled_over_bare"] = bare / update_seconds(kit, folder, batch, columns, {}, compiled=True)
    return figures


def update_seconds(
    kit: Kit, folder: Path, batch: RankBatch, columns: Columns, figures: dict[str, float], compiled: bool = False
) -> float:
    """Seconds of the fastest update. Adds its synchronizations and MFU to `figures`."""
    worker = kit.worker(folder, model={"enable_gradient_checkpointing": False, "use_torch_compile": compiled})
    worker.load_batch(batch)
    worker.update(columns)
    if kit.on_gpu:
        figures["waits_a_micro_batch"] = count_waits(worker, batch, columns)
    ours = []
    for _ in range(ROUNDS if kit.on_gpu else 1):
        with kit.clock() as seconds:
            worker.update(columns)
        ours += seconds
    size = FlopsEstimator.from_model(worker.policy.model)
    peak = find_peak_flops(torch.cuda.get_device_name()) if kit.on_gpu else None
    if peak and size:
        figures["mfu"] = size.estimate_training_flops(batch.rows.lengths) / min(ours) / peak
    worker.close()
    del worker
    gc.collect()
    return min(ours)


def count_waits(worker: PolicyWorker, batch: RankBatch, columns: Columns) -> float:
    """Synchronizations with the GPU per micro-batch, counted by torch."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker.update(columns)
    torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchronizing CUDA operation" in str(one.message)]
    return len(waits) / sum(len(mini_batch.micro_batches) for mini_batch in batch.mini_batches)


def bare_seconds(kit: Kit, folder: Path, batch: RankBatch) -> float:
    """Seconds of one optimizer step of a minimal loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(kit.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    best = float("inf")
    for _ in range(1 + ROUNDS if kit.on_gpu else 1):
        with kit.clock() as seconds:
            bare_step(kit, model, optimizer, batch)
        best = min(best, *seconds)
    return best


def bare_step(kit: Kit, model: Any, optimizer: torch.optim.Optimizer, batch: RankBatch) -> None:
    rows = batch.rows
    for mini_batch in batch.mini_batches:
        for micro in mini_batch.micro_batches:
            for position in (micro[i : i + 4] for i in range(0, len(micro), 4)):  # tokens for which dense logits fit
                tokens = [rows.token_ids[slice(*rows.token_offsets[[p, p + 1]])] for p in position]
                ids = torch.stack([torch.from_numpy(one) for one in tokens]).to(kit.device)
                with torch.autocast(kit.device, torch.bfloat16, enabled=kit.on_gpu):
                    logits = model(ids, use_cache=False).logits[:, :-1]
                logp = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                ratio = (logp - logp.detach()).exp()
                (-torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() / len(rows.token_ids)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
