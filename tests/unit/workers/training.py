"""Policy workers on small batches, and their gradients as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import BatchLayout, Columns, Rows
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Actor, Model, Reference, RolloutCorrection, Teacher
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.models import sharding
from alphaapollo.models.moe_routing import ROUTED_EXPERTS
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.models.train_state import OptimizerStep
from alphaapollo.types import LONGER_PROMPT, Row, WeightUpdate
from alphaapollo.workers.builders import make_teacher_model_sections
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.process_group import RankPlacement
from tests.matrices import join, split
from tests.unit.tiny import run_ranks, some_rows
from tests.vision.rows import make_rows_with_images

NUM_ROWS = 10


@dataclass(frozen=True)
class Case:
    """Layout and settings of one iteration."""

    folder: str
    actor: dict[str, Any] = field(default_factory=dict)
    attention: str = "padded"
    dtype: str = "auto"
    max_tokens: int = 10_000
    num_rows: int = NUM_ROWS
    mini_batch_size: int = NUM_ROWS
    needs_reference: bool = False
    ref: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    use_liger: Any = "auto"
    lora_rank: int = 0
    min_unit: int = 0  # parameters of a layer that FSDP gathers on its own
    rough: bool = False  # rows 0 and 2 have a response of one token, and rows 1 and 2 no weight in the loss
    order: int | None = None  # seed of a shuffle of the rows
    correction: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: int = 1
    aux: float = 0.0  # weight of the load-balancing loss
    replay: bool = False  # rows come with experts
    device: Device = "cpu"
    teacher: dict[str, Any] = field(default_factory=dict)
    teacher_folder: str = ""
    teacher_shares: tuple[tuple[float, ...], ...] = ()  # of the first, second, ... row, repeated
    server_folder: str = ""  # model of a teacher behind a server
    contexts: bool = False  # rows have prompts for a self-teacher, except every third one
    no_advantages: bool = False
    freeze_vision: bool = True
    images: bool = False  # the rows are those of tests/vision/rows.py

    def share(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Index of the rank's part of the rows, and the number of parts."""
        return rank // self.sequence_parallel, num_ranks // self.sequence_parallel

    @property
    def row_order(self) -> np.ndarray:
        rows = np.arange(self.num_rows)
        return rows if self.order is None else np.random.default_rng(self.order).permutation(rows)


def make_worker(case: Case, rank: int, num_ranks: int, address: str, **arguments: Any) -> PolicyWorker:
    sharding.MIN_UNIT = case.min_unit
    model = resolve_model(
        Model(
            path=case.folder,
            attention=case.attention,
            dtype=case.dtype,
            enable_gradient_checkpointing=case.checkpointing,
            lora_rank=case.lora_rank,
            freeze_vision=case.freeze_vision,
            router_aux_loss_coef=case.aux,
            use_liger=case.use_liger,
        ),
        case.device,
    )
    teacher = Teacher(**{"model": {"path": case.teacher_folder}} | case.teacher)
    sender = arguments.pop("sender", None)
    setup = PolicyWorkerConfig(
        model=model,
        actor=Actor(**case.actor),
        ref=Reference(**case.ref),
        needs_reference=case.needs_reference,
        optimizer_steps=10,
        temperature=0.9,
        teacher=teacher,
        teacher_models=make_teacher_model_sections(model, teacher),
        **arguments,
    )
    placement = RankPlacement(rank, num_ranks, address, case.device, 1, case.sequence_parallel)
    return PolicyWorker(setup, placement, sender)


