import subprocess
from pathlib import Path

import pytest

from alphaapollo.config.__main__ import main
from alphaapollo.config.port.convert import translate_keys
from alphaapollo.config.port.translate import port_script
from examples.quickstart.make_task import make_model, make_tokenizer
from tests.unit.tool_templates import RESPONSE_TEMPLATE, TAGS, tokenizer_of

SCRIPTS = Path(__file__).parent / "scripts"


def ported(name: str, *given: str) -> dict[str, str]:
    """Keys and values for a script, as the shell passes them to python."""
    path = SCRIPTS / f"{name}.sh"
    return dict(word.split("=", 1) for word in arguments(port_script(path.read_text(), str(path), given)))


def arguments(script: str) -> list[str]:
    in_place_of_python = "python() { shift 2; printf '%s\\0' \"$@\"; }\n"
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", "MODEL_PATH": "my/model"}
    done = subprocess.run(["bash", "-c", in_place_of_python + script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


ACTOR = "actor_rollout_ref.actor"
GREEDY = "actor_rollout_ref.rollout.val_kwargs.temperature=0"  # verl's default
DATA = "/home/me/data"


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        (
            "grpo",
            [],
            [
                f"{ACTOR}.ppo_mini_batch_size=1280",  # 256 x 5
                f"{ACTOR}.ppo_max_token_len_per_gpu=16384",  # 2048 x 8
                *(f"{ACTOR}.clip_ratio_c=3.0", "trainer.save_freq=-1", GREEDY),  # verl's defaults
                f"data.train_files=['{DATA}/gsm8k/train.parquet', '{DATA}/math/train.parquet']",
                *("data.truncation=drop", "trainer.logger=[console,swanlab]"),
            ],
        ),
        (
            "grpo",  # variables of the script, and more keys
            ["ENGINE=sglang", "DEVICE=npu", "trainer.n_gpus_per_node=1", "trainer.total_epochs=3"],
            [
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",  # 4, but there is one GPU
                *("actor_rollout_ref.rollout.name=sglang", "trainer.total_epochs=3"),
            ],
        ),
        (
            "ppo",
            [],
            [
                *("critic.fsdp_config.param_offload=True", "critic.fsdp_config.optimizer_offload=True"),
                *("trainer.logger=[console,tensorboard]", f"{ACTOR}.ppo_mini_batch_size=256"),
                "algorithm.kl_ctrl.target_kl=51.2",  # 0.1 a token x 512
            ],
        ),
        (
            "dapo",
            ["RAY_DATA_HOME=/big"],
            [
                f"{ACTOR}.ppo_mini_batch_size=512",  # 32 x 16
                *(f"{ACTOR}.ulysses_sequence_parallel_size=4", "algorithm.overlong_penalty.cache=4096"),
                *("algorithm.filter_groups.metric=accuracy", "trainer.output_dir=/big/ckpts", "data.truncation=left"),
            ],
        ),
        (
            "rloo",
            [],
            [
                *("algorithm.adv_estimator=rloo", f"{ACTOR}.ppo_mini_batch_size=1280", GREEDY),
                *("data.train_files=/data/gsm8k/train.parquet", "actor_rollout_ref.model.path=my/model"),
            ],
        ),
        (
            "multi_turn",  # reads the configuration that it starts from
            [],
            [
                *("env.env_name=informal_math", "env.max_steps=5", "env.action_format=chat_template"),
                *("env.tool_parser=hermes", "data.max_response_length=1024", f"{ACTOR}.ppo_mini_batch_size=4096"),
                "data.train_batch_size=256",  # the command wins over the file
            ],
        ),
    ],
)
def test_a_script_of_verl_becomes_keys(name: str, given: list[str], found: list[str]):
    assert {*found} <= {f"{key}={value}" for key, value in ported(name, *given).items()}


