"""A policy worker with two layers of 0.5B: an update has the same gradient norm with gradient checkpointing, with each
offload and with the full KL. Gradients against transformers; save, load and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from alphaapollo.models.checkpoint import CheckpointWriter
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.workers.policy import PolicyWorker
from scripts.gpu_check.kit import Kit, relative, vocabulary_of
from scripts.gpu_check.older_torch import is_older_torch
from scripts.random_batch import random_batch

LENGTHS = {"cuda": [512, 300, 2, 411, 256, 64], "cpu": [48, 30, 2]}
OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy")  # without effect on a CPU
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    # The full KL to the reference that training starts from is 0, with a gradient of 0.
    "full KL": {"actor": {"use_kl_loss": True, "kl_loss_type": "full"}, "needs_reference": True},
    **{key: {"actor": {"fsdp_config": {key: True}}} for key in OFFLOADS},
}
LIMIT = {"cuda": 0.1, "cpu": 1e-3}  # relative: bfloat16 against float32


def run(kit: Kit) -> None:
    folder, norms = kit.model(num_hidden_layers=2), dict[str, float]()
    for name, settings in VARIANTS.items():
        with kit.part(name):
            check_variant(kit, folder, name, settings, norms)


def check_variant(kit: Kit, folder: Path, name: str, settings: dict[str, Any], norms: dict[str, float]) -> None:
    """Train, and save, load and export with and without offloads. Adds the gradient norm to `norms`."""
    worker = kit.worker(folder, **settings)
    batch, columns = random_batch(LENGTHS[kit.device], vocabulary_of(folder), 1024, worker.builder.padded)
    worker.load_batch(batch)
    if name == "plain":
        error = gradient_error(worker, folder)
        kit.record("gradient_error", error)
        assert error < LIMIT[kit.device], f"gradients differ from those of transformers by {error:.2g}"
    before = worker.compute_log_probs()
    norm = norms[name] = worker.update(columns)["actor/grad_norm"]
    kit.record(f"{name} grad_norm", norm)
    worker.offload()
    after = worker.compute_log_probs()
    assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-4, f"{name}: the weights did not change"
    assert abs(norm / norms.get("plain", norm) - 1) < LIMIT[kit.device], f"gradient norms differ: {norms}"
    if name == "plain" or name in OFFLOADS:
        with kit.part(f"{name} checkpoint"):
            save_load_export(worker, columns, after, kit.folder / name)
    worker.close()


def gradient_error(worker: PolicyWorker, folder: Path) -> float:
    """Relative error of the gradient of the summed log-probs, against transformers in float32 without padding."""
    from transformers import AutoModelForCausalLM

    rows, chosen = worker.batch.rows, [0, 2]
    stats = worker.policy(worker.builder.build(rows, chosen), 1.0)
    stats.logprobs.sum().backward()
    ours = {
        name: local_tensor(p.grad).float().cpu() for name, p in worker.policy.named_parameters() if p.grad is not None
    }
    worker.policy.zero_grad()
    reshard(worker.policy)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    bare.to(worker.device)
    for position in chosen:
        tokens = rows.token_ids[slice(*rows.token_offsets[[position, position + 1]])]
        ids = torch.from_numpy(tokens).to(worker.device)
        first = int(rows.response_starts[position])
        logp = bare(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logp.gather(1, ids[1:, None])[first - 1 :].sum().backward()
    exact = {f"model.{name}": p.grad.cpu() for name, p in bare.named_parameters() if p.grad is not None}
    assert ours.keys() == exact.keys()
    names = sorted(ours)
    return relative(*(torch.cat([side[name].flatten() for name in names]) for side in (ours, exact)))


def save_load_export(worker: PolicyWorker, columns: Any, after: np.ndarray, folder: Path) -> None:
    """A checkpoint written during an update restores the earlier log-probs; the export loads in transformers."""
    from transformers import AutoModelForCausalLM

    worker.writer = CheckpointWriter(in_background=not is_older_torch())  # torch 2.11 copies once
    for name in ("first", "saved"):  # the second uses pinned memory
        worker.save(str(folder / name))
        worker.offload()
        if name == "saved":
            worker.update(columns)
        worker.get_save_future().result()
    worker.load(str(folder / "saved"))
    assert np.abs(worker.compute_log_probs() - after).max() < 1e-6, "a loaded checkpoint gives different log-probs"
    worker.export(str(folder / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    assert all(torch.isfinite(p).all() for p in exported.parameters())
