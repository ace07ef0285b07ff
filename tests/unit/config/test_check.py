from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.check import check, check_generation
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, GenerationConfig


@pytest.fixture
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "val.jsonl").touch()
    return ["actor_rollout_ref.model.path=some/model", "data.train_files=train.jsonl"]


def outcome(argv: list[str], num_gpus: int = 0, num_cores: int = 8) -> list[str]:
    return check(load_config(Config, "ppo", argv), num_gpus, num_cores)


def problems(argv: list[str], **machine: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        outcome(argv, **machine)
    return caught.value.problems


def test_defaults_with_model_and_data_are_fine(needed: list[str]):
    assert outcome(needed) == []
    assert outcome(needed, num_gpus=8) == []


def test_model_and_data_are_required():
    first, second = problems([])
    assert first == "actor_rollout_ref.model.path: required, got nothing. Give actor_rollout_ref.model.path=..."
    assert second == "data.train_files: required, got nothing. Give data.train_files=..."


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.val_files=[val.jsonl,gone.jsonl]", "data.val_files: no such file: gone.jsonl"),
        ("actor_rollout_ref.model.path=./gone", "actor_rollout_ref.model.path: no such folder: ./gone"),
        ("actor_rollout_ref.model.path=.", "holds no config.json"),
        ("actor_rollout_ref.model.path=outputs/modle", "actor_rollout_ref.model.path: no such folder: outputs/modle"),
        ("critic.model.path=/gone", "critic.model.path: no such folder: /gone"),
        ("reward_model.enable=True", "reward_model.model.path: required, got nothing"),
        ("reward_model={enable: true, model: {path: /gone}}", "reward_model.model.path: no such folder: /gone"),
        ("custom_reward_function.path=gone.py", "custom_reward_function.path: no such file: gone.py"),
        ("algorithm.custom_module=gone.py", "algorithm.custom_module: no such file: gone.py"),
        *(
            (f"{key}={'x' * 300}", f"{key}: no such {kind}: xxx")  # longer than names may be
            for key, kind in [("data.train_files", "file"), ("custom_reward_function.path", "file")]
        ),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path: required with trainer.resume_mode=resume_path"),
        ("algorithm.filter_groups.enable=True", "groups of one"),
        ("actor_rollout_ref.actor.clip_ratio_c=1.0", "clip_ratio_c=1.0: the dual clip must be above 1"),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "ulysses_sequence_parallel_size=2: does not divide",
        ),
        (
            "critic.ulysses_sequence_parallel_size=2",
            "critic.ulysses_sequence_parallel_size=2: it must be the actor's, 1",
        ),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "fsdp_size=2: does not divide the trainer.n_gpus_per_node"),
        ("critic.fsdp_config.fsdp_size=0", "fsdp_size=0: does not divide the trainer.n_gpus_per_node x trainer.nnodes"),
        ("actor_rollout_ref.rollout.top_p=0", "actor_rollout_ref.rollout.top_p=0: nothing is left to sample"),
        ("actor_rollout_ref.rollout.top_k=0", "actor_rollout_ref.rollout.top_k=0: expected -1"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0", "val_kwargs.top_p=0"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", "AdamW needs decay rates below 1"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=9", "every part needs a core, and there are 8"),
        ("trainer.device=cuda", "trainer.device: got cuda, but this machine has no GPU"),
        ("algorithm.filtration.method=best", "algorithm.filtration.method=best: groups of one have nothing to choose"),
        ("algorithm.reference_reset.every=5", "algorithm.reference_reset: there is no reference model to reset"),
        ("algorithm.overlong_penalty={enable: true, cache: 513}", "more than data.max_response_length=512"),
        ("algorithm.rollout_correction={method: tis, bypass: true}", "both would correct twice. Keep one."),
        (
            "algorithm.rollout_correction={method: mask, low: 2.0}",
            "low=2, algorithm.rollout_correction.high=2: no ratio",
        ),
        ("algorithm.rollout_correction={method: tis, high: null}", "without low and high bounds nothing"),
    ],
)
def test_one_problem_says_what_got_and_fix(needed: list[str], override: str, says: str):
    (text,) = problems([*needed, override])
    assert says in text
    assert text.endswith(".")


