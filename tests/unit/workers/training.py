"""Workers of every role on small batches, and what plain transformers computes for them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import BatchLayout, Columns, Rows
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import (
    Actor,
    Critic,
    DpoConfig,
    FrozenFsdp,
    Model,
    Reference,
    RmConfig,
    SftConfig,
    Teacher,
)
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.models import sharding
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.moe_routing import ROUTED_EXPERTS
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.models.train_state import OptimizerStep
from alphaapollo.types import LONGER_PROMPT, Row
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens
from alphaapollo.workers.builders import make_teacher_model_sections
from alphaapollo.workers.critic import CriticWorker, RewardModelWorker
from alphaapollo.workers.finetuning_worker import SftWorker
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.preference import PreferenceWorker, RewardTrainingWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.matrices import join, split
from tests.unit.tiny import some_rows
from tests.vision.rows import make_rows_with_images

NUM_ROWS, NUM_STEPS = 10, 10


FINETUNING = {
    "sft": (SftWorker, SftConfig),
    "preference": (PreferenceWorker, DpoConfig),
    "reward": (RewardTrainingWorker, RmConfig),
}


@dataclass(frozen=True)
class Case:
    """Model, role, settings and layout of one iteration."""

    folder: str  # in tables the name of a tiny model, before `Folders.locate`
    actor: dict[str, Any] = field(default_factory=dict)
    attention: str = "padded"
    dtype: str = "auto"  # "float64": what a configuration cannot choose; needs Float64Mode
    role: str = "policy"  # or critic, reward_model (frozen), and those of FINETUNING
    settings: dict[str, Any] = field(default_factory=dict)  # of another role
    max_tokens: int = 10_000
    num_rows: int = NUM_ROWS
    row_seed: int = 0
    mini_batch_size: int = NUM_ROWS
    needs_reference: bool = False
    ref: dict[str, Any] = field(default_factory=dict)
    checkpointing: Any = False
    offloads: bool = False  # the inputs of recomputed layers
    compiles: bool = False
    use_liger: Any = "auto"
    lora_rank: int = 0
    min_unit: int = 0  # parameters of a layer that FSDP gathers on its own
    rough: bool = False  # rows 0 and 2 have a response of one token, and rows 1 and 2 no weight in the loss
    order: int | None = None  # seed of a shuffle of the rows
    sequence_parallel: int = 1
    shares_prompts: bool = False
    records_old: bool = False  # the update gets no old log-probs, and records its own
    aux: float = 0.0  # weight of the load-balancing loss
    replay: bool = False  # rows come with experts
    kept: bool = False  # rows come with the tokens that the sampler kept, except every third one
    device: Device = "cpu"
    teacher: dict[str, Any] = field(default_factory=dict)
    teacher_folder: str = ""
    teacher_shares: tuple[tuple[float, ...], ...] = ()  # of the first, second, ... row, repeated
    server_folder: str = ""  # model of a teacher behind a server
    contexts: bool = False  # rows have prompts for a self-teacher, except every third one
    no_advantages: bool = False
    freeze_vision: bool = True
    images: bool = False  # the rows are the first ones of tests/vision/rows.py

    def share(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Index of the rank's part of the rows, and the number of parts."""
        return rank // self.sequence_parallel, num_ranks // self.sequence_parallel

    @property
    def row_order(self) -> np.ndarray:
        rows = np.arange(self.num_rows)
        return rows if self.order is None else np.random.default_rng(self.order).permutation(rows)

    @property
    def needs_ref_column(self) -> bool:
        actor = Actor(**self.actor)
        return actor.use_kl_loss and actor.kl_loss_type != "full"


def make_worker(case: Case, rank: int = 0, num_ranks: int = 1, address: str = "", **arguments: Any) -> Any:
    """Worker of the case's role. arguments: further ones of its class."""
    sharding.MIN_UNIT = case.min_unit
    model = resolve_model(
        Model(
            path=case.folder,
            attention=case.attention,
            dtype="auto" if case.dtype == "float64" else case.dtype,
            enable_gradient_checkpointing=case.checkpointing,
            activation_offload=case.offloads,
            lora_rank=case.lora_rank,
            freeze_vision=case.freeze_vision,
            router_aux_loss_coef=case.aux,
            use_torch_compile=case.compiles,
            use_liger=case.use_liger,
        ),
        case.device,
    )
    if case.dtype == "float64":
        model = model.model_copy(update={"dtype": "float64"})
    placement = RankPlacement(rank, num_ranks, address, case.device, 1, case.sequence_parallel)
    if case.role == "policy":
        return make_policy_worker(case, model, placement, **arguments)
    if case.role == "critic":
        return CriticWorker(model, Critic(**case.settings), placement, NUM_STEPS, **{"seed": 0} | arguments)
    if case.role == "reward_model":
        return RewardModelWorker(model, FrozenFsdp(), placement)
    worker_class, config_class = FINETUNING[case.role]
    return worker_class(config_class(**case.settings), model, placement, NUM_STEPS, **arguments)


