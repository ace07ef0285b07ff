"""The plan of memory: gradient checkpointing where it is needed, and refusals that name the keys to turn."""

from __future__ import annotations

import re
from pathlib import Path

from alphaapollo.config.resolve import resolve_model, resolve_rollout
from alphaapollo.config.schema import Config
from alphaapollo.launch.memory_plan import CHECKPOINTING, Roles, fit_memory, micro_batch, with_keys
from alphaapollo.launch.model_memory import GIB, RUNTIME, MemoryPlan

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
ALONE = Roles(reference=False, full_kl=False, critic=False, reward_model=False)
LONG = {"data.max_prompt_length": 1024, "data.max_response_length": 7168, "env.rollout.n": 8}
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def resolved(name: str, gpus: int, keys: dict[str, object], device: str = "cuda") -> Config:
    path = {"actor_rollout_ref.model.path": str(PUBLISHED / name), "trainer.n_gpus_per_node": gpus}
    config = with_keys(Config(), {**path, **LONG, **keys})
    role = config.actor_rollout_ref
    model = resolve_model(role.model, device)
    rollout = resolve_rollout(role.rollout, model, device, gpus)
    return with_keys(config, {"actor_rollout_ref.model": model, "actor_rollout_ref.rollout": rollout})


def planned(name: str, gpus: int, gib: int, roles: Roles = ALONE, may_choose: bool = True, **keys: object):
    config = resolved(name, gpus, {key.replace("__", "."): value for key, value in keys.items()})
    config, plan = fit_memory(config, "cuda", roles, gib * GIB, may_choose)
    return config.actor_rollout_ref.model.enable_gradient_checkpointing, plan


def test_checkpointing_is_chosen_where_16k_tokens_would_not_fit():
    assert planned("qwen2.5-7b", 8, 80)[0] is True
    assert planned("qwen2.5-0.5b", 8, 80)[0] is False
    chosen, plan = planned("qwen2.5-7b", 8, 80, may_choose=False)  # the user said false
    assert chosen is False and f"Set {CHECKPOINTING}=true." in plan.problem


def test_a_model_that_cannot_fit_is_refused_with_the_keys():
    _, plan = planned("qwen2.5-7b", 1, 80)
    assert re.match(r"memory: \d+\.\d GiB are needed on a GPU of 80 GiB at its peak \(update", plan.problem)
    assert plan.problem.endswith("Set actor_rollout_ref.actor.fsdp_config.offload_policy=true.")
    _, plan = planned("qwen3-235b-a22b", 8, 80)
    assert plan.problem.endswith("raise trainer.nnodes.")


def test_what_is_offloaded_must_fit_into_the_nodes_own_memory():
    keys = {"actor_rollout_ref.actor.fsdp_config.offload_policy": True, CHECKPOINTING: True}
    config = resolved("qwen2.5-7b", 8, keys)
    _, plan = fit_memory(config, "cuda", ALONE, 80 * GIB, False, host=64 * GIB)
    assert plan.host == 8 * 12 * -(-7_615_616_512 // 8)
    assert plan.problem.startswith("memory: what is offloaded needs 85 GiB of a node's own memory, which has 64.")
    assert fit_memory(config, "cuda", ALONE, 80 * GIB, False, host=128 * GIB)[1].problem == ""


def test_nothing_is_refused_where_the_memory_is_not_known():
    assert planned("qwen3-235b-a22b", 1, 0)[1].problem == ""


def test_reference_and_critic_count():
    def weights(roles: Roles) -> int:
        _, plan = planned("qwen2.5-1.5b", 8, 80, roles)
        return plan.moments["publish"].total

    critic = Roles(reference=False, full_kl=False, critic=True, reward_model=False)
    reference = Roles(reference=True, full_kl=False, critic=False, reward_model=False)
    parameters = 1_543_714_304
    assert weights(reference) - weights(ALONE) == 2 * parameters // 8
    assert weights(critic) - weights(ALONE) == 12 * parameters // 8


def test_a_micro_batch_is_the_budget_or_a_longer_row_or_all_there_is():
    def tokens(**keys: object) -> int:
        rows, length = micro_batch(with_keys(Config(), {**LONG, **keys}))
        return rows * length

    assert tokens() == 16384
    assert tokens(**{TOKENS: 1000}) == 8192
    assert tokens(**{"data.train_batch_size": 1, "env.rollout.n": 1}) == 8192


def test_ranks_that_share_sequences_hold_a_part_of_them():
    key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    config = with_keys(Config(), {**LONG, key: 4, "trainer.n_gpus_per_node": 8, "data.max_response_length": 127_000})
    rows, length = micro_batch(config)
    assert rows * length == (1024 + 127_000) // 4


def test_adapters_train_a_7b_on_one_gpu():
    _, plan = planned("qwen2.5-7b", 1, 80, actor_rollout_ref__model__lora_rank=16)
    held = plan.moments["update of the policy, step"]
    targets = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))  # q, o; k, v; gate, up, down
    assert plan.problem == ""
    assert (held.weights, held.optimiser) == (2 * 7_615_616_512 + 4 * targets, 8 * targets)
    with_reference = Roles(reference=True, full_kl=False, critic=False, reward_model=False)
    _, same = planned("qwen2.5-7b", 1, 80, with_reference, actor_rollout_ref__model__lora_rank=16)
    assert same.moments == plan.moments  # the base is the reference


