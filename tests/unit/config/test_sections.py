"""Values and combinations that the schema refuses when a configuration is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from alphaapollo.config.build import build_config
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import (
    Config,
    DpoConfig,
    EvolvingConfig,
    GenerationConfig,
    RmConfig,
    RunFolder,
    SftConfig,
    Teacher,
)
from alphaapollo.config.schema.base import Section
from tests.unit.config.overrides import from_overrides

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
CORRECTION, RANK = "algorithm.rollout_correction", f"{MODEL}.lora_rank=16"
SELF = "teacher.self_teacher"
POLICY = "models={policy: {path: some/model}}"
SCHEMAS: dict[str, type[Section]] = {
    "ppo": Config,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "rm": RmConfig,
    "generation": GenerationConfig,
    "evolving": EvolvingConfig,
}


def problem(command: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_overrides(SCHEMAS[command], *argv)
    (text,) = caught.value.errors
    assert text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["algorithm.filter_groups.enable=True"],
            "algorithm.filter_groups.enable=true needs groups of several samples",
        ),
        (["algorithm.filtration.method=best"], "algorithm.filtration.method=best needs groups of several samples"),
        ([f"{ACTOR}.clip_ratio_c=1.0"], f"{ACTOR}.clip_ratio_c: expected number > 1.0 or null, got 1.0"),
        ([f"{ACTOR}.optim.betas=[0.9,1.0]"], f"{ACTOR}.optim.betas: expected list of 2: number >= 0.0 and < 1.0"),
        ([f"{ACTOR}.optim.lr=2"], f"{ACTOR}.optim.lr: expected number > 0.0 and <= 1.0, got 2"),
        ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p: expected number > 0.0 and <= 1.0, got 0"),
        ([f"{ROLLOUT}.val_kwargs.top_p=0"], f"{ROLLOUT}.val_kwargs.top_p: expected number > 0.0"),
        ([f"{ROLLOUT}.top_k=-2"], f"{ROLLOUT}.top_k: expected integer >= -1, got -2"),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=2"],
            "ulysses_sequence_parallel_size=2 does not divide the 1 training",
        ),
        ([f"{ACTOR}.fsdp_config.fsdp_size=2"], f"{ACTOR}.fsdp_config.fsdp_size=2 does not divide the 1 training ranks"),
        (
            ["trainer.n_gpus_per_node=4", "critic.fsdp_config={fsdp_size: 2, ep_size: 4}"],
            "critic.fsdp_config.ep_size=4 does not divide the 2 ranks that share one copy of the model (fsdp_size=2). "
            "Set one of 1, 2.",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.expert_parallel_size=2"],
            f"{ROLLOUT}.expert_parallel_size=2 must be 1 or tensor_model_parallel_size=4. Set one of these.",
        ),
        (["critic.fsdp_config.fsdp_size=0"], "critic.fsdp_config.fsdp_size=0 does not divide"),
        (["algorithm.reference_reset.every=5"], "algorithm.reference_reset needs a reference model"),
        (["algorithm.overlong_penalty={enable: true, cache: 513}"], "cache=513 exceeds data.max_response_length=512"),
        ([f"{CORRECTION}={{method: tis, bypass: true}}"], ".method=tis and bypass=true apply two corrections"),
        ([f"{CORRECTION}={{method: mask, low: 2.0}}"], f"{CORRECTION}.low=2 must be below high=2"),
        ([f"{CORRECTION}={{method: tis, high: null}}"], f"{CORRECTION}.method=tis needs low or high. Set high=2.0."),
        ([f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], "are both true. Set one of them to false."),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0"], f"{ACTOR}.kl_loss_coef=0 runs the reference model"),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0"],
            "algorithm.kl_ctrl.kl_coef=0 runs the reference model without effect",
        ),
        (
            ["teacher.divergence=reverse", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"],
            f"teacher.divergence=reverse does not work with {ACTOR}.kl_loss_type=full",
        ),
        (['trainer.val_suites=["lm-eval:gsm8k"]', f"{ROLLOUT}.name=hf"], f"needs {ROLLOUT}.name=vllm"),
        (
            ["teacher.divergence=sampled", f"{SELF}.context=feedback"],
            "teacher.self_teacher.context=feedback does not work with divergence=sampled",
        ),
        (
            ["teacher.divergence=jsd", f"{SELF}.context=feedback", "env.context=memory"],
            f"{SELF}.context=feedback needs one prompt per episode, got env.context=memory",
        ),
        (
            ["teacher.divergence=jsd", f"{SELF}.context=feedback", "reward_model.enable=true"],
            f"{SELF}.context=feedback needs rewards during the rollout",
        ),
        (["trainer.controller=local", f"{ROLLOUT}.num_engines=2"], "trainer.controller=local has one engine"),
        (["trainer.controller=local", "trainer.n_gpus_per_node=2"], "trainer.controller=local has one rank"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.name=hf"], "needs name=vllm, got name=hf"),
        (
            [f"{ROLLOUT}.max_num_batched_tokens=1", f"{ROLLOUT}.max_num_seqs=1025"],
            f"is less than {ROLLOUT}.max_num_seqs=1025",
        ),
        (
            ["data.train_batch_size=999999937", "env.rollout.n=7"],
            "exceeds the limit of 10000000 trajectories per iteration",
        ),
        (
            ["data.apply_chat_template_kwargs.tools=x"],
            "tools is a parameter of apply_chat_template, not of the template. Remove it.",
        ),
        (["data.apply_chat_template_kwargs.add_generation_prompt=x"], "add_generation_prompt is a parameter"),
        # LoRA
        ([f"{MODEL}.lora_alpha=32"], f"{MODEL}.lora_alpha is set, but lora_rank=0 means there are no adapters"),
        ([f"{MODEL}.target_modules=[q_proj]"], f"{MODEL}.target_modules is set, but lora_rank=0"),
        (["critic.model.lora_alpha=8"], "critic.model.lora_alpha is set, but lora_rank=0"),
        ([RANK, f"{MODEL}.target_modules=[]"], f"{MODEL}.target_modules=[] selects no layer for an adapter"),
        (
            [RANK, f"{MODEL}.router_aux_loss_coef=0.01"],
            "router_aux_loss_coef=0.01 trains the routers, but lora_rank=16",
        ),
        ([f"{MODEL}.lora_rank=-1"], f"{MODEL}.lora_rank: expected integer >= 0, got -1"),
        (["trainer.export_lora=adapter"], f"trainer.export_lora=adapter needs adapters, but {MODEL}.lora_rank=0"),
        ([f"{ROLLOUT}.lora=adapter"], f"{ROLLOUT}.lora=adapter needs {MODEL}.lora_rank from 1 to 512, got 0"),
        ([f"{MODEL}.lora_rank=513", f"{ROLLOUT}.lora=adapter"], "from 1 to 512, got 513"),
        ([RANK, f"{ROLLOUT}.lora=adapter", f"{ROLLOUT}.name=hf"], f"{ROLLOUT}.lora=adapter needs name=vllm"),
        (
            [RANK, f"{ROLLOUT}.lora=adapter", f"{ROLLOUT}.tensor_model_parallel_size=2"],
            "lora=adapter does not work with tensor_model_parallel_size=2",
        ),
        (
            [RANK, f"{ACTOR}.use_kl_loss=True", "algorithm.reference_reset.every=5"],
            f"algorithm.reference_reset does not work with LoRA, got {MODEL}.lora_rank=16",
        ),
        # a mixture of experts
        ([f"{ROLLOUT}.router_replay=True", f"{ROLLOUT}.name=hf"], "router_replay=true needs name=vllm, got name=hf"),
        (
            [f"{ROLLOUT}.router_replay=True", f"{ROLLOUT}.enable_prefix_caching=False"],
            "router_replay=true needs vLLM's prefix cache",
        ),
        (
            [f"{ROLLOUT}.router_replay=True", RANK, f"{ROLLOUT}.lora=adapter"],
            "router_replay=true with lora=adapter is not supported",
        ),
    ],
)
def test_one_problem_of_main_ppo(overrides: list[str], says: str):
    assert says in problem("ppo", *overrides)


@pytest.mark.parametrize(
    ("command", "overrides", "says"),
    [
        ("sft", ["trainer.controller=local", "trainer.n_gpus_per_node=2"], "trainer.controller=local has one rank"),
        (
            "sft",
            ["ulysses_sequence_parallel_size=2"],
            "ulysses_sequence_parallel_size=2 does not divide the 1 training",
        ),
        ("sft", ["fsdp_config.ep_size=2"], "fsdp_config.ep_size=2 does not divide the 1 ranks"),
        ("sft", ["trainer.n_gpus_per_node=4", "fsdp_config.fsdp_size=3"], "fsdp_config.fsdp_size=3 does not divide"),
        (
            "sft",
            ["data.train_files=a.jsonl", "data.source_weights=[1,2]"],
            "data.source_weights has 2 weights, but train_files has 1 files",
        ),
        ("sft", ["model.lora_alpha=8"], "model.lora_alpha is set, but lora_rank=0"),
        ("sft", ["fsdp_config.param_offload=True"], "instead: fsdp_config.offload_policy"),
        ("dpo", ["data.truncation=left"], 'data.truncation: expected error | drop, got "left"'),
        ("rm", ["data.truncation=right"], 'data.truncation: expected error | drop, got "right"'),
        ("rm", ["trainer.export_lora=adapter"], 'trainer.export_lora: expected merged, got "adapter"'),
        ("evolving", [POLICY, "env.context=memory"], 'env.context: expected append, got "memory"'),
        ("evolving", [POLICY, "env.action_format=chat_template"], "env.action_format: expected tags"),
        ("evolving", [POLICY, "reward.judge.backend=policy"], "reward.judge.backend=policy works only in main_ppo"),
        ("evolving", ["models={policy: {base_url: x}}"], "models.policy.name is required with base_url"),
        (
            "evolving",
            ["models={policy: {path: a, base_url: x, name: y}}"],
            "models.policy.path or base_url must be set, not both",
        ),
        (
            "evolving",
            [POLICY, "evolving.branches=[polcy]"],
            "evolving.branches[0]=polcy is not in models. Set one of policy",
        ),
        ("evolving", [POLICY, "roles.verifier.plugin=''"], "evolving.votes=3 needs roles.verifier.plugin"),
        ("evolving", [POLICY, "budget.money=1"], "budget.money=1 needs prices"),
        ("evolving", [POLICY, "roles.proposer.max_tokens=4096"], "exceeds data.max_response_length=1024"),
    ],
)
def test_one_problem_of_other_commands(command: str, overrides: list[str], says: str):
    assert says in problem(command, *overrides)


MODELS = "teacher.models={math: {path: a}, code: {base_url: 'http://h/v1', name: b}}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["teacher.model={path: a, base_url: x, name: y}"], "teacher.model.path=a and base_url=x are both set"),
        (["teacher.model.base_url=x"], "teacher.model.name is required with base_url"),
        ([MODELS], "teacher.models needs by_source. Set by_source={*: code} or patterns"),
        (["teacher.models={a: {}}", "teacher.by_source={a: a}"], "teacher.models.a has no model"),
        (
            [MODELS, "teacher.by_source={a/*: maths}"],
            "'a/*' names the teacher 'maths'. Use a name in models (math, code",
        ),
        ([MODELS, "teacher.by_source={a: {math: 0.5, code: 0.4}}"], "the weights of 'a' sum to 0.9. Set weights that"),
        (
            [MODELS, "teacher.by_source={a: math}", "teacher.divergence=jsd"],
            "teacher.top_k is required: the server of teacher.models.code cannot return full distributions",
        ),
        (
            [MODELS, "teacher.by_source={a: math}", "teacher.divergence=sampled", f"{ROLLOUT}.temperature=0.7"],
            f"{ROLLOUT}.temperature=0.7, but the server of teacher.models.code returns log-probs at temperature 1",
        ),
    ],
)
def test_teachers_that_cannot_work(overrides: list[str], says: str):
    assert says in problem("ppo", *overrides)


def test_the_first_matching_pattern_chooses_the_teachers_of_a_data_source():
    by_source = "teacher.by_source={OpenAI/gsm8k: math, '*gsm8k': {math: 0.25, code: 0.75}}"
    teacher = from_overrides(Config, MODELS, by_source, "teacher.divergence=sampled").teacher
    assert teacher.find_shares("openai/gsm8k") == [1.0, 0.0]
    assert teacher.find_shares("my-GSM8K") == [0.25, 0.75]
    assert teacher.find_shares("apps") == [0.0, 0.0]
    assert list(teacher.local_models) == ["teacher.models.math"] and list(teacher.servers) == ["teacher.models.code"]
    assert Teacher(divergence="sampled", model={"path": "a"}).find_shares("apps") == [1.0]
    assert not Teacher().models_by_key


def test_every_problem_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        build_config(Config, {"actor_rollout_ref": {"rollout": {"top_p": 0.0}, "actor": {"clip_ratio_c": 0.5}}})
    assert len(caught.value.errors) == 2
    wrong = {"trainer": {"n_gpus_per_node": 4}, "critic": {"fsdp_config": {"fsdp_size": 3}}}
    wrong["algorithm"] = {"filter_groups": {"enable": True}}
    with pytest.raises(ConfigError) as caught:
        build_config(Config, wrong)
    assert len(caught.value.errors) == 2


def test_mini_batches_divide_the_trajectories_or_contain_them_all():
    batch, mini = ["data.train_batch_size=12", "env.rollout.n=8"], f"{ACTOR}.ppo_mini_batch_size"  # 96 trajectories
    assert problem("ppo", *batch, f"{mini}=64") == (
        f"{mini}=64 must divide the 96 trajectories of an iteration (12 prompts x 8). Set 48 or another divisor."
    )
    for size in (1, 48, 96, 97, 256):
        from_overrides(Config, *batch, f"{mini}={size}")


def test_the_group_size_under_either_name():
    ours, theirs = "env.rollout.n", f"{ROLLOUT}.n"
    for given in (
        [f"{theirs}=4"],
        [f"+{theirs}=4"],
        [f"{ours}=4"],
        [f"{ours}=4", f"{theirs}=4"],
        [f"{ours}=4", f"{theirs}=1"],
    ):
        assert load_config(Config, "ppo", given).group_size == 4
    assert problem("ppo", f"{ours}=8", f"{theirs}=4") == (
        f"{ours}=8 and {theirs}=4 both set the group size, to different values. Set only {ours}."
    )


def test_dual_ascent_may_start_at_zero():
    argv = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=dual", "algorithm.kl_ctrl.kl_coef=0"]
    assert from_overrides(Config, *argv).algorithm.kl_ctrl.kl_coef == 0


def test_groups_of_ranks_are_within_a_node_or_cover_complete_nodes():
    """2 nodes of 6: groups of 4 would share the second group's ranks between nodes; 6 and 12 are complete nodes."""
    machine, key = ["trainer.n_gpus_per_node=6", "trainer.nnodes=2"], f"{ACTOR}.fsdp_config.fsdp_size"
    for size in (1, 2, 3, 6, 12, -1):
        from_overrides(Config, *machine, f"{key}={size}")
    assert problem("ppo", *machine, f"{key}=4") == (
        f"{key}=4 does not fit 6-rank nodes. Set one of 1, 2, 3, 6, 12, or -1 for all."
    )
    assert "does not divide the 12 training ranks" in problem("ppo", *machine, f"{key}=5")


