"""Scripts of verl, TRL, OpenRLHF and ms-swift become valid commands, with comments about what is not converted."""

import subprocess
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.key_tables import find_key_in_section
from alphaapollo.config.keys import COMMANDS, format_value, get_value
from alphaapollo.config.load import load_config
from alphaapollo.config.requirements import CheckContext as Case
from alphaapollo.config.requirements import find_conflicts
from alphaapollo.config.schema import Config
from alphaapollo.plugins.port.translate import port_script
from alphaapollo.trainer.setup.combinations import check_setting_combinations
from examples.quickstart.make_task import make_model, make_tokenizer
from tests.unit.tool_templates import RESPONSE_TEMPLATE, TAGS, tokenizer_of

FOLDER = Path(__file__).parent / "scripts"


@cache
def port(name: str, *given: str) -> str:
    decided = ("LAUNCH=python3", "EXTRA=", "parallel=2") if name == "grpo.sh" else ()  # what its branches set
    return port_script((FOLDER / name).read_text(), str(FOLDER / name), (*decided, *given))


def run(script: str) -> list[tuple[str, list[str]]]:
    """(command, arguments) that a ported script runs."""
    python = "python() { printf '%s\\0' \"${2##*.}\" \"${@:3}\"; printf '\\1'; }\n"
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", "MODEL_PATH": "my/model"}
    done = subprocess.run(["bash", "-c", python + script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]]
    return [(command, words) for command, *words in calls]


# {script and what is added to its command line: keys and values of each command that it becomes}. `optim.X`, `actor.X`,
# `rollout.X` and `model.X` of main_ppo are below actor_rollout_ref.
SCRIPTS: dict[str, list[str]] = {
    "grpo.sh": [
        "actor.ppo_mini_batch_size=1280 actor.ppo_max_token_len_per_gpu=16384 "  # 256 x 5 and 2048 x 8
        "clip_ratio_c=3.0 trainer.save_freq=-1 rollout.val_kwargs.temperature=0.0 "  # verl's defaults
        "data.train_files=[/home/me/data/gsm8k/train.parquet,/home/me/data/math/train.parquet] "
        "data.truncation=drop trainer.logger=[console,swanlab]"
    ],
    # variables of the script, and more keys; 4 ranks of an engine, but there is one GPU
    "grpo.sh ENGINE=sglang parallel=4 trainer.n_gpus_per_node=1 trainer.total_epochs=3": [
        "rollout.tensor_model_parallel_size=1 rollout.name=sglang trainer.total_epochs=3"
    ],
    "ppo.sh": [
        "critic.fsdp_config.param_offload=true critic.fsdp_config.optimizer_offload=true actor.ppo_mini_batch_size=256 "
        "trainer.logger=[console,tensorboard] algorithm.kl_ctrl.target_kl=51.2"  # 0.1 a token x 512
    ],
    "dapo.sh RAY_DATA_HOME=/big": [
        "actor.ppo_mini_batch_size=512 actor.ulysses_sequence_parallel_size=4 "  # 32 x 16
        "algorithm.overlong_penalty.cache=4096 algorithm.filter_groups.metric=accuracy "
        "trainer.output_dir=/big/ckpts data.truncation=left"
    ],
    "rloo.sh": [
        "algorithm.adv_estimator=rloo actor.ppo_mini_batch_size=1280 rollout.val_kwargs.temperature=0.0 "
        "data.train_files=/data/gsm8k/train.parquet actor_rollout_ref.model.path=my/model"
    ],
    # reads the configuration that it starts from; data.train_batch_size of the command wins over the file's
    "multi_turn.sh": [
        "env.env_name=informal_math env.max_steps=5 env.action_format=chat_template env.tool_parser=hermes "
        "data.max_response_length=1024 actor.ppo_mini_batch_size=4096 data.train_batch_size=256"
    ],
    "trl_grpo.py": [
        # 8 x 16 completions of one process, in groups of 8
        "data.train_batch_size=16 actor.ppo_mini_batch_size=32 env.rollout.n=8 "
        "optim.lr=2e-06 optim.lr_warmup_steps_ratio=0.05 actor.kl_loss_coef=0.01 actor.kl_loss_type=unbiased "
        "actor.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=false "
        "model.target_modules=[q_proj,v_proj] custom_reward_function.name=[short] algorithm.rollout_correction.high=3.0"
    ],
    "trl_dpo.sh BETA=0.3": [
        "preference.loss=ipo_mean preference.beta=0.3 data.train_batch_size=64 trainer.n_gpus_per_node=4 "
        "trainer.test_freq=-1 model.dtype=bfloat16",
        "preference.loss=kto preference.kto_desirable_weight=1.5 data.train_batch_size=32 model.path=/home/me/model "
        "model.lora_rank=16 trainer.total_training_steps=100 trainer.total_epochs=1",  # batches of 8 x 1 x 4
    ],
    "trl_sft.yaml trainer=sft": [
        "optim.lr=0.0001 optim.warmup_style=cosine data.max_length=1024 trainer.total_epochs=2"
    ],
    "openrlhf_grpo.sh": [
        "algorithm.adv_estimator=grpo data.train_batch_size=128 actor.ppo_mini_batch_size=512 actor.use_kl_loss=true "
        "actor.clip_ratio_high=0.28 optim.betas=[0.9,0.95] optim.min_lr_ratio=0.1 trainer.logger=[console,wandb] "
        "algorithm.rollout_correction.method=tis algorithm.rollout_correction.high=5.0"
    ],
    "openrlhf_ppo.sh": [
        "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.02 "
        "reward_model.enable=true critic.optim.lr=9e-06 actor.fsdp_config.optimizer_offload=true",
        # the router is frozen with LoRA
        "preference.loss=ipo preference.beta=0.2 data.train_batch_size=256 model.router_aux_loss_coef=0.0",
        "data.max_length=4096 optim.lr=9e-06",
    ],
    "swift_grpo.sh": [
        # 8 x 2 x 4 completions, in groups of 8
        "data.train_files=AI-MO/NuminaMath-TIR data.train_max_samples=5000 data.train_batch_size=8 "
        "actor.ppo_mini_batch_size=64 custom_reward_function.path=plugin.py custom_reward_function.name=[my_accuracy] "
        "algorithm.filter_groups.enable=true algorithm.overlong_filter=true algorithm.overlong_penalty.cache=256 "
        "algorithm.rollout_correction.method=tis trainer.n_gpus_per_node=4 trainer.logger=[tensorboard,swanlab]"
    ],
    "swift_tuning.sh": [
        "data.train_files=[a/first,b/second] data.train_turns=last data.truncation=drop data.train_batch_size=16 "
        "model.lora_rank=8 data.apply_chat_template_kwargs={enable_thinking:false}",
        "preference.loss=simpo preference.beta=2.0 preference.sft_coef=0.1 optim.lr=1e-05",
        "data.train_batch_size=64 optim.min_lr_ratio=0.1 fsdp_config.ep_size=4 trainer.nnodes=2 "
        "trainer.n_gpus_per_node=8",
    ],
    "swift_rm.yaml": ["bradley_terry.centring_coef=0.01 trainer.n_gpus_per_node=4 data.train_files=a/pairs"],
}


