from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.load import load_config
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import SftConfig
from alphaapollo.finetuning.sft import SftTask
from alphaapollo.models import sharding
from alphaapollo.types import Row
from alphaapollo.workers.finetuning_worker import SftWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import run_ranks, some_rows
from tests.unit.workers.training import assert_close, load_plain, parameters

NUM_STEPS, EXAMPLES = 3, 6
OPTIM = {"lr": 0.01, "lr_warmup_steps": 2, "warmup_style": "cosine", "weight_decay": 0.1}


@dataclass(frozen=True)
class SftCase:
    folder: str
    attention: str = "padded"
    max_tokens: int = 10_000
    optim: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: int = 1
    model: dict[str, Any] = field(default_factory=dict)


def make_worker(case: SftCase, rank: int, num_ranks: int, address: str) -> SftWorker:
    sharding.MIN_UNIT = 0
    model = {"path": case.folder, "attention": case.attention} | case.model
    config = SftConfig(model=model, optim=OPTIM | case.optim, grad_clip=0.5)
    placement = RankPlacement(rank, num_ranks, address, "cpu", 1, case.sequence_parallel)
    return SftWorker(config, resolve_model(config.model, "cpu"), placement, NUM_STEPS, saves_in_background=True)


@pytest.fixture
def make(model_folder, close_later) -> Callable[..., tuple[SftWorker, SftCase]]:
    def make_alone(**fields: Any) -> tuple[SftWorker, SftCase]:
        case = SftCase(str(model_folder("qwen3")), **fields)
        return close_later(make_worker(case, 0, 1, "")), case

    return make_alone


def rank_batch(case: SftCase, rows: list[Row], rank: int, num_ranks: int) -> RankBatch:
    padded, shared = case.attention == "padded", case.sequence_parallel
    layout = build_batch_layout(
        rows, range(len(rows)), num_ranks // shared, len(rows), case.max_tokens, padded, 0, False
    )
    return layout.rank_batches[rank // shared]


def batches() -> list[list[Row]]:
    return [some_rows(EXAMPLES, seed) for seed in range(NUM_STEPS)]


def step_metrics(worker: SftWorker, batch: RankBatch, skip_bad_step: bool = False) -> dict[str, float]:
    """Metrics of a step."""
    stepped = worker.step(batch, skip_bad_step)
    return SftTask(SftConfig()).compute_metrics(stepped.metric_sums) | stepped.metrics


def train(
    rank: int, num_ranks: int, address: str, case: SftCase
) -> tuple[list[dict[str, float]], dict[str, np.ndarray], float]:
    worker = make_worker(case, rank, num_ranks, address)
    metrics = [step_metrics(worker, rank_batch(case, rows, rank, num_ranks)) for rows in batches()]
    sums = worker.evaluate(rank_batch(case, some_rows(5, seed=9), rank, num_ranks))
    found = metrics, parameters(worker), SftTask(SftConfig()).compute_metrics(sums)["loss"]
    worker.close()
    return found


def plain_loss(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    losses = []
    for row in rows:
        ids, mask = torch.tensor(row.token_ids), torch.tensor(row.action_mask)
        losses.append(F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask[1:].bool()])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_three_steps_equal_a_plain_loop(model_folder, name: str):
    """Warm-up 1/2, 2/2, then the start of the cosine: 0.005, 0.01, 0.01; AdamW, norms do not decay; clipped at 0.5."""
    folder = str(model_folder(name))
    metrics, weights, val_loss = train(0, 1, "", SftCase(folder, max_tokens=40))
    plain = load_plain(folder)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for rows, figure, lr in zip(batches(), metrics, (0.005, 0.01, 0.01), strict=True):
        loss = plain_loss(plain, rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert figure["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert figure["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert figure["lr"] == pytest.approx(lr)
    expected = {f"model.{name}": parameter.detach().numpy() for name, parameter in plain.named_parameters()}
    assert_close(weights, expected, atol=2e-4, rtol=1e-7)
    with torch.no_grad():
        assert val_loss == pytest.approx(plain_loss(plain, some_rows(5, seed=9)).item(), rel=1e-3)


def test_layout_and_ranks_change_nothing(model_folder):
    case = SftCase(str(model_folder("qwen3")))
    expected, _, val_loss = train(0, 1, "", case)
    others = [train(0, 1, "", SftCase(case.folder, "sdpa", 50))]
    for layout in (SftCase(case.folder, max_tokens=40), SftCase(case.folder, "sdpa", 50, sequence_parallel=2)):
        others += run_ranks(train, 2, layout)
    for metrics, _, own_val_loss in others:
        for ours, figure in zip(metrics, expected, strict=True):
            assert ours == pytest.approx(figure, rel=2e-3)
        assert own_val_loss == pytest.approx(val_loss, rel=2e-3)


def test_resumed_steps_are_the_same_bits(make, tmp_path: Path):
    """A checkpoint is written while the next step trains, and the resumed worker uses its own optimizer settings."""
    worker, case = make()
    first, second, third = (rank_batch(case, rows, 0, 1) for rows in batches())
    worker.step(first)
    worker.step(second)
    worker.save(str(tmp_path / "saved"))
    expected = worker.step(third)
    assert worker.get_save_future().result() > 0
    resumed, _ = make()
    resumed.load(str(tmp_path / "saved"))
    assert resumed.step(third) == expected

    changed, _ = make(optim={"weight_decay": 0.3, "betas": (0.8, 0.95)})
    changed.load(str(tmp_path / "saved"))
    groups = changed.state.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.95)}


def test_bad_steps_stop_or_are_skipped_and_damaged_weights_are_not_written(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    worker, case = make()
    batch, loss = rank_batch(case, batches()[0], 0, 1), worker.compute_loss
    before = parameters(worker)

    def infinite(*arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        own, sums = loss(*arguments)
        return own * np.inf, sums

    monkeypatch.setattr(worker, "compute_loss", infinite)
    with pytest.raises(FloatingPointError, match=r"gradient norm is (nan|inf)") as error:
        worker.step(batch)
    keys = re.findall(r"[a-z_.]+=[\w.-]+", str(error.value))
    assert keys == ["data.seed=1000", "trainer.on_bad_step=skip", "optim.lr=0.001"]
    assert load_config(SftConfig, "sft", keys).trainer.on_bad_step == "skip"
    assert step_metrics(worker, batch, skip_bad_step=True)["steps_skipped"] == 1
    assert_close(parameters(worker), before, atol=0, rtol=0)
    monkeypatch.undo()
    assert step_metrics(worker, batch)["steps_skipped"] == 0
    next(worker.model.parameters()).data.fill_(np.nan)
    for write in (worker.save, worker.export):
        with pytest.raises(FloatingPointError, match=r"model's \d+ parameters are not finite"):
            write(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
