"""Log-probs and gradients of a tiny model in each layout of a micro-batch, and those of transformers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from alphaapollo.batching.batch import Rows
from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.config.resolve import Attention, resolve_model
from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder, make_rows
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.ulysses import SequenceGroup, create_sequence_groups
from tests.architectures.models import MAX_LENGTH, VOCABULARY, Architecture

CPU = torch.device("cpu")
LENGTHS, STARTS = [80, 60, 20, 45], [40, 40, 1, 1]  # the first two rows share a prompt of 40 tokens
Result = tuple[list[Tensor], dict[str, Tensor]]  # log-probs of each row, gradient by parameter name


@dataclass(frozen=True)
class Case:
    """Model and layout of micro-batches."""

    folder: Path
    attention: Attention = "padded"
    batches: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)  # rows of each micro-batch
    uses_shared_prompts: bool = False
    checkpointing: bool = False


def draw_rows(uses_shared_prompts: bool = False) -> Rows:
    tokens = np.random.default_rng(5).integers(2, VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    tokens[1, : STARTS[0]] = tokens[0, : STARTS[0]]
    prefixes = SharedPrompts(np.array([0, 0, 1, 2]), np.array(STARTS)) if uses_shared_prompts else None
    return make_rows([row[:length] for row, length in zip(tokens, LENGTHS, strict=True)], STARTS, prefixes)


def load_policy(folder: Path, attention: Attention = "padded", checkpointing: bool = False) -> PolicyModel:
    configured = Model(path=str(folder), enable_gradient_checkpointing=checkpointing)
    return PolicyModel(load_causal_lm(resolve_model(configured, "cpu", MAX_LENGTH), attention))


def weigh(logprobs: Tensor) -> Tensor:
    """Loss of one row."""
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


def compute(case: Case, sequence: SequenceGroup | None = None) -> Result:
    """Compute the log-probs of all rows and the gradients of their losses, on the rank's part of `sequence`."""
    policy, rows = load_policy(case.folder, case.attention, case.checkpointing), draw_rows(case.uses_shared_prompts)
    builder = MicroBatchBuilder(case.attention == "padded", CPU, sequence)
    found: list[Tensor] = []
    for batch in case.batches:
        logprobs = policy(builder.build(rows, batch), 1.0).logprobs
        parts = logprobs.split([LENGTHS[index] - STARTS[index] for index in batch])
        torch.stack([weigh(row) for row in parts]).sum().backward()
        found += [row.detach() for row in parts]
    return found, collect_gradients(policy.model)


def collect_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compute_with_transformers(architecture: Architecture, folder: Path) -> Result:
    """Compute what training must compute: each row alone, with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    settings = architecture.same_as
    config = None if settings is None else architecture.build_config(settings)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager").eval()
    rows = draw_rows()
    found = []
    for (begin, end), start in zip(itertools.pairwise(rows.token_offsets), STARTS, strict=True):
        ids = torch.from_numpy(rows.token_ids[begin:end])[None]
        logprobs = (
            model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[start - 1 :, 0]
        )
        weigh(logprobs).backward()
        found.append(logprobs.detach())
    return found, collect_gradients(model)


def compute_on_ranks(rank: int, num_ranks: int, address: str, cases: list[Case]) -> list[Result]:
    """Compute each case with Ulysses. Each rank returns its part of the gradients."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    sequence, _ = create_sequence_groups("cpu", num_ranks)
    return [compute(case, sequence) for case in cases]


def assert_same(found: Result, expected: Result) -> None:
    (logprobs, gradients), (expected_logprobs, expected_gradients) = found, expected
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=5e-5)
    assert gradients.keys() == expected_gradients.keys()
    total = torch.nn.utils.get_total_norm(expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * total, name
