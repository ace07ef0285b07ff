"""Node and visible GPUs of each worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_placement import assign_actor_slots, check_engine_nodes_have_ranks, choose_visible_gpus
from alphaapollo.controller.ray_ranks import ActorLocation

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
    has_critic=True,
    has_reward_model=False,
)
APART = replace(SHARED, num_engines=3, colocate=False)


def test_engines_on_shared_gpus_get_the_slots_and_gpus_of_their_ranks() -> None:
    ranks = [(slot.group, slot.bundle, slot.num_gpus) for slot in assign_actor_slots(SHARED, "policy", [NODES])]
    assert ranks == [*[(NODES, 0, 1.0)] * 4, *[(NODES, 1, 1.0)] * 4]
    critics = [(slot.bundle, slot.num_gpus) for slot in assign_actor_slots(SHARED, "critic", [NODES])]
    assert critics == [*[(0, 0.0)] * 4, *[(1, 0.0)] * 4]
    engines = [(slot.bundle, slot.num_gpus) for slot in assign_actor_slots(SHARED, "rollout", [NODES])]
    assert engines == [(0, 0.0), (0, 0.0), (1, 0.0), (1, 0.0)]
    gpus = ["0", "1", "2", "3", "3", "2", "1", "0"]  # as Ray assigned them
    assert choose_visible_gpus(SHARED, "policy", gpus) == [{}] * 8
    assert [one["CUDA_VISIBLE_DEVICES"] for one in choose_visible_gpus(SHARED, "critic", gpus)] == gpus
    visible = [one["CUDA_VISIBLE_DEVICES"] for one in choose_visible_gpus(SHARED, "rollout", gpus)]
    assert visible == ["0,1", "2,3", "3,2", "1,0"]


def test_engines_with_gpus_of_their_own_get_them_from_ray() -> None:
    engines = assign_actor_slots(APART, "rollout", [NODES, ENGINE_GPUS])
    assert [(slot.group, slot.bundle, slot.num_gpus) for slot in engines] == [
        (ENGINE_GPUS, index, 2.0) for index in range(3)
    ]
    gpus = [str(gpu) for gpu in range(8)]
    assert choose_visible_gpus(APART, "rollout", gpus) == [{}, {}, {}]
    assert choose_visible_gpus(APART, "critic", gpus)[5] == {"CUDA_VISIBLE_DEVICES": "5"}


def test_without_gpus_engines_are_dealt_to_the_nodes_in_turn() -> None:
    laptops = replace(SHARED, device="cpu", num_engines=5)
    engines = assign_actor_slots(laptops, "rollout", [NODES])
    assert {slot.num_gpus for slot in (*assign_actor_slots(laptops, "policy", [NODES]), *engines)} == {0.0}
    assert [slot.bundle for slot in engines] == [0, 1, 0, 1, 0]
    assert choose_visible_gpus(laptops, "rollout", [""] * 8) == [{}] * 5


def test_an_engine_on_a_node_without_training_rank_is_named() -> None:
    ranks = [ActorLocation(1, "a", "10.0.0.1", "")]
    check_engine_nodes_have_ranks(ranks, [ActorLocation(2, "a", "10.0.0.1", "")])
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.2 has engine 1 but no training rank.*rollout\.colocate=true"):
        check_engine_nodes_have_ranks(
            ranks, [ActorLocation(2, "a", "10.0.0.1", ""), ActorLocation(3, "b", "10.0.0.2", "")]
        )
