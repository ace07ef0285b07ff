"""Checks of files, folders and the machine, and the lines about keys without effect."""

import os
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Config, EvolvingConfig, GenerationConfig, SftConfig
from alphaapollo.config.schema.base import Section
from tests.unit.config.overrides import from_overrides

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
SCHEMAS: dict[str, type[Section]] = {
    "ppo": Config,
    "sft": SftConfig,
    "generation": GenerationConfig,
    "evolving": EvolvingConfig,
}
NEEDED = {
    "ppo": [f"{MODEL}.path=some/model", "data.train_files=train.jsonl"],
    "sft": ["model.path=some/model", "data.train_files=train.jsonl"],
    "generation": ["model.path=some/model", "data.path=train.jsonl"],
    "evolving": ["data.path=train.jsonl", "models={policy: {path: some/model}}"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    for name in ("train.jsonl", "val.jsonl", "own.py"):
        (tmp_path / name).touch()
    return tmp_path


def outcome(*argv: str, command: str = "ppo", num_gpus: int = 0, num_cores: int = 8) -> list[str]:
    return check_config_and_get_notices(from_overrides(SCHEMAS[command], *NEEDED[command], *argv), num_gpus, num_cores)


def problem(*argv: str, **machine: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        outcome(*argv, **machine)
    (text,) = caught.value.errors
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("command", SCHEMAS)
def test_defaults_with_model_and_data_are_fine(command: str):
    assert outcome(command=command) == []
    assert outcome(command=command, num_gpus=8) == []


def test_model_and_data_are_required():
    with pytest.raises(ConfigError, match="models is required, but it is empty"):
        check_config_and_get_notices(EvolvingConfig())
    with pytest.raises(ConfigError) as caught:
        check_config_and_get_notices(Config())
    assert caught.value.errors == [
        "data.train_files is required, but it is empty. Set data.train_files=...",
        f"{MODEL}.path is required, but it is empty. Set {MODEL}.path=...",
    ]


@pytest.mark.parametrize(
    ("command", "override", "says"),
    [
        ("ppo", "data.val_files=[val.jsonl,gone.jsonl]", "data.val_files: no such file: gone.jsonl"),
        ("ppo", f"{MODEL}.path=./gone", f"{MODEL}.path: no such folder: ./gone"),
        ("ppo", f"{MODEL}.path=.", ". has no config.json"),
        ("ppo", f"{MODEL}.path=outputs/modle", f"{MODEL}.path: no such folder: outputs/modle"),
        ("ppo", "critic.model.path=/gone", "critic.model.path: no such folder: /gone"),
        ("ppo", "reward_model.enable=True", "reward_model.model.path is required, but it is empty"),
        ("ppo", "reward_model={enable: true, model: {path: /gone}}", "reward_model.model.path: no such folder: /gone"),
        ("ppo", "teacher.divergence=reverse", "teacher.model.path is required, but it is empty"),
        ("ppo", "custom_reward_function.path=gone.py", "custom_reward_function.path: no such file: gone.py"),
        ("ppo", "algorithm.custom_module=gone.py", "algorithm.custom_module: no such file: gone.py"),
        ("ppo", f"data.train_files={'x' * 300}", "data.train_files: no such file: xxx"),  # longer than names may be
        ("ppo", f"custom_reward_function.path={'x' * 300}", "custom_reward_function.path: no such file: xxx"),
        ("ppo", "trainer.resume_mode=resume_path", "trainer.resume_from_path is required, but it is empty"),
        ("ppo", "trainer={resume_mode: resume_path, resume_from_path: gone}", "no such folder: gone"),
        (
            "ppo",
            "{actor_rollout_ref.actor.use_kl_loss=True,algorithm.reference_reset.patience=3}",
            "algorithm.reference_reset.patience=3 needs data.val_files and trainer.test_freq",
        ),
        ("sft", "data.val_prompts=no.jsonl", "data.val_prompts: no such file: no.jsonl"),
        ("evolving", "models={policy: {path: /gone}}", "models.policy.path: no such folder: /gone"),
    ],
)
def test_files_and_folders_exist(command: str, override: str, says: str):
    assert says in problem(
        *override.strip("{}").split(",") if override.startswith("{") else [override], command=command
    )


def test_the_run_folder_can_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "file").touch()
    assert "file is a file" in problem("trainer.output_dir=file")
    assert "file is a file" in problem("trainer.output_dir=.", "trainer.project_name=file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert f"{folder} is not writable" in problem("trainer.output_dir=not/there")


def test_a_machine_without_gpus():
    assert "a node has 8. Lower it" in problem(f"{ROLLOUT}.tensor_model_parallel_size=9")
    for command in SCHEMAS:
        error = problem("trainer.device=cuda", command=command)
        assert error.startswith("trainer.device=cuda, but this machine has no GPU")
    assert outcome("trainer.n_gpus_per_node=9") == [
        "trainer.n_gpus_per_node=9 is slow, because a node has only 8 CPU cores. Set 8 or less."
    ]
    assert "many times slower" in outcome(f"{ROLLOUT}.router_replay=true")[0]


def test_engines_fit_the_gpus():
    parallel, engines, apart = (
        f"{ROLLOUT}.{name}" for name in ("tensor_model_parallel_size", "num_engines", "colocate=False")
    )
    per_node, two_nodes = "trainer.n_gpus_per_node", ["trainer.nnodes=2", "trainer.n_gpus_per_node=6", f"{parallel}=4"]
    assert outcome(f"{per_node}=4", f"{parallel}=2", num_gpus=4) == []
    assert "does not divide trainer.n_gpus_per_node=4" in problem(f"{per_node}=4", f"{parallel}=3", num_gpus=4)
    for more in ([], [f"{engines}=2"]):  # 4 divides 12, not 6
        error = problem(*two_nodes, *more, num_gpus=6)
        assert error.endswith("does not divide trainer.n_gpus_per_node=6. Set one of 1, 2, 3, 6.")
    assert outcome("trainer.nnodes=2", f"{per_node}=2", f"{parallel}=4", apart, num_gpus=6) == []
    assert "needs 8 GPUs, but 3 GPUs are not used for training" in problem(f"{parallel}=8", apart, num_gpus=4)
    assert "needs 2 GPUs, but 1 GPUs are shared with training" in problem(f"{engines}=2", num_gpus=4)
    assert outcome(apart, f"{engines}=3", num_gpus=4) == []
    assert "but 3 GPUs are not used for training" in problem(apart, f"{engines}=4", num_gpus=4)
    on_two = [*two_nodes, apart, f"{engines}=1"]  # 4 are free, 2 on each node
    assert "2 GPUs on each of 2 nodes are not used for training" in problem(*on_two, num_gpus=8)
    own = [f"{per_node}=4", "actor_rollout_ref.rollout.nnodes=2", f"{parallel}=2"]
    assert outcome(*own, num_gpus=4) == []
    assert "needs 10 GPUs, but 4 GPUs on each of 2 nodes are for engines" in problem(*own, f"{engines}=5", num_gpus=4)
    assert outcome(*on_two, num_gpus=10) == []
    for command in ("ppo", "sft"):
        assert "a node has 4 GPUs" in problem(f"{per_node}=8", command=command, num_gpus=4)


def test_engines_of_a_generation_fit_into_nodes():
    two = ["trainer.nnodes=2", "trainer.n_gpus_per_node=6", "rollout.tensor_model_parallel_size=4"]
    assert outcome(*two, "rollout.num_engines=2", command="generation", num_gpus=8) == []
    error = problem(*two, command="generation", num_gpus=8)  # three by default
    assert "only 2 engines of this size fit trainer.n_gpus_per_node=6 x trainer.nnodes=2" in error
    assert "one engine, not 2" in problem("trainer.controller=local", "rollout.num_engines=2", command="generation")


def test_own_engines_of_an_evolution_share_the_gpu():
    two = "models={judge: {path: some/b}}"
    assert "2 engines (policy, judge) on one GPU. Set 0.50 or less" in problem(two, command="evolving", num_gpus=1)
    assert outcome(two, "rollout.gpu_memory_utilization=0.5", command="evolving", num_gpus=1) == []


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "says"),
    [
        ([f"{ACTOR}.fsdp_config.param_offload=True"], 0, "it needs a GPU"),
        ([f"{ACTOR}.fsdp_config.param_offload=True"], 1, None),
        ([f"{ACTOR}.fsdp_config.offload_policy=True"], 0, "it needs a GPU"),
        ([f"{ACTOR}.fsdp_config.offload_policy=True"], 1, None),
        (
            [f"{ACTOR}.fsdp_config.param_offload=True", f"+{ACTOR}.fsdp_config.offload_policy=True"],
            1,
            f"{ACTOR}.fsdp_config.offload_policy is true",
        ),
        ([f"{ROLLOUT}.kv_cache_gib=2.0"], 1, "it is for machines without GPUs"),
        ([f"{ROLLOUT}.engine_kwargs.vllm={{a: 1}}", f"+{ROLLOUT}.name=hf"], 0, f"{ROLLOUT}.name is hf"),
        ([f"{ROLLOUT}.engine_kwargs.vllm={{a: 1}}"], 0, None),
        (["critic.optim.min_lr_ratio=0.1"], 0, "critic.optim.warmup_style is constant"),
        (
            ["critic.optim.lr_warmup_steps_ratio=0.1", "+critic.optim.lr_warmup_steps=3"],
            0,
            "critic.optim.lr_warmup_steps is 3",
        ),
        (["reward_model.weight=2.0"], 0, "reward_model.enable is false"),
        (["reward_model.model.path=some/model"], 0, "reward_model.enable is false"),
        (["teacher.coef=2.0"], 0, "teacher.divergence is null"),
        ([f"{ACTOR}.kl_loss_coef=0.1"], 0, f"{ACTOR}.use_kl_loss is false"),
        (
            [f"{ACTOR}.clip_ratio=0.3", f"+{ACTOR}.clip_ratio_low=0.2", f"+{ACTOR}.clip_ratio_high=0.28"],
            0,
            "clip_ratio_low and clip_ratio_high are both set",
        ),
        ([f"{ACTOR}.loss_scale_factor=100.0"], 0, f"{ACTOR}.loss_agg_mode is token-mean"),
        (["algorithm.rollout_correction.level=sequence"], 0, "algorithm.rollout_correction.method is null"),
        (["algorithm.overlong_penalty.cache=64"], 0, "algorithm.overlong_penalty.enable is false"),
        (["algorithm.length_budget.coef=0.1"], 0, "algorithm.length_budget.mode is null"),
        (["env.history_length=3", "+env.env_name=informal_math"], 0, "env.context is append"),
        (["env.max_steps=3"], 0, "env.env_name is single_turn"),
        (["env.openenv.url=x"], 0, "env.env_name is single_turn"),
        (["env.prompt=x"], 0, "env.env_name is single_turn"),
        (
            ["env.openenv.url=x", "+env.env_name=own", "+env.custom_module=own.py"],
            0,
            None,
        ),  # may read every section
        (
            [
                "env.informal_math.python_code_timeout=3.0",
                "+env.env_name=informal_math",
                "+env.informal_math.enable_python_code=False",
            ],
            0,
            "env.informal_math.enable_python_code is false",
        ),
        (["custom_reward_function.name=mine"], 0, "custom_reward_function.path is empty"),
        (["trainer.max_staleness=4"], 0, "trainer.async_mode is null"),
        (
            ["trainer.export_lora=adapter", f"+{MODEL}.lora_rank=16", "+trainer.export_hf=False"],
            0,
            "trainer.export_hf is false",
        ),
        (
            ["actor_rollout_ref.ref.fsdp_config.param_offload=True", f"+{MODEL}.lora_rank=16"],
            1,
            "with LoRA the reference is the policy without its adapters",
        ),
        (
            ["actor_rollout_ref.ref.log_probs_ahead=True"],
            0,
            "no KL term uses the reference's log-probs",
        ),
    ],
)
def test_keys_without_effect(overrides: list[str], num_gpus: int, says: str | None):
    key = overrides[0].replace("=True", "=true").replace("{a: 1}", "{a:1}")
    expected = [] if says is None else [f"{key} has no effect: {says}."]
    found = outcome(*(word.removeprefix("+") for word in overrides), num_gpus=num_gpus)
    assert found == expected


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.kl_loss_coef=0",
        "algorithm.kl_ctrl.kl_coef=0",
        "trainer.test_freq=-1",
        f"{ROLLOUT}.free_cache_engine=False",
    ],
)
def test_a_key_that_requests_nothing_is_not_reported(override: str):
    assert outcome(override) == []


