from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from alphaapollo.config.schema import Optimizer
from alphaapollo.models.training.optimizer import (
    clip_gradients,
    compute_learning_rate,
    make_optimizers,
    set_hyperparams,
)
from tests.unit.tiny import free_address


def test_constant_after_linear_warm_up():
    config = Optimizer(lr=0.8, lr_warmup_steps=4)
    assert [compute_learning_rate(step, config, 100) for step in (0, 1, 3, 4, 99)] == pytest.approx(
        [0.2, 0.4, 0.8, 0.8, 0.8]
    )


def test_cosine_from_peak_to_floor():
    config = Optimizer(lr=1.0, lr_warmup_steps=2, warmup_style="cosine", min_lr_ratio=0.2)
    rates = [compute_learning_rate(step, config, 10) for step in (2, 6, 10, 1000)]
    assert rates == pytest.approx([1.0, 0.6, 0.2, 0.2])  # half way: 0.2 + 0.8 / 2


def test_warm_up_as_a_share_of_all_steps():
    config = Optimizer(lr=1.0, lr_warmup_steps_ratio=0.1)
    assert compute_learning_rate(4, config, 100) == pytest.approx(0.5)
    assert compute_learning_rate(0, Optimizer(lr=1.0), 100) == 1.0  # no warm-up


def test_norms_and_biases_do_not_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    groups = make_optimizers(model, Optimizer(weight_decay=0.1))[0].param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 3)]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", init_method=free_address(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_clip_by_hand(one_rank: None):
    """Gradients (3, 0) and (4): norm 5, clipped to 1."""
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    unused = nn.Parameter(torch.zeros(1))
    assert clip_gradients([a, b, unused], 1.0) == pytest.approx(5.0)
    assert a.grad.tolist() == pytest.approx([0.6, 0.0])
    assert b.grad.tolist() == pytest.approx([0.8])
    assert clip_gradients([a, b], 2.0) == pytest.approx(1.0)
    assert b.grad.tolist() == pytest.approx([0.8])


def test_non_finite_gradients_are_not_changed(one_rank: None):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.nan, 1.0])
    assert math.isnan(clip_gradients([parameter], 1.0))
    assert parameter.grad[1] == 1.0


def test_settings_of_the_configuration_replace_those_of_a_checkpoint():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    (optimizer,) = make_optimizers(model, Optimizer(weight_decay=0.1))
    set_hyperparams([optimizer], Optimizer(weight_decay=0.3, betas=(0.8, 0.95)))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}