def test_mini_batches_divide_the_trajectories_or_hold_them_all(needed: list[str]):
    batch = ["data.train_batch_size=12", "env.rollout.n=8"]  # 96 trajectories
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    (text,) = problems([*needed, *batch, f"{mini}=64"])
    assert text == (
        f"{mini}=64: an iteration has 96 trajectories (12 prompts x 8), which mini-batches of 64 do not divide. "
        "Set 48 or 96."
    )
    for size in (1, 48, 96, 97, 256):
        assert outcome([*needed, *batch, f"{mini}={size}"]) == []


def test_a_batch_that_no_machine_holds_is_told_at_once(needed: list[str]):
    (text,) = problems([*needed, "data.train_batch_size=999999937", "env.rollout.n=7"])
    assert "999999937: with groups of 7 an iteration would have 6999999559 trajectories" in text


def test_group_size_from_either_key_but_not_two_sizes(needed: list[str]):
    rollout = "actor_rollout_ref.rollout.n"
    assert load_config(Config, "ppo", [f"{rollout}=4"]).group_size == 4
    assert outcome([*needed, "env.rollout.n=4", f"{rollout}=4"]) == []
    (text,) = problems([*needed, "env.rollout.n=8", f"{rollout}=4"])
    assert text == "env.rollout.n=8, actor_rollout_ref.rollout.n=4: two group sizes. Set only env.rollout.n."


def test_kl_is_never_counted_twice_or_for_nothing(needed: list[str]):
    loss, reward = "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"
    assert "the KL would count twice. Keep one." in problems([*needed, loss, reward])[0]
    assert "run for nothing" in problems([*needed, loss, "actor_rollout_ref.actor.kl_loss_coef=0"])[0]
    assert "run for nothing" in problems([*needed, reward, "algorithm.kl_ctrl.kl_coef=0"])[0]
    dual = ["algorithm.kl_ctrl.type=dual", "algorithm.kl_ctrl.kl_coef=0"]  # dual ascent raises it by itself
    assert outcome([*needed, reward, *dual]) == []
    assert outcome([*needed, "actor_rollout_ref.actor.kl_loss_coef=0.1"]) == [
        "actor_rollout_ref.actor.kl_loss_coef=0.1 has no effect: actor_rollout_ref.actor.use_kl_loss is false."
    ]


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.kl_loss_coef=0",
        "algorithm.kl_ctrl.kl_coef=0",
        "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.free_cache_engine=False",
    ],
)
def test_a_key_that_asks_for_nothing_is_no_surprise(needed: list[str], override: str):
    assert outcome([*needed, override]) == []


def test_local_controller_has_one_rank(needed: list[str]):
    (text,) = problems([*needed, "trainer.controller=local", "actor_rollout_ref.rollout.num_engines=2"])
    assert "it has one engine, but actor_rollout_ref.rollout.num_engines=2" in text
    (text,) = problems([*needed, "trainer.controller=local", "trainer.n_gpus_per_node=2"])
    assert "trainer.nnodes is 2" in text


def test_replicas_in_verls_words(needed: list[str]):
    key, engines = "actor_rollout_ref.rollout.data_parallel_size", "actor_rollout_ref.rollout.num_engines"
    assert outcome([*needed, f"{key}=2"]) == []
    (line,) = outcome([*needed, "trainer.n_gpus_per_node=4", f"{key}=2"], num_gpus=4)
    assert line.startswith(f"{key}=2 has no effect: each replica is an engine of its own")
    (text,) = problems([*needed, "trainer.n_gpus_per_node=4", f"{key}=3"], num_gpus=4)
    assert text == f"{key}=3: does not divide the 4 engines. Set one of 1, 2, 4, or another {engines}."
    assert "that is 8 GPUs" in problems([*needed, f"{key}=8"], num_gpus=8)[0]
    (text,) = problems([*needed, f"{engines}=3", f"{key}=2"])
    assert "does not divide the 3 engines" in text