def check_start(config: BaseModel) -> None:
    """What a run checks before it starts, on nodes with 16 GPUs."""
    errors = [*find_conflicts(Case(config, "cuda", 16, 10**6))]
    if isinstance(config, Config):
        estimator, loss = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
        check_setting_combinations(config, get_estimator(estimator), get_policy_loss(loss))
    assert errors == []


def test_asynchronous_training_has_a_correction_and_engines_with_their_own_gpus():
    source = """from trl import AsyncGRPOConfig, AsyncGRPOTrainer
AsyncGRPOTrainer(model="m", reward_funcs=f, environment_factory=E, args=AsyncGRPOConfig(max_staleness=4))"""
    ported = port_script(source, "a.py")
    assert "env.env_name=E" in ported and "env.custom_module=FILE" in ported
    ((_, words),) = run(ported)
    config = load_config(Config, "ppo", words)
    check_start(config)
    assert not config.actor_rollout_ref.rollout.colocate and config.algorithm.rollout_correction.method == "tis"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_becomes_a_valid_configuration(script: str):
    calls = run(port(*script.split()))
    assert len(calls) == len(SCRIPTS[script])
    for (command, words), expected in zip(calls, SCRIPTS[script], strict=True):
        config = load_config(COMMANDS[command], command.removeprefix("main_"), words)
        check_start(config)
        for key, _, value in (word.partition("=") for word in expected.split()):
            assert format_value(get_value(config, find_key_in_section(key, COMMANDS[command]))) == value, key


def test_what_is_changed_or_left_out_has_a_comment():
    for name, *parts in (
        ("grpo.sh", "actor_rollout_ref.actor.ppo_mini_batch_size=1280  # 256 prompts x rollout.n=5"),
        ("grpo.sh", "# actor_rollout_ref.model.use_remove_padding=True: dropped"),
        ("grpo.sh", "'trainer.logger=[console,swanlab]'\n", "export SWANLAB_MODE=${SWANLAB_MODE:-offline}\n"),
        ("grpo.sh", "trainer.save_freq=-1  # verl's default\n", ": $(date +%Y%m%d), ${HOME}\n"),
        ("swift_grpo.sh", "# line 3: swift rollout: not converted. a run starts", "left out: format"),
        ("swift_grpo.sh", "'data.system_prompt=You are a helpful assistant.'  # was system (a text, not a file)"),
        ("trl_grpo.py", "# output_dir=args.out: known only at run time", "not supported: clearml", ", for one process"),
        ("swift_tuning.sh", "# tensor_model_parallel_size=4: not supported ("),
    ):
        assert [part for part in parts if part not in port(name)] == [], name
    assert ", for one process" not in port("swift_grpo.sh")


def ported(name: str, *given: str) -> dict[str, str]:
    ((_, words),) = run(port(f"{name}.sh", *given))
    return dict(word.split("=", 1) for word in words)


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


@pytest.mark.parametrize("name", ["ppo", "dapo", "multi_turn"])
def test_a_ported_command_passes_the_dry_run(name: str, local: list[str], capsys: pytest.CaptureFixture[str]):
    from alphaapollo.trainer.main_ppo import main as main_ppo

    ranks = ["trainer.n_gpus_per_node=4"] if name == "dapo" else []  # its sequences are shared by 4
    words = ported(name, *local, *ranks) | {"trainer.logger": "[console]"}  # the package swanlab may be missing
    if name == "multi_turn":
        assert words.pop("env.tool_parser") == "hermes"
        assert words.pop("actor_rollout_ref.rollout.name") == "sglang"  # the plug-in may be missing
    assert main_ppo([*(f"{key}={value}" for key, value in words.items()), "trainer.dry_run=True"]) == 0
    assert "the configuration is valid" in capsys.readouterr().out