def make_batch(case: Case, num_ranks: int) -> BatchLayout:
    rows = make_rows_with_images(Path(case.folder)) if case.images else some_rows(case.num_rows)
    if case.rough:
        rows = [cut_to_one_token(row) if index in (0, 2) else row for index, row in enumerate(rows)]
    if case.replay:
        rows = [replace(row, columns={ROUTED_EXPERTS: some_experts(row, index)}) for index, row in enumerate(rows)]
    if case.teacher_shares:
        rows = [replace(row, columns={TEACHER_SHARES: shares}) for row, shares in zip(rows, cycle(case.teacher_shares))]
    if case.contexts:
        prompts = [longer_prompt(row, index) for index, row in enumerate(rows)]
        rows = [
            replace(row, columns={LONGER_PROMPT: prompt} if prompt else {})
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    rows = [rows[index] for index in case.row_order]
    padded = case.attention == "padded"
    return build_batch_layout(
        rows, list(range(case.num_rows)), num_ranks, case.mini_batch_size, case.max_tokens, padded, 0, False
    )


def longer_prompt(row: Row, index: int) -> list[int]:
    """Prompt of a self-teacher: three tokens, some more, and the row's prompt; none for every third row."""
    return [] if index % 3 == 2 else [7, 8, 9, *range(2, 2 + index), *row.token_ids[: row.response_start]]


def cut_to_one_token(row: Row) -> Row:
    end = row.response_start + 1
    return Row(row.token_ids[:end], row.action_mask[:end], row.logprobs[:end], [end - 1])


def some_experts(row: Row, seed: int) -> np.ndarray:
    """Two of four experts for each token and each of two layers."""
    generator = np.random.default_rng(seed)
    return generator.random((len(row.token_ids), 2, 4)).argsort(-1)[..., :2].astype(np.uint8)


def make_columns(case: Case, batch: BatchLayout, rank: int, old: bool = True, ref: bool = False) -> Columns:
    """Columns like the driver's: read-only, with weights over the mini-batch. A row has the same values in any order
    of the rows."""
    generator = np.random.default_rng(1)
    mask = join(batch, [one.rows.action_mask for one in batch.rank_batches])
    all_lengths = torch.from_numpy(mask.sum(1).astype(np.int64))
    lengths = all_lengths.clone()
    if case.rough:
        lengths[torch.from_numpy(np.isin(case.row_order, (1, 2)))] = 0
    groups = torch.from_numpy(case.row_order) // 2
    weights, per_sequence, of_values, taught = (np.zeros(batch.num_rows, np.float32) for _ in range(4))
    mode = Actor(**case.actor).loss_agg_mode
    for rows in batch.mini_batch_rows:
        weights[rows] = row_weights(lengths[rows], groups[rows], mode, 16.0).numpy()
        per_sequence[rows] = row_weights(lengths[rows], groups[rows], "seq-mean-token-sum", 16.0).numpy()
        if case.contexts:
            with_context = [row for row in rows if case.row_order[row] % 3 != 2]
            taught[with_context] = row_weights(lengths[with_context], groups[with_context], mode, 16.0).numpy()
        of_values[rows] = row_weights(all_lengths[rows], groups[rows], "token-mean", 16.0).numpy()

    def column(scale: float, shift: float = 0.0) -> np.ndarray:
        matrix = (scale * generator.standard_normal(mask.shape) + shift).astype(np.float32)
        flat = split(batch, matrix[case.row_order])[rank]
        flat.flags.writeable = False
        return flat

    chosen = (column(1.0) > 0.5).astype(np.uint8)
    return Columns(
        advantages=column(0.0 if case.no_advantages else 1.0),
        returns=column(1.0),
        values=column(0.5),
        old_logprobs=column(0.5, -4.0) if old else None,
        ref_logprobs=column(0.5, -4.0) if ref else None,
        loss_weights=batch.split_row_values(weights)[rank],
        sequence_weights=batch.split_row_values(per_sequence)[rank],
        value_weights=batch.split_row_values(of_values)[rank],
        divergence_weights=batch.split_row_values(taught)[rank] if case.contexts else None,
        trajectory_ids=batch.split_row_values(case.row_order)[rank],
        selected_tokens=chosen if get_policy_loss(Actor(**case.actor).policy_loss.loss_mode).select_tokens else None,
        **(make_top_tokens(case.server_folder, batch.rank_batches[rank].rows) if case.server_folder else {}),
    )


@torch.no_grad()
def make_top_tokens(folder: str, rows: Rows, k: int = 5) -> dict[str, np.ndarray]:
    """Columns with a model's k most probable tokens and the probability of all others, like those from a server."""
    model, tokens, logprobs = load_plain(folder), [torch.zeros(0, k, dtype=torch.int64)], [torch.zeros(0, k + 1)]
    for ids, start, _, _ in iterate_rows(rows):
        logits = model(ids[None]).logits[0, start - 1 : -1] / 0.9
        top = logits.softmax(-1).topk(k)
        tokens.append(top.indices)
        logprobs.append(torch.cat([top.values, 1 - top.values.sum(-1, keepdim=True)], -1).log())
    return {
        "top_tokens": torch.cat(tokens)[:, None].int().numpy(),
        "top_token_logprobs": torch.cat(logprobs)[:, None].numpy(),
    }


def iterate_rows(rows: Rows) -> Iterator[tuple[torch.Tensor, int, slice, torch.Tensor]]:
    """Token ids of each row, start of its response, the response's part of a column, and its mask of actions."""
    for row in range(len(rows)):
        part = slice(*rows.response_offsets[row : row + 2])
        ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]])
        yield ids, int(rows.response_starts[row]), part, torch.from_numpy(rows.action_mask[part]).bool()


def load_plain(folder: object, factor: float = 1.0) -> Any:
    """Model of transformers in float32 with eager attention, and weights times a factor."""
    from transformers import AutoModelForCausalLM

    arguments: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(str(folder), **arguments).eval()
    scale_weights(model, factor)
    return model


def plain_logprobs(model: Any, ids: torch.Tensor, temperature: float = 0.9) -> torch.Tensor:
    """Log-probs of the tokens after the first one."""
    with torch.no_grad():
        logprobs = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0]


