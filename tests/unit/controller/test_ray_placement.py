"""Node and visible GPUs of each worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_launcher import assign_actor_slots, choose_visible_gpus

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


def test_nodes_for_engines_follow_the_training_nodes() -> None:
    gpus = replace(SHARED, num_engines=4, colocate=False, engine_nodes=2, gpus_per_engine_node=4)
    engines = [(slot.group, slot.bundle, slot.num_gpus) for slot in assign_actor_slots(gpus, "rollout", [NODES])]
    assert engines == [(NODES, 2, 2.0), (NODES, 3, 2.0), (NODES, 2, 2.0), (NODES, 3, 2.0)]
    assert choose_visible_gpus(gpus, "rollout", [""] * 8) == [{}] * 4 and gpus.num_gpus == 16
    laptops = replace(gpus, device="cpu", num_engines=2)
    assert [slot.bundle for slot in assign_actor_slots(laptops, "rollout", [NODES])] == [2, 3]
