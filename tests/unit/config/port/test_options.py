"""The tables of TRL, OpenRLHF and ms-swift, and whole scripts of these projects."""

import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from alphaapollo.config.__main__ import main
from alphaapollo.config.key_tables import PROJECTS, find_answer, load_project
from alphaapollo.config.keys import COMMANDS, get_value
from alphaapollo.config.load import load_config
from alphaapollo.config.port.convert import translate_keys
from alphaapollo.config.port.rules import RULES
from alphaapollo.config.port.sources import find_program, parse_options
from alphaapollo.config.port.translate import port_script

FOLDER = Path(__file__).parent
ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"


@pytest.mark.parametrize(("project", "at_least"), [("trl", 170), ("openrlhf", 200), ("swift", 470)])
def test_every_option_of_scripts_and_releases_is_answered(project: str, at_least: int):
    lines = (FOLDER / f"{project}_options.txt").read_text(encoding="utf-8").splitlines()
    programs = {name.replace(":", " "): options for name, *options in map(str.split, lines)}
    commands = {name: find_program(project, name, "", {}) for name in programs}
    assert [name for name, found in commands.items() if not found.is_known] == []
    unanswered = [
        f"{name} {option}"
        for name, options in programs.items()
        for option in options
        if (command := commands[name].command.partition(" ")[0])
        if find_answer(project, option, COMMANDS[command]) is None and option not in RULES[project]
    ]
    assert unanswered == []
    assert len({option for options in programs.values() for option in options}) >= at_least


@pytest.mark.parametrize("project", ["trl", "swift"])
def test_every_argument_of_transformers_is_answered(project: str):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    names = [field.name for field in fields(transformers.TrainingArguments) if not field.name.startswith("_")]
    known = [find_answer(project, name, COMMANDS["main_sft"]) is not None or name in RULES[project] for name in names]
    assert [name for name, is_known in zip(names, known, strict=True) if not is_known] == []