def assert_close(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], atol: float = 1e-6, rtol: float = 1e-4
) -> None:
    """Compare arrays by name. rtol=atol=0 compares bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=atol, rtol=rtol, err_msg=name)


def parameters(worker: Any) -> dict[str, np.ndarray]:
    """Copies of a worker's complete parameters by name."""
    return {name: full_tensor(p.detach()).numpy().copy() for name, p in worker.state.module.named_parameters()}


class Recorder:
    """Sender that keeps the weights that it gets."""

    def send(self, tensors: Any, version: int) -> WeightUpdate:
        self.sent = {name: tensor.clone() for name, tensor in tensors}
        return WeightUpdate(version, "digest")

    def release_sent_weights(self) -> None:
        pass


def scale_weights(model: torch.nn.Module, factor: float) -> None:
    """Move the weights away from the reference, the same on all ranks."""
    for parameter in model.parameters():
        local_tensor(parameter.data).mul_(factor)


def record_gradients(worker: Any) -> list[dict[str, np.ndarray]]:
    """Replace the optimizer step: it only records the gradients, gathered from all ranks."""
    recorded: list[dict[str, np.ndarray]] = []

    def step(skip_bad_step: bool = False) -> OptimizerStep:
        module = worker.state.module
        trained = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        recorded.append({name: full_tensor(gradient).cpu().numpy() for name, gradient in trained.items()})
        worker.state.module.zero_grad()
        return OptimizerStep(0.0, 0.0)

    worker.state.step = step
    return recorded


Gradients = tuple[dict[str, np.ndarray], dict[str, float]]
"""Gradients of one optimizer step by parameter name, with the update's metrics."""


def gradients(rank: int, num_ranks: int, address: str, case: Case) -> Gradients:
    return gradients_of_losses(rank, num_ranks, address, [case])[0]


def gradients_of_losses(rank: int, num_ranks: int, address: str, cases: list[Case]) -> list[Gradients]:
    """Run cases that differ in loss and layout one after the other with one worker."""
    worker = make_worker(cases[0], rank, num_ranks, address)
    scale_weights(worker.policy, 1.1)
    found = []
    for case in cases:
        assert all(
            getattr(case, name) == getattr(cases[0], name) for name in ("folder", "attention", "needs_reference")
        )
        worker.actor, worker.correction = Actor(**case.actor), RolloutCorrection(**case.correction)
        worker.policy_loss = get_policy_loss(worker.actor.policy_loss.loss_mode)
        recorded = record_gradients(worker)
        own, shares = case.share(rank, num_ranks)
        batch = make_batch(case, shares)
        worker.load_batch(batch.rank_batches[own])
        needs_ref_column = worker.actor.use_kl_loss and worker.actor.kl_loss_type != "full"
        metrics = worker.update(make_columns(case, batch, own, ref=needs_ref_column))
        found.append((recorded[0], metrics))
    worker.close()
    return found


def call_for_each(
    rank: int, num_ranks: int, address: str, function: Callable[..., Any], cases: Sequence[Any], *arguments: Any
) -> list[Any]:
    """Results of a function of a rank for several cases, each with its own process group."""
    return [function(rank, num_ranks, f"{address}_{index}", case, *arguments) for index, case in enumerate(cases)]


def alone(case: Case) -> Gradients:
    """Gradients on one rank in this process, without recomputation."""
    actor = {key: value for key, value in case.actor.items() if key != "fsdp_config"}
    return gradients(0, 1, "", replace(case, actor=actor, sequence_parallel=1, checkpointing=False))


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert_close(found[0], expected[0])
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-6)


def compare_ranks_with_one(cases: list[Case], num_ranks: int = 2) -> None:
    """Compare the gradients and metrics of each case on several ranks with those on one."""
    ranks = run_ranks(call_for_each, num_ranks, gradients, cases, timeout=300)
    for case, *found in zip(cases, *ranks, strict=True):
        expected = alone(case)
        assert max(np.abs(gradient).max() for gradient in expected[0].values()) > 1e-3
        for own in found:
            assert_same(own, expected)


def check_layouts_compute_the_same(case: Case) -> None:
    """Micro-batches, packed rows, checkpointing, two ranks, a rank without rows, and sequence parallelism."""
    expected = alone(case)
    for other in (replace(case, max_tokens=40, checkpointing=True), replace(case, attention="sdpa", max_tokens=60)):
        assert_same(gradients(0, 1, "", other), expected)
    small = replace(case, max_tokens=40)
    shared = replace(small, sequence_parallel=2)
    compare_ranks_with_one([small, replace(case, num_rows=1), shared, replace(shared, attention="sdpa")])


def gradients_of(plain: torch.nn.Module) -> dict[str, np.ndarray]:
    """Gradients of a plain model, with the names that workers use."""
    return {f"model.{name}": parameter.grad.numpy() for name, parameter in plain.named_parameters()}
