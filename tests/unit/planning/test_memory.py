"""Memory plan: gradient checkpointing if it is needed, and refusals that name the keys to set."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from alphaapollo.config.resolve import resolve_model, resolve_rollout
from alphaapollo.config.schema import Config, Teacher
from alphaapollo.planning.memory_fit import CHECKPOINTING, fit_to_memory, list_fast_settings, replace_values
from alphaapollo.planning.memory_plan import (
    FURTHER_PROCESS,
    PROCESS,
    SLEEPING_ENGINE,
    MemoryPlan,
    find_micro_batch_shape,
)
from alphaapollo.planning.model_memory import GIB, Usage
from alphaapollo.planning.plan_table import describe_checkpointing

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
LONG = {
    "algorithm.adv_estimator": "grpo",
    "data.max_prompt_length": 1024,
    "data.max_response_length": 7168,
    "env.rollout.n": 8,
}
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
KEY = "enable_gradient_checkpointing"
OFFLOAD, COMPILES = (f"actor_rollout_ref.model.{key}" for key in ("activation_offload", "use_torch_compile"))


def resolved(name: str, gpus: int, keys: dict[str, object], device: str = "cuda") -> Config:
    path = {"actor_rollout_ref.model.path": str(PUBLISHED / name), "trainer.n_gpus_per_node": gpus}
    config = replace_values(Config(), {**path, **LONG, TOKENS: 16_384, **keys})
    role = config.actor_rollout_ref
    model = resolve_model(role.model, device)
    rollout = resolve_rollout(role.rollout, model, device, gpus)
    return replace_values(config, {"actor_rollout_ref.model": model, "actor_rollout_ref.rollout": rollout})


def planned(name: str, gpus: int, gib: int, may_choose: bool = True, **keys: object):
    config = resolved(name, gpus, {key.replace("__", "."): value for key, value in keys.items()})
    config, plan = fit_to_memory(config, "cuda", gib * GIB, may_choose, host_memory=1024 * GIB)
    return config.actor_rollout_ref.model.enable_gradient_checkpointing, plan


def test_checkpointing_is_enabled_if_16k_tokens_would_not_fit():
    assert planned("qwen2.5-7b", 8, 80)[0] is True
    assert planned("qwen2.5-0.5b", 8, 80)[0] is False
    assert planned("qwen3-235b-a22b", 1, 0)[1].problem == "", "unknown memory refuses nothing"
    chosen, plan = planned("qwen2.5-7b", 8, 80, may_choose=False)  # the user said false
    assert chosen is False and plan.problem == ""  # activations are an estimate
    assert plan.warning.startswith("memory: about 1") and "gradient_checkpointing=selective, " in plan.warning
    assert "ppo_max_token_len_per_gpu=8192 (docs" in plan.warning


def test_smaller_micro_batches_come_before_gradient_checkpointing():
    def chosen(gpus: int) -> tuple[object, object]:
        config = resolved("qwen2.5-1.5b", gpus, {TOKENS: "auto", "data.max_response_length": 1024})
        actor = (role := fit_to_memory(config, "cuda", 80 * GIB, True)[0].actor_rollout_ref).actor
        return actor.ppo_max_token_len_per_gpu, role.model.enable_gradient_checkpointing

    assert chosen(8) == (16_384, False)
    assert chosen(1) == (8192, False)


def test_an_engine_gets_what_training_leaves_free():
    def share(gib: int, **keys: object) -> float | str:
        config = resolved("qwen2.5-0.5b", 1, {f"actor_rollout_ref.rollout.{key}": value for key, value in keys.items()})
        return fit_to_memory(config, "cuda", gib * GIB, True)[0].actor_rollout_ref.rollout.gpu_memory_utilization

    training = 12 * 494_032_768 + PROCESS["cuda"] + SLEEPING_ENGINE
    assert share(80) == math.floor(100 * (0.9 - training / (80 * GIB))) / 100 == 0.78
    assert share(80, gpu_memory_utilization=0.4) == 0.4
    assert share(80, colocate=False) == 0.86
    assert share(80, free_cache_engine=False) < 0.78 and share(0) == 0.5


def test_a_model_that_cannot_fit_is_refused_with_keys():
    _, plan = planned("qwen2.5-7b", 1, 80)
    assert re.match(r"memory: at least \d+\.\d GiB are needed on a GPU of 80 GiB at its peak \(update", plan.problem)
    assert "fsdp_config.offload_policy=true" in plan.problem and "trainer.nnodes=2; or with" in plan.problem
    _, plan = planned("qwen2.5-32b", 8, 80)  # 61 GiB of weights beside the optimizer state
    assert "engine weights 61.0" in plan.problem and "tensor_model_parallel_size" in plan.problem
    _, plan = planned("qwen2.5-32b", 8, 80, actor_rollout_ref__rollout__gpu_memory_utilization=0.5)
    assert "gpu_memory_utilization=0.5 of a GPU of 80 GiB" in plan.problem and "61.0 GiB" in plan.problem


def test_rank_0_needs_host_memory_for_the_whole_model():
    config = resolved("qwen3-235b-a22b", 64, {"actor_rollout_ref.rollout.tensor_model_parallel_size": 32})
    _, plan = fit_to_memory(config, "cuda", 80 * GIB, True, host_memory=256 * GIB)
    assert plan.problem.startswith("memory: loading the model needs 438 GiB of host memory")


def test_offloaded_state_must_fit_into_host_memory():
    keys = {"actor_rollout_ref.actor.fsdp_config.offload_policy": True, CHECKPOINTING: True}
    config = resolved("qwen2.5-7b", 8, keys)
    _, plan = fit_to_memory(config, "cuda", 80 * GIB, False, host_memory=64 * GIB)
    assert plan.offloaded_bytes == 8 * 12 * -(-7_615_616_512 // 8)
    assert plan.problem.startswith("memory: offloading needs 85 GiB of host memory per node, but a node has 64 GiB.")
    assert fit_to_memory(config, "cuda", 80 * GIB, False, host_memory=128 * GIB)[1].problem == ""


def on_cpu(ranks: int = 1, gib: int = 64, keys: dict[str, object] | None = None) -> MemoryPlan:
    config = resolved("qwen2.5-0.5b", ranks, {TOKENS: 8192, **(keys or {})}, device="cpu")
    return fit_to_memory(config, "cpu", gib * GIB, False)[1]


def on_two_nodes(name: str, gib: int = 80, **keys: object) -> tuple[object, MemoryPlan]:
    settings = {"trainer.nnodes": 2, TOKENS: "auto", "data.max_response_length": 1024}
    config = resolved(name, 8, {**settings, **{key.replace("__", "."): value for key, value in keys.items()}})
    config, plan = fit_to_memory(config, "cuda", gib * GIB, True, host_memory=1024 * GIB)
    assert plan.problem == ""
    return config.actor_rollout_ref.actor.fsdp_config.fsdp_size, plan


def test_each_node_has_a_copy_of_a_model_that_fits():
    size, plan = on_two_nodes("qwen2.5-7b")
    assert (size, plan.shards) == (8, 8)
    size, plan = on_two_nodes("qwen2.5-32b", actor_rollout_ref__rollout__tensor_model_parallel_size=4)
    assert (size, plan.shards) == (16, 16)
    assert on_two_nodes("qwen2.5-7b", actor_rollout_ref__actor__fsdp_config__fsdp_size=4)[0] == 4
    assert on_two_nodes("qwen2.5-7b", gib=0)[0] == 16  # of GPUs of unknown size
    experts = {"actor_rollout_ref__actor__fsdp_config__ep_size": 16}
    assert on_two_nodes("qwen3-30b-a3b", 140, **experts)[0] == 16  # which share the experts


def test_checkpointing_comes_before_more_traffic():
    """14B shared by 16 ranks: halving 16,384 tokens would gather the weights twice as often through the network."""
    config = resolved("qwen2.5-14b", 8, {TOKENS: "auto", "data.max_response_length": 1024, "trainer.nnodes": 2})

    def choose(size: int) -> tuple[object, object]:
        shared = replace_values(config, {"actor_rollout_ref.actor.fsdp_config.fsdp_size": size})
        role = fit_to_memory(shared, "cuda", 80 * GIB, True)[0].actor_rollout_ref
        return role.actor.ppo_max_token_len_per_gpu, role.model.enable_gradient_checkpointing

    assert choose(16) == (16_384, True)
    fixed = replace_values(config, {TOKENS: 16_384})
    ordered = [tuple(settings.values()) for settings in list_fast_settings(fixed, "cuda", [TOKENS, CHECKPOINTING])]
    assert ordered[:4] == [(False, 16_384), ("selective", 16_384), (True, 16_384), (True, 8192)]
    within = replace_values(fixed, {"actor_rollout_ref.actor.fsdp_config.fsdp_size": 8})
    ordered = [tuple(settings.values()) for settings in list_fast_settings(within, "cuda", [TOKENS, CHECKPOINTING])]
    steps = [(value, tokens) for value in (False, "selective") for tokens in (16_384, 8192, 4096)]
    assert ordered[:7] == [*steps, (True, 16_384)]
    for key, value, first in (
        (CHECKPOINTING, "selective", "selective"),
        (CHECKPOINTING, 3, 3),
        (COMPILES, True, False),
    ):
        settings = list_fast_settings(replace_values(fixed, {key: value}), "cuda", [CHECKPOINTING])
        assert [*settings] == [{CHECKPOINTING: first}, {CHECKPOINTING: True}]


def test_auto_is_selective_if_that_is_enough_and_the_plan_says_what_it_costs():
    chosen, plan = planned("qwen2.5-1.5b", 1, 80)
    model = resolved("qwen2.5-1.5b", 1, {CHECKPOINTING: chosen}).actor_rollout_ref.model
    text = describe_checkpointing(model, plan)
    assert (chosen, plan.problem, plan.warning) == ("selective", "", "")
    assert text == f"selective, no more products in updates; {plan.saved_activations / GIB:.1f} GiB of activations"
    plain = planned("qwen2.5-1.5b", 1, 80, may_choose=False)[1]
    assert plain.excess and 0.45 < plan.saved_activations / plain.saved_activations < 0.55
    texts = {3: "1 of 3 layers, 11% more products in updates", True: "every layer, 33% more", False: "off"}
    for value, start in texts.items():
        assert describe_checkpointing(model.model_copy(update={KEY: value}), None).startswith(start)
    adapted = model.model_copy(update={KEY: True, "lora_rank": 8, "activation_offload": True})
    assert describe_checkpointing(adapted, None) == "every layer, 50% more products in updates, inputs in host memory"


def test_offloaded_inputs_must_fit_into_host_memory():
    """Qwen2.5-7B, 16,384 tokens: 27 inputs of 112 MiB, in buffers of 128 MiB, on each of eight GPUs."""
    config = resolved("qwen2.5-7b", 8, {CHECKPOINTING: True, OFFLOAD: True})
    both = replace_values(config, {OFFLOAD: False}), config
    plain, plan = (fit_to_memory(one, "cuda", 80 * GIB, False)[1] for one in both)
    update = "update of the policy"
    saved = plain.phases[update]["activations"] - plan.phases[update]["activations"]
    assert (saved, plan.host_bytes) == (25 * 112 * 2**20, 8 * 27 * 2**27)
    problem = fit_to_memory(config, "cuda", 80 * GIB, False, host_memory=20 * GIB)[1].problem
    assert problem.startswith("memory: offloading needs 27 GiB") and "activation_offload" in problem


def test_offload_is_proposed_before_more_gpus():
    """The longest row alone is a micro-batch of 49,152 tokens."""
    chosen, plan = planned("qwen2.5-7b", 8, 64, data__max_response_length=100_000, data__max_prompt_length=1024)
    assert chosen is True and "activation_offload=true" in plan.warning, plan.warning


def test_reference_and_critic_are_counted():
    def weights(**keys: object) -> int:
        _, plan = planned("qwen2.5-1.5b", 8, 80, **keys)
        return plan.phases["publish"].total()

    parameters = 1_543_714_304
    assert weights(actor_rollout_ref__actor__use_kl_loss=True) - weights() == 2 * parameters // 8
    assert weights(algorithm__adv_estimator="gae") - weights() == 12 * parameters // 8 + FURTHER_PROCESS


def test_largest_micro_batch():
    def tokens(**keys: object) -> int:
        rows, length = find_micro_batch_shape(replace_values(Config(), {**LONG, TOKENS: 16_384, **keys}))
        return rows * length

    assert tokens() == 16384
    assert tokens(**{TOKENS: 1000}) == 8192
    assert tokens(**{"data.train_batch_size": 1, "env.rollout.n": 1}) == 8192
    ulysses = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 4, "trainer.n_gpus_per_node": 8}
    assert tokens(**ulysses, **{"data.max_response_length": 127_000}) == (1024 + 127_000) // 4  # a part of each row


def test_lora_trains_a_7b_on_one_gpu():
    _, plan = planned("qwen2.5-7b", 1, 80, actor_rollout_ref__model__lora_rank=16)
    usage = plan.phases["update of the policy"]
    targets = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))  # q, o; k, v; gate, up, down
    assert plan.problem == ""
    assert (usage["weights"], usage["optimizer"]) == (2 * 7_615_616_512 + 4 * targets, 8 * targets)
    keys = {"actor_rollout_ref__model__lora_rank": 16, "actor_rollout_ref__actor__use_kl_loss": True}
    _, same = planned("qwen2.5-7b", 1, 80, **keys)
    assert same.phases == plan.phases  # the base is the reference


def test_on_a_cpu_all_ranks_and_engines_share_the_machine():
    one, two = (on_cpu(ranks, gib=1000).phases["generate"] for ranks in (1, 2))
    assert two["engine weights"] == one["engine weights"] and abs(two["weights"] - one["weights"]) < 10
    assert two["runtime"] - one["runtime"] == PROCESS["cpu"]  # one more process
    assert "on this machine at its peak" in on_cpu(gib=8).problem


def test_on_a_cpu_processes_keep_the_memory_of_their_update():
    def updates(controller: str) -> list[Usage]:
        phases = on_cpu(keys={"algorithm.adv_estimator": "gae", "trainer.controller": controller}).phases
        return [phases[f"update of the {role}"] for role in ("policy", "critic")]

    together, apart = updates("local"), updates("ray")
    assert apart[0] == apart[1]
    assert apart[0]["activations"] == sum(usage["activations"] for usage in together)


def test_checkpoint_copies_are_made_if_they_fit():
    size = 8 * 12 * -(-7_615_616_512 // 8)
    config = resolved("qwen2.5-7b", 8, {CHECKPOINTING: True})

    def saves(host: int, **keys: object) -> tuple[bool, int]:
        plan = fit_to_memory(replace_values(config, keys), "cuda", 80 * GIB, False, host_memory=host * GIB)[1]
        assert plan.problem == ""
        return plan.saves_in_background, plan.checkpoint_copy_bytes

    assert saves(0) == saves(128) == (True, size)
    assert saves(90) == (False, size)  # 85 GiB of 90
    assert saves(128, **{"actor_rollout_ref.actor.fsdp_config.offload_policy": True}) == (False, size)
    assert saves(90, **{"trainer.save_freq": -1}) == (True, 0)
    assert saves(90, **{"trainer.save_freq": -1, "trainer.record_steps": [3]}) == (False, size)
    reset = {"algorithm.reference_reset.every": 100, "actor_rollout_ref.actor.use_kl_loss": True}
    assert saves(0, **reset)[1] == size + 8 * 2 * -(-7_615_616_512 // 8)  # the reference in bfloat16


CACHES = [
    ({}, "^$"),
    # 24 layers x 2 heads x 64 x keys and values, in float32: 24 KiB per token
    ({"kv_cache_gib": 1e-3}, r"rollout.kv_cache_gib=0.001 is too small.*0.19 GiB"),
    ({"kv_cache_gib": 1e-3, "name": "hf"}, "^$"),
    ({"kv_cache_gib": 1e5}, "on this machine at its peak .*kv cache.*rollout.kv_cache_gib"),
]


@pytest.mark.parametrize(("rollout", "problem"), CACHES)
def test_a_cache_that_is_too_small_or_too_large_is_refused(rollout: dict[str, object], problem: str):
    keys = {f"actor_rollout_ref.rollout.{key}": value for key, value in rollout.items()}
    assert re.search(problem, on_cpu(keys={TOKENS: 16_384, **keys}).problem)


def test_several_teachers_are_counted_and_compute_one_after_the_other():
    """The larger of two offloaded teachers decides the memory of the teacher's pass. A server needs no memory."""

    def plan(*sizes: str, **keys: object) -> MemoryPlan:
        models = {
            size: {"path": str(PUBLISHED / f"qwen2.5-{size}"), "fsdp_config": {"param_offload": True}} for size in sizes
        }
        models["server"] = {"base_url": "http://127.0.0.1:9/v1", "name": "big"}
        return planned("qwen2.5-1.5b", 8, 80, teacher=Teacher(models=models, by_source={"*": sizes[0]}, **keys))[1]

    both, large = plan("1.5b", "7b", divergence="sampled"), plan("7b", divergence="sampled")
    assert both.phases == large.phases
    assert both.offloaded_bytes - large.offloaded_bytes == 8 * 2 * -(-1_543_714_304 // 8)
    full = [plan(*sizes, divergence="jsd", top_k=5) for sizes in (("1.5b",), ("7b",), ("1.5b", "7b"))]
    small, large, both = (one.phases["update of the policy"]["frozen models"] for one in full)
    assert both == small + large


def test_the_teacher_is_counted():
    """Qwen2.5 7B teaches 1.5B on eight GPUs: an eighth of its bfloat16 weights per GPU, unless offloaded."""
    teacher = {"teacher__model__path": str(PUBLISHED / "qwen2.5-7b"), "teacher__divergence": "sampled"}
    _, alone = planned("qwen2.5-1.5b", 8, 80)
    _, taught = planned("qwen2.5-1.5b", 8, 80, **teacher)
    slices = 2 * -(-7_615_616_512 // 8)
    assert taught.phases["publish"]["frozen models"] - alone.phases["publish"]["frozen models"] == slices
    _, away = planned("qwen2.5-1.5b", 8, 80, **teacher, teacher__model__fsdp_config__param_offload=True)
    assert away.phases["publish"] == alone.phases["publish"]
    assert (
        away.phases["frozen models compute"]["frozen models"] == slices
        and away.offloaded_bytes - alone.offloaded_bytes == 8 * slices
    )
    _, whole = planned("qwen2.5-1.5b", 8, 80, **teacher | {"teacher__divergence": "jsd"})
    head = "update of the policy"
    assert whole.phases[head]["logits"] > taught.phases[head]["logits"]
    assert (
        whole.phases[head]["gathered layers"] - taught.phases[head]["gathered layers"]
        == 2 * 2 * 152_064 * 3584 + 2 * 3584
    )


def test_a_self_teacher_is_counted():
    """An eighth of its float32 weights per GPU, and once more for the copy that a checkpoint is written from."""
    taught = {"teacher__divergence": "jsd", "teacher__self_teacher__context": "demonstration"}
    _, alone = planned("qwen2.5-1.5b", 8, 80)
    _, plan = planned("qwen2.5-1.5b", 8, 80, **taught)
    slices = 4 * -(-1_543_714_304 // 8)
    assert plan.phases["publish"]["frozen models"] - alone.phases["publish"]["frozen models"] == slices
    assert plan.checkpoint_copy_bytes - alone.checkpoint_copy_bytes == 8 * slices