def run(name: str, *given: str) -> list[tuple[str, list[str]]]:
    """(command, arguments) that the ported script runs."""
    path = FOLDER / "scripts" / name
    text = port_script(path.read_text(), str(path), given)
    python = "python() { printf '%s\\0' \"${2##*.}\" \"${@:3}\"; printf '\\1'; }\n"
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", python + text], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]]
    return [(command, words) for command, *words in calls]


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        (
            "trl_grpo.py",
            [],
            [
                {
                    "algorithm.adv_estimator": "grpo",
                    "data.train_batch_size": 16,  # 8 x 16 completions of one process, in groups of 8
                    f"{ACTOR}.ppo_mini_batch_size": 32,
                    "env.rollout.n": 8,
                    f"{ACTOR}.optim.lr": 2e-6,
                    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.05,
                    f"{ACTOR}.optim.weight_decay": 0.0,
                    f"{ACTOR}.use_kl_loss": True,
                    f"{ACTOR}.kl_loss_coef": 0.01,
                    f"{ACTOR}.kl_loss_type": "unbiased",
                    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                    f"{ACTOR}.clip_ratio_low": 0.1,
                    f"{ACTOR}.clip_ratio_high": 0.3,
                    "algorithm.norm_adv_by_std_in_grpo": False,
                    "actor_rollout_ref.model.lora_rank": 32,
                    "actor_rollout_ref.model.target_modules": ["q_proj", "v_proj"],
                    "custom_reward_function.name": ["short"],
                    "data.apply_chat_template_kwargs": {"enable_thinking": False},
                    "trainer.logger": ["wandb"],
                    "trainer.total_epochs": 3,
                    f"{CORRECTION}.method": "mask",
                    f"{CORRECTION}.level": "sequence",
                    f"{CORRECTION}.high": 3.0,
                }
            ],
        ),
        (
            "trl_dpo.sh",
            ["BETA=0.3"],
            [
                {
                    "preference.loss": "ipo_mean",
                    "preference.beta": 0.3,
                    "data.train_batch_size": 64,
                    "trainer.n_gpus_per_node": 4,
                    "trainer.test_freq": -1,
                    "model.dtype": "bfloat16",
                },
                {
                    "preference.loss": "kto",
                    "preference.kto_desirable_weight": 1.5,
                    "data.train_batch_size": 32,  # 8 x 1 x 4
                    "model.path": "/home/me/model",
                    "model.lora_rank": 16,
                    "trainer.total_training_steps": 100,
                    "trainer.total_epochs": 1,
                },
            ],
        ),
        (
            "trl_sft.yaml",
            ["trainer=sft"],
            [{"optim.lr": 1e-4, "optim.warmup_style": "cosine", "data.max_length": 1024, "trainer.total_epochs": 2}],
        ),
        (
            "openrlhf_grpo.sh",
            [],
            [
                {
                    "algorithm.adv_estimator": "grpo",
                    "data.train_batch_size": 128,
                    f"{ACTOR}.ppo_mini_batch_size": 512,
                    f"{ACTOR}.use_kl_loss": True,
                    f"{ACTOR}.kl_loss_coef": 1e-3,
                    f"{ACTOR}.kl_loss_type": "low_var_kl",
                    "algorithm.use_kl_in_reward": False,
                    f"{ACTOR}.clip_ratio_low": 0.2,
                    f"{ACTOR}.clip_ratio_high": 0.28,
                    f"{ACTOR}.optim.betas": (0.9, 0.95),
                    f"{ACTOR}.optim.min_lr_ratio": 0.1,
                    "custom_reward_function.path": "/data/openrlhf/reward.py",
                    f"{CORRECTION}.method": "tis",
                    f"{CORRECTION}.high": 5.0,
                    "trainer.logger": ["console", "wandb"],
                }
            ],
        ),
        (
            "openrlhf_ppo.sh",
            [],
            [
                {
                    "algorithm.adv_estimator": "gae",
                    "algorithm.use_kl_in_reward": True,
                    "algorithm.kl_ctrl.kl_coef": 0.02,
                    "reward_model.enable": True,
                    "critic.optim.lr": 9e-6,
                    f"{ACTOR}.fsdp_config.optimizer_offload": True,
                },
                {
                    "preference.loss": "ipo",
                    "preference.beta": 0.2,
                    "data.train_batch_size": 256,
                    "model.router_aux_loss_coef": 0.0,  # the router is frozen with LoRA
                },
                {"data.max_length": 4096, "optim.lr": 9e-6},
            ],
        ),
        (
            "swift_grpo.sh",
            [],
            [
                {
                    "data.train_files": "AI-MO/NuminaMath-TIR",
                    "data.train_max_samples": 5000,
                    "data.train_batch_size": 8,  # 8 x 2 x 4 completions, in groups of 8
                    f"{ACTOR}.ppo_mini_batch_size": 64,
                    f"{ACTOR}.optim.lr": 1e-5,
                    f"{ACTOR}.optim.weight_decay": 0.1,
                    f"{ACTOR}.loss_agg_mode": "token-mean",
                    "custom_reward_function.path": "plugin.py",
                    "custom_reward_function.name": ["my_accuracy"],
                    "custom_reward_function.weights": [1.0],
                    "algorithm.adv_estimator": "grpo",
                    "algorithm.filter_groups.enable": True,
                    "algorithm.overlong_filter": True,
                    "algorithm.overlong_penalty.cache": 256,
                    f"{CORRECTION}.method": "tis",
                    "actor_rollout_ref.model.lora_rank": 0,
                    f"{ROLLOUT}.temperature": 0.9,
                    "trainer.n_gpus_per_node": 4,
                    "trainer.logger": ["tensorboard", "swanlab"],
                }
            ],
        ),
        (
            "swift_tuning.sh",
            [],
            [
                {
                    "data.train_files": ["a/first", "b/second"],
                    "data.train_turns": "last",
                    "data.truncation": "drop",
                    "data.train_batch_size": 16,
                    "model.lora_rank": 8,
                    "data.apply_chat_template_kwargs": {"enable_thinking": False},
                },
                {"preference.loss": "simpo", "preference.beta": 2.0, "preference.sft_coef": 0.1, "optim.lr": 1e-5},
                {
                    "data.train_batch_size": 64,
                    "optim.min_lr_ratio": 0.1,
                    "fsdp_config.ep_size": 4,
                    "trainer.nnodes": 2,
                    "trainer.n_gpus_per_node": 8,
                },
            ],
        ),
        (
            "swift_rm.yaml",
            [],
            [{"bradley_terry.centring_coef": 0.01, "trainer.n_gpus_per_node": 4, "data.train_files": "a/pairs"}],
        ),
    ],
)
def test_a_script_becomes_a_valid_configuration(name: str, given: list[str], found: list[dict[str, object]]):
    calls = run(name, *given)
    assert len(calls) == len(found)
    for (command, words), expected in zip(calls, found, strict=True):
        config = load_config(COMMANDS[command], command.removeprefix("main_"), words)
        assert {key: get_value(config, key) for key in expected} == expected


