"""Node and visible GPUs of each worker."""

from __future__ import annotations

from collections.abc import Sequence
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


def list_slots(placement: Placement, role: str, groups: Sequence[Any] = (NODES,)) -> list[tuple[Any, int, float]]:
    return [(slot.group, slot.bundle, slot.num_gpus) for slot in assign_actor_slots(placement, role, list(groups))]


def test_engines_on_shared_gpus_get_the_slots_and_gpus_of_their_ranks() -> None:
    assert list_slots(SHARED, "policy") == [*[(NODES, 0, 1.0)] * 4, *[(NODES, 1, 1.0)] * 4]
    assert list_slots(SHARED, "critic") == [*[(NODES, 0, 0.0)] * 4, *[(NODES, 1, 0.0)] * 4]
    assert list_slots(SHARED, "rollout") == [(NODES, node, 0.0) for node in (0, 0, 1, 1)]
    gpus = ["0", "1", "2", "3", "3", "2", "1", "0"]  # as Ray assigned them
    assert choose_visible_gpus(SHARED, "policy", gpus) == [{}] * 8
    for role, visible in (("critic", gpus), ("rollout", ["0,1", "2,3", "3,2", "1,0"])):
        assert choose_visible_gpus(SHARED, role, gpus) == [{"CUDA_VISIBLE_DEVICES": one} for one in visible]


def test_engines_with_gpus_of_their_own_get_them_from_ray() -> None:
    engines = [(ENGINE_GPUS, index, 2.0) for index in range(3)]
    assert list_slots(APART, "rollout", [NODES, ENGINE_GPUS]) == engines
    gpus = [str(gpu) for gpu in range(8)]
    assert choose_visible_gpus(APART, "rollout", gpus) == [{}, {}, {}]
    assert choose_visible_gpus(APART, "critic", gpus)[5] == {"CUDA_VISIBLE_DEVICES": "5"}


def test_without_gpus_engines_are_dealt_to_the_nodes_in_turn() -> None:
    laptops = replace(SHARED, device="cpu", num_engines=5)
    assert list_slots(laptops, "rollout") == [(NODES, node, 0.0) for node in (0, 1, 0, 1, 0)]
    assert {num_gpus for _, _, num_gpus in list_slots(laptops, "policy")} == {0.0}
    assert choose_visible_gpus(laptops, "rollout", [""] * 8) == [{}] * 5


def test_nodes_for_engines_follow_the_training_nodes() -> None:
    gpus = replace(SHARED, num_engines=4, colocate=False, engine_nodes=2, gpus_per_engine_node=4)
    assert list_slots(gpus, "rollout") == [(NODES, node, 2.0) for node in (2, 3, 2, 3)]
    assert choose_visible_gpus(gpus, "rollout", [""] * 8) == [{}] * 4 and gpus.num_gpus == 16
    laptops = replace(gpus, device="cpu", num_engines=2)
    assert list_slots(laptops, "rollout") == [(NODES, 2, 0.0), (NODES, 3, 0.0)]