def test_keys_without_a_counterpart_are_left_out():
    words = ported("grpo")
    assert words["trainer.experiment_name"].startswith("Qwen3-8B_grpo_vllm_20")
    assert f"{ACTOR}.use_dynamic_bsz" not in words and f"{ACTOR}.policy_loss.ppo_kl_coef" not in words
    assert "algorithm.overlong_penalty.log" not in ported("dapo")


def test_every_changed_line_has_a_comment():
    path = SCRIPTS / "grpo.sh"
    text = port_script(path.read_text(), str(path))
    for line in (
        f"{ACTOR}.ppo_mini_batch_size=1280  # 256 prompts x rollout.n=5",
        "# actor_rollout_ref.model.use_remove_padding=True: dropped",
        "'trainer.logger=[console,swanlab]'\n",
        "export SWANLAB_MODE=${SWANLAB_MODE:-offline}\n",
        "trainer.save_freq=-1  # verl's default\n",
        ": $(date +%Y%m%d), ${HOME}\n",
    ):
        assert line in text


def test_wandb_needs_no_login():
    line = "export WANDB_MODE=${WANDB_MODE:-offline}\n"
    assert line in port_script('python3 -m verl.trainer.main_ppo trainer.logger=\'["console","wandb"]\'', "a.sh")
    assert line not in port_script("python3 -m verl.trainer.main_ppo trainer.logger=console", "a.sh")


def test_other_programs():
    script = "torchrun --nproc_per_node=$1 --nnodes 2 -m verl.trainer.sft_trainer optim.clip_grad=1 engine=fsdp\n"
    script += "python3 -m verl.trainer.main_generation data.output_path=out rollout.n=1"
    text = port_script(script, "both.sh")
    assert "python -m alphaapollo.trainer.main_sft " in text and "torchrun" not in text
    assert '    "trainer.n_gpus_per_node=${1}"\n' in text and "    trainer.nnodes=2\n" in text
    assert "    grad_clip=1  # was optim.clip_grad\n" in text
    assert "    # engine=fsdp: not supported (FSDP2" in text
    assert "    trainer.output_dir=out  # was" in text


@pytest.mark.parametrize(
    ("key", "value", "new"),
    [
        ("data.truncation", "middle", "left"),
        ("trainer.total_training_steps", "null", "null"),
        (f"{ACTOR}.policy_loss.loss_mode", "geo_mean", "gmpo"),
        ("algorithm.filter_groups.max_num_gen_batches", "0", "1000"),
        ("actor_rollout_ref.rollout.name", "trtllm", "vllm"),
        ("trainer.device", "cuda", "auto"),
    ],
)
def test_values_that_are_written_differently(key: str, value: str, new: str):
    assert f"{key}={new}" in [word for word, _ in translate_keys({key: value}, "main_ppo").values()]


def test_greedy_validation_has_temperature_0():
    lines = translate_keys({"actor_rollout_ref.rollout.val_kwargs.do_sample": "False"}, "main_ppo")
    assert GREEDY in [word for word, _ in lines.values()]


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": "2.0"}, {"method": "tis", "level": "token", "high": "2.0"}),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.001"},
            {"method": "mask", "level": "geometric", "low": "0.999001", "high": "1.0101"},  # of 1 / rho in verl
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0"},
            {"method": "mask", "level": "token", "low": "0.5", "high": "2.0"},
        ),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": "3", "rollout_rs_threshold_lower": "0.9"},
            {"method": "mask", "level": "token", "high": "3", "low": "0.9"},
        ),
        (
            {"rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"},
            {"method": "tis", "level": "sequence"},
        ),
        ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "2"}, {}),
        ({"rollout_is": "null", "rollout_rs": "null"}, {}),
    ],
)
def test_the_correction_of_engine_and_trainer(values: dict[str, str], found: dict[str, str]):
    lines = translate_keys({f"{CORRECTION}.{name}": value for name, value in values.items()}, "main_ppo")
    words = [word for word, _ in lines.values() if word.startswith(CORRECTION)]
    assert words == [f"{CORRECTION}.{name}={value}" for name, value in found.items()]


