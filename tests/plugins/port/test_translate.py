"""Values and options that are written differently here, and files that cannot be ported."""

import contextlib
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest

from alphaapollo.config import renamed_keys
from alphaapollo.config.__main__ import main
from alphaapollo.config.key_tables import find_answer
from alphaapollo.config.keys import COMMANDS
from alphaapollo.config.load import load_config
from alphaapollo.plugins.port.convert import translate_keys
from alphaapollo.plugins.port.rules import RULES
from alphaapollo.plugins.port.sources import find_program, parse_options
from alphaapollo.plugins.port.translate import port_script

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"


def translate(values: dict[str, str], *program: str) -> tuple[set[str], str]:
    """Words, and all comments, of options of main_ppo."""
    lines = translate_keys(values, "main_ppo", *program).values()
    return {word for word, _ in lines if word}, "\n".join(comment for _, comment in lines)


@pytest.mark.parametrize(
    ("key", "value", "new"),
    [
        (LOSS, "geo_mean", f"{LOSS}=gmpo"),
        ("algorithm.filter_groups.max_num_gen_batches", "0", "algorithm.filter_groups.max_num_gen_batches=1000"),
        ("trainer.device", "cuda", "trainer.device=auto"),
        (f"{ROLLOUT}.val_kwargs.do_sample", "False", f"{ROLLOUT}.val_kwargs.temperature=0"),  # greedy
    ],
)
def test_values_that_are_written_differently(key: str, value: str, new: str):
    assert new in translate({key: value})[0]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ("rollout_is=token rollout_is_threshold=2.0", "method=tis level=token high=2.0"),
        (
            "rollout_rs=token rollout_rs_threshold=3 rollout_rs_threshold_lower=0.9",
            "method=mask level=token high=3 low=0.9",
        ),
        ("rollout_is=sequence rollout_rs=token rollout_rs_threshold=2", "method=tis level=sequence"),
        ("rollout_rs=seq_max_k2 rollout_rs_threshold=2", ""),
        ("rollout_is=null rollout_rs=null", ""),
    ],
)
def test_the_correction_of_engine_and_trainer(values: str, found: str):
    words, _ = translate({f"{CORRECTION}.{key}": value for key, value in (word.split("=") for word in values.split())})
    assert {word for word in words if word.startswith(CORRECTION)} == {f"{CORRECTION}.{word}" for word in found.split()}