def test_a_map_on_the_command_line():
    algorithm = load_config(Config, "ppo", ["algorithm.gdpo_conditions={length: [accuracy, 1.0]}"]).algorithm
    assert algorithm.gdpo_conditions == {"length": ("accuracy", 1.0)}
    assert "expected map of text to list of 2: text, number, got" in problem(
        "ppo", "algorithm.gdpo_conditions={length: accuracy}"
    )


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"experiment_name": ""}, "trainer.experiment_name='': the name is empty"),
        ({"experiment_name": "."}, "the name is empty"),
        ({"project_name": ""}, "trainer.project_name=''"),
        ({"experiment_name": "../../escape"}, "is outside trainer.output_dir"),
        ({"experiment_name": "/tmp/run"}, "is outside trainer.output_dir"),
        ({"experiment_name": "grpo/lr1"}, "trainer.experiment_name=grpo/lr1: a name with / could put the run"),
        ({"experiment_name": "x" * 300}, "xxxxxxxxxxxxxxxxxxxx... is longer than 200 bytes"),
        ({"experiment_name": "a\0b"}, "zero byte"),
        ({"output_dir": "y" * 300}, "trainer.output_dir=yyyy"),
    ],
)
def test_names_of_run_folders(keys: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as caught:
        build_config(SftConfig, {"trainer": keys})
    assert says in str(caught.value)


def test_stall_is_reported_before_its_timeout():
    assert RunFolder(experiment_name="a").folder.name == "a"
    for timeout, notice in ((600.0, 60.0), (3600.0, 60.0), (None, 60.0), (100.0, 10.0)):
        trainer = build_config(SftConfig, {"trainer": {"stall_timeout": timeout}}).trainer
        assert trainer.stall_notice_seconds == notice