@pytest.mark.parametrize(
    ("kind", "read"),
    [("fixed", []), ("adaptive", ["target_kl", "horizon"]), ("doubling", ["target_kl"]), ("dual", ["target_kl"])],
)
def test_each_kl_controller_reads_its_own_keys(kind: str, read: list[str]):
    values = {"target_kl": 3.0, "horizon": 50.0}
    keys = [f"algorithm.kl_ctrl.{name}={value}" for name, value in values.items()]
    assert outcome("algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl.type={kind}", *keys) == [
        f"algorithm.kl_ctrl.{name}={value} has no effect: algorithm.kl_ctrl.type is {kind}."
        for name, value in values.items()
        if name not in read
    ]
    off = outcome("algorithm.kl_penalty=k3", f"algorithm.kl_ctrl.type={kind}", *keys)
    assert all(line.endswith("has no effect: algorithm.use_kl_in_reward is false.") for line in off)
    assert len(off) == 3 + (kind != "fixed")


@pytest.mark.parametrize(
    ("command", "overrides", "lines"),
    [
        (
            "generation",
            ["env.openenv.url=x"],
            ["env.openenv.url=x has no effect: env.env_name is single_turn."],
        ),
        ("generation", ["model.lora_rank=8"], ["model.lora_rank=8 has no effect: it affects only training."]),
        ("generation", ["rollout.val_kwargs.n=8"], ["rollout.val_kwargs.n=8 has no effect: it affects only training."]),
        (
            "generation",
            ["env.rollout.n=8"],
            ["env.rollout.n=8 has no effect: data.n_samples is the number of samples."],
        ),
        ("evolving", ["rollout.top_p=0.5"], ["rollout.top_p=0.5 has no effect: roles.ROLE sets the sampling."]),
        (
            "sft",
            ["rollout.val_kwargs.n=4", "reward.timeout=3"],
            [
                "rollout.val_kwargs.n=4 has no effect: data.val_prompts is empty.",
                "reward.timeout=3.0 has no effect: data.val_prompts is empty.",
            ],
        ),
        (
            "sft",
            ["data.val_prompts=train.jsonl"],
            ["data.val_prompts=train.jsonl has no effect: trainer.test_freq is -1."],
        ),
        (
            "sft",
            ["data.val_prompts=train.jsonl", "trainer.test_freq=5", "env.max_steps=3", "env.rollout.n=2"],
            [
                "env.max_steps=3 has no effect: env.env_name is single_turn.",
                "env.rollout.n=2 has no effect: rollout.val_kwargs.n is the number of samples.",
            ],
        ),
        (
            "sft",
            ["fsdp_config.optimizer_offload=True"],
            ["fsdp_config.optimizer_offload=true has no effect: it needs a GPU."],
        ),
    ],
)
def test_lines_of_other_commands(command: str, overrides: list[str], lines: list[str]):
    assert outcome(*overrides, command=command) == lines


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "20")])
def test_training_on_samples_of_a_truncated_distribution(key: str, value: str):
    (line,) = outcome(f"{ROLLOUT}.{key}={value}")
    assert line.startswith(f"{ROLLOUT}.{key}={value} biases the gradients")
    assert outcome(f"{ROLLOUT}.val_kwargs.{key}={value}") == []
    assert outcome(f"rollout.{key}={value}", command="generation") == []


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("low_var_kl", "has the gradient of KL(reference||policy)."),
        ("k1", "has an expected gradient of zero, so this loss only adds noise."),
    ],
)
def test_kl_loss_with_the_gradient_of_another_kl(kind: str, says: str):
    on, key = f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type"
    (line,) = outcome(on, f"{key}={kind}")
    assert line.startswith(f"{key}={kind} {says} Append +, or set k2")
    for right in (f"{kind}+", "k2", "mse", "full"):
        assert outcome(on, f"{key}={right}") == []


def test_bounds_of_a_geometric_mean_that_never_act():
    correction = "algorithm.rollout_correction"
    (line,) = outcome(f"{correction}={{method: mask, level: geometric}}")
    assert line.startswith(f"{correction}.level=geometric with bounds 0 and 2 has no effect")
    assert outcome(f"{correction}={{method: mask, level: geometric, high: 1.01}}") == []