def test_engines_fit_the_gpus(needed: list[str]):
    parallel, engines = "actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.rollout.num_engines"
    assert outcome([*needed, "trainer.n_gpus_per_node=4", f"{parallel}=2"], num_gpus=4) == []
    assert "does not divide the 4" in problems([*needed, "trainer.n_gpus_per_node=4", f"{parallel}=3"], num_gpus=4)[0]
    two_nodes = [*needed, "trainer.nnodes=2", "trainer.n_gpus_per_node=6", f"{parallel}=4"]  # 4 divides 12, not 6
    for more in ([], [f"{engines}=2"]):
        (text,) = problems([*two_nodes, *more], num_gpus=6)
        assert "does not divide the 6 training ranks of a node" in text and text.endswith("Set one of 1, 2, 3, 6.")
    apart = "actor_rollout_ref.rollout.colocate=False"
    assert outcome([*two_nodes[:-2], "trainer.n_gpus_per_node=2", f"{parallel}=4", apart], num_gpus=6) == []
    larger, _ = problems([*needed, f"{parallel}=8"], num_gpus=4)
    assert f"{parallel}=8: a node has 4 GPUs. Set 4 or less." in larger
    assert "that is 2 GPUs, but on the training side there are 1" in problems([*needed, f"{engines}=2"], num_gpus=4)[0]
    apart = "actor_rollout_ref.rollout.colocate=False"
    assert outcome([*needed, apart, f"{engines}=3"], num_gpus=4) == []
    assert "beside the training GPUs there are 3" in problems([*needed, apart, f"{engines}=4"], num_gpus=4)[0]
    apart_on_two = [*two_nodes[:-2], "trainer.n_gpus_per_node=6", f"{parallel}=4", apart, f"{engines}=1"]
    (text,) = problems(apart_on_two, num_gpus=8)  # 4 are free, 2 on each node
    assert "beside the training GPUs there are 2 on each of 2 nodes, and an engine's GPUs are of one" in text
    assert outcome(apart_on_two, num_gpus=10) == []
    assert "a node has 4 GPUs" in problems([*needed, "trainer.n_gpus_per_node=8"], num_gpus=4)[0]
    assert "only the vllm engine" in problems([*needed, f"{parallel}=2", "actor_rollout_ref.rollout.name=hf"])[0]


def test_keys_of_a_reward_model_that_is_off_are_noticed(needed: list[str]):
    assert outcome([*needed, "reward_model.model.path=some/model", "reward_model.weight=2.0"]) == [
        "reward_model.weight=2.0 has no effect: reward_model.enable is false.",
        "reward_model.model.path=some/model has no effect: reward_model.enable is false.",
    ]


def test_keys_without_effect_are_noticed(needed: list[str]):
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    key = offload.split("=")[0]
    assert outcome([*needed, offload]) == [f"{key}=true has no effect: it needs a GPU."]
    assert outcome([*needed, offload], num_gpus=1) == []
    policy = "actor_rollout_ref.actor.fsdp_config.offload_policy"
    assert outcome([*needed, f"{policy}=True"]) == [f"{policy}=true has no effect: it needs a GPU."]
    assert outcome([*needed, f"{policy}=True"], num_gpus=1) == []
    assert outcome([*needed, offload, f"{policy}=True"], num_gpus=1) == [f"{key}=true has no effect: {policy} is true."]
    assert outcome([*needed, "actor_rollout_ref.rollout.kv_cache_gib=2"], num_gpus=1) == [
        "actor_rollout_ref.rollout.kv_cache_gib=2.0 has no effect: it is for machines without GPUs."
    ]
    assert outcome([*needed, "critic.optim.min_lr_ratio=0.1"]) == [
        "critic.optim.min_lr_ratio=0.1 has no effect: critic.optim.warmup_style is constant."
    ]
    assert outcome([*needed, "trainer.n_gpus_per_node=9"]) == [
        "trainer.n_gpus_per_node=9 on 8 cores: the ranks share them and slow each other down."
    ]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("fixed", []),
        ("adaptive", ["target_kl", "horizon"]),
        ("doubling", ["target_kl"]),
        ("dual", ["target_kl", "dual_step_size"]),
    ],
)
def test_each_kl_controller_reads_its_own_keys(needed: list[str], kind: str, read: list[str]):
    values = {"target_kl": 3.0, "horizon": 50.0, "dual_step_size": 0.5}
    keys = [f"algorithm.kl_ctrl.{name}={value}" for name, value in values.items()]
    on = ["algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl.type={kind}"]
    assert outcome([*needed, *on, *keys]) == [
        f"algorithm.kl_ctrl.{name}={value} has no effect: algorithm.kl_ctrl.type is {kind}."
        for name, value in values.items()
        if name not in read
    ]