def test_names_of_types_and_trackers_of_other_programs():
    lines = translate_keys({"model.dtype": "bf16", "trainer.logger": "console"}, "main_sft")
    assert [word for word, _ in lines.values()] == ["model.dtype=bfloat16", "trainer.logger=[console]"]
    lines = translate_keys({"trainer.logger": "['console','wandb','swanlab','mlflow','clearml']"}, "main_ppo")
    assert lines["trainer.logger"] == ("trainer.logger=[console,wandb,swanlab,mlflow]", "not supported: clearml")


@pytest.mark.parametrize(
    ("key", "value", "comment"),
    [
        ("reward.custom_reward_function.path", "null", "custom_reward_function.path keeps its default"),
        ("my_recipe.alpha", "1", "my_recipe.alpha=1: not a known key of verl"),
        ("actor_rollout_ref.actor.grad_clip", "none", "expected number > 0"),
        ("actor_rollout_ref.rollout.multi_turn.format", "hermes", "episodes have one turn"),
    ],
)
def test_what_is_left_out_says_why(key: str, value: str, comment: str):
    lines = translate_keys({key: value}, "main_ppo")
    assert any(comment in found and not word for word, found in lines.values())


@pytest.mark.parametrize("option", ["--nproc_per_node=4", "--standalone --nproc-per-node 4"])
def test_torchrun_options_become_keys(option: str):
    assert "    trainer.n_gpus_per_node=4\n" in port_script(f"torchrun {option} -m verl.trainer.sft_trainer", "a.sh")


def test_a_script_without_a_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "install.sh"
    script.write_text("pip install verl")
    assert main(["port", str(script)]) == 2
    assert f"{script}" in capsys.readouterr().err
    assert main(["port", str(tmp_path / "none.sh")]) == 2


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and data of this machine, and its size."""
    import pandas as pd
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("local")
    make_tokenizer(folder, TAGS)
    make_model(folder, seed=0)
    tokenizer = tokenizer_of()
    tokenizer.response_template = RESPONSE_TEMPLATE  # reads calls as vLLM's parser does, without its import
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 32768
    config.save_pretrained(folder)
    question = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What is 1 + 1?"}]}
    row = question | {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}
    pd.DataFrame([row] * 4).to_parquet(folder / "rows.parquet")
    paths = {"actor_rollout_ref.model.path": folder, "critic.model.path": folder}
    paths |= {f"data.{name}": folder / "rows.parquet" for name in ("train_files", "val_files")}
    machine = {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.default_local_dir": folder / "runs"}
    return [f"{key}={value}" for key, value in (paths | machine).items()]


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "rloo", "multi_turn"])
def test_a_ported_command_passes_the_dry_run(name: str, local: list[str], capsys: pytest.CaptureFixture[str]):
    from alphaapollo.trainer.main_ppo import main as main_ppo

    ranks = ["trainer.n_gpus_per_node=4"] if name == "dapo" else []  # its sequences are shared by 4
    words = ported(name, *local, *ranks) | {"trainer.logger": "[console]"}  # the package swanlab may be missing
    if name == "multi_turn":
        assert words.pop("env.tool_parser") == "hermes"
    assert main_ppo([*(f"{key}={value}" for key, value in words.items()), "trainer.dry_run=True"]) == 0
    assert "the configuration is valid" in capsys.readouterr().out


@pytest.mark.parametrize("loss", ["gspo", "cispo", "geo_mean", "dppo_kl"])
def test_clip_ranges_that_differ_from_verls_are_written(loss: str):
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    lines = translate_keys({key: loss, f"{ACTOR}.clip_ratio_high": "0.28"}, "main_ppo")
    words = {word for word, _ in lines.values()}
    assert {f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"} <= words
    assert not any("clip_ratio_low" in word for word, _ in translate_keys({key: "vanilla"}, "main_ppo").values())