@pytest.mark.parametrize("loss", ["gspo", "cispo", "geo_mean", "dppo_kl"])
def test_clip_ranges_that_differ_from_verls_are_written(loss: str):
    words, _ = translate({LOSS: loss, f"{ACTOR}.clip_ratio_high": "0.28"})
    assert {f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"} <= words
    assert not any("clip_ratio_low" in word for word in translate({LOSS: "vanilla"})[0])


@pytest.mark.parametrize(
    ("values", "program", "comment"),
    [
        ({"reward.custom_reward_function.path": "null"}, [], "custom_reward_function.path keeps its default"),
        ({f"{ACTOR}.grad_clip": "none"}, [], "expected number > 0"),
        ({f"{ROLLOUT}.multi_turn.format": "hermes"}, [], "episodes have one turn"),
        ({"tools": "[f]", "callbacks": "[C()]"}, ["trl", "grpo"], "tools=[f]: not supported"),
        ({"actor_rollout_ref.model.lora_alpha": "16"}, [], "left out, there is no lora_rank"),
        ({f"{ROLLOUT}.engine_kwargs.vllm.max-model-len": "1"}, [], "add it if you need it"),
        ({"max_completion_length": "long"}, ["trl", "grpo"], "data.max_response_length="),
    ],
)
def test_values_without_a_counterpart_are_comments(values: dict[str, str], program: list[str], comment: str):
    lines = translate_keys(values, "main_ppo", *program)
    assert any(comment in found and not word for word, found in lines.values())


def test_first_condition_that_holds_counts():
    words, comments = translate({"loss_type": "cispo", "epsilon": "0.2", "epsilon_high": "5"}, "trl", "grpo")
    assert f"{LOSS}=cispo" in words and not any("clip_ratio_high" in word for word in words) and "one less" in comments
    words, _ = translate({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "trl", "grpo")
    assert {f"{LOSS}=gspo_token", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"} <= words
    words, _ = translate({"beta": "0.05"}, "trl", "rloo")
    assert "algorithm.kl_ctrl.kl_coef=0.05" in words and not any("use_kl_loss" in word for word in words)


def test_names_of_types_and_trackers_of_other_programs():
    lines = translate_keys({"model.dtype": "bf16", "trainer.logger": "console"}, "main_sft")
    assert [word for word, _ in lines.values()] == ["model.dtype=bfloat16", "trainer.logger=[console]"]
    lines = translate_keys({"trainer.logger": "['console','wandb','swanlab','mlflow','clearml']"}, "main_ppo")
    assert lines["trainer.logger"] == ("trainer.logger=[console,wandb,swanlab,mlflow]", "not supported: clearml")


def test_special_characters_are_quoted():
    lines = translate_keys({"model": "<a model>", "dataset": "[a b,c]"}, "main_sft", "swift", "swift sft")
    config = load_config(COMMANDS["main_sft"], "sft", [lines[key][0] for key in ("model.path", "data.train_files")])
    assert (config.model.path, config.data.train_files) == ("<a model>", ["a b", "c"])


def test_next_steps_name_what_is_left_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "run.sh"
    script.write_text("swift sft --model m --vit_lr 1 --report_to clearml --seed 3")
    assert main(["port", str(script)]) == 0
    first, *others = capsys.readouterr().err.splitlines()[1:]
    assert first.endswith("comments: vit_lr, trainer.logger, data.train_files (not in the script)")
    assert [line.rpartition(": ")[2] for line in others][1:] == ["bash ours.sh trainer.dry_run=True", "bash ours.sh"]
    script.write_text("swift sft --model m --dataset a b --interleave_prob 0.7 0.3")
    assert main(["port", str(script)]) == 0
    ported, steps = capsys.readouterr()
    assert "data.train_files=[a,b]" in ported and "data.source_weights=[0.7,0.3]" in ported
    assert "# 1. Save the new script: " in steps


def test_options_of_a_command_line():
    words = ["x", "--lr", "1e-5", "--packing", "--ids=q_proj", "--betas", "0.9", "0.95", "--flag", "True", "--n", "-1"]
    found = {"lr": "1e-5", "packing": "true", "ids": "q_proj", "betas": "[0.9,0.95]", "flag": "true", "n": "-1"}
    assert parse_options(words) == found


TUNING = """torchrun --nproc_per_node=$1 --nnodes 2 -m verl.trainer.sft_trainer optim.clip_grad=1 engine=fsdp
python3 -m verl.trainer.main_generation data.output_path=out rollout.n=1"""
OPENRLHF = "openrlhf.cli.train_sft --data.dataset $'a\\nb' --train.batch_size 64"
OTB = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=optimal_token_baseline model_engine=dp "
    f"{ROLLOUT}.expert_parallel_size=2 {ROLLOUT}.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8"
)
ASSIGNED = """import trl
lr = 1
lr = 2
if lr:
    lr = 3
name = make()
config = trl.SFTConfig(learning_rate=lr, output_dir=name, seed=7, **more)
trainer = SFTTrainer(build(), train_dataset=rows, peft_config=LoraConfig(r=lr, bias="all"))
"""


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.sh", TUNING, ["python -m alphaapollo.trainer.main_sft ", "    trainer.n_gpus_per_node=4\n"]),
        ("a.sh", TUNING, ["    trainer.nnodes=2\n", "    grad_clip=1  # was optim.clip_grad\n"]),
        ("a.sh", TUNING, ["    # engine=fsdp: not supported (FSDP2", "    trainer.output_dir=out  # was"]),
        ("a.sh", "torchrun --standalone --nproc-per-node 4 -m verl.trainer.sft_trainer", ["n_gpus_per_node=4\n"]),
        ("a.sh", f"deepspeed --num_gpus 4 --num_nodes=2 --module {OPENRLHF}", ["n_gpus_per_node=4 ", "nnodes=2 "]),
        (
            "a.sh",
            OTB,
            ["adv_estimator=optimal_token_baseline  # refused at the start: ", "    # model_engine=dp: dropped"],
        ),
        ("a.sh", OTB, ["expert_parallel_size=2  # refused at the start: ", "tensor_model_parallel_size=4\n"]),
        ("a.py", ASSIGNED, ["# learning_rate=lr: known only", "# output_dir=name: known only", "    trainer.seed=7  "]),
        ("a.py", ASSIGNED, ["# **=more: known only", "# model=build(): known only", "# train_dataset=rows: not supp"]),
        ("a.py", ASSIGNED, ["# lora_r=lr: known only", "# bias=all: not a known option"]),
    ],
)
def test_other_programs(name: str, text: str, lines: list[str]):
    ported = port_script(text, name, ["--", "4"])
    assert [line for line in lines if line not in ported] == [] and "torchrun" not in ported


