"""Scripts of verl, TRL, OpenRLHF and ms-swift become valid commands, with comments about what is not converted."""

import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
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


SCRIPTS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("whole_scripts.yaml").read_text(encoding="utf-8")
)


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