def test_no_key_of_the_kl_in_the_reward_counts_while_it_is_off(needed: list[str]):
    keys = ["type=dual", "kl_coef=0.5", "target_kl=3.0", "horizon=50.0", "dual_step_size=0.5"]
    lines = outcome([*needed, "algorithm.kl_penalty=k3", *(f"algorithm.kl_ctrl.{key}" for key in keys)])
    assert sorted(lines) == sorted(
        f"algorithm.{key} has no effect: algorithm.use_kl_in_reward is false."
        for key in ("kl_penalty=k3", *(f"kl_ctrl.{key}" for key in keys))
    )


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "key", "because"),
    [
        (
            [f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"],
            f"{ACTOR}.clip_ratio=0.3",
            "clip_ratio_low and clip_ratio_high are both given",
        ),
        (
            ["algorithm.rollout_correction.level=sequence"],
            "algorithm.rollout_correction.level=sequence",
            "algorithm.rollout_correction.method is null",
        ),
        (
            ["algorithm.overlong_penalty.cache=64"],
            "algorithm.overlong_penalty.cache=64",
            "algorithm.overlong_penalty.enable is false",
        ),
        (
            ["algorithm.length_budget.coef=0.1"],
            "algorithm.length_budget.coef=0.1",
            "algorithm.length_budget.mode is null",
        ),
        (
            ["algorithm.length_budget.mode=exact", "algorithm.length_budget.slack=0.1"],
            "algorithm.length_budget.slack=0.1",
            "algorithm.length_budget.mode is exact",
        ),
        (
            ["algorithm.reference_reset.min_gain=0.1"],
            "algorithm.reference_reset.min_gain=0.1",
            "algorithm.reference_reset.patience is null",
        ),
        (
            ["env.env_name=informal_math", "env.history_length=3"],
            "env.history_length=3",
            "env.context is append",
        ),
        (["env.max_steps=3"], "env.max_steps=3", "env.env_name is single_turn, which has one turn"),
        (["env.grid_world.size=9"], "env.grid_world.size=9", "env.env_name is single_turn"),
        (
            [
                "env.env_name=informal_math",
                "env.informal_math.python_code_timeout=3",
                "env.informal_math.enable_python_code=False",
            ],
            "env.informal_math.python_code_timeout=3.0",
            "env.informal_math.enable_python_code is false",
        ),
        (
            ["custom_reward_function.name=mine"],
            "custom_reward_function.name=mine",
            "custom_reward_function.path is empty",
        ),
        (
            [f"{ACTOR}.loss_scale_factor=100"],
            f"{ACTOR}.loss_scale_factor=100.0",
            f"{ACTOR}.loss_agg_mode is token-mean",
        ),
    ],
)
def test_keys_behind_a_switch_that_is_off(needed: list[str], overrides: list[str], key: str, because: str):
    assert outcome([*needed, *overrides]) == [f"{key} has no effect: {because}."]


def test_an_environment_of_ones_own_may_read_every_section(needed: list[str], tmp_path: Path):
    (tmp_path / "own.py").touch()
    argv = [*needed, "env.custom_module=own.py", "env.env_name=own", "env.max_steps=3", "env.grid_world.size=9"]
    assert outcome(argv) == []


def test_generation_has_the_same_notices_of_environments(tmp_path: Path):
    (tmp_path / "rows.jsonl").touch()
    argv = ["model.path=a/b", f"data.path={tmp_path}/rows.jsonl", "env.grid_world.size=9"]
    assert check_generation(load_config(GenerationConfig, "generation", argv), 0, 8) == [
        "env.grid_world.size=9 has no effect: env.env_name is single_turn."
    ]