def test_the_arguments_of_a_script_are_needed():
    with pytest.raises(ValueError, match=r"a\.sh reads \$1, .* -- ARG"):
        port_script(TUNING, "a.sh")
    with pytest.raises(ValueError, match="larger than 96 KiB"):
        port_script("# é" + "x" * (96 << 10), "a.sh")


def test_wandb_needs_no_login():
    line = "export WANDB_MODE=${WANDB_MODE:-offline}\n"
    assert line in port_script('python3 -m verl.trainer.main_ppo trainer.logger=\'["console","wandb"]\'', "a.sh")
    assert line not in port_script("python3 -m verl.trainer.main_ppo trainer.logger=console", "a.sh")


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("a.sh", "python3 train_it.py --lr 1", "no training command"),
        ("a.sh", "trl bco --model_name_or_path x", "BCO has no counterpart"),
        ("a.py", "from trl import MagicConfig\nMagicConfig(a=1)", "unknown program"),
        ("a.py", "print(", "line 1"),
        ("a.yaml", "model_name_or_path: x", "trainer=sft"),
        ("a.yaml", "a: " + "[" * 9999 + "]" * 9999, "nested too deeply"),
        ("a.yaml", "a: &a " + "x" * 99_999 + "\nb: [" + "*a," * 99 + "]", "aliases"),
        ("a.py", "import trl\nx = " + "1+" * 20_000 + "1", "nested too deeply"),
        ("a.sh", "python -m verl.trainer.main_ppo a.b=1 c.d=2 e.f=3", "3 of its 3 options are not of verl"),
        ("a.sh", "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=x", "docs/verl.md"),
        ("a.yaml", "grpo: {}\ncheckpointing: {}\npolicy: {}", "NeMo-RL"),
        ("none.sh", None, "none.sh"),
    ],
)
def test_a_file_that_cannot_be_ported_is_one_error(
    name: str, text: str | None, fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["port", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert fact in error and str(tmp_path / name) in error


HOSTILE = {
    "a.sh": "$'x\\ntouch PWNED #openrlhf.cli.train_sft' --model.model_name_or_path $'\\002$(touch PWNED)\\003'",
    "b.sh": """H=$HOME; P='$(touch PWNED)'; N=$'a\\ntouch PWNED'
python3 -m verl.trainer.main_ppo "data.train_files=${H/?\\{HOME?/$P}" "trainer.experiment_name=${H/?\\{HOME?/$N}" """
    """"trainer.project_name=${H/?\\{HOME?/((x[$P]))}" trainer.output_dir=$(touch PWNED)""",
    "c.yaml": 'model_name_or_path: m\ndataset_name: "\\x02$(touch PWNED)\\x03"\noutput_dir: "a\\ntouch PWNED"',
    "d.py": """import trl; trl.SFTTrainer(model="\\x02$(touch PWNED)\\x03", args=trl.SFTConfig(output_dir="o"))""",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_text_of_a_script_never_becomes_a_command(name: str, tmp_path: Path):
    ported = port_script(HOSTILE[name], name, ["trainer=sft"])
    subprocess.run(
        ["bash", "-c", f"python() {{ :; }}\n{ported}"], cwd=tmp_path, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert "PWNED" in ported and not [*tmp_path.iterdir()]
    assert not [line for line in ported.splitlines() if line.startswith("touch")]


@pytest.mark.parametrize("part", ["[[ ", "((", "<<A\n", "${a", "a='b' ", "$((1+"])
def test_a_long_line_is_read_in_linear_time(part: str):
    start = time.process_time()
    with contextlib.suppress(ValueError, RecursionError):
        port_script(part * (60_000 // len(part)), "a.sh")
    assert time.process_time() - start < 10  # about one second; quadratic patterns take minutes


def test_a_value_that_the_script_decides_is_an_error():
    source = "if [ $N = 8 ]; then TP=4; fi\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$TP\n"
    with pytest.raises(
        ValueError, match=r"a\.sh: line 2: TP is set inside `if` \(line 1\).* port a\.sh TP=VALUE, or run bash -x"
    ):
        port_script(source, "a.sh")
    assert "env.rollout.n=2" in port_script(source, "a.sh", ["TP=2"])
    with pytest.raises(ValueError, match=r"\$1 is an argument of a function.* Write its value"):
        port_script("f() { trl sft --seed $1\n}\nf 1", "a.sh")
    assert "# inside `while` (line 1): remove it" in port_script("while :; do trl sft --seed 1; done", "a.sh")


def test_renamed_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(renamed_keys, "RENAMED_KEYS", {"sampler": ROLLOUT})
    script = port_script("python3 -m verl.trainer.main_ppo sampler.temperature=0.5\n", "run.sh")
    assert f"{ROLLOUT}.temperature=0.5" in script and "was sampler.temperature" in script


@pytest.mark.parametrize(
    ("project", "program", "command", "options"),  # of scripts and releases of these projects
    [
        ("trl", "sft_vlm_gemma3", "main_sft", "attn_implementation dataset_train_split dtype lora_target_modules"),
        ("trl", "reward_modeling", "main_rm", "eval_strategy lora_task_type max_length num_train_epochs"),
        ("openrlhf", "train_ppo_ray", "main_ppo", "actor.adam.lr critic.adam.lr vllm.num_engines algo.kl.init_coef"),
        ("swift", "megatron rlhf dpo", "main_dpo", "tensor_model_parallel_size lr_warmup_fraction rpo_alpha"),
        ("swift", "swift rlhf grpo", "main_ppo", "reward_funcs vllm_gpu_memory_utilization sleep_level report_to"),
    ],
)
def test_options_of_real_programs_are_answered(project: str, program: str, command: str, options: str):
    found = find_program(project, program, "", {})
    assert found.is_known and found.command.partition(" ")[0] == command
    answered = {option for option in options.split() if find_answer(project, option, COMMANDS[command])}
    assert set(options.split()) == answered | (set(options.split()) & RULES[project].keys())


@pytest.mark.parametrize("project", ["trl", "swift"])
def test_every_argument_of_transformers_is_answered(project: str):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    names = [field.name for field in fields(transformers.TrainingArguments) if not field.name.startswith("_")]
    unknown = [name for name in names if not find_answer(project, name, COMMANDS["main_sft"])]
    assert set(unknown) <= RULES[project].keys()