def make_policy_worker(
    case: Case, model: Model, placement: RankPlacement, sender: Any = None, **arguments: Any
) -> PolicyWorker:
    teacher = Teacher(**{"model": {"path": case.teacher_folder}} | case.teacher)
    setup = PolicyWorkerConfig(
        model=model,
        actor=Actor(**case.actor),
        ref=Reference(**case.ref),
        needs_reference=case.needs_reference,
        optimizer_steps=NUM_STEPS,
        temperature=0.9,
        teacher=teacher,
        teacher_models=make_teacher_model_sections(model, teacher),
        **arguments,
    )
    return PolicyWorker(setup, placement, sender)


def make_rows(case: Case) -> list[Row]:
    every = make_rows_with_images(Path(case.folder)) if case.images else some_rows(case.num_rows, case.row_seed)
    rows = [every[index] for index in range(case.num_rows)]
    if case.role == "reward_model":
        rows = [read_at_the_end(row) for row in rows]
    if case.rough:
        rows = [cut_to_one_token(row) if index in (0, 2) else row for index, row in enumerate(rows)]
    if case.replay:
        rows = [replace(row, columns={ROUTED_EXPERTS: some_experts(row, index)}) for index, row in enumerate(rows)]
    if case.kept:
        codes = [some_kept_tokens(row, index) for index, row in enumerate(rows)]
        rows = [replace(row, columns={KEPT_TOKENS: code}) for row, code in zip(rows, codes, strict=True)]
    if case.teacher_shares:
        rows = [replace(row, columns={TEACHER_SHARES: shares}) for row, shares in zip(rows, cycle(case.teacher_shares))]
    if case.contexts:
        prompts = [longer_prompt(row, index) for index, row in enumerate(rows)]
        rows = [
            replace(row, columns={LONGER_PROMPT: prompt} if prompt else {})
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    return [rows[index] for index in case.row_order]


def make_batch(case: Case, num_ranks: int = 1) -> BatchLayout:
    rows, padded = make_rows(case), case.attention == "padded"
    shared = find_shared_prompts(rows, [0] * len(rows)) if case.shares_prompts else None
    sizes = num_ranks, case.mini_batch_size, case.max_tokens
    return build_batch_layout(rows, range(len(rows)), *sizes, padded, shared_prompts=shared, min_sharing_ratio=1.0)


def some_kept_tokens(row: Row, index: int) -> bytes | None:
    """For each token the next one of the row and random others, in its response."""
    generator = np.random.default_rng(index)
    others = [generator.choice(48, size) for size in generator.integers(0, 9, len(row.token_ids))]
    following = np.roll(row.token_ids, -1)
    sets = [np.union1d(one, token) for one, token in zip(others, following, strict=True)]
    start = row.response_start - 1
    return None if index % 3 == 2 else KeptTokens.of_sets([*[()] * start, *sets[start:]]).encode()


def read_at_the_end(row: Row) -> Row:
    """The row with its last token as response, where a reward model reads its score."""
    length = len(row.token_ids)
    return Row(row.token_ids, [0] * (length - 1) + [1], [0.0] * length, [length - 1])


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


def make_columns(case: Case, batch: BatchLayout, rank: int = 0, old: bool = True) -> Columns:
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
        ref_logprobs=column(0.5, -4.0) if case.needs_ref_column else None,
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
    return {name: full_tensor(p.detach()).clone().numpy() for name, p in worker.state.module.named_parameters()}


class Recorder:
    """Sender that keeps the weights that it gets."""

    def send(self, tensors: Any, version: int) -> WeightUpdate:
        self.sent = {name: tensor.clone() for name, tensor in tensors}
        return WeightUpdate(version, "digest")

    def release_sent_weights(self) -> None:
        pass


@torch.no_grad()
def train_by_hand(model: nn.Module) -> None:
    """Set nonzero adapters, drawn by the parameter's name: the same on any number of ranks, and in peft's model."""
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = (torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
            local_tensor(parameter).copy_(value)


def scale_weights(model: nn.Module, factor: float) -> None:
    """Move the weights away from the reference, the same on all ranks."""
    for parameter in model.parameters():
        local_tensor(parameter.data).mul_(factor)


def read_gradients(worker: Any) -> dict[str, np.ndarray]:
    """Accumulated gradients, gathered from all ranks."""
    named = worker.state.module.named_parameters()
    return {name: full_tensor(p.grad).cpu().numpy().copy() for name, p in named if p.grad is not None}


def gather(values: np.ndarray) -> list[np.ndarray]:
    """Values of all ranks."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, values)
    return every


def record_gradients(worker: Any) -> list[dict[str, np.ndarray]]:
    """Replace the optimizer step: it only records the gradients, gathered from all ranks."""
    recorded: list[dict[str, np.ndarray]] = []

    def step(*_: object) -> OptimizerStep:
        recorded.append(read_gradients(worker))
        worker.state.module.zero_grad()
        return OptimizerStep(0.0, 0.0)

    worker.state.step = step
    return recorded


def gradients_of(plain: nn.Module) -> dict[str, np.ndarray]:
    """Gradients of a plain model, with the names that workers use."""
    return {f"model.{name}": parameter.grad.numpy() for name, parameter in plain.named_parameters()}
