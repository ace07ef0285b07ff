"""Who sits on which node and sees which GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alphaapollo.controller.ray_placement import check_reach, seats, visible_gpus
from alphaapollo.controller.ray_ranks import Place
from alphaapollo.controller.worker_counts import Placement

NODES: Any = "nodes"  # two, of four GPUs
ENGINE_GPUS: Any = "GPUs of the engines"
SHARED = Placement(
    device="cuda",
    num_nodes=2,
    ranks_per_node=4,
    num_engines=4,
    tensor_parallel=2,
    colocate=True,
    threads=1,
    engine_threads=1,
    critic=True,
    reward_model=False,
)
APART = replace(SHARED, num_engines=3, colocate=False)


def test_engines_that_share_gpus_sit_and_see_where_their_ranks_are() -> None:
    placed = seats(SHARED, NODES, None)
    assert [(seat.group, seat.bundle, seat.num_gpus) for seat in placed.policy] == [
        *[(NODES, 0, 1.0)] * 4,
        *[(NODES, 1, 1.0)] * 4,
    ]
    assert [seat.bundle for seat in placed.beside] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [(seat.bundle, seat.num_gpus) for seat in placed.engines] == [(0, 0.0), (0, 0.0), (1, 0.0), (1, 0.0)]
    visible = visible_gpus(SHARED, ["0", "1", "2", "3", "3", "2", "1", "0"])  # as Ray dealt them
    assert [one["CUDA_VISIBLE_DEVICES"] for one in visible.beside] == ["0", "1", "2", "3", "3", "2", "1", "0"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in visible.engines] == ["0,1", "2,3", "3,2", "1,0"]


def test_engines_with_gpus_of_their_own_get_them_from_ray() -> None:
    placed = seats(APART, NODES, ENGINE_GPUS)
    assert [(seat.group, seat.bundle, seat.num_gpus) for seat in placed.engines] == [
        (ENGINE_GPUS, index, 2.0) for index in range(3)
    ]
    visible = visible_gpus(APART, [str(gpu) for gpu in range(8)])
    assert visible.engines == [{}, {}, {}] and visible.beside[5] == {"CUDA_VISIBLE_DEVICES": "5"}


def test_without_gpus_nobody_is_told_and_engines_take_the_nodes_in_turn() -> None:
    laptops = replace(SHARED, device="cpu", num_engines=5)
    placed = seats(laptops, NODES, None)
    assert {seat.num_gpus for seat in (*placed.policy, *placed.engines)} == {0.0}
    assert [seat.bundle for seat in placed.engines] == [0, 1, 0, 1, 0]
    assert visible_gpus(laptops, [""] * 8).engines == [{}] * 5


def test_an_engine_beside_no_training_rank_is_named() -> None:
    ranks = [Place(1, "a", "10.0.0.1", "")]
    check_reach(ranks, [Place(2, "a", "10.0.0.1", "")])
    with pytest.raises(ValueError, match=r"engine 1 runs on node 10\.0\.0\.2.*rollout\.colocate=true"):
        check_reach(ranks, [Place(2, "a", "10.0.0.1", ""), Place(3, "b", "10.0.0.2", "")])