def test_engines_of_a_generation_fit_into_nodes(tmp_path: Path):
    (tmp_path / "rows.jsonl").touch()
    two = ["model.path=a/b", f"data.path={tmp_path}/rows.jsonl", "trainer.nnodes=2", "trainer.n_gpus_per_node=6"]
    argv = [*two, "rollout.tensor_model_parallel_size=4"]
    check_generation(load_config(GenerationConfig, "generation", [*argv, "rollout.num_engines=2"]), 8, 8)
    with pytest.raises(ConfigError, match=r"of such engines 2 fit into trainer\.n_gpus_per_node=6 x trainer\.nnodes=2"):
        check_generation(load_config(GenerationConfig, "generation", argv), 8, 8)  # three by default


def test_every_problem_is_named_at_once(needed: list[str]):
    assert (
        len(problems([*needed, "actor_rollout_ref.rollout.top_p=0", "actor_rollout_ref.actor.clip_ratio_c=0.5"])) == 2
    )


def test_a_map_on_the_command_line():
    algorithm = load_config(Config, "ppo", ["algorithm.gdpo_conditions={length: [accuracy, 1.0]}"]).algorithm
    assert algorithm.gdpo_conditions == {"length": ("accuracy", 1.0)}
    with pytest.raises(ConfigError, match="expected map of text to list of 2: text, number, got"):
        load_config(Config, "ppo", ["algorithm.gdpo_conditions={length: accuracy}"])


def test_a_reset_on_stagnation_needs_validations(needed: list[str]):
    reset = ["algorithm.reference_reset.patience=3", "actor_rollout_ref.actor.use_kl_loss=True"]
    validations = ["data.val_files=val.jsonl", "trainer.test_freq=5"]
    assert "algorithm.reference_reset.patience=3: needs validations" in problems([*needed, *reset])[0]
    assert outcome([*needed, *reset, *validations]) == []


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "20")])
def test_training_on_samples_of_a_cut_distribution_is_noticed(needed: list[str], key: str, value: str):
    (line,) = outcome([*needed, f"actor_rollout_ref.rollout.{key}={value}"])
    assert line.startswith(f"actor_rollout_ref.rollout.{key}={value}: training samples come from the most likely")
    assert outcome([*needed, f"actor_rollout_ref.rollout.val_kwargs.{key}={value}"]) == []


@pytest.mark.parametrize("name", ["tools", "add_generation_prompt", "chat_template"])
def test_arguments_that_are_not_the_chat_templates(needed: list[str], name: str):
    (text,) = problems([*needed, f"data.apply_chat_template_kwargs.{name}=x"])
    assert text.startswith(f"data.apply_chat_template_kwargs.{name}: ") and text.endswith("Leave it out.")
    assert outcome([*needed, "data.apply_chat_template_kwargs.enable_thinking=false"]) == []


def test_arguments_of_an_engine_that_is_not_there(needed: list[str]):
    own = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    assert outcome([*needed, f"{own}.a=1", "actor_rollout_ref.rollout.name=hf"]) == [
        f"{own}={{a:1}} has no effect: actor_rollout_ref.rollout.name is hf."
    ]
    assert outcome([*needed, f"{own}.a=1"]) == []


def test_groups_of_ranks_lie_in_a_node_or_cover_whole_ones(needed: list[str]):
    """2 nodes of 6: groups of 4 would share the second group's ranks between nodes; 6 and 12 are whole nodes."""
    machine = ["trainer.n_gpus_per_node=6", "trainer.nnodes=2"]
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    for size in (1, 2, 3, 6, 12, -1):
        outcome([*needed, *machine, f"{key}={size}"], num_gpus=6)
    (text,) = problems([*needed, *machine, f"{key}=4"], num_gpus=6)
    assert text == (
        f"{key}=4: with 6 ranks a node its groups would begin and end inside of nodes. Set one of 1, 2, 3, 6, 12, or "
        "-1 for all of them."
    )
    (text,) = problems([*needed, *machine, f"{key}=5"], num_gpus=6)
    assert "does not divide the trainer.n_gpus_per_node x trainer.nnodes = 12 training ranks. Set one of" in text
