"""Loss, log-probs and gradients of a loop of one's own equal plain transformers in float64, in any split."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import Columns
from alphaapollo.config.schema import Config
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.models.train_state import MAX_SKIPPED_STEPS
from alphaapollo.own_loop.policy_columns import make_columns
from alphaapollo.own_loop.rows import RowReader, distribute, make_row, split_by_row
from alphaapollo.types import Row
from alphaapollo.workers.loss_functions import cross_entropy
from tests.unit.tiny import VOCABULARY, plan_ranks, run_ranks
from tests.unit.workers import training
from tests.unit.workers.layouts import run_on_ranks
from tests.unit.workers.training import Case

TEMPERATURE, NUM_ROWS, DENOMINATOR = 0.9, 6, 7.5
READER = RowReader(None, VOCABULARY, ())


def own_loss(logp: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    return -(logp - columns["old_logprobs"]).exp() * columns["advantages"][:, None] + 0.1 * logp.square()


def paired_loss(logp: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    sums = (logp * columns["mask"]).sum(1)
    return -torch.nn.functional.logsigmoid(0.3 * (sums[0::2] - sums[1::2])).repeat_interleave(2) / 2


def rows_of_test() -> list[Row]:
    """Rows with targets of their own, weights of tokens, and columns per token and per row."""
    generator, rows = np.random.default_rng(3), []
    for length in (5, 9, 4, 12, 7, 6):
        ids, targets = (generator.integers(2, VOCABULARY, length) for _ in range(2))
        weights = generator.uniform(0.2, 2.0, length) * (np.arange(length) > 1)
        weights[3:4] = 0.0
        old = generator.normal(-4.0, 0.5, length)
        rows.append(make_row(ids.tolist(), weights, targets, old_logprobs=old, advantages=float(generator.normal())))
    return rows


LOSSES: dict[str, str | bytes] = {
    "cross_entropy": cloudpickle.dumps(cross_entropy),
    "ppo": "ppo",
    "own": cloudpickle.dumps(own_loss),
    "pairs": cloudpickle.dumps(paired_loss),
}
SPLITS: dict[str, list[list[int]]] = {"at once": [[0, 1, 2, 3, 4, 5]], "three calls": [[0, 1], [4, 5], [2, 3]]}
Found = dict[str, tuple[float, np.ndarray, dict[str, np.ndarray]]]
"""Loss, log-probs of all rows and gradients, by loss and split."""


def accumulate_on_rank(rank: int, num_ranks: int, address: str, case: Case) -> Found:
    found: Found = {}
    plan = plan_ranks(num_ranks, case.max_tokens)
    with Float64Mode(), closing(training.make_worker(case, rank, num_ranks, address)) as worker:
        if case.lora_rank:
            training.train_by_hand(worker.policy)
        for name, loss in LOSSES.items():
            for split, calls in SPLITS.items():
                total, logprobs = 0.0, np.zeros((NUM_ROWS, 12))
                for indices in calls:
                    rows = READER.read([rows_of_test()[index] for index in indices])
                    layout = distribute(
                        rows, plan, [index // 2 for index in range(len(rows))] if name == "pairs" else None
                    )
                    columns = Columns[np.ndarray]()
                    if isinstance(loss, str):
                        settings = get_policy_loss(loss), Config(), DENOMINATOR, None, 0
                        columns = make_columns(rows, layout, *settings, dtype="float64")[rank]
                    metrics, values = worker.accumulate(layout.rank_batches[rank], columns, loss, DENOMINATOR)
                    total += metrics["loss"]
                    for index, row in zip(indices, split_by_row(layout, rows, training.gather(values)), strict=True):
                        logprobs[index, : len(row)] = row
                found[f"{name}, {split}"] = total, logprobs, training.read_gradients(worker)
                worker.clear_gradients()
    return found


def plain_gradients(folder: Path, lora_rank: int) -> Found:
    """The same with transformers and, for LoRA, peft: one row at a time, without any code of the project."""
    from transformers import AutoModelForCausalLM

    arguments: Any = {"dtype": torch.float64, "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), **arguments).eval()
    if lora_rank:
        from peft import LoraConfig, inject_adapter_in_model

        layers = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
        targets = sorted(layers - {"lm_head"})
        inject_adapter_in_model(LoraConfig(r=lora_rank, lora_alpha=16, target_modules=targets), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter_parameter(name))
        training.train_by_hand(torch.nn.ModuleDict({"model": model}))
    found: Found = {}
    for name, _ in LOSSES.items():
        model.zero_grad()
        sums, logprobs = [], np.zeros((NUM_ROWS, 12))
        total = torch.zeros((), dtype=torch.float64)
        for number, row in enumerate(rows_of_test()):
            ids, columns = torch.tensor([row.token_ids]), row.columns
            logits = model(ids).logits[0, :-1] / TEMPERATURE
            logp = logits.log_softmax(-1).gather(1, torch.tensor(columns["targets"])[1:, None])[:, 0]
            weights = torch.tensor(columns["weights"])[1:]
            logprobs[number, 1 : len(row.token_ids)] = (logp * (weights != 0)).detach()
            old, advantage = torch.tensor(columns["old_logprobs"])[1:], columns["advantages"]
            ratio = (logp - old).exp()
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            losses = {"cross_entropy": -logp, "ppo": -clipped, "own": -ratio * advantage + 0.1 * logp.square()}
            if name == "pairs":
                sums.append((logp * (weights != 0)).sum())
            else:
                total = total + (weights * losses[name]).sum()
        for better, worse in zip(sums[0::2], sums[1::2], strict=True):
            total = total - torch.nn.functional.logsigmoid(0.3 * (better - worse))
        (total / DENOMINATOR).backward()
        named = {
            f"model.{key}": one.grad.numpy().copy() for key, one in model.named_parameters() if one.grad is not None
        }
        found[name] = total.item() / DENOMINATOR, logprobs, named
    return found


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_equals_plain_transformers_on_one_and_two_ranks(model_folder: Any, lora_rank: int) -> None:
    folder = model_folder("qwen3")
    case = Case(str(folder), lora_rank=lora_rank, max_tokens=20, dtype="float64")
    with Float64Mode():
        expected = plain_gradients(folder, lora_rank)
    for ranks in (1, 2):
        for found in run_on_ranks(accumulate_on_rank, ranks, case):
            assert found.keys() == {f"{name}, {split}" for name in LOSSES for split in SPLITS}
            for label, (loss, logprobs, gradients) in found.items():
                own_loss_value, own_logprobs, read_gradients = expected[label.partition(",")[0]]
                assert loss == pytest.approx(own_loss_value, rel=1e-7), label
                np.testing.assert_allclose(logprobs, own_logprobs, atol=1e-8, err_msg=label)
                training.assert_close(gradients, read_gradients, atol=1e-7, rtol=1e-6)


def fail_on_rank(rank: int, num_ranks: int, address: str, case: Case) -> tuple[list[str], bool]:
    """Errors of losses that fail on one row only, and whether gradients and weights are unchanged after them."""

    def nan_loss(logp: Any, columns: Any) -> Any:
        return torch.where(columns["number"][:, None] == 3, torch.nan, 1.0) * logp

    def short_loss(logp: Any, columns: Any) -> Any:
        return logp[:, :1]

    def broken_loss(logp: Any, columns: Any) -> Any:
        return logp * columns["number"].tolist().index(3)

    plan = plan_ranks(num_ranks, 12)
    worker = training.make_worker(case, rank, num_ranks, address)
    batches = [distribute(READER.read(rows_of_test(), {"number": [*range(6)]}), plan).rank_batches[rank]]
    worker.accumulate(batches[0], Columns(), LOSSES["cross_entropy"], 10.0)
    before, weights, errors = training.read_gradients(worker), training.parameters(worker), []
    for loss in (nan_loss, short_loss, broken_loss):
        with pytest.raises(ValueError) as failed:
            worker.accumulate(batches[0], Columns(), cloudpickle.dumps(loss), 10.0)
        errors.append(str(failed.value))
    training.assert_close(training.read_gradients(worker), before, 0, 0)
    worker.clear_gradients()
    assert not worker.accumulated
    for _ in range(MAX_SKIPPED_STEPS + 1):
        worker.accumulate(batches[0], Columns(), LOSSES["cross_entropy"], 1e-300)
        with pytest.raises(FloatingPointError, match="The weights are unchanged, and the gradients are dropped"):
            worker.take_step(1e-2, 1.0)
    training.assert_close(training.parameters(worker), weights, 0, 0)
    worker.accumulate(batches[0], Columns(), LOSSES["cross_entropy"], 10.0)
    done = worker.take_step(1e-2, 0.5)
    has_moved = any((weights[name] != one).any() for name, one in training.parameters(worker).items())
    is_cleared = not training.read_gradients(worker)
    worker.close()
    return errors, has_moved and is_cleared and done["lr"] == 1e-2 and worker.state.num_steps == 1


def test_a_loss_that_fails_on_one_rank_fails_on_all_and_changes_nothing(model_folder: Any) -> None:
    for errors, is_right in run_ranks(fail_on_rank, 2, Case(str(model_folder("qwen3"))), timeout=120):
        assert is_right
        nan, short, broken = errors
        assert "the loss is not finite: [nan" in nan and "nan_loss" in nan
        assert "must be a float tensor of shape (1, " in short and "short_loss" in short
        assert "3 is not in list" in broken and "broken_loss" in broken


def test_the_load_balancing_loss_has_the_calls_share_of_the_denominator(model_folder: Any) -> None:
    """With one row per micro-batch, one call equals one call per row, whatever the lengths of their prompts."""
    plan = plan_ranks(1, 1)
    found = []
    for split in ([[0, 1, 2, 3, 4, 5]], [[2], [0], [1], [5, 4], [3]]):
        with closing(training.make_worker(Case(str(model_folder("qwen3_moe")), aux=0.5))) as worker:
            for indices in split:
                rows = READER.read([rows_of_test()[index] for index in indices])
                (batch,) = distribute(rows, plan).rank_batches
                worker.accumulate(batch, Columns(), LOSSES["cross_entropy"], 27.0)
            found.append(training.read_gradients(worker))
    training.assert_close(*found, atol=1e-6, rtol=1e-4)