def test_engines_of_their_own_leave_the_training_gpus_alone():
    _, shared = planned("qwen2.5-7b", 8, 80)
    _, apart = planned("qwen2.5-7b", 8, 80, actor_rollout_ref__rollout__colocate=False)
    assert shared.moments["generate"].engine > 14 * GIB
    assert {name for name, held in apart.moments.items() if held.engine} == {"generate (an engine's GPU)"}


def test_on_a_cpu_all_ranks_and_engines_share_the_machine():
    def plan(ranks: int, gib: int) -> MemoryPlan:
        config = resolved("qwen2.5-0.5b", ranks, {TOKENS: 8192}, device="cpu")
        return fit_memory(config, "cpu", ALONE, gib * GIB, True)[1]

    one, two = plan(1, 1000).moments["generate"], plan(2, 1000).moments["generate"]
    assert two.engine == one.engine and abs(two.weights - one.weights) < 10
    assert two.runtime - one.runtime == RUNTIME["cpu"]  # one process more
    assert "on this machine at its peak" in plan(1, 8).problem


def test_copies_for_checkpoints_take_what_room_is_left():
    size = 8 * 12 * -(-7_615_616_512 // 8)
    config = resolved("qwen2.5-7b", 8, {CHECKPOINTING: True})

    def behind(host: int, **keys: object) -> tuple[bool, int]:
        plan = fit_memory(with_keys(config, keys), "cuda", ALONE, 80 * GIB, False, host=host * GIB)[1]
        assert plan.problem == ""
        return plan.saves_in_background, plan.copies

    assert behind(0) == behind(128) == (True, size)
    assert behind(90) == (False, size)  # 85 GiB, and room for others
    assert behind(128, **{"actor_rollout_ref.actor.fsdp_config.offload_policy": True}) == (False, size)
    assert behind(90, **{"trainer.save_freq": -1}) == (True, 0)
    assert behind(90, **{"trainer.save_freq": -1, "trainer.record_steps": [3]}) == (False, size)
    reset = {"algorithm.reference_reset.every": 100}
    assert behind(0, **reset)[1] == size + 8 * 2 * -(-7_615_616_512 // 8)  # the reference in bfloat16


def test_on_a_cpu_copies_for_checkpoints_count_at_every_moment():
    config = resolved("qwen2.5-0.5b", 2, {TOKENS: 8192}, device="cpu")
    without = fit_memory(with_keys(config, {"trainer.save_freq": -1}), "cpu", ALONE, 0, False)[1]
    peak = without.peak[1].total
    for capacity, behind in ((2 * peak, True), (peak, False)):
        plan = fit_memory(config, "cpu", ALONE, capacity, False)[1]
        assert (plan.saves_in_background, plan.problem) == (behind, "")
        assert {held.checkpoint for held in plan.moments.values()} == {plan.copies if behind else 0}
    assert plan.copies == 2 * 12 * -(-494_032_768 // 2)


def on_cpu(**keys: object) -> MemoryPlan:
    given = {"actor_rollout_ref.rollout." + key: value for key, value in keys.items()}
    return fit_memory(resolved("qwen2.5-0.5b", 1, given, "cpu"), "cpu", ALONE, 64 * GIB, False)[1]


def test_a_cache_without_room_for_one_sequence_is_refused():
    assert on_cpu().problem == ""
    problem = on_cpu(kv_cache_gib=1e-3).problem
    # 24 layers x 2 heads x 64 x keys and values, in float32: 24 KiB a token
    assert problem.startswith("actor_rollout_ref.rollout.kv_cache_gib=0.001: room for 43 tokens, and a sequence may ")
    assert on_cpu(kv_cache_gib=1e-3, name="hf").problem == ""


def test_a_cache_that_is_too_large_is_named():
    assert on_cpu(kv_cache_gib=1e5).problem.endswith("Set actor_rollout_ref.rollout.kv_cache_gib=0.5.")


def test_the_teacher_counts_where_it_is():
    """Qwen2.5 7B teaches 1.5B on eight GPUs: an eighth of its bfloat16 weights, unless they rest in host memory."""
    teacher = {"teacher__model__path": str(PUBLISHED / "qwen2.5-7b"), "teacher__divergence": "sampled"}
    _, alone = planned("qwen2.5-1.5b", 8, 80)
    _, taught = planned("qwen2.5-1.5b", 8, 80, **teacher)
    slices = 2 * -(-7_615_616_512 // 8)
    assert taught.moments["publish"].frozen - alone.moments["publish"].frozen == slices
    _, away = planned("qwen2.5-1.5b", 8, 80, **teacher, teacher__model__fsdp_config__param_offload=True)
    assert away.moments["publish"] == alone.moments["publish"]
    assert away.moments["the teacher's pass"].frozen == slices and away.host - alone.host == 8 * slices
    _, whole = planned("qwen2.5-1.5b", 8, 80, **teacher | {"teacher__divergence": "jsd"})
    head = "update of the policy, head"
    assert whole.moments[head].logits > taught.moments[head].logits
    assert whole.moments[head].gathered - taught.moments[head].gathered == 2 * 2 * 152_064 * 3584 + 2 * 3584
