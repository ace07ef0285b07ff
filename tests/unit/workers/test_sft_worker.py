from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from alphaapollo.config.schema import SftConfig
from alphaapollo.finetuning.sft import SftTask
from alphaapollo.types import Row
from tests.unit.workers.training import Case, assert_close, load_plain, make_batch, make_rows, parameters

OPTIM = {"lr": 0.01, "lr_warmup_steps": 2, "warmup_style": "cosine", "weight_decay": 0.1}
SFT = Case("qwen3", role="sft", num_rows=6, settings={"optim": OPTIM, "grad_clip": 0.5})


def plain_loss(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    losses = []
    for row in rows:
        ids, mask = torch.tensor(row.token_ids), torch.tensor(row.action_mask)
        losses.append(F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask[1:].bool()])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_three_steps_equal_a_plain_loop(start, model_folder, name: str):
    """Warm-up 1/2, 2/2, then the start of the cosine: 0.005, 0.01, 0.01; AdamW, norms do not decay; clipped at 0.5."""
    worker, _ = start(SFT, folder=name, max_tokens=40)
    cases = [replace(SFT, max_tokens=40, row_seed=seed) for seed in range(3)]
    plain, compute_metrics = load_plain(model_folder(name)), SftTask(SftConfig()).compute_metrics
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for case, lr in zip(cases, (0.005, 0.01, 0.01), strict=True):
        stepped = worker.step(make_batch(case).rank_batches[0])
        loss = plain_loss(plain, make_rows(case))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert compute_metrics(stepped.metric_sums)["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stepped.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert stepped.metrics["lr"] == pytest.approx(lr)
    expected = {f"model.{name}": parameter.detach().numpy() for name, parameter in plain.named_parameters()}
    assert_close(parameters(worker), expected, atol=2e-4, rtol=1e-7)
    held_out = replace(SFT, num_rows=5, row_seed=9)
    loss = compute_metrics(worker.evaluate(make_batch(held_out).rank_batches[0]))["loss"]
    with torch.no_grad():
        assert loss == pytest.approx(plain_loss(plain, make_rows(held_out)).item(), rel=1e-3)