def port(name: str) -> str:
    path = FOLDER / "scripts" / name
    return port_script(path.read_text(), str(path))


def test_what_is_not_converted_says_why():
    text = port("swift_grpo.sh")
    assert "# line 3: swift rollout: not converted. a run starts" in text
    assert "# system=You are a helpful assistant.: not supported (" in text
    assert "left out: format" in text
    assert "# output_dir=args.out: known only at run time" in port("trl_grpo.py")
    assert "not supported: clearml" in port("trl_grpo.py")
    assert ", for one process" in port("trl_grpo.py") and ", for one process" not in port("swift_grpo.sh")
    assert "# tensor_model_parallel_size=4: not supported (" in port("swift_tuning.sh")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"loss_type": "luspo"}, "# loss_type"),
        ({"nonsense": "1"}, "# nonsense"),
        ({"max_completion_length": "long"}, "data.max_response_length"),
    ],
)
def test_values_without_a_counterpart_are_comments(values: dict[str, str], found: str):
    word, comment = translate_keys(values, "main_ppo", "trl", "grpo")[found]
    assert word == "" and comment.startswith(f"{found.removeprefix('# ')}=")


def test_special_characters_are_quoted():
    lines = translate_keys({"model": "<a model>", "dataset": "[a b,c]"}, "main_sft", "swift", "swift sft")
    words = [lines[key][0] for key in ("model.path", "data.train_files")]
    config = load_config(COMMANDS["main_sft"], "sft", words)
    assert (config.model.path, config.data.train_files) == ("<a model>", ["a b", "c"])


def test_first_condition_that_holds_counts():
    lines = translate_keys({"loss_type": "cispo", "epsilon": "0.2", "epsilon_high": "5"}, "main_ppo", "trl", "grpo")
    assert lines[f"{ACTOR}.policy_loss.loss_mode"][0].endswith("=cispo")
    assert f"{ACTOR}.clip_ratio_high" not in lines and "one less" in lines["# epsilon_high"][1]
    lines = translate_keys({"beta": "0.05"}, "main_ppo", "trl", "rloo")
    assert lines["algorithm.kl_ctrl.kl_coef"][0].endswith("=0.05") and f"{ACTOR}.use_kl_loss" not in lines


def test_options_of_a_command_line():
    words = ["x", "--lr", "1e-5", "--packing", "--ids=q_proj", "--betas", "0.9", "0.95", "--flag", "True", "--n", "-1"]
    found = {"lr": "1e-5", "packing": "true", "ids": "q_proj", "betas": "[0.9,0.95]", "flag": "true", "n": "-1"}
    assert parse_options(words) == found


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("a.sh", "python3 train_it.py --lr 1", "no training command"),
        ("a.sh", "pip install trl deepspeed", "no training command"),
        ("a.sh", "trl bco --model_name_or_path x", "BCO has no counterpart"),
        ("a.sh", "swift rlhf --rlhf_type magic --model x", "unknown program"),
        ("a.sh", "trl magic --model_name_or_path x", "unknown program"),
        ("a.py", "from trl import MagicConfig\nMagicConfig(a=1)", "unknown program"),
        ("a.py", "print('hello')", "no training command"),
        ("a.py", "print(", "line 1"),
        ("a.yaml", "model_name_or_path: x", "trainer=sft"),
        ("a.yaml", "lr: 1", "no key of TRL"),
    ],
)
def test_an_unknown_trainer_is_one_error(
    name: str, text: str, fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_text(text)
    assert main(["port", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert fact in error and str(tmp_path / name) in error


def test_programs_name_presets_and_commands():
    recipes = {path.stem for path in (FOLDER.parents[3] / "configs" / "algorithm").glob("*.yaml")}
    for project in PROJECTS:
        for command in load_project(project).programs.values():
            name, *settings = command.split()
            assert name in load_project(project).tables
            assert [one for one in settings if one.startswith("algorithm=") and one[10:] not in recipes] == []


def test_names_with_several_values_are_known_only_at_run_time():
    text = "import trl\nlr = 1\nlr = 2\nif lr:\n    lr = 3\nname = make()\n"
    text += "config = trl.SFTConfig(learning_rate=lr, output_dir=name, seed=7)\n"
    ported = port_script(text, "a.py")
    assert "# learning_rate=lr: known only" in ported and "# output_dir=name: known only" in ported
    assert "    trainer.seed=7  " in ported
