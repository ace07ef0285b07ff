"""Models that cannot share prompts are detected at the start or at the first batch; skipping rows without advantage
does not change the weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import filter_mini_batches
from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Machine
from alphaapollo.launch.plan import can_skip_rows_without_advantage
from alphaapollo.trainer.lifecycle import can_use_shared_prompts
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck
from tests.matrices import join, split
from tests.unit.session.steps import prepare_plan
from tests.unit.workers.training import Case, assert_close, make_batch, parameters

KEY = "actor_rollout_ref.actor.use_prefix_grouper"


def shared(batch: RankBatch) -> RankBatch:
    """Rows that share their prompts in pairs."""
    rows = batch.rows
    ids, lengths = np.arange(len(rows)) // 2, rows.response_starts.copy()
    starts = rows.token_offsets[:-1]
    token_ids = rows.token_ids.copy()
    for first in range(0, len(rows) - 1, 2):
        length = lengths[first] = lengths[first + 1] = min(lengths[first], lengths[first + 1])
        token_ids[starts[first + 1] : starts[first + 1] + length] = token_ids[starts[first] : starts[first] + length]
    return replace(batch, rows=replace(rows, token_ids=token_ids, shared_prompts=SharedPrompts(ids, lengths)))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_batch_is_checked_once(start, lora_rank: int):
    worker, columns = start(max_tokens=60, lora_rank=lora_rank)
    assert worker.shared_prompts.unsupported_reason is None
    metrics = []
    for _ in range(2):
        worker.load_batch(shared(worker.batch))
        metrics.append(worker.update(columns))
    assert 0 <= metrics[0]["actor/sharing_gap"] < 1e-4
    assert "actor/sharing_gap" not in metrics[1]


class Summing(torch.nn.Module):
    """Layer that carries state along the sequence."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self.inner(x + 0.1 * x.cumsum(1), *arguments, **keywords)


def test_a_layer_with_state_is_detected(start):
    worker, _ = start()
    layer = worker.policy.model.model.layers[0]
    layer.mlp = Summing(layer.mlp)
    function = worker.policy.make_logprobs_function(worker.temperature)
    check = SharedPromptCheck(worker.policy, function, worker.builder, torch.float32)
    assert check.unsupported_reason is not None and "Qwen3ForCausalLM" in check.unsupported_reason
    worker.shared_prompts.mismatch = None
    worker.load_batch(shared(worker.batch))
    with pytest.raises(ValueError, match=rf"^{KEY}=true .* Qwen3ForCausalLM, .* {KEY}=false\.$"):
        worker.compute_log_probs()


@pytest.mark.parametrize("asked", ["auto", True])
def test_a_model_that_cannot_share_prompts(asked: Any):
    async def problem() -> str | None:
        return "Mamba has layers of type mamba"

    said: list[str] = []
    config = Config.model_validate({"actor_rollout_ref": {"actor": {"use_prefix_grouper": asked}}})
    role = SimpleNamespace(get_shared_prompts_obstacle=problem)
    run: Any = SimpleNamespace(
        config=config,
        workers=SimpleNamespace(policy=role, critic=None),
        console=SimpleNamespace(notify=said.append),
    )
    if asked is True:
        with pytest.raises(ValueError, match=rf"^{KEY}=true .* type mamba.* auto or false"):
            asyncio.run(can_use_shared_prompts(run))
    else:
        assert asyncio.run(can_use_shared_prompts(run)) is False
        (message,) = said
        assert f"{KEY}=auto" in message and "layers of type mamba" in message


def test_moe_features_need_the_plain_layout(model_folder):
    def prepare(actor: dict[str, Any], **model: Any) -> Any:
        model = {"path": str(model_folder("qwen3_moe")), **model}
        values = {"actor_rollout_ref": {"actor": actor, "model": model}, "data": {"train_files": __file__}}
        return prepare_plan(Config.model_validate(values), Machine(num_cores=2, num_gpus=0))

    prepared = prepare({}, router_aux_loss_coef=0.01)
    assert not prepared.plan.uses_shared_prompts and prepare({}).plan.uses_shared_prompts
    assert not prepare({"use_prefix_grouper": False}).plan.uses_shared_prompts
    assert any(f"({KEY}=auto): model.router_aux_loss_coef" in notice for notice in prepared.notices)
    with pytest.raises(ValueError, match=f"{KEY}=true .*: model.router_aux_loss_coef"):
        prepare({"use_prefix_grouper": True}, router_aux_loss_coef=0.01)


@pytest.mark.parametrize(
    ("actor", "skips"),
    [
        ({}, True),
        ({"policy_loss": {"loss_mode": "gspo"}}, True),
        ({"policy_loss": {"loss_mode": "clip_cov"}}, True),
        ({"policy_loss": {"loss_mode": "kl_cov"}}, False),  # its penalty needs no advantage
        ({"entropy_coeff": 0.01}, False),
        ({"use_kl_loss": True}, False),
    ],
)
def test_losses_that_can_skip_rows_without_advantage(actor: dict[str, Any], skips: bool):
    config = Config.model_validate({"actor_rollout_ref": {"actor": actor}})
    loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    assert can_skip_rows_without_advantage(config, loss) is skips


def test_skipped_rows_do_not_change_the_weights(start, model_folder):
    """Two iterations, the second without advantages, in which only the optimizer's momentum moves the weights."""
    case = Case(str(model_folder("qwen3")), max_tokens=60, mini_batch_size=5, actor={"optim": {"lr": 1e-2}})
    weights, tokens = [], []
    for leaves_out in (False, True):
        (worker, columns), batch = start(case), make_batch(case, 1)
        keep = np.arange(batch.num_rows) % 3 == 0
        for kept in (keep, np.zeros_like(keep)):
            advantages = join(batch, [columns.advantages]) * kept[:, None]
            worker.load_batch(batch.rank_batches[0])
            steps = filter_mini_batches(batch, kept if leaves_out else np.ones_like(kept), 60, padded=True)[0]
            metrics = worker.update(replace(columns, advantages=split(batch, advantages)[0]), steps)
            tokens.append(metrics["actor/tokens"])
            assert metrics["actor/optimizer_steps"] == 2
        assert ("actor/entropy" in metrics) is not leaves_out
        weights.append(parameters(worker))
    assert_close(weights[1], weights[0], atol=2e-5, rtol=1e-7)
    assert tokens[0] == tokens[1] > 2 * tokens[2] > 0 and tokens[3] == 0
